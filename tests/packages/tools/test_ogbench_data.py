"""OGBench's data, made here: the rules of its authors' programs, its files, resuming, and what can go wrong.

With ONRAMP_OGBENCH, a checkout of OGBench's repository, rows are compared with those of its programs.
"""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from conftest import ROOT

from common.command_line import command_line
from common.errors import InputError, RunError
from offline import ogbench
from offline.npz import Archive
from tools import ogbench_data, ogbench_oracles
from tools.ogbench_data import Args, main, parsed, write_shard
from tools.ogbench_oracles import cells, is_in_reach, make_episode

package = pytest.importorskip("ogbench", reason="needs pip install -e '.[ogbench]'")
AUTHORS = os.environ.get("ONRAMP_OGBENCH")
NAME = "pointmaze-medium-navigate"

# Runs a program of the authors for one episode, with the environment and NumPy's generator seeded once. Modules of
# their training code, which these programs import for experts of other robots, are empty here.
DRIVER = """
import sys, types
import gymnasium, numpy as np
program, seed, flags = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
absent = {"agents": "SACAgent", "utils": "", "utils.evaluation": "supply_rng", "utils.flax_utils": "restore_agent"}
for name, entries in absent.items():
    sys.modules[name] = types.ModuleType(name)
    for entry in entries.split():
        setattr(sys.modules[name], entry, None)
make = gymnasium.make
def seeded(*args, **kwargs):
    env = make(*args, **kwargs)
    env.reset(seed=seed)
    np.random.seed(seed)
    if "pointmaze" not in args[0]:  # their random actions come from a space without a seed
        gymnasium.spaces.Box.sample = lambda self: np.random.uniform(-1, 1, 5)
    return env
gymnasium.make = seeded
from absl import flags as absl
theirs = __import__(program)
absl.FLAGS(["x", *flags])
theirs.main(None)
"""


