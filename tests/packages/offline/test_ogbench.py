"""OGBench's tasks as --dataset and --env: files, relabelling, scores, exact resume, downloads and bad input.

Its package, an extra, relabels the same rows here, and splits the same trajectories.
"""

import csv
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from test_download import Server

from common.errors import InputError
from common.evaluate import Episode
from envs import ogbench as environments
from envs.make import make
from offline import ogbench
from offline.dataset import load, read
from offline.download import note_of
from offline.npz import Archive
from offline.scores import scorer
from tools.convert import Args as ConvertArgs
from tools.convert import main as convert

package = pytest.importorskip("ogbench", reason="needs pip install -e '.[ogbench]'")
relabel = importlib.import_module("ogbench.relabel_utils").relabel_dataset
LENGTHS = (5, 1, 8, 2)  # rows of the trajectories; the second has no transition


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data in a folder of its own, and no server."""
    monkeypatch.setenv("OGBENCH_DATASET_DIR", str(tmp_path))
    monkeypatch.setenv("OGBENCH_MIRROR", "http://127.0.0.1:9")
    return tmp_path


def random_rows(env_id: str, seed: int = 0) -> dict[str, Any]:
    """Rows of the files' form, whose states are near the goal of a task: some solve it, some parts of it."""
    goal, random, n = ogbench.goal_of(env_id), np.random.default_rng(seed), sum(LENGTHS)
    rows: dict[str, Any] = {
        key: random.normal(size=(n, width)).astype(np.float32) for key, width in goal.widths.items()
    }
    rows["actions"] = np.tanh(rows["actions"])
    for columns, position in zip(goal.columns, goal.positions, strict=True):
        rows["qpos"][:, columns] = position + random.normal(size=(n, len(position))) * goal.radius / 1.6
    for column, position in goal.joints.items():
        rows["qpos"][:, column] = position + random.normal(size=n) * 0.03
    if goal.buttons is not None:
        flipped = random.random((n, len(goal.buttons))) < 0.04
        rows["button_states"] = np.where(flipped, 1 - goal.buttons, goal.buttons).astype(np.int64)
    rows["terminals"] = np.isin(np.arange(n), np.cumsum(LENGTHS) - 1)
    return rows | {"qvel": np.zeros((n, 3), np.float32)}


def save(folder: Path, name: str, rows: dict[str, Any]) -> Path:
    np.savez_compressed(folder / f"{name}.npz", **rows)
    return folder / f"{name}.npz"


def packages(path: Path, env_id: str) -> tuple[dict[str, Any], Any]:
    """The transitions as the package's own loader and relabelling give them, and its environment.

    For a task with sparse rewards, its rewards are changed by the rule of ColinQiyangLi/qc (main.py, commit 48283b4).
    """
    env = gym.make(env_id, disable_env_checker=True)
    data = package.load_dataset(str(path), add_info=True)
    relabel(env_id, env, data)
    if "-sparse-" in env_id:
        data["rewards"] = (data["rewards"] != 0.0) * -1.0
    return data, env.unwrapped


TASKS = {
    "cube-single-play-singletask-task4-v0": "cube-single-singletask-task4-v0",
    "cube-double-noisy-singletask-v0": "cube-double-singletask-v0",
    "scene-play-singletask-task5-v0": "scene-singletask-task5-v0",
    "scene-play-sparse-singletask-task1-v0": "scene-sparse-singletask-task1-v0",
    "puzzle-3x3-noisy-sparse-singletask-v0": "puzzle-3x3-sparse-singletask-v0",
    "puzzle-3x3-play-singletask-v0": "puzzle-3x3-singletask-v0",
    "puzzle-4x5-noisy-singletask-v0": "puzzle-4x5-singletask-v0",
    "pointmaze-medium-navigate-singletask-task2-v0": "pointmaze-medium-singletask-task2-v0",
    "antmaze-large-stitch-singletask-task3-v0": "antmaze-large-singletask-task3-v0",
    "antsoccer-arena-navigate-singletask-v0": "antsoccer-arena-singletask-v0",
}


