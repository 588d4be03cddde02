"""`--preset`: values of others, which flags override, under a short name; and what is refused."""

import dataclasses
import json
import logging
import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from conftest import ALGORITHMS, OFFLINE, PENDULUM, ROOT, command, every_algorithm, module

from algos.sac import Args
from common.command_line import parse
from common.errors import InputError
from common.run_folder import name_and_folder
from offline.offline_to_online import with_presets
from tools import policies

FILES = sorted((ROOT / "algos").glob("*.toml"))
SECTIONS = [
    (f"{path.stem}/{task}", algo, values)
    for path in FILES
    for algo, tables in tomllib.loads(path.read_text()).items()
    for task, values in tables.items()
]
SMALL = 'source = "a paper"\nhidden = [16, 16]\ntotal_steps = 60\nlearning_starts = 20\ntau = 0.25\ngamma = 0.5\n'
SMALL += 'device = "cpu"\neval_every = 30\neval_episodes = 1\n'


@pytest.fixture
def mine() -> str:
    """A preset of the user's own, in a file of the current folder."""
    Path("mine.toml").write_text(f'[sac."Pendulum-v1"]\n{SMALL}')
    return "mine.toml/Pendulum-v1"


@pytest.mark.parametrize(("preset", "algo", "values"), SECTIONS, ids=[f"{algo}-{name}" for name, algo, _ in SECTIONS])
def test_every_section_is_arguments_of_its_algorithm(preset: str, algo: str, values: dict[str, Any]) -> None:
    """With its source, its task as the environment, and each value as the file has it."""
    values = dict(values)
    assert values.pop("source")
    assert algo in ALGORITHMS
    args = module(algo).Args(preset=preset)
    assert args.env == preset.partition("/")[2]
    assert values
    for name, value in values.items():
        assert getattr(args, name) == (tuple(value) if isinstance(value, list) else value)
    assert parse(module(algo).Args, ["--preset", preset]) == args
    assert name_and_folder(algo, args)[0].startswith(f"{algo}__{args.env}__preset-{preset.replace('/', '-')}")


def test_the_page_lists_the_presets() -> None:
    """All files, algorithms and tasks, and no other."""
    rows = re.findall(
        r"^\| \[`(\w+)`\]\(../algos/\1\.toml\) \| ([A-Z0-9+]+) \| (.*) \| .+ \|$",
        (ROOT / "docs" / "presets.md").read_text(), re.MULTILINE,
    )  # fmt: skip
    listed = {
        (f"{name}/{task}", algo.lower().replace("+", "_")) for name, algo, tasks in rows for task in tasks.split(", ")
    }
    assert listed == {(preset, algo) for preset, algo, _ in SECTIONS}
    assert len(listed) >= 20


@pytest.mark.parametrize(
    ("task", "entropy", "steps", "dropout"),
    [
        ("Hopper-v4", -1, 125_000, 1e-4), ("HalfCheetah-v4", -3, 400_000, 1e-2), ("Walker2d-v4", -3, 300_000, 5e-3),
        ("Ant-v4", -4, 300_000, 1e-2), ("Humanoid-v4", -2, 300_000, 1e-1),
    ],
)  # fmt: skip
def test_redq_and_droq_are_the_authors(task: str, entropy: int, steps: int, dropout: float) -> None:
    """The target entropies are MBPO's. Each update of the actor follows 20 of the critics, in one step."""
    for preset, critics, drawn, layer_norm, dropped in (("redq", 10, 2, False, 0.0), ("droq", 2, 2, True, dropout)):
        args = Args(preset=f"{preset}/{task}")
        action_dim = gymnasium.make(task).action_space.shape[0]
        assert args.target_entropy * action_dim == pytest.approx(entropy, rel=1e-12)
        assert (args.utd, args.policy_delay, args.actor_value, args.total_steps) == (20, 20, "mean", steps)
        assert (args.critics, args.target_critics or critics) == (critics, drawn)
        assert (args.layer_norm, args.dropout) == (layer_norm, dropped)
        assert {args.actor_lr, args.critic_lr, args.alpha_lr} == {3e-4}
        assert (args.hidden, args.batch_size, args.gamma, args.tau) == ((256, 256), 256, 0.99, 0.005)


