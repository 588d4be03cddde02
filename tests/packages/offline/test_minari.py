"""Minari datasets, made with its own library in a folder of the test's, read into the buffer."""

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium as gym
import minari
import numpy as np
import pytest
from conftest import ROOT
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, flatten
from minari.data_collector import EpisodeBuffer
from minari.storage import remotes

from common.errors import InputError
from envs.make import make
from offline import scores
from offline.dataset import load
from offline.minari import is_id, reference

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # the library's, that no author is named and the like
PLAIN = Box(-np.inf, np.inf, (2,), np.float64)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


def episode(steps: int, first: float, end: str, obs: Callable[[Any], Any] = lambda values: values) -> EpisodeBuffer:
    """`steps` steps; the i-th observation is [first + i, -i]."""
    values = np.stack([first + np.arange(steps + 1), -np.arange(steps + 1.0)], axis=1)
    flags = np.zeros((2, steps), bool)
    flags[["terminated", "truncated"].index(end), -1] = True
    return EpisodeBuffer(
        observations=obs(values), actions=np.linspace(-1, 1, steps)[:, None], rewards=np.arange(steps) + first,
        terminations=flags[0], truncations=flags[1],
    )  # fmt: skip


def create(
    episodes: list[EpisodeBuffer], name: str = "mine/made-v0", obs_space: Space[Any] = PLAIN, **facts: Any
) -> str:
    facts = {"action_space": Box(-2.0, 2.0, (1,), np.float32), "env": None} | facts
    minari.create_dataset_from_buffers(name, buffer=episodes, observation_space=obs_space, **facts)
    return name


def test_every_step_is_a_transition_with_its_true_successor() -> None:
    name = create([episode(3, 0.0, "terminated"), episode(4, 100.0, "truncated"), episode(1, 200.0, "truncated")])
    dataset = load(name)
    assert dataset.column("obs")[:, 0].tolist() == [0, 1, 2, 100, 101, 102, 103, 200]
    assert dataset.column("next_obs")[:, 0].tolist() == [1, 2, 3, 101, 102, 103, 104, 201]
    assert dataset.column("terminations").tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert dataset.truncations.tolist() == [False] * 6 + [True] * 2
    assert dataset.ends.tolist() == [3, 7, 8]
    assert dataset.returns().tolist() == [3, 406, 200]
    assert np.allclose(dataset.column("actions")[:3, 0], [-0.5, 0, 0.5])  # of a box of ±2


def test_many_short_episodes_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    name = create([episode(1 + i % 3, 10.0 * i, "truncated") for i in range(40)])
    whole = load(name).buffer.rows
    for rows in (1, 7, 50):
        monkeypatch.setattr("offline.minari.BLOCK_ROWS", rows)
        assert load(name).buffer.rows.equal(whole)


def test_dict_observations_are_joined_as_the_environment_joins_them() -> None:
    parts = {"observation": PLAIN, "achieved_goal": PLAIN, "desired_goal": PLAIN}

    def split(values: Any) -> dict[str, Any]:
        return {"observation": values, "achieved_goal": values + 1000, "desired_goal": 0 * values}

    name = create([episode(3, 0.0, "truncated", split)], obs_space=Dict(parts))
    dataset = load(name)
    assert dataset.column("obs")[1].tolist() == [1001, 999, 0, 0, 1, -1]
    assert dataset.column("next_obs")[1].tolist() == [1002, 998, 0, 0, 2, -2]


def test_numbers_in_dict_observations_are_flattened_as_the_environment_does() -> None:
    space = Dict({"where": PLAIN, "gear": Discrete(3, start=1), "on": MultiBinary(2), "of": MultiDiscrete([2, 3])})
    gear, on, of = np.array([1, 3, 2, 1]), np.array([[0, 1], [1, 1], [1, 0], [0, 0]]), np.array([[0, 2]] * 4)

    def parts(values: Any) -> dict[str, Any]:
        return {"where": values, "gear": gear, "on": on.astype(np.int8), "of": of}

    dataset = load(create([episode(3, 0.0, "truncated", parts)], obs_space=space))
    each = {"gear": gear[1], "on": on[1].astype(np.int8), "of": of[1], "where": dataset.column("obs")[1, -2:]}
    assert dataset.column("obs")[1].tolist() == flatten(space, each).tolist()
    assert dataset.column("next_obs")[1, :3].tolist() == [0, 1, 0]