@pytest.mark.parametrize("dataset_id", TASKS)
def test_rewards_and_masks_equal_the_packages(dataset_id: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row, in blocks of any size; a trajectory is an episode, and its last row is no transition."""
    env_id, name = TASKS[dataset_id], ogbench.dataset_and_environment(dataset_id)[0]
    theirs, _ = packages(save(folder, name, random_rows(env_id)), env_id)
    assert 0 < (theirs["masks"] == 0).sum() < len(theirs["masks"])
    for rows in (16_384, 3, 1):
        monkeypatch.setattr(ogbench, "BLOCK_ROWS", rows)
        ours = read(dataset_id)
        blocks = [np.concatenate(parts) for parts in zip(*ours.blocks(), strict=True)]
        names = ("observations", "actions", "rewards", "next_observations")
        for block, key in zip(blocks, names, strict=False):
            np.testing.assert_array_equal(block, theirs[key])
        np.testing.assert_array_equal(blocks[4], theirs["masks"] == 0)
        np.testing.assert_array_equal(ours.rewards(), theirs["rewards"])
        assert ours.ends.tolist() == [4, 11, 12]
    assert (ours.env, len(ours)) == (env_id, 12)
    assert np.isnan(ours.dropped_final_rewards).all()


@pytest.mark.parametrize(("name", "task"), [
    ("pointmaze-giant", 1), ("antmaze-large", 1), ("humanoidmaze-medium", 1), ("antsoccer-medium", 4),
    ("cube-triple", 2), ("scene", 2), ("puzzle-3x3", 4), ("puzzle-4x4", 4), ("puzzle-4x5", 2), ("puzzle-4x6", 2),
])  # fmt: skip
def test_a_name_without_a_task_is_the_default_task(name: str, task: int) -> None:
    """The numbers are those of the package's documentation."""
    assert make(f"{name}-singletask-v0").unwrapped._reward_task_id == task


def test_every_dataset_has_the_environment_of_its_name() -> None:
    environments.register("cube-single-singletask-v0")
    for dataset_id in ogbench.IDS:
        env_id = ogbench.dataset_and_environment(dataset_id)[1]
        one, other = gym.registry[dataset_id], gym.registry[env_id]
        assert (one.kwargs, one.additional_wrappers) == (other.kwargs, other.additional_wrappers)
        assert gym.envs.registration.EnvSpec.from_json(one.to_json()) == one  # Minari's datasets store it
        assert gym.registry[env_id].entry_point.startswith("ogbench.")
    assert len(environments.DATASETS) == 47
    assert len(ogbench.IDS) == 6 * (47 + 18)  # the 18 of the arm have sparse rewards too


@pytest.mark.parametrize("unsolved", [0, 1, 3])
def test_sparse_rewards_count_no_parts(unsolved: int) -> None:
    """A puzzle with so many wrong buttons, in both forms."""
    for form, reward in (("", -unsolved), ("-sparse", -min(unsolved, 1))):
        env = make(f"puzzle-3x3{form}-singletask-task1-v0")
        env.reset(seed=0)
        inner: Any = env.unwrapped
        inner._cur_button_states = inner._target_button_states.copy()
        inner._cur_button_states[:unsolved] ^= 1
        inner.post_step()  # success is that of the state before a step
        assert env.step(np.zeros(5, np.float32))[1:3] == (reward, unsolved == 0)


@pytest.mark.parametrize("env_id", [
    "cube-single-play-singletask-task2-v0", "scene-sparse-singletask-task1-v0", "puzzle-3x3-singletask-v0",
    "pointmaze-teleport-navigate-singletask-v0", "antmaze-medium-singletask-v0",
])  # fmt: skip
def test_environments_resume_exactly(env_id: str) -> None:
    """Inside the third episode, from another process's point of view: another environment of another seed."""
    random = np.random.default_rng(0)
    env, other = make(env_id), make(env_id)
    env.reset(seed=1)
    other.reset(seed=2)

    def act(*envs: Any) -> list[Any]:
        action = random.uniform(-1, 1, env.action_space.shape).astype(np.float32)
        return [each.step(action) for each in envs]

    for _ in range(2):
        for _ in range(20):
            act(env)
        env.reset()
    for _ in range(15):
        info = act(env)[0][4]
    assert info["success"] in (False, True)
    np.random.seed(5)  # noqa: NPY002
    global_state = np.random.get_state()[1].tolist()  # noqa: NPY002
    assert other.set_state(env.get_state())
    for _ in range(20):
        one, two = act(env, other)
        assert one[0].tobytes() == two[0].tobytes()
        assert one[1:4] == two[1:4]
    assert env.reset()[0].tobytes() == other.reset()[0].tobytes()
    assert np.random.get_state()[1].tolist() == global_state  # noqa: NPY002


def test_without_the_wrapper_a_maze_is_not_reproducible() -> None:
    """The reason for the wrapper. If this fails, the package seeds its mazes itself."""
    starts = []
    for _ in range(2):
        env = gym.make("antmaze-medium-v0", disable_env_checker=True)
        starts.append(env.reset(seed=1, options={"task_id": 1})[0])
    assert (starts[0] != starts[1]).any()


@pytest.mark.parametrize(("settings", "scored"), [("{}", "0.0"), ('{"max_episode_steps": 5}', "")])
def test_a_run_scores_success_in_per_cent(settings: str, scored: str, folder: Path) -> None:
    """`success` is filled, and the score is 100 times success, whatever the return. A variant has no score."""
    from algos import bc

    save(folder, "pointmaze-medium-navigate-v0", random_rows("pointmaze-medium-singletask-v0"))
    dataset = "pointmaze-medium-navigate-singletask-v0"
    args = bc.Args(
        dataset=dataset, offline_steps=2, eval_every=2, eval_episodes=1, hidden=(4,), device="cpu",
        env_kwargs=settings, run_dir=folder / "run",
    )  # fmt: skip
    bc.train(args)
    rows = list(csv.DictReader((folder / "run" / "evaluations.csv").open()))
    assert [(row["step"], row["success"], row["normalized_score"]) for row in rows][1:] == [("0", "0", scored)]
    score = scorer("pointmaze-medium-singletask-v0", None)
    assert score is not None
    assert score([Episode(-3.0, 4, True), Episode(-5.0, 5, False)]).tolist() == [100.0, 0.0]
    assert scorer("Pendulum-v1", None) is None


def test_a_termination_inside_an_episode_ends_its_return_to_go(folder: Path) -> None:
    """By brute force: the sum stops at the first solved state."""
    save(folder, "pointmaze-medium-navigate-v0", random_rows("pointmaze-medium-singletask-v0"))
    data = load("pointmaze-medium-navigate-singletask-v0")
    rewards, terminations = data.column("rewards"), data.column("terminations")
    assert terminations[:4].any()
    expected = []
    for start, end in zip(data.starts, data.ends, strict=True):
        for first in range(start, end):
            total = 0.0
            for row in range(first, end):
                total += 0.9 ** (row - first) * float(rewards[row])
                if terminations[row]:
                    break
            expected.append(total)
    np.testing.assert_allclose(data.return_to_go(0.9), expected, rtol=1e-6)


@pytest.mark.parametrize("env_id", ["scene-singletask-task5-v0", "cube-double-sparse-singletask-task1-v0"])
def test_convert_relabels_a_raw_file(env_id: str, folder: Path) -> None:
    path = save(folder, "raw", random_rows(env_id))
    convert(ConvertArgs(path, str(folder / "out.hdf5"), env=env_id))
    theirs, _ = packages(path, env_id)
    converted = load(str(folder / "out.hdf5"))
    np.testing.assert_array_equal(converted.column("rewards"), theirs["rewards"])
    np.testing.assert_array_equal(converted.column("terminations") == 1, theirs["masks"] == 0)


def fails(dataset_id: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(dataset_id)


def test_a_dataset_that_does_not_exist() -> None:
    for wrong in (
        "cube-single-play-singletask-task7-v0", "cube-single-play-v0", "visual-scene-play-singletask-v0",
        "pointmaze-large-navigate-sparse-singletask-v0",
    ):  # fmt: skip
        fails(
            wrong, f"there is no dataset {wrong}. OGBench's tasks have one goal each.*cube-single-play-singletask-task2"
        )
        with pytest.raises(InputError, match=f"There is no environment {wrong}. OGBench's tasks"):
            make(wrong)
    with pytest.raises(InputError, match="are for D4RL's files: scene-play-singletask-v0 is OGBench's"):
        read("scene-play-singletask-v0", compat=True)


def test_a_file_of_another_task(folder: Path) -> None:
    save(folder, "scene-play-v0", random_rows("puzzle-3x3-singletask-v0"))
    fails(
        "scene-play-singletask-v0", r"has observations of shape \(16, 55\), scene-play-v0 has 40 columns: it is another"
    )
    save(folder, "scene-play-v0", {"observations": np.zeros((3, 40))})
    fails("scene-play-singletask-v0", "has no actions, qpos, button_states, terminals: it is not OGBench's file")


BAD_FILES = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-200]), "is damaged .*put a whole copy"),
    "text": (lambda path: path.write_text("<html>"), "is damaged .*put a whole copy"),
    "encrypted": (lambda path: path.write_bytes(encrypted(path.read_bytes())), "is damaged at .* is encrypted"),
    "flipped": (lambda path: path.write_bytes(flipped(path.read_bytes())), "is damaged at qpos"),
    "pickle": (lambda path: rewrite(path, qpos=np.array([None] * 16, dtype=object)), "holds qpos as a pickle"),
    "column": (lambda path: rewrite(path, terminals=np.zeros((16, 1), bool)), r"terminals has shape \(16, 1\), not"),
    "valids": (
        lambda path: rewrite(path, valids=np.ones(8)),
        r"valids has shape \(8,\), not \(16,\): put a",
    ),
    "rows": (lambda path: rewrite(path, qpos=np.zeros((4, 2))), "qpos has 4 rows, terminals 16"),
    "NaN": (lambda path: rewrite(path, qpos=np.full((16, 2), np.nan)), "qpos of row 0 is not finite: put a whole"),
    "words": (lambda path: rewrite(path, qpos=np.full((16, 2), "a")), "qpos holds <U1, not numbers: put a whole"),
    "single": (lambda path: rewrite(path, terminals=np.ones(16, bool)), "holds no transitions"),
    "Fortran": (lambda path: rewrite(path, qpos=np.asfortranarray(np.ones((16, 2)))), "Fortran's order"),
}