@pytest.mark.skipif(AUTHORS is None, reason="ONRAMP_OGBENCH is no checkout of OGBench's repository")
@pytest.mark.parametrize("name", [
    NAME, "pointmaze-teleport-navigate",
    *(f"{env}-{kind}" for env in ("cube-single", "cube-double", "scene", "puzzle-3x3") for kind in ("play", "noisy")),
])  # fmt: skip
def test_rows_equal_those_of_the_authors_program(name: str, tmp_path: Path) -> None:
    """With one seed, every array of an episode is the same, bit for bit."""
    task, seed = parsed(name), 11
    is_maze = "maze" in name
    flags = {"env_name": f"{task.env}-v0", "save_path": tmp_path / "a.npz", "dataset_type": task.behaviour}
    flags |= {"num_episodes": 1, "max_episode_steps": task.steps}
    # As in the authors' commands.
    random_actions = {"play": 0.0, "noisy": 0.2 if task.env.startswith("puzzle") else 0.1}
    flags |= {"noise": 0.5} if is_maze else {"p_random_action": random_actions[task.behaviour]}
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DRIVER, f"generate_{'locomaze' if is_maze else 'manipspace'}", str(seed)]
        + [f"--{key}={value}" for key, value in flags.items()],
        check=True, env=os.environ | {"PYTHONPATH": str(Path(str(AUTHORS)) / "data_gen_scripts")},
    )  # fmt: skip
    ours = make_episode(task, seed)
    with np.load(tmp_path / "a.npz") as theirs:
        assert set(theirs.files) == set(ours)
        for key in theirs.files:
            assert theirs[key].dtype == ours[key].dtype
            np.testing.assert_array_equal(theirs[key], ours[key])


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards are written by this process, which is faster and can be changed by a test."""
    monkeypatch.setattr(ogbench_data, "generate", lambda _, parts, __: [write_shard(part) for part in parts])


def arguments(folder: Path, transitions: int = 2000, **changed: Any) -> Args:
    return Args((NAME,), transitions, folder, described=folder / "results", **changed)


@pytest.mark.usefixtures("in_process")
def test_files_have_the_packages_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and validation data, described; the same command does nothing, another one changes nothing."""
    main(arguments(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{NAME}-v0.npz", f"{NAME}-v0-val.npz", f"{NAME}-v0.json", f"{NAME}-v0.npz.sha256", "results",
    }  # fmt: skip
    rows = {split: dict(np.load(tmp_path / f"{NAME}-v0{split}.npz")) for split in ("", "-val")}
    for split, episodes in (("", 2), ("-val", 1)):
        kinds = {key: (values.dtype.name, values.shape) for key, values in rows[split].items()}
        n = 1001 * episodes
        assert kinds == dict.fromkeys(("observations", "actions", "qpos", "qvel"), ("float32", (n, 2))) | {
            "terminals": ("bool", (n,))
        }
        assert np.flatnonzero(rows[split]["terminals"]).tolist() == list(range(1000, n, 1001))
    assert len(package.load_dataset(str(tmp_path / f"{NAME}-v0.npz"))["observations"]) == 2000
    told = json.loads((tmp_path / "results" / f"{NAME}-v0.json").read_text())
    assert told == json.loads((tmp_path / f"{NAME}-v0.json").read_text())
    assert "another sample from the same generator, not the published file" in told["source"]
    assert (told["transitions"], told["episodes"], told["versions"]["ogbench"]) == (2000, 2, "1.2.2")
    solved = {}
    for task in range(1, 6):
        goal = ogbench.goal_of(f"pointmaze-medium-singletask-task{task}-v0").positions[0]
        solved[f"task{task}"] = int((np.hypot(*(rows[""]["qpos"] - goal).T) <= 1.0).sum())
    assert told["solved rows"] == solved
    assert sum(solved.values()) > 0
    monkeypatch.setattr(ogbench_data, "generate", None)
    shutil.rmtree(tmp_path / "results")  # a kill may have come before it
    main(arguments(tmp_path))
    assert told == json.loads((tmp_path / "results" / f"{NAME}-v0.json").read_text())
    for wrong in ({"transitions": 3000}, {"seed": 1}):
        with pytest.raises(InputError, match="exists and was made with other arguments: give another --folder"):
            main(arguments(tmp_path, **wrong))
    (tmp_path / f"{NAME}-v0.json").unlink()
    with pytest.raises(InputError, match="exists and was not made by this command: give another --folder"):
        main(arguments(tmp_path))


@pytest.mark.usefixtures("in_process")
def test_the_description_is_copied_if_asked(tmp_path: Path) -> None:
    """Another seed gives another sample. Without `--described`, the description is next to the data alone."""
    main(Args((NAME,), 1000, tmp_path / "0", seed=0, described=tmp_path))
    main(Args((NAME,), 1000, tmp_path / "1", seed=1))
    facts = [json.loads((tmp_path / where / f"{NAME}-v0.json").read_text()) for where in (".", "0", "1")]
    assert facts[0] == facts[1] != facts[2]
    assert facts[1]["fingerprint"] != facts[2]["fingerprint"]


def test_a_cube_is_moved_and_a_seed_repeats() -> None:
    """An episode of the arm: the oracle lifts the cube, and a seed gives the same rows after another episode."""
    task = parsed("cube-single-play")
    first, other, again = (make_episode(task, seed) for seed in (5, 6, 5))
    for key, values in first.items():
        np.testing.assert_array_equal(values, again[key])
        assert key == "terminals" or (values != other[key]).any()
    np.testing.assert_allclose(first["observations"][:, :6], first["qpos"][:, :6])
    height = first["qpos"][:, 16]
    assert height.min() < 0.03
    assert height.max() > 0.1
    assert np.abs(first["actions"]).max() <= 1
    assert len(height) == 1001


def test_a_killed_command_resumes_and_jobs_change_nothing(tmp_path: Path) -> None:
    """SIGKILL after the first shard: its processes end too, its files are kept, and the result is the same."""
    command = [sys.executable, "-m", "tools.ogbench_data", NAME, "--transitions", "20000"]

    def started(folder: str, jobs: int) -> "subprocess.Popen[bytes]":
        where = ["--folder", str(tmp_path / folder), "--described", str(tmp_path / folder), "--jobs", str(jobs)]
        return subprocess.Popen([*command, *where], cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL)

    killed = started("a", 1)
    parts = tmp_path / "a" / f"{NAME}-v0.seed0.parts"
    wait(lambda: len(list(parts.glob("*.npz"))) >= 1)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    wait(lambda: group_is_gone(killed.pid))
    kept = {path: path.stat().st_mtime_ns for path in parts.glob("*.npz")}
    assert 1 <= len(kept) <= 2
    resumed = started("a", 1)
    wait(lambda: len(list(parts.glob("*.npz"))) > len(kept))
    assert all(path.stat().st_mtime_ns == made for path, made in kept.items())
    assert resumed.wait(120) == 0
    assert not parts.exists()
    parts.mkdir()  # a kill after the last file leaves it
    assert started("a", 1).wait(120) == 0
    assert not parts.exists()
    assert started("b", 2).wait(120) == 0
    for name in (f"{NAME}-v0.npz", f"{NAME}-v0-val.npz"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def group_is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_an_oracle_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    task = parsed(NAME)
    source = ogbench_oracles.recorder(task)
    monkeypatch.setattr(source, "episode", lambda: 1 / 0)
    with pytest.raises(RunError, match=r"oracle of pointmaze.* failed in the episode of seed 7: ZeroDivisionError"):
        make_episode(task, 7)
    monkeypatch.setattr(source, "episode", lambda: {"qpos": np.array([[np.nan]])})
    with pytest.raises(RunError, match="the episode of seed 7 has qpos that are not finite"):
        make_episode(task, 7)


def test_a_cube_that_is_always_lost_is_no_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {"qpos": np.full((3, 25), 0.5)}
    monkeypatch.setattr(ogbench_oracles.Manipulator, "_attempt", lambda self: lost)
    with pytest.raises(RunError, match=r"oracle of scene-play failed .*: RuntimeError the cube left .* in 100 ep"):
        make_episode(parsed("scene-play"), 1)


@pytest.mark.usefixtures("in_process")
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 1 and a line of advice; shards are kept, nothing is half-written, and the same command resumes."""
    whole, wrote = ogbench_data.replacing, list[str]()

    @contextlib.contextmanager
    def full(path: Path) -> Any:
        with whole(path) as file:
            yield Full(file) if path.name.startswith(NAME) else file
        wrote.append(path.name)

    class Full:
        def __init__(self, file: BinaryIO) -> None:
            self.file = file

        def write(self, data: Any) -> None:
            self.file.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))

    monkeypatch.setattr(ogbench_data, "replacing", full)
    words = [NAME, "--transitions", "1000", "--folder", str(tmp_path), "--described", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["ogbench_data", *words])
    with pytest.raises(SystemExit) as status:
        command_line(main, Args)
    assert status.value.code == 1
    assert "No space left on device" in capsys.readouterr().err
    assert wrote == ["train-00000-1.npz", "val-00000-1.npz"]
    assert {path.name for path in tmp_path.iterdir()} == {f"{NAME}-v0.seed0.parts"}
    monkeypatch.setattr(ogbench_data, "replacing", whole)
    monkeypatch.setattr(ogbench_oracles, "recorder", None)
    command_line(main, Args)
    assert len(Archive(tmp_path / f"{NAME}-v0.npz")["terminals"]) == 1001


def test_bad_arguments(tmp_path: Path) -> None:
    for wrong in ("cube-single", "antmaze-large-navigate", "scene-play-v1", "cube-octuple-play"):
        with pytest.raises(InputError, match=f"{wrong} cannot be made here: choose from scene-play, scene-noisy"):
            main(Args((wrong,), folder=tmp_path))
    with pytest.raises(InputError, match="give whole numbers of 1 or more"):
        main(Args((NAME,), transitions=0, folder=tmp_path))
    with pytest.raises(InputError, match="--seed is -1: give a number of 0 or more"):
        main(Args((NAME,), seed=-1, folder=tmp_path))
    with pytest.raises(InputError, match="no dataset is named: give one such as scene-play"):
        main(Args((), folder=tmp_path))
    note = tmp_path / f"{NAME}-v0.json"
    note.write_text("{")
    with pytest.raises(InputError, match=r"-v0\.json is damaged: give another --folder"):
        main(Args((NAME,), folder=tmp_path))
    note.unlink()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/data cannot be written \(Not a directory\): give another --folder"):
        main(Args((NAME,), folder=tmp_path / "file" / "data"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("position", "is_seen"), [
    ((0.4, 0.0, 0.02), True), ((0.4, 0.289, 0.02), True), ((0.4, 0.29, 0.3), False), ((0.4, -0.299, 0.02), True),
    ((0.4, -0.3, 0.02), False), ((0.4, -0.35, 0.07), True), ((0.4, -0.35, 0.081), False),
])  # fmt: skip
def test_a_cube_is_seen_on_the_table_and_in_the_drawer(position: tuple[float, ...], is_seen: bool) -> None:
    path = np.array([(0.4, 0.0, 0.02), position, (0.4, 0.0, 0.02)])
    assert is_in_reach(path) is is_seen


def test_goals_are_the_cells_that_are_not_inside_a_corridor() -> None:
    """In the picture, goals are o and corridors are +."""
    picture = ["#######", "#o++o##", "#+##+##", "#o++oo#", "#######"]
    maze = np.array([[cell == "#" for cell in row] for row in picture], int)
    free, goals = cells(maze)
    assert set(free) == {(i, j) for i, row in enumerate(picture) for j, cell in enumerate(row) if cell in "o+"}
    assert set(goals) == {(i, j) for i, row in enumerate(picture) for j, cell in enumerate(row) if cell == "o"}
