"""Files of other projects become the transitions that their own loaders give, and unknown ones are refused in words."""

import json
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import minari
import numpy as np
import pytest
from conftest import PENDULUM, ROOT, bound_by_permissions
from d4rl_file import make
from pages import commands

from common.command_line import command_line, parse
from common.errors import InputError
from offline.dataset import load, read
from tools.convert import Args, main

LENGTHS = (3, 2, 4)  # transitions of the trajectories
WALKS = [np.random.default_rng(i).normal(size=(length + 1, 3)).astype(np.float32) for i, length in enumerate(LENGTHS)]
OBS, NEXT_OBS = (np.concatenate(part) for part in ([w[:-1] for w in WALKS], [w[1:] for w in WALKS]))
ACTIONS = np.linspace(-1.0, 1.0, 9, dtype=np.float32)[:, None] * [1.0, -0.5]
REWARDS = -np.arange(9, dtype=np.float32)
ENDS = np.array([0, 0, 1, 0, 1, 0, 0, 0, 1], bool)
BOX = {"action_low": (-1.0,), "action_high": (1.0,)}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


def converted(file: Path, output: str = "out.hdf5", **arguments: Any) -> Any:
    """Convert, and load the result without clipping its actions."""
    main(Args(file, output, **arguments))
    return load(output.removeprefix("minari:"), max_action=None)


def assert_holds(dataset: Any, terminations: Any, rows: Any = slice(None), rewards: Any = REWARDS) -> None:
    """The transitions are those `rows` of the walks, with these terminations."""
    assert np.array_equal(dataset.column("obs"), OBS[rows])
    assert np.array_equal(dataset.column("next_obs"), NEXT_OBS[rows])
    assert np.array_equal(dataset.column("actions"), ACTIONS[rows].astype(np.float32))
    assert np.array_equal(dataset.column("rewards"), rewards[rows])
    assert dataset.column("terminations").tolist() == [float(each) for each in np.asarray(terminations)[rows]]


def with_last_rows(values: Any, last: Any) -> np.ndarray:
    """Return the rows of the transitions, with a row at the end of each trajectory."""
    return np.concatenate([np.append(part, [last], axis=0) for part in np.split(values, np.cumsum(LENGTHS)[:-1])])


MASKS = np.array([1, 1, 1, 1, 0, 1, 0, 0, 1], np.float32)  # solved inside a trajectory, and at an end


def ogbench(form: str) -> Path:
    """OGBench's data: as its file holds them, or as its loader returns them, compact or not (version 1.2.1).

    Numbers in a trajectory's last row are wrong on purpose: no transition may have them.
    """
    if form == "loader":
        parts = {
            "observations": OBS,
            "actions": ACTIONS,
            "next_observations": NEXT_OBS,
            "terminals": ENDS,
            "masks": MASKS,
        }
        parts["rewards"] = REWARDS
    else:
        compact = {"valids": with_last_rows(np.ones(9), 0)} if form == "compact" else {}
        parts = compact | {
            "observations": np.concatenate(WALKS), "actions": with_last_rows(ACTIONS, [0.7, 0.7]),
            "rewards": with_last_rows(REWARDS, 99.0), "masks": with_last_rows(MASKS, 0.0),
            "terminals": with_last_rows(ENDS if compact else 0 * ENDS, 1),
        }  # fmt: skip
    np.savez("ogbench.npz", **parts)
    return Path("ogbench.npz")