def flipped(content: bytes) -> bytes:
    """The content with a changed byte in the middle of the compressed array qpos."""
    start = content.index(b"qpos.npy") + 200
    return content[:start] + bytes([content[start] ^ 255]) + content[start + 1 :]


def encrypted(content: bytes) -> bytes:
    """The content with the mark of encryption on each file of the archive."""
    for signature, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        parts = content.split(signature)
        content = signature.join([parts[0], *(p[: at - 4] + bytes([p[at - 4] | 1]) + p[at - 3 :] for p in parts[1:])])
    return content


def rewrite(path: Path, **changed: Any) -> None:
    np.savez(path, **random_rows("pointmaze-medium-singletask-v0") | changed)


@pytest.mark.parametrize("fault", BAD_FILES)
def test_a_bad_file(fault: str, folder: Path) -> None:
    path = save(folder, "pointmaze-medium-navigate-v0", random_rows("pointmaze-medium-singletask-v0"))
    damage, message = BAD_FILES[fault]
    damage(path)
    fails("pointmaze-medium-navigate-singletask-v0", message)
    assert not note_of(path).exists()  # it is not the file that is asked for later


def test_a_huge_promise_takes_no_memory(folder: Path) -> None:
    """A header of 10¹² rows in a file of a few bytes."""
    path = save(folder, "a", {"terminals": np.zeros(7, np.float64)})
    import zipfile

    with zipfile.ZipFile(path) as file:
        array = file.read("terminals.npy").replace(b"(7,), }     ", b"(7000000,), }")[:-1]
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("terminals.npy", array)
    with pytest.raises(InputError, match="is damaged at terminals"):
        ogbench.last_rows(Archive(path))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both programs print what to install."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("ogbench", "dm_control")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ogbench", None)
    ogbench.goal_of.cache_clear()
    for program in (make, read):
        with pytest.raises(
            InputError, match=r"needs OGBench's package, which is not installed: pip install -e '.\[ogb"
        ):
            program("scene-play-singletask-v0")