def test_the_environment_is_recovered_with_its_arguments() -> None:
    kwargs = {"healthy_reward": 5.0}
    environment = gym.make("Hopper-v5", max_episode_steps=77, **kwargs)
    spaces = {"obs_space": environment.observation_space, "action_space": environment.action_space}
    steps = EpisodeBuffer(
        observations=np.zeros((3, 11)), actions=np.zeros((2, 3), np.float32), rewards=np.zeros(2),
        terminations=np.zeros(2, bool), truncations=np.array([False, True]),
    )  # fmt: skip
    dataset = load(create([steps], env=environment.spec, **spaces))
    assert (dataset.env, dataset.env_kwargs) == ("Hopper-v5", kwargs | {"max_episode_steps": 77})
    again = make(dataset.env, **dataset.env_kwargs)
    assert again.spec is not None
    assert (again.spec.max_episode_steps, again.unwrapped._healthy_reward) == (77, 5.0)
    for_evaluation = create([steps], "mine/two-v0", env=environment.spec, eval_env="Hopper-v4", **spaces)
    assert load(for_evaluation).env == "Hopper-v4"


UMAZE = [[1, 1, 1, 1, 1], [1, 0, 0, 0, 1], [1, 1, 1, 0, 1], [1, 0, 0, 0, 1], [1, 1, 1, 1, 1]]
MIRRORED = [row[::-1] for row in UMAZE]


def marked(maze: list[list[Any]], start: tuple[int, int], goal: tuple[int, int]) -> list[list[Any]]:
    """The maze with its start and goal, as Gymnasium-Robotics marks them."""
    cells = [[*row] for row in maze]
    cells[start[0]][start[1]], cells[goal[0]][goal[1]] = "r", "g"
    return cells


@pytest.mark.parametrize(
    ("made_in", "evaluated_in", "used"),
    [
        (UMAZE, marked(MIRRORED, (1, 3), (3, 3)), UMAZE),  # D4RL/antmaze/umaze-diverse-v1
        (UMAZE, marked(UMAZE, (1, 1), (3, 1)), marked(UMAZE, (1, 1), (3, 1))),
        (UMAZE, None, UMAZE),
    ],
    ids=["mirrored", "marks alone", "no evaluation environment"],
)
def test_the_maze_is_that_of_the_data(capsys: Any, made_in: Any, evaluated_in: Any, used: Any) -> None:
    """Evaluation in other walls than those of the data measures nothing (Minari's issues 301 and 304)."""

    def spec(maze: Any) -> EnvSpec:
        entry = "gymnasium_robotics.envs.maze.ant_maze_v4:AntMazeEnv"
        return EnvSpec("AntMaze_UMaze-v4", entry, max_episode_steps=700, kwargs={"maze_map": maze})

    evaluation = {} if evaluated_in is None else {"eval_env": spec(evaluated_in)}
    name = create([episode(3, 0.0, "truncated")], env=spec(made_in), **evaluation)
    dataset = [load(name) for _ in range(2)][-1]
    assert (dataset.env, dataset.env_kwargs["maze_map"]) == ("AntMaze_UMaze-v4", used)
    assert capsys.readouterr().err.count("the data's maze is used") == (evaluated_in is not None and used is made_in)