@pytest.mark.parametrize("output", ["out.hdf5", "minari:og/cube-v0"])
@pytest.mark.parametrize("form", ["file", "loader", "compact"])
def test_ogbench(form: str, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Terminals are ends, masks are terminations, and the last row of a trajectory is no transition."""
    dataset = converted(ogbench(form), output)
    assert_holds(dataset, MASKS == 0)
    assert dataset.ends.tolist() == [3, 5, 7, 8, 9]
    assert np.flatnonzero(dataset.truncations).tolist() == [2, 8]
    assert "is OGBench's npz" in capsys.readouterr().err


def test_ogbench_without_rewards_is_refused_with_the_cure() -> None:
    np.savez("raw.npz", observations=OBS, actions=ACTIONS, terminals=ENDS, qpos=OBS)
    with pytest.raises(InputError, match=r"has no rewards, .* for one task\ngive the task as --env"):
        converted(Path("raw.npz"))


def stable_baselines(starts: Any = None) -> Path:
    """An expert's file, with the arrays that `generate_expert_traj` of stable-baselines 2.10.2 writes."""
    starts = np.append(True, ENDS[:-1]) if starts is None else starts
    parts = {"actions": ACTIONS, "obs": OBS, "rewards": REWARDS, "episode_starts": starts}
    np.savez("expert.npz", **parts, episode_returns=np.zeros(3))
    return Path("expert.npz")


def test_stable_baselines() -> None:
    """Episodes of the time limit are cut, and their last step has no successor. Shorter ones terminated."""
    dataset = converted(stable_baselines(), horizon=4, **BOX)
    terminations = ENDS & (np.arange(9) != 8)
    kept = np.arange(8)
    assert dataset.column("terminations").tolist() == terminations[kept].tolist()
    assert np.array_equal(dataset.column("obs"), OBS[kept])
    inside = ~terminations[kept]
    assert np.array_equal(dataset.column("next_obs")[inside], NEXT_OBS[kept][inside])
    assert dataset.returns().tolist() == [-3, -7, -26]
    assert dataset.truncations.tolist() == [False] * 7 + [True]


@pytest.mark.parametrize("command", [c for _, c in commands() if "tools.convert" in c and "Hopper" in c])
def test_a_command_of_the_docs_runs(command: str) -> None:
    """On an expert's file of two episodes with Hopper's sizes, of which the second ends at the time limit."""
    args, n = parse(Args, shlex.split(command)[3:]), 1_020
    parts = {"obs": np.random.default_rng(0).normal(size=(n, 11)), "actions": np.zeros((n, 3)), "rewards": np.ones(n)}
    np.savez(args.file, **parts, episode_starts=np.isin(np.arange(n), [0, 20]))
    main(args)
    dataset = load(args.output)
    assert (dataset.env, dataset.lengths.tolist()) == ("Hopper-v4", [20, 999])


def test_the_time_limit_of_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    """Pendulum's is 200 steps, and its box is ±2."""
    obs, n = np.random.default_rng(0).normal(size=(250, 3)), 250
    parts = {"obs": obs, "actions": np.full((n, 1), 1.0), "rewards": np.zeros(n)}
    np.savez("expert.npz", **parts, episode_starts=np.isin(np.arange(n), [0, 200]))
    dataset = converted(Path("expert.npz"), env="Pendulum-v1")
    assert np.flatnonzero(dataset.column("terminations")).tolist() == [248]  # row 199 has no successor
    assert (dataset.env, set(dataset.column("actions")[:, 0])) == ("Pendulum-v1", {0.5})
    assert "is an expert's npz of Stable-Baselines 2" in capsys.readouterr().err


def imitation(terminal: Any = (True, True, False), **changed: Any) -> Path:
    """Trajectories as `types.save` of imitation 0.3.1 writes them: infos are objects, which NumPy pickles."""
    parts = {
        "obs": np.concatenate(WALKS), "acts": ACTIONS, "rews": REWARDS, "infos": np.array([{"a": Bomb()}] * 9),
        "terminal": np.array(terminal), "indices": np.cumsum(LENGTHS[:-1]),
    }  # fmt: skip
    np.savez_compressed("imitation.npz", **{k: v for k, v in (parts | changed).items() if v is not None})
    return Path("imitation.npz")


class Bomb:
    """Leaves a file if it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("unpickled"),)


@pytest.mark.parametrize("output", ["out.hdf5", "minari:im/expe-v0"])
def test_imitation(output: str) -> None:
    """Every step has its successor. Whole episodes shorter than the limit terminated, fragments did not."""
    assert_holds(converted(imitation(), output, horizon=5, **BOX), [0, 0, 1, 0, 1, 0, 0, 0, 0])
    limited = converted(
        imitation((True, True, True)), output.replace("out", "two").replace("expe", "two"), horizon=4, **BOX
    )
    assert_holds(limited, [0, 0, 1, 0, 1, 0, 0, 0, 0])
    assert not Path("unpickled").exists()


def robomimic(**changed: Any) -> Path:
    """Demonstrations as robomimic's docs/datasets/overview.md describes them, in another order of names."""
    dones = changed.pop("dones", ENDS)
    rewards = changed.pop("rewards", np.array([0, 0, 1, 0, 0, 0, 1, 1, 1], np.float64))
    names, firsts = ("demo_2", "demo_9", "demo_10"), np.append(0, np.cumsum(LENGTHS))
    with h5py.File("low_dim.hdf5", "w") as file:
        file.create_group("mask")["train"] = [b"demo_2"]
        data = file.create_group("data")
        facts = {"env_name": "Lift", "type": 1, "env_kwargs": {}} | changed.pop("env_args", {})
        data.attrs.update({"total": 9, "env_args": json.dumps(facts)})
        for name, first, last in zip(names, firsts[:-1], firsts[1:], strict=True):
            demo, rows = data.create_group(name), slice(first, last)
            demo.attrs["num_samples"] = last - first
            parts = {"actions": ACTIONS[rows], "rewards": rewards[rows], "dones": dones[rows].astype(int)}
            parts |= {"states": np.zeros((last - first, 5))}
            for group, obs in (("obs", OBS[rows]), ("next_obs", NEXT_OBS[rows])):
                parts |= {f"{group}/object": obs[:, 2], f"{group}/eef_pos": obs[:, :2]}
                parts |= {f"{group}/agentview_image": np.zeros((last - first, 8, 8, 3), np.uint8)}
            for key, values in (parts | changed).items():
                if values is not None:
                    demo[key] = values
    return Path("low_dim.hdf5")


SPARSE = np.array([0, 0, 1, 0, 0, 0, 1, 1, 1], np.float32)


@pytest.mark.parametrize("keys", [(), ("eef_pos", "object")])
def test_robomimic(keys: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Demonstrations are in the order of their numbers. An end without success is no termination."""
    dones = np.array([0, 0, 1, 0, 1, 0, 1, 1, 1], bool)
    dataset = converted(robomimic(dones=dones), obs_keys=keys)
    assert_holds(dataset, [0, 0, 1, 0, 0, 0, 1, 1, 1], rewards=SPARSE)
    said = capsys.readouterr().err
    assert "is robomimic's HDF5" in said
    assert "3 demonstrations in Lift; observations: eef_pos, object\n" in said
    assert "warning: images are left out: agentview_image" in said


def test_the_order_of_obs_keys() -> None:
    dataset = converted(robomimic(), obs_keys=("object", "eef_pos"))
    assert np.array_equal(dataset.column("obs"), OBS[:, [2, 0, 1]])
    assert np.array_equal(converted(robomimic(), "one.hdf5", obs_keys=("object",)).column("next_obs"), NEXT_OBS[:, 2:])


def test_robomimic_with_dense_rewards(capsys: pytest.CaptureFixture[str]) -> None:
    """Every end is marked as done. That is printed, and --horizon decides."""
    file = robomimic(rewards=REWARDS)
    assert_holds(converted(file), ENDS)
    assert "every demonstration ends with a termination: give --horizon" in capsys.readouterr().err
    assert_holds(converted(file, "cut.hdf5", horizon=4), ENDS & (np.arange(9) < 8))


def test_robomimic_without_next_obs() -> None:
    """Successors are the next rows then."""
    file = robomimic(rewards=REWARDS)
    with h5py.File(file, "a") as opened:
        for demo in opened["data"].values():
            del demo["next_obs"]
    dataset = converted(file, horizon=4)
    assert np.array_equal(dataset.column("obs"), OBS[:8])
    assert np.array_equal(dataset.column("next_obs")[[0, 1, 3]], NEXT_OBS[[0, 1, 3]])


def named(**changed: Any) -> Path:
    parts = {"observations": OBS, "actions": ACTIONS, "rewards": REWARDS, "next_observations": NEXT_OBS}
    np.savez(
        "named.npz", **parts | {"terminals": ENDS & (np.arange(9) < 3), "timeouts": ENDS & (np.arange(9) > 3)} | changed
    )
    return Path("named.npz")


def test_arrays_with_d4rls_names_and_all_facts() -> None:
    """The box has one number or one for each dimension, and scores and the origin are stored."""
    dataset = converted(named(), action_low=(-2.0, -1.0), action_high=(2.0, 1.0), ref_scores=(-5.0, 5.0))
    assert dataset.column("terminations").tolist() == (ENDS & (np.arange(9) < 3)).tolist()
    assert np.allclose(dataset.column("actions"), ACTIONS / [2.0, 1.0])
    assert dataset.reference == (-5.0, 5.0)
    with h5py.File("out.hdf5") as file:
        kind = json.loads(file.attrs["recipe"])["sources"][0]["kind"]
    assert kind == "named.npz, an npz with D4RL's names"
    main(Args(Path("named.npz"), "minari:mine/named-v0", **BOX))
    assert minari.load_dataset("mine/named-v0").total_steps == 9


def test_a_dataset_changes_its_kind_and_back() -> None:
    """From HDF5 to Minari and back, with environment, its settings, box, scores and every transition."""
    first = converted(named(), action_low=(-2.0, -1.0), action_high=(2.0, 1.0), ref_scores=(-5.0, 5.0))
    in_minari = converted(Path("out.hdf5"), "minari:mine/walk-v0")
    back = converted(Path("mine/walk-v0"), "back.hdf5")
    for dataset in (in_minari, back):
        for column in ("obs", "next_obs", "actions", "rewards", "terminations"):
            assert np.array_equal(dataset.column(column), first.column(column)), column
        assert (dataset.ends.tolist(), dataset.reference) == (first.ends.tolist(), first.reference)
    main(Args(PENDULUM, "minari:mine/pendulum-v0", env="Pendulum-v1"))
    main(Args(Path("mine/pendulum-v0"), "pendulum.hdf5"))
    assert (load("pendulum.hdf5").env, len(load("pendulum.hdf5"))) == ("Pendulum-v1", len(load(PENDULUM)))


def test_code_that_a_dataset_names_is_not_imported(caplog: pytest.LogCaptureFixture) -> None:
    """It is left out, with the flag that keeps it."""
    converted(named(), **BOX)
    with h5py.File("out.hdf5", "a") as file:
        file.attrs["env"] = "mine:Walk-v0"
    assert converted(Path("out.hdf5"), "minari:mine/walk-v0").env is None
    assert "mine:Walk-v0 is left out: give --env mine:Walk-v0 to keep it" in caplog.text


def test_the_advice_to_name_code_keeps_the_environments_arguments(tmp_path: Path, monkeypatch: Any) -> None:
    """And the reference scores, which are also kept without the code."""
    (tmp_path / "walks.py").write_text(
        "import gymnasium\ngymnasium.register('Swing-v0', 'gymnasium.envs.classic_control.pendulum:PendulumEnv')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    facts = {"env": "walks:Swing-v0", "env_kwargs": '{"g": 3.0}', "ref_min_score": -5.0, "ref_max_score": 5.0}
    converted(PENDULUM, "minari:mine/swing-v0")
    main(Args("mine/swing-v0", "swing.hdf5"))
    with h5py.File("swing.hdf5", "a") as file:
        file.attrs.update(facts)
    for env, settings in ((None, {}), ("walks:Swing-v0", {"g": 3.0})):
        name = f"mine/swing-v{1 if env else 2}"
        main(Args("swing.hdf5", f"minari:{name}", env=env))
        found = read(name)
        assert (found.untrusted_env, found.env_kwargs or {}, found.reference) == (env, settings, (-5.0, 5.0))


def test_a_file_without_timeouts_takes_a_horizon() -> None:
    """It is D4RL's layout. Two walks terminate, and that of four steps is cut."""
    terminals = ENDS & (np.arange(9) < 8)
    converted(named(terminals=terminals, timeouts=ENDS & ~terminals), "named.hdf5", **BOX)
    with h5py.File("named.hdf5", "a") as file:
        del file["timeouts"]
    with pytest.raises(InputError, match=r"has no timeouts.*give their time limit as --horizon"):
        converted(Path("named.hdf5"), "minari:mine/walk-v0", **BOX)
    dataset = converted(Path("named.hdf5"), "minari:mine/walk-v0", horizon=4, **BOX)
    assert_holds(dataset, terminals)
    assert dataset.ends.tolist() == (np.flatnonzero(ENDS) + 1).tolist()


def test_an_id_of_a_remote_is_not_a_path() -> None:
    with pytest.raises(InputError, match="hf://nowhere/D4RL/pen/human-v2"):
        main(Args("hf://nowhere/D4RL/pen/human-v2", "out.hdf5"))


def raw_hdf5(**parts: Any) -> Path:
    with h5py.File("raw.hdf5", "w") as file:
        for key, values in parts.items():
            file[key] = values
    return Path("raw.hdf5")


def saved(content: bytes) -> Path:
    Path("file").write_bytes(content)
    return Path("file")


def cut(file: Path) -> Path:
    return saved(file.read_bytes()[: file.stat().st_size // 2])


OBJECTS = np.array([True, np.array([False, True])], dtype=object)
REFUSED: dict[str, tuple[Callable[[], Path], dict[str, Any], str]] = {
    "none": (lambda: Path("none.npz"), {}, "there is no file none.npz"),
    "text": (lambda: saved(b"years of work"), {}, r"file is a text file, no .npz or HDF5 file.*\nknown: .*OGBench"),
    "pickle": (lambda: saved(pickle.dumps(Bomb())), {}, r"is a pickle, no .npz.*\n.*docs/data.md has a recipe"),
    "other npz": (lambda: (np.savez("a.npz", x=[1], y=[2]), Path("a.npz"))[1], {}, "an archive of x, y, of no known"),
    "other HDF5": (lambda: raw_hdf5(x=[1]), {}, "an HDF5 file of x, of no known format"),
    "D4RL's": (lambda: make(Path("d.hdf5"), "..t"), {}, "is in D4RL's layout already: give it as --dataset"),
    "other demonstrations": (lambda: raw_hdf5(**{"data/demo_a/actions": [1]}), {}, "an HDF5 file of data, of no known"),
    "raw robosuite": (lambda: raw_hdf5(**{"data/demo_1/actions": [1]}), {}, "without dones, obs, rewards"),
    "robomimic's D4RL": (lambda: robomimic(env_args={"env_name": "hopper-medium-v2"}), {}, "give --dataset hopper-m"),
    "an image": (robomimic, {"obs_keys": ("agentview_image",)}, "agentview_image is no vector: choose from eef_"),
    "no such key": (robomimic, {"obs_keys": ("joint",)}, "joint is not in the file: choose from eef_pos, object"),
    "images only": (lambda: robomimic(**{f"{g}/{k}": None for g in ("obs", "next_obs") for k in ("object", "eef_pos")}),
                    {}, "has images only"),
    "cut zip": (lambda: cut(ogbench("file")), {}, "is damaged"),
    "cut HDF5": (lambda: cut(robomimic()), {}, "is cut short|is damaged"),
    "damaged array": (lambda: saved(ogbench("file").read_bytes().replace(b"NUMPY", b"NUMPX")), {}, "is damaged"),
    "pickled array": (lambda: stable_baselines(OBJECTS), {"horizon": 4}, "holds episode_starts as a pickle"),
    "no limit": (stable_baselines, BOX, "does not distinguish terminations from time limits: .*--horizon"),
    "a limit too small": (stable_baselines, {"horizon": 3}, "has an episode of 4 steps: give that or more"),
    "no box": (stable_baselines, {"horizon": 4}, "the box of the actions is unknown"),
    "no rewards": (lambda: imitation(rews=None), {"horizon": 5}, r"has no rewards \(rews\)"),
    "wrong indices": (lambda: imitation(indices=np.array([3, 3])), {"horizon": 5}, "do not fit together"),
    "wrong lengths": (lambda: named(rewards=REWARDS[:8]), BOX, "rewards has 8 rows, observations has 9"),
    "not finite": (lambda: named(observations=OBS * np.nan), BOX, "observations of row 0 is not finite"),
    "OGBench --horizon": (lambda: ogbench("file"), {"horizon": 3}, "needs no --horizon: leave it out"),
    "OGBench's NaN": (lambda: ogbench_of(masks=MASKS * np.nan), {}, "masks has values that are not finite"),
    "OGBench's words": (lambda: ogbench_of(masks=np.full(len(MASKS), "a")), {}, "masks has values that are not finite"),
    "a start that is NaN": (lambda: stable_baselines(np.full(9, np.nan)), {"horizon": 5}, "episode_starts has values"),
    "OGBench lengths": (lambda: ogbench_of(masks=MASKS[:8]), {}, "the arrays have different lengths"),
    "--obs-keys": (stable_baselines, {"obs_keys": ("a",)}, "needs no --obs-keys"),
}  # fmt: skip


def ogbench_of(**changed: Any) -> Path:
    with np.load(ogbench("loader")) as file:
        parts = dict(file) | changed
    np.savez("changed.npz", **parts)
    return Path("changed.npz")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_is_named(name: str, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """With exit status 2 and at most two lines. No output is left, and no pickle was loaded."""
    file, arguments, said = REFUSED[name]
    flags = [str(file()), "--output", "out.hdf5"]
    for key, value in arguments.items():
        flags += [f"--{key.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else [value])]
    monkeypatch.setattr(sys, "argv", ["convert.py", *flags])
    with pytest.raises(SystemExit) as stop:
        command_line(main, Args)
    lines = capsys.readouterr().err.splitlines()
    lines = lines[next(i for i, line in enumerate(lines) if line.startswith("convert.py: ")) :]
    assert stop.value.code == 2
    assert len(lines) <= 2
    assert re.search(said, "\n".join(lines)), lines
    assert not Path("out.hdf5").exists()
    assert not Path("unpickled").exists()


def test_one_that_may_not_be_read() -> None:
    with tempfile.TemporaryDirectory() as other:  # pytest's own folders are closed to other users
        folder = Path(other)
        (file := Path(shutil.copy(named(), folder))).chmod(0)
        with bound_by_permissions(folder), pytest.raises(InputError, match=r"named\.npz cannot be read \(Permission"):
            main(Args(file, str(folder / "out.hdf5"), **BOX))


def test_a_horizon_of_no_step() -> None:
    with pytest.raises(InputError, match="--horizon is 0: give a number of 1 or more"):
        Args(Path("a.npz"), "out.hdf5", horizon=0)


def test_the_recipe_for_dapgs_pickles() -> None:
    """The lines of docs/data.md, in a Python that does not find our packages, and the command that follows them."""
    page = (ROOT / "docs" / "data.md").read_text()
    (recipe,) = re.findall(r"```python\n(import pickle.*?)```", page, re.DOTALL)
    (call,) = re.findall(r"`(python unpickle\.py .*?)`", page)
    Path("unpickle.py").write_text(recipe)
    parts = [np.split(values, np.cumsum(LENGTHS)[:-1]) for values in (OBS, ACTIONS, REWARDS)]
    names = ("observations", "actions", "rewards", "init_state_dict")
    paths = [dict(zip(names, (*path, {"qpos": np.zeros(3)}), strict=True)) for path in zip(*parts, strict=True)]
    Path("demos.pickle").write_bytes(pickle.dumps(paths))
    line = [sys.executable, "-I", *shlex.split(call)[1:]]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    dataset = converted(Path("demos.npz"), **BOX)
    kept = np.flatnonzero(~ENDS)  # the successor of a demonstration's last step is unknown
    assert_holds(dataset, np.zeros(9), kept)
    assert dataset.returns().tolist() == [-3, -7, -26]


def test_nothing_of_ours_unpickles() -> None:
    """No module that reads or writes datasets imports pickle, or allows NumPy to use it."""
    files = [*(ROOT / "offline").glob("*.py"), ROOT / "tools" / "convert.py"]
    assert len(files) > 10
    for path in files:
        assert not re.search(r"import pickle|allow_pickle=True|\bmarshal\b|joblib", path.read_text()), path
