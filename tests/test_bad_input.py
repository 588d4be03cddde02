"""Every bad input ends with 2, every failed run with 1: one or two lines that name the cure, nothing half-written."""

import dataclasses
import importlib.metadata
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch
from conftest import (
    EXAMPLE,
    OFFLINE,
    PENDULUM,
    ROOT,
    arguments_of,
    bound_by_permissions,
    command,
    contents,
    every_algorithm,
    final_state,
    flags,
    killed_at,
    module,
    same,
    some,
    with_flag,
)

from common.command_line import command_line
from common.provenance import versions
from common.replay_buffer import ReplayBuffer


class Broken(gym.Env[Any, Any]):
    """A point that gives a non-finite reward or observation, or fails, at its 130th step in the process."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,))
    action_space = gym.spaces.Box(-1, 1, (1,))
    steps = 0

    def __init__(self, part: str) -> None:
        self.part = part

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(3), {}

    def step(self, action: Any) -> Any:
        Broken.steps += 1
        bad = Broken.steps > 130
        if bad and self.part == "steps":
            raise ZeroDivisionError("no wind")
        obs = np.full(3, np.nan if bad and self.part == "obs" else 1.0)
        return obs, np.inf if bad and self.part == "rewards" else 1.0, False, Broken.steps % 10 == 0, {}


for part in ("rewards", "obs", "steps"):
    gym.register(f"Broken-{part}-v0", entry_point=lambda part=part: Broken(part))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """`python algos/<algo>.py FLAGS` in this process: its exit status and what it said of the failure."""

    def run(*arguments: str, algo: str = "sac") -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [f"{algo}.py", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            command_line(module(algo).train, module(algo).Args)
        said = capsys.readouterr().err
        at = said.find(f"{algo}.py: ")
        return int(stop.value.code or 0), said[at:] if at >= 0 else said

    return run


def assert_refused(result: tuple[int, str], status: int, *named: str) -> None:
    assert result[0] == status, result
    assert len(result[1].strip().splitlines()) <= 2, result[1]
    assert "Traceback" not in result[1]
    for word in named:
        assert word in result[1], result[1]


@every_algorithm
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--eval-evry", "3"], ["--eval-evry", "--eval-every"]),
        (["--eval-every", "many"], ["--eval-every", "'many'"]),
        (["--eval-every", "1.5"], ["--eval-every", "'1.5' is not a whole number"]),
        (["--eval-every", "1e-3"], ["--eval-every", "'1e-3' is not a whole number"]),
        (["--hidden", "1.5"], ["--hidden", "'1.5'"]),
        (["--device", "tpu"], ["--device", "'auto', 'cpu', 'cuda'"]),
        (["--seed"], ["--seed"]),
        (["HalfCheetah-v4"], ["HalfCheetah-v4"]),
        (["--seed", "-1"], ["--seed is -1: give a number of 0 or more"]),
        (["--eval-episodes", "-1"], ["--eval-episodes is -1: give a number of 0 or more"]),
        (["--eval-every", "0"], ["--eval-every is 0"]),
        (["--gamma", "1.5"], ["--gamma is 1.5"]),
        (["--hidden", "0"], ["--hidden is (0,)"]),
        (["--hidden"], ["--hidden"]),
        (["--env", "HalfCheeta-v4"], ["HalfCheeta-v4", "HalfCheetah-v4"]),
        (["--env", "CartPole-v1"], ["CartPole-v1", "Discrete"]),
        (["--env", "no_such_module:Env-v0"], ["no_such_module"]),
        (["--vectorizer", "threads"], ["--vectorizer", "'sync', 'async', 'envpool'"]),
        (["--vectorizer", "envpool", "--env", "Humanoid-v4"], ["Humanoid-v4", "--vectorizer sync", "Hopper-v4"]),
        (["--run-dir", "/proc/no/such"], ["/proc/no/such", "--run-dir"]),
        (["--run-dir", ""], ["--run-dir", "PATH", "['']"]),
        (["--run-dir", "/dev/null"], ["/dev/null", "--run-dir"]),
        (["--run-dir", "x" * 300], ["File name too long", "--run-dir"]),
        (["--seed", str(2**64)], [f"--seed is {2**64}"]),
    ],
)
def test_bad_flags(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algo: str, arguments: list[str], named: list[str]
):
    monkeypatch.chdir(tmp_path)
    if "--gamma" in arguments and algo not in with_flag("gamma"):
        pytest.skip("imitation discounts nothing")
    data = ["--dataset", str(PENDULUM), "--online-steps", "9"] if algo in OFFLINE else []
    assert_refused(run(*data, *arguments, algo=algo), 2, *named)
    assert list(tmp_path.iterdir()) == []


TERA = str(10**12)
ABSURD = {
    "--hidden": ["--hidden", "10000000", "10000000"],
    "--critic-hidden": ["--critic-hidden", "10000000", "10000000"],
    "--batch-size": ["--batch-size", TERA],
    "--minibatch-size": ["--minibatch-size", TERA],
    "--critics": ["--critics", TERA],
    "--width": ["--width", "10000000"],
    "--rollout-steps": ["--rollout-steps", TERA],
    "--num-envs": ["--num-envs", TERA],
    "--eval-episodes": ["--eval-episodes", TERA],
}


@pytest.mark.parametrize(
    ("algo", "flag"),
    [
        (algo, flag)
        for flag in ABSURD
        for algo in with_flag(flag.removeprefix("--").replace("-", "_"))
        if flag != "--num-envs" or algo not in with_flag("rollout_steps")  # it is more than --rollout-steps
    ],
)
def test_sizes_beyond_all_memory(run, tmp_path: Path, algo: str, flag: str):
    """Nothing is allocated: neither by the kernel, which only promises, nor on the disk."""
    data = ["--dataset", str(PENDULUM), "--online-steps", "9"] if algo in OFFLINE else []
    before = psutil.Process().memory_info().vms
    assert_refused(run(*data, *ABSURD[flag], algo=algo), 2, flag, "GB of memory or more, and", "give a smaller number")
    assert psutil.Process().memory_info().vms - before < 2**30
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "flag",
    ["total_steps", "offline_steps", "online_steps", "utd", "flow_steps", "denoising_steps", "epochs", "improve_steps"],
)
def test_work_of_ten_years(run, tmp_path: Path, flag: str):
    """They are 3.2 · 10¹⁴ steps at a million a second."""
    algo = max(with_flag(flag))
    given = [f"--{flag.replace('_', '-')}", str(4 * 10**14)]
    data = ["--dataset", str(PENDULUM), "--online-steps", "9"] if algo in OFFLINE else []
    assert_refused(run(*data, *given, algo=algo), 2, given[0], "ten years or more", "give a smaller number")
    assert list(tmp_path.iterdir()) == []


@every_algorithm
def test_numbers_beyond_float32(run, tmp_path: Path, algo: str):
    """Each flag of a float: 10³⁹ would be infinite in the first product."""
    data = ["--dataset", str(PENDULUM), "--online-steps", "9"] if algo in OFFLINE else []
    args = module(algo).Args(**arguments_of(algo, {}))
    found = [name for name, value in vars(args).items() if isinstance(value, float)]
    assert found
    for name in found:
        flag = f"--{name.replace('_', '-')}"
        assert_refused(run(*data, f"{flag}=1e39", algo=algo), 2, f"{flag} is 1e+39: give")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("algo", "arguments", "named"),
    [
        ("sac", ["--total-steps", "0"], ["--total-steps is 0"]),
        ("sac", ["--learning-starts", "5e-3"], ["--learning-starts", "'5e-3'"]),
        ("sac", ["--utd", "0"], ["--utd is 0"]),
        ("sac", ["--critic-lr", "nan"], ["--critic-lr is nan"]),
        ("sac", ["--buffer-size", "1000000000000", "--total-steps", "1000000000000"], ["GB", "--buffer-size"]),
        ("sac", ["--track"], ["pip install wandb"]),
        ("expo", ["--dataset", str(PENDULUM), "--base-tau", "2"], ["--base-tau is 2"]),
        ("cql", [*f"--dataset {PENDULUM} --calibrated --gamma 1 --failure-reward -1".split()], ["--gamma is 1"]),
        ("iql", ["--dataset", "D4RL/pen/human-v2", "--d4rl-compat"], ["--d4rl-compat", "Minari"]),
        ("td3", ["--policy-delay", "0"], ["--policy-delay is 0"]),
        ("td3", ["--target-noise", "-0.2"], ["--target-noise is -0.2"]),
        ("bc", ["--dataset", str(PENDULUM), "--top-fraction", "1.5"], ["--top-fraction is 1.5"]),
        ("td3_bc", ["--dataset", str(PENDULUM), "--alpha", "0"], ["--alpha is 0"]),
        ("iql", [], ["--dataset is missing"]),
        ("iql", ["--dataset", str(PENDULUM), "--horizon", "0"], ["--horizon is 0"]),
        ("iql", ["--dataset", str(PENDULUM), "--horizon", "5"], ["marks its time-outs itself", "--horizon"]),
        ("iql", ["--dataset", str(ROOT / "README.md")], ["README.md is a text file, not an HDF5 file"]),
        ("iql", ["--dataset", "hoper-medium-v2"], ["no dataset hoper-medium-v2", "hopper-medium-v2"]),
        ("iql", ["--dataset", "nowhere.hdf5"], ["no file nowhere.hdf5"]),
        ("iql", ["--dataset", str(PENDULUM), "--env", "Hopper-v4"], ["3 observations", "Hopper-v4 has 11", "--env"]),
        ("iql", ["--dataset", str(PENDULUM), "--offline-ratio", "1"], ["--offline-ratio is 1"]),
        ("iql", ["--dataset", str(PENDULUM), "--expectile", "1"], ["--expectile is 1"]),
        ("iql", ["--dataset", str(PENDULUM), "--dropout", "1"], ["--dropout is 1"]),
        ("iql", ["--dataset", str(PENDULUM), "--retain", "all"], ["--retain", "'none', 'append', 'mix'"]),
        ("iql", ["--dataset", str(PENDULUM), "--offline-steps", "-1"], ["--offline-steps is -1"]),
        ("iql", ["--dataset", str(PENDULUM), "--expectile", "nan"], ["--expectile is nan"]),
        ("iql", ["--dataset", str(PENDULUM), "--reward-shift", "nan"], ["--reward-shift is nan: give a finite number"]),
        ("ppo", ["--gae-lambda", "1.1"], ["--gae-lambda is 1.1"]),
        ("ppo", ["--minibatch-size", "0"], ["--minibatch-size is 0"]),
        ("ppo", ["--num-envs", "100", "--rollout-steps", "64"], ["--rollout-steps", "--num-envs"]),
    ],
)
def test_bad_flags_of_one_algorithm(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algo: str, arguments: list[str], named: list[str]
):
    monkeypatch.chdir(tmp_path)
    assert_refused(run(*arguments, algo=algo), 2, *named)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda(run):
    assert_refused(run("--device", "cuda"), 2, "--device cpu")


def test_as_a_command_too(tmp_path: Path):
    result = command("--env", "Hoper-v4", cwd=tmp_path)
    assert_refused((result.returncode, result.stderr), 2, "Hopper-v4")
    assert list(tmp_path.iterdir()) == []


@every_algorithm
def test_help_lists_every_flag(algo: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", [f"{algo}.py", "--help"])
    with pytest.raises(SystemExit) as stop:
        command_line(module(algo).train, module(algo).Args)
    assert not stop.value.code
    shown, names = capsys.readouterr().out, [field.name for field in dataclasses.fields(module(algo).Args)]
    assert all(f"--{name.replace('_', '-')}" in shown for name in names)


@every_algorithm
def test_a_folder_of_other_arguments(run, small, algo: str):
    args = small(algo, total_steps=20)
    folder = args.run_dir
    module(algo).train(args)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    data = ["--dataset", str(PENDULUM), "--online-steps", "9"] if algo in OFFLINE else []
    result = run(*data, "--env", "Pendulum-v1", "--run-dir", str(folder), "--seed", "7", algo=algo)
    assert_refused(result, 2, "seed (1 there, 7 here)", "the same arguments", "another --run-dir")
    assert "delete" not in result[1]
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_folder_that_is_no_run_folder(run, tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert_refused(run(*flags(run_dir=tmp_path)), 2, "not a run folder", "--run-dir")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_in_use(run, tmp_path: Path):
    line = [sys.executable, str(ROOT / "algos" / "sac.py"), *flags(run_dir=tmp_path, total_steps=10**7)]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    try:
        assert any(text.startswith("step 0:") for text in process.stderr), "it ended before its first evaluation"
        second = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    finally:
        process.kill()
        process.communicate()
    assert_refused((second.returncode, second.stderr), 2, "another process is running")


def stopped_run(folder: Path) -> None:
    """A run killed after its checkpoint of step 100."""
    assert killed_at("sac", [("update", 250)], *flags(run_dir=folder)).returncode == 0


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("config.json", "truncated", "is damaged"),
        ("checkpoint/state.pt", "truncated", "is damaged (BadZipFile File is not a zip file)"),
        ("checkpoint/state.pt", "flipped", "is damaged (BadZipFile the checksum of"),
        ("checkpoint/replay/000000000000.rows", "truncated", "is missing or damaged"),
        ("checkpoint/replay/000000000000.rows", "gone", "is missing or damaged"),
        ("evaluations.csv", "truncated", "is shorter than its checkpoint requires"),
        ("metrics.csv", "gone", "is missing"),
        ("checkpoint/state.pt", "of other code", "made by other code: ['extra'] differ"),
    ],
)
def test_damaged_run_folders(run, tmp_path: Path, file: str, damage: str, reason: str):
    """Each is refused with the reason of its own, the file and what to do instead of deleting the run."""
    folder = tmp_path / "run"
    stopped_run(folder)
    path = folder / file
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "of other code":
        state = torch.load(path, weights_only=True)
        state["agent"]["extra"] = 1
        torch.save(state, path)
    else:
        data[len(data) // 2] ^= 255
        path.write_bytes(data if damage == "flipped" else data[: len(data) // 3])
    named = reason if damage == "of other code" else f"{path} {reason}"
    assert_refused(run(*flags(run_dir=folder)), 2, named, "another --run-dir")


@pytest.mark.parametrize(
    "file", ["config.json", "checkpoint/state.pt", "checkpoint/replay/000000000000.rows", "checkpoint"]
)
def test_a_run_that_may_not_be_read_is_whole(run, small, file: str):
    """The message names the file and the permission, not a damage; with the permission, the run resumes."""
    module("sac").train(small(total_steps=60, run_dir=Path("imports")))  # another user may not read the packages
    with tempfile.TemporaryDirectory() as home:  # that user may read it, unlike pytest's own
        os.chmod(home, 0o755)
        folder = Path(home, "run")
        path, arguments = folder / file, flags(run_dir=folder)
        stopped_run(folder)
        before, mode = contents(folder), path.stat().st_mode
        path.chmod(0)
        with bound_by_permissions(folder):
            result = run(*arguments)
        path.chmod(mode)
        named = path / "state.pt" if path.is_dir() else path
        assert_refused(result, 2, f"{named} cannot be read", "Permission denied", "permi")
        assert not any(word in result[1] for word in ("damaged", "delete"))
        assert contents(folder) == before
        module("sac").train(small(run_dir=folder))
        assert (folder / "DONE").exists()


@pytest.mark.parametrize("algo", some("sac", "ppo", "stream_ac", "wsrl"))
@pytest.mark.parametrize("part", ["rewards", "obs"])
def test_non_finite_environment(run, tmp_path: Path, algo: str, part: str):
    Broken.steps = 0
    arguments = {"env": f"Broken-{part}-v0", "run_dir": tmp_path / "run", "eval_every": 10_000, "checkpoint_every": 50,
                 "eval_episodes": 2}  # fmt: skip
    assert_refused(run(*flags(algo, **arguments), algo=algo), 1, "non-finite", part, "transition")
    assert final_state(tmp_path / "run")["logger"]["step"] in (50, 100)  # the checkpoint before it is whole


@pytest.mark.parametrize("vectorizer", ["sync", "async"])
def test_the_traceback_of_an_environment_is_in_the_run(run, tmp_path: Path, vectorizer: str):
    """Of its own lines, also if it ran in another process. A later failure adds to the file."""
    folder = tmp_path / "run"
    Broken.steps = 0
    line = flags(
        "sac", env="Broken-steps-v0", run_dir=folder, vectorizer=vectorizer, checkpoint_every=50, eval_episodes=2
    )
    for times in (1, 2):
        failed = run(*line)
        assert_refused(failed, 1, "no wind", "Correct it", f"(traceback: {folder / 'errors.log'})")
        text = (folder / "errors.log").read_text()
        assert text.count('raise ZeroDivisionError("no wind")') == times
        assert text.count("sac.py: Broken-steps-v0 failed in a step: ZeroDivisionError no wind") == times


@pytest.mark.parametrize("algo", sorted({*with_flag("critic_lr")} - {*OFFLINE}))
def test_non_finite_loss(run, tmp_path: Path, algo: str):
    result = run(*flags(algo, run_dir=tmp_path / "run", total_steps=400, critic_lr=1e30), algo=algo)
    assert_refused(result, 1, "non-finite actions", "learning rate")
    assert not (tmp_path / "run" / "DONE").exists()
    path = tmp_path / "run" / "checkpoint" / "state.pt"
    assert not path.exists() or all(
        v.isfinite().all() for v in final_state(tmp_path / "run")["agent"]["critic"].values()
    )


def test_a_checkpoint_that_is_not_finite_is_not_saved(run, tmp_path: Path):
    """Here no action tells of it: nothing acts before the switch."""
    rates = {"actor_lr": 1e30, "critic_lr": 1e30}
    result = run(*flags("td3_bc", run_dir=tmp_path / "run", checkpoint_every=20, **rates), algo="td3_bc")
    assert_refused(result, 1, "is not finite at step", "learning rate")
    assert not (tmp_path / "run" / "checkpoint" / "state.pt").exists()


def test_a_full_card(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1.00 GiB"
    monkeypatch.setattr(ReplayBuffer, "sample", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError(said)))
    assert_refused(run(*flags(run_dir=tmp_path / "run")), 1, "CUDA out of memory", "--batch-size", "share")


@pytest.mark.parametrize("algo", some(EXAMPLE))
def test_a_full_disk(tmp_path: Path, algo: str, small):
    """Files may not grow beyond a few kB (logs, replay rows, state): exit 1. With room, the command resumes."""
    module(algo).train(small(algo, run_dir=tmp_path / "undisturbed", checkpoint_every=50))
    for kilobytes in (2, 10) if algo in (EXAMPLE, OFFLINE[0]) else (10,):
        limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1024 * kilobytes, 1024 * kilobytes))
        where = {"run_dir": tmp_path / f"{kilobytes}", "checkpoint_every": 50}
        full = command(*flags(algo, **where), algo=algo, preexec_fn=limit)
        assert_refused((full.returncode, full.stderr[full.stderr.find(f"{algo}.py: ") :]), 1, "make room")
        assert not list((tmp_path / f"{kilobytes}").rglob("*.part"))
        module(algo).train(small(algo, **where))
        assert same(final_state(tmp_path / f"{kilobytes}"), final_state(tmp_path / "undisturbed"))


def test_an_environment_that_does_not_replay_is_announced(tmp_path: Path):
    """It resumes in a new episode, and prints that it is not the same run."""
    code = (
        "import itertools, gymnasium as gym, numpy as np\n"
        "class Drifting(gym.Env):\n"
        "    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,)); action_space = gym.spaces.Box(-1, 1, (1,))\n"
        "    def reset(self, *, seed=None, options=None): super().reset(seed=seed); return np.zeros(1), {}\n"
        "    def step(self, action): return np.random.rand(1), 1.0, False, False, {}\n"
        "gym.register('Drifting-v0', entry_point=Drifting, max_episode_steps=70)\n"
    )
    (tmp_path / "drifting.py").write_text(code)
    environ = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    arguments = flags(env="drifting:Drifting-v0", run_dir=tmp_path / "run")
    assert killed_at("sac", [("update", 250)], *arguments).returncode == 0
    result = command(*arguments, env=environ)
    assert result.returncode == 0
    assert result.stderr.count("is not reproducible, so it starts a new episode") == 1


def test_versions_without_a_package_that_not_every_task_needs(monkeypatch: pytest.MonkeyPatch):
    version = importlib.metadata.version

    def without_mujoco(name: str) -> str:
        if name == "mujoco":
            raise importlib.metadata.PackageNotFoundError
        return version(name)

    everything = versions()
    monkeypatch.setattr(importlib.metadata, "version", without_mujoco)
    assert versions() == {name: found for name, found in everything.items() if name != "mujoco"}


@every_algorithm
def test_config_tells_what_made_the_run(small, algo: str):
    module(algo).train(small(algo, total_steps=60))
    config = json.loads((small().run_dir / "config.json").read_text())
    assert config["arguments"]["hidden"] == [16, 16]
    assert config["arguments"].keys() == {field.name for field in dataclasses.fields(small(algo))}
    assert {"python", "torch", "gymnasium", "mujoco", "numpy"} <= config["versions"].keys()
    assert config["hardware"].keys() == {"cpu", "cores", "threads", "gpu"}
    assert config["commit"]
    assert (small().run_dir / "DONE").exists()