@pytest.mark.parametrize("stated", ["data", "evaluation"])
def test_a_maze_of_which_one_spec_is_silent(capsys: Any, stated: str) -> None:
    """A spec without a map has the one that its id is registered with."""
    robotics = pytest.importorskip("gymnasium_robotics.envs.maze.maps")
    entry, kwargs = "gymnasium_robotics.envs.maze.point_maze:PointMazeEnv", {"maze_map": MIRRORED}
    specs = {name: EnvSpec("PointMaze_UMaze-v3", entry, max_episode_steps=300, kwargs=kwargs if name == stated else {})
             for name in ("data", "evaluation")}  # fmt: skip
    name = create([episode(3, 0.0, "truncated")], env=specs["data"], eval_env=specs["evaluation"])
    used = MIRRORED if stated == "data" else robotics.U_MAZE
    assert load(name).env_kwargs["maze_map"] == used
    assert "the data's maze is used" in capsys.readouterr().err


@pytest.mark.parametrize("wrapper", [None, gym.wrappers.NormalizeReward, gym.wrappers.RecordEpisodeStatistics])
def test_a_wrapper_that_evaluations_lack_is_named(capsys: Any, wrapper: Callable[[gym.Env], gym.Env] | None) -> None:
    env = gym.make("Pendulum-v1")
    name = create([episode(3, 0.0, "truncated")], env=env if wrapper is None else wrapper(env))
    assert [load(name).env for _ in range(2)] == ["Pendulum-v1"] * 2
    said = "its environment has the wrapper NormalizeReward, evaluations have not: give --env one with it"
    assert capsys.readouterr().err.count(said) == (wrapper is gym.wrappers.NormalizeReward)


def test_images_are_refused() -> None:
    name = create(
        [episode(3, 0.0, "truncated", obs=lambda values: np.zeros((len(values), 8, 8, 3)))],
        obs_space=Box(0, 255, (8, 8, 3), np.float64),
    )
    with pytest.raises(InputError, match="the algorithms here take vectors of numbers"):
        load(name)


def test_other_libraries_read_what_we_write() -> None:
    """Minari, d3rlpy, TorchRL and Stable-Baselines3, in an environment of their own."""
    if not (ROOT / ".venv-libraries").exists():
        pytest.skip("there is no .venv-libraries: make libraries")
    line = [sys.executable, str(ROOT / "bench" / "checks" / "compare_libraries.py")]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert [line[:3] for line in done.stdout.splitlines()] == ["ok "] * 10, done.stdout


def test_its_own_reference_scores() -> None:
    name = create([episode(3, 0.0, "truncated")], env="Pendulum-v1", ref_min_score=-10.0, ref_max_score=30.0)
    assert load(name).reference == scores.reference(name) == (-10.0, 30.0)
    assert scores.normalized([-10.0, 10.0, 30.0], (-10.0, 30.0)).tolist() == [0, 50, 100]
    assert load(create([episode(3, 0.0, "truncated")], "mine/two-v0")).reference is None


@pytest.mark.parametrize(
    ("name", "whether"),
    [
        ("D4RL/pen/human-v2", True), ("hf://farama-minari/D4RL/pen/human-v2", True), ("mine-v0", False),
        ("hopper-medium-v2", False), ("D4RL/pen/human", False), ("data/file.hdf5", False), ("../../etc-v0", False),
    ],
)  # fmt: skip
def test_ids(name: str, whether: bool) -> None:
    assert is_id(name) is whether


def test_one_without_a_namespace_that_is_here() -> None:
    assert len(load(create([episode(3, 0.0, "truncated")], "mine-v0"))) == 3


class Shelf:
    """A remote that holds the datasets of a folder."""

    def __init__(self, name: str, token: str | None = None) -> None:
        self.folder = Path("/" + name)

    def list_datasets(self, prefix: str | None = None) -> list[str]:
        found = (path.parent.parent.relative_to(self.folder) for path in self.folder.rglob("metadata.json"))
        return [path.as_posix() for path in found if path.as_posix().startswith(prefix or "")]

    def get_dataset_metadata(self, dataset_id: str) -> Any:
        return json.loads((self.folder / dataset_id / "data" / "metadata.json").read_text())

    def download_dataset(self, dataset_id: str, path: Path) -> None:
        for file in (self.folder / dataset_id).rglob("*.*"):
            to = path / dataset_id / file.relative_to(self.folder / dataset_id)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(file.read_bytes())

    def list_namespaces(self) -> list[str]:
        return ["mine"]

    def download_namespace_metadata(self, namespace: str, path: Path) -> None:
        (path / namespace).mkdir(parents=True, exist_ok=True)