def test_versions_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of MuJoCo, as on the XML of a newer dm_control, names the pins."""
    module = importlib.import_module("ogbench.manipspace.envs.env")

    def refuse(self: Any) -> None:
        raise ValueError("XML Error: Schema violation: unrecognized attribute: 'class'")

    monkeypatch.setattr(module.CustomMuJoCoEnv, "compile_model_and_data", refuse)
    with pytest.raises(InputError, match=r"cannot be made .*Schema violation.*\nGet the versions .*\.\[ogbench\]"):
        make("scene-singletask-v0")


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    both = [Server(), Server()]
    yield both
    for server in both:
        server.http.shutdown()
        server.http.server_close()


def test_downloads_use_the_second_address(
    servers: list[Server], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file appears once it is whole and of the right task, from the first address that has it."""
    save(folder, "right", random_rows("pointmaze-medium-singletask-v0"))
    monkeypatch.delenv("OGBENCH_MIRROR")
    addresses = [re.sub("/file.hdf5$", "/data", server.url) for server in servers]
    monkeypatch.setattr(ogbench, "SERVER", addresses[0])
    monkeypatch.setattr(ogbench, "MIRROR", addresses[1])
    wanted, path = "pointmaze-medium-navigate-singletask-task3-v0", folder / "pointmaze-medium-navigate-v0.npz"
    servers[0].status = 404
    servers[1].content = b"<html>"
    fails(wanted, f"the file from {addresses[1]}/{path.name} is not the right one")
    assert not path.exists()
    servers[1].content = (folder / "right.npz").read_bytes()
    assert len(read(wanted)) == 12
    assert f"{addresses[1]} is tried next" in capsys.readouterr().err
    path.unlink()
    servers[0].status, servers[0].content = 200, servers[1].content
    asked = len(servers[1].asked)
    assert len(read(wanted)) == 12
    assert len(servers[1].asked) == asked
    servers[0].status = servers[1].status = 503
    path.unlink()
    fails(
        wanted, f"{addresses[1]}/{path.name} cannot be downloaded .*: get the file by other means and put it at {path}"
    )