@pytest.mark.parametrize("task", sorted(tomllib.loads((ROOT / "algos" / "tuned.toml").read_text())["ppo"]))
def test_the_first_sigma_of_rl_zoo_is_in_units_of_the_action(task: str) -> None:
    """RL Zoo's log σ starts at 0 or -2, for actions as the environment has them. Ours are in [-1, 1]."""
    preset = module("ppo").Args(preset=f"tuned/{task}")
    high = gymnasium.make(task).action_space.high
    assert (high == high[0]).all()
    assert math.log(preset.initial_std * high[0]) in (pytest.approx(0.0, abs=1e-6), pytest.approx(-2.0, abs=1e-6))


@pytest.mark.parametrize("gamma", [0.5, 0.75, 0.99])  # the preset's, another, and the default of the flag
def test_a_given_flag_overrides_the_preset(mine: str, gamma: float) -> None:
    """On the command line and in Python, also if the value is the default. The others are the preset's."""
    args = module("sac").Args(preset=mine, gamma=gamma)
    assert parse(module("sac").Args, ["--preset", mine, "--gamma", str(gamma)]) == args
    assert parse(module("sac").Args, [f"--gamma={gamma}", f"--preset={mine}"]) == args
    assert (args.gamma, args.tau, args.hidden, args.env) == (gamma, 0.25, (16, 16), "Pendulum-v1")
    assert args.batch_size == module("sac").Args().batch_size
    assert module("sac").Args(preset=mine, env="Hopper-v4").env == "Hopper-v4"


def test_copies_keep_what_was_given_and_filled_in(mine: str) -> None:
    args = dataclasses.replace(module("sac").Args(preset=mine, gamma=0.99), seed=4)
    assert (args.seed, args.gamma, args.tau) == (4, 0.99, 0.25)
    assert dataclasses.replace(args, tau=0.005).tau == 0.005
    assert module("sac").Args(**json.loads(json.dumps(dataclasses.asdict(args), default=str))) == args
    with pytest.raises(InputError, match=r"came too late: give it to Args, not to dataclasses\.replace"):
        dataclasses.replace(module("sac").Args(), preset=mine)


def test_the_name_states_the_preset_and_what_differs_from_it(mine: str) -> None:
    """Not every value. Other values, other presets and other flags give other names."""
    made = [{}, {"gamma": 0.99}, {"gamma": 0.75}, {"env": "Hopper-v4"}]
    names = [name_and_folder("sac", module("sac").Args(preset=mine, **given))[0] for given in made]
    assert names == [
        "sac__Pendulum-v1__preset-mine.toml-Pendulum-v1__1",
        "sac__Pendulum-v1__gamma-0.99_preset-mine.toml-Pendulum-v1__1",
        "sac__Pendulum-v1__gamma-0.75_preset-mine.toml-Pendulum-v1__1",
        "sac__Hopper-v4__preset-mine.toml-Pendulum-v1__1",
    ]
    assert name_and_folder("sac", module("sac").Args(preset=mine, gamma=0.5))[0] == names[0]
    Path("a").mkdir()
    for path in ("a/b.toml", "a-b.toml", "a_b.toml"):
        Path(path).write_text(f'[sac."x/y"]\n{SMALL}')
    labels = [module("sac").Args(preset=f"{path}/x/y").label for path in ("a/b.toml", "a-b.toml", "a_b.toml")]
    assert len({*labels}) == 3
    assert not set("".join(labels)) & set("/\\")