class TestRemote:
    @pytest.fixture
    def shelf(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """mine/made-v0, three transitions, is on the remote and not here."""
        create([episode(3, 0.0, "truncated")])
        (tmp_path / "minari").rename(tmp_path / "shelf")
        monkeypatch.setitem(remotes._registry, "shelf", lambda: Shelf)
        monkeypatch.setenv("MINARI_REMOTE", f"shelf://{tmp_path.as_posix()[1:]}/shelf")
        return tmp_path / "shelf"

    def test_it_is_downloaded_once(self, shelf: Path, own_folder: Path) -> None:
        assert len(load("mine/made-v0")) == 3
        (shelf / "mine").rename(shelf / "gone")
        assert len(load("mine/made-v0")) == 3

    def test_a_killed_download_starts_again(self, shelf: Path, own_folder: Path) -> None:
        (own_folder / "mine" / "made-v0" / "data").mkdir(parents=True)
        assert len(load("mine/made-v0")) == 3

    def test_a_download_that_was_killed_behind_its_metadata_resumes(
        self, shelf: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The metadata may arrive before the data, and another program may look then."""

        def killed(self: Shelf, dataset_id: str, path: Path) -> None:
            (data := path / dataset_id / "data").mkdir(parents=True)
            (data / "metadata.json").write_bytes((shelf / dataset_id / "data" / "metadata.json").read_bytes())
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Shelf, "download_dataset", killed)
            with pytest.raises(KeyboardInterrupt):
                load("mine/made-v0")
        assert reference("mine/made-v0") is None
        assert len(load("mine/made-v0")) == 3
        assert [path.name for path in own_folder.iterdir()] == ["mine"]

    def test_two_programs_download_it_once(
        self, shelf: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked, original = [], Shelf.download_dataset

        def slow(self: Shelf, dataset_id: str, path: Path) -> None:
            asked.append(dataset_id)
            time.sleep(0.5)
            original(self, dataset_id, path)

        monkeypatch.setattr(Shelf, "download_dataset", slow)
        with ThreadPoolExecutor() as pool:
            assert [len(each) for each in pool.map(load, ["mine/made-v0"] * 2)] == [3, 3]
        assert asked == ["mine/made-v0"]

    def test_what_arrives_by_other_means_needs_no_mark_removed(
        self, shelf: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A download of which nothing arrived leaves no mark."""
        (shelf / "mine").rename(shelf / "gone")
        with pytest.raises(InputError, match="cannot be downloaded"):
            load("mine/made-v0")
        assert list(own_folder.glob(".*")) == []

    def test_an_unknown_one(self, shelf: Path) -> None:
        with pytest.raises(InputError, match=r"D4RL/pen/humn-v2 is not in .* did you mean .*D4RL/pen/human-v2"):
            load("D4RL/pen/humn-v2")

    def test_no_network_is_noticed_before_the_library_retries(
        self, own_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its own six tries take 25 s; what is wrong is the network, not the id, so no other id is suggested."""
        tried: list[Any] = []
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        monkeypatch.setattr("offline.download.time.sleep", lambda seconds: None)
        monkeypatch.setattr("offline.minari.download_dataset", lambda *asked, **_: tried.append(asked))
        monkeypatch.delenv("MINARI_REMOTE", raising=False)
        for proxy in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(proxy, raising=False)
        for source in ("D4RL/pen/human-v2", "hf://farama-minari/D4RL/pen/human-v2"):
            with pytest.raises(
                InputError, match=r"127\.0\.0\.1:9 did not answer in 3 tries: .*get that folder"
            ) as caught:
                load(source)
            assert "did you mean" not in str(caught.value)
        assert tried == []

    def test_no_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any) -> None:
            raise ConnectionError("no route to host")

        monkeypatch.setitem(remotes._registry, "shelf", refuse)
        monkeypatch.setenv("MINARI_REMOTE", "shelf://anywhere")
        with pytest.raises(InputError, match=r"cannot be downloaded \(ConnectionError: no route to host\)"):
            load("mujoco/hopper/medium-v0")


class TestBadDatasets:
    @pytest.mark.parametrize(("obs", "actions"), [(Discrete(3), None), (None, Discrete(3))])
    def test_spaces_that_are_no_vectors(self, obs: Any, actions: Any) -> None:
        changed = ({"observations": np.zeros(4, np.int64)} if obs else {}) | (
            {"actions": np.zeros(3, np.int64)} if actions else {}
        )
        steps = dataclasses.replace(episode(3, 0.0, "truncated"), **changed)
        spaces = ({"obs_space": obs} if obs else {}) | ({"action_space": actions} if actions else {})
        with pytest.raises(InputError, match="the algorithms here take vectors of numbers"):
            load(create([steps], **spaces))

    @pytest.mark.parametrize("file", ["metadata.json", "main_data.hdf5"])
    @pytest.mark.parametrize("damage", ["empty", "cut", "noise"])
    def test_damaged_files(self, own_folder: Path, file: str, damage: str) -> None:
        path = own_folder / create([episode(30, 0.0, "truncated")]) / "data" / file
        content = path.read_bytes()
        noise = np.random.default_rng(0).bytes(len(content))
        path.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "noise": noise}[damage])
        with pytest.raises(InputError, match=r"mine/made-v0(/data)? is not a whole Minari dataset"):
            load("mine/made-v0")

    @pytest.mark.parametrize(
        ("changed", "reason"),
        [
            ({"total_episodes": 10**9}, "metadata.json has 1,000,000,000 episodes, its files have"),
            ({"total_episodes": -1}, "metadata.json has -1 episodes"),
            ({"total_episodes": None}, "is not a whole Minari dataset"),
        ],
    )
    def test_metadata_that_lies(
        self, own_folder: Path, changed: Any, reason: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The library, which allocates an index for each episode, never sees it."""
        path = own_folder / create([episode(3, 0.0, "truncated")]) / "data" / "metadata.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))
        monkeypatch.setattr("offline.minari.load_dataset", lambda _: pytest.fail("the library read it"))
        for read in (load, reference):
            with pytest.raises(InputError, match=reason):
                read("mine/made-v0")

    def test_arrow_without_its_package(self, own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        monkeypatch.delitem(sys.modules, "minari.dataset._storages.arrow_storage", raising=False)
        path = own_folder / create([episode(3, 0.0, "truncated")]) / "data" / "metadata.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"data_format": "arrow"}))
        with pytest.raises(InputError, match=r"data cannot be read \(.*pip install \"minari\[arrow\]\""):
            load("mine/made-v0")

    def test_an_episode_without_its_last_observation(self) -> None:
        whole = episode(3, 0.0, "truncated")
        steps = dataclasses.replace(whole, observations=np.asarray(whole.observations)[:-1])
        with pytest.raises(InputError, match="lacks its last observation"):
            load(create([steps]))

    def test_numbers_that_are_not_finite(self) -> None:
        steps = episode(3, 0.0, "truncated")
        steps.rewards[1] = np.nan
        with pytest.raises(InputError, match="rewards of transition 1 are not finite"):
            load(create([steps]))


def test_a_home_that_may_not_be_written_has_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minari makes its folder when asked where a dataset is; a run without Minari's data must not end there."""

    def refused(dataset_id: str = "") -> Path:
        raise PermissionError(dataset_id)

    monkeypatch.setattr("offline.minari.get_dataset_path", refused)
    assert reference("mujoco/hopper/expert-v0") is None