@every_algorithm
def test_every_algorithm_takes_a_preset(algo: str) -> None:
    """Its task is the dataset of an offline algorithm, whose values are stronger than those of the domain."""
    task = str(PENDULUM) if algo in OFFLINE else "Pendulum-v1"
    tables = vars(module(algo)).get("PRESETS", {"locomotion": {}})
    domain = tables["locomotion" if "locomotion" in tables else next(iter(tables))]
    changed = {k: v / 2 if type(v) is float else v + 1 for k, v in domain.items() if type(v) in (int, float)}
    changed |= {"seed": 5, "batch_size": 3}
    changed = {k: v for k, v in (changed | {"online_steps": 9}).items() if hasattr(module(algo).Args, k)}
    lines = [f"{name} = {value}" for name, value in changed.items()]
    Path("mine.toml").write_text("\n".join([f"[{algo}.{json.dumps(task)}]", *lines]))
    args = module(algo).Args(preset=f"mine.toml/{task}")
    assert args == parse(module(algo).Args, ["--preset", f"mine.toml/{task}"])
    filled = with_presets(args, tables) if algo in OFFLINE else args
    assert {name: getattr(filled, name) for name in changed} == changed
    assert filled.label == args.label
    assert filled.dataset == task if algo in OFFLINE else filled.env == task


def test_a_run_prints_its_preset_stores_the_values_and_resumes(mine: str, caplog: pytest.LogCaptureFixture) -> None:
    """The same command finds its run. Values that changed since are refused in words."""
    caplog.set_level(logging.INFO, "onramp")
    result = module("sac").train(module("sac").Args(preset=mine, gamma=0.99))
    assert result.folder.name == "sac__Pendulum-v1__gamma-0.99_preset-mine.toml-Pendulum-v1__1"
    (printed,) = [text for text in caplog.messages if text.startswith("preset ")]
    assert printed.startswith(f"preset {mine}: env Pendulum-v1, hidden (16, 16), total_steps 60")
    assert "gamma" not in printed
    config = json.loads((result.folder / "config.json").read_text())["arguments"]
    assert (config["preset"], config["tau"], config["gamma"], config["hidden"]) == (mine, 0.25, 0.99, [16, 16])
    done = command("--preset", mine, "--gamma", "0.99")
    assert done.returncode == 0
    assert "is finished (60 steps): nothing to do" in done.stderr
    longer = command("--preset", mine, "--gamma", "0.99", "--total-steps", "90")
    assert f"{result.folder.name}: resumes from step 60" in longer.stderr
    Path("mine.toml").write_text(Path("mine.toml").read_text().replace("tau = 0.25", "tau = 0.5"))
    with pytest.raises(InputError, match=r"made with other arguments: .*tau \(0.25 there, 0.5 here\)"):
        module("sac").train(module("sac").Args(preset=mine, gamma=0.99))


def test_a_policy_is_read_without_its_preset(mine: str) -> None:
    """The arguments of a run are complete, so the file may be gone or changed."""
    folder = module("sac").train(module("sac").Args(preset=mine)).folder
    Path("mine.toml").rename("away.toml")
    agent = policies.load_agent(policies.read_trained(str(folder)), 3, 1, seed=0)
    assert agent.actor


@pytest.mark.parametrize(
    ("preset", "wanted"),
    [
        ("tuned", r"--preset is 'tuned': give NAME/TASK, of which NAME is droq or redq or tuned, or the path of"),
        ("", "--preset is '': give NAME/TASK"),
        ("tuned/", "--preset is 'tuned/': give NAME/TASK"),
        ("best/Hopper-v4", r"algos/best\.toml does not exist \(presets in its folder: droq, redq, tuned\)$"),
        ("none.toml/Hopper-v4", r"none\.toml does not exist \(presets in its folder: mine\)$"),
        ("tuned/Hoper-v4", r"algos/tuned\.toml has no settings of sac for Hoper-v4: give one of Ant-v4, .*Hopper-v4"),
        ("mine.toml/A", r'^mine\.toml: gama in \[sac\."A"\] is not a flag that a preset can set \(perhaps gamma\?\)$'),
        ("mine.toml/B", "^gamma of --preset mine.toml/B is 'high': give a number$"),
        ("mine.toml/C", "^batch_size of --preset mine.toml/C is 1.5: give a whole number$"),
        ("mine.toml/D", "^hidden of --preset mine.toml/D is 64: give a list of whole numbers$"),
        ("mine.toml/E", "^tau of --preset mine.toml/E is 7.0: give a number in"),
        ("mine.toml/F", 'preset in .* is not a flag that a preset can set'),
        ("mine.toml/tau", "has no settings of sac for tau: give one of"),
        ("broken.toml/A", "broken.toml is not valid TOML"),
        ("bytes.toml/A", "bytes.toml is not valid TOML"),
        ("other.toml/A", r"^other\.toml has no settings of sac: it has those of td3$"),
        ("empty.toml/A", r"^empty\.toml has no settings of sac: it has those of no algorithm$"),
        ("folder.toml/A", r"folder\.toml cannot be read \(Is a directory\)$"),
    ],
)  # fmt: skip
def test_an_unusable_preset_is_refused_in_words(preset: str, wanted: str) -> None:
    """With what exists, before anything is written. The command line exits with status 2."""
    tables = {"A": "gama = 0.9", "B": 'gamma = "high"', "C": "batch_size = 1.5", "D": "hidden = 64", "E": "tau = 7.0"}
    tables["F"] = 'preset = "tuned/Hopper-v4"'
    with pytest.MonkeyPatch.context() as patch:
        Path("sub").mkdir()
        patch.chdir("sub")
        text = "\n".join(f"[sac.{task}]\n{line}" for task, line in tables.items())
        Path("mine.toml").write_text(f"[sac]\ntau = 0.5\n{text}")
        if not preset.startswith("none"):
            Path("broken.toml").write_text("[sac")
            Path("bytes.toml").write_bytes(b"\xff\xfe")
            Path("other.toml").write_text("[td3.A]\ntau = 0.5")
            Path("empty.toml").touch()
            Path("folder.toml").mkdir()
        with pytest.raises(InputError, match=wanted):
            module("sac").Args(preset=preset)
        with pytest.raises(InputError, match=wanted):
            parse(module("sac").Args, ["--preset", preset])
        assert not Path("runs").exists()


@pytest.mark.parametrize("given", [3, True, ["tuned/Hopper-v4"]])
def test_a_preset_of_another_type_is_refused(given: Any) -> None:
    with pytest.raises(InputError, match=r"--preset is .*: give a string or None"):
        module("sac").Args(preset=given)


def test_bad_presets_end_with_status_2(small: Callable[..., Any]) -> None:
    done = command("--preset", "tuned/Nothing-v0")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("sac.py: ")


def test_a_preset_that_flags_override_wholly_is_kept(mine: str) -> None:
    """Copies and values that are filled in later do not count as a preset that came too late."""
    args = Args(preset=mine, gamma=0.5, hidden=(8,))
    for copy in (dataclasses.replace(args, seed=2), args.filled_in(seed=2)):
        assert (copy.gamma, copy.hidden, copy.seed, copy.preset) == (0.5, (8,), 2, mine)
    assert args.filled_in(seed=2).label == args.label


def test_a_preset_may_hold_an_environments_arguments(tmp_path: Path) -> None:
    """As a table of TOML or as JSON. They do not appear a second time in the run's name."""
    for text in ("{ g = 5.0 }", "'{\"g\":5.0}'"):
        (tmp_path / "mine.toml").write_text(f'[sac."Pendulum-v1"]\nenv_kwargs = {text}\n')
        args = Args(preset=f"{tmp_path / 'mine.toml'}/Pendulum-v1")
        assert args.env_settings == {"g": 5.0}
        assert "env-kwargs" not in args.label


def test_vars_are_the_arguments_alone(mine: str) -> None:
    """So that `Args(**vars(args))` makes a copy."""
    args = Args(preset=mine)
    assert vars(args).keys() == {field.name for field in dataclasses.fields(args)}
    assert Args(**vars(args)) == args
