"""Datasets made by tools.collect: whole, reproducible, equal in both layouts, and what is refused."""

import json
import multiprocessing
import os
import resource
import runpy
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import minari
import numpy as np
import pytest
from conftest import module
from gymnasium.spaces import Box, flatten

from common.command_line import command_line
from common.errors import Finished, InputError, RunError
from common.replay_buffer import ReplayBuffer
from common.seeding import seeds
from envs.make import CanonicalEnv
from offline.dataset import load
from tools.collect import Args, collect
from tools.policies import load_policy

FIELDS = ("observations", "actions", "rewards", "terminals", "timeouts", "next_observations")
Data = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


def made(output: str = "data.hdf5", env: str | None = "Pendulum-v1", **arguments: Any) -> Data:
    """The file that `collect` writes, by default with a random policy in two environments."""
    if "replay" not in arguments:
        arguments = {"policy": ("random",), "transitions": 500, "num_envs": 2} | arguments
    collect(Args(output, env, **arguments))
    return read(output)


def read(output: str) -> Data:
    with h5py.File(output) as file:
        return {name: file[name][:] for name in FIELDS}


def recipe(output: str = "data.hdf5") -> dict[str, Any]:
    with h5py.File(output) as file:
        return json.loads(file.attrs["recipe"])


def equal(a: Data, b: Data) -> bool:
    return all(a[name].dtype == b[name].dtype and a[name].tobytes() == b[name].tobytes() for name in FIELDS)


def episodes(data: Data) -> list[slice]:
    ends = np.flatnonzero(data["terminals"] | data["timeouts"]) + 1
    assert ends[-1] == len(data["rewards"])
    return [slice(first, last) for first, last in zip([0, *ends[:-1]], ends, strict=True)]


@pytest.mark.parametrize("env", ["Pendulum-v1", "Hopper-v4"])
def test_reproducible_from_the_seed(env: str):
    data = made(env=env)
    assert equal(data, made("again.hdf5", env=env))
    assert equal(data, made("async.hdf5", env=env, vectorizer="async"))
    other = made("other.hdf5", env=env, seed=2)
    assert all((other[name] != data[name]).mean() > 0.99 for name in ("observations", "actions"))


class Weighed(gym.Env[Any, Any]):
    """Its registration has arguments that do not fit into JSON."""

    observation_space, action_space = Box(-1, 1, (2,), np.float32), Box(-1, 1, (1,), np.float32)

    def __init__(self, weigh: Callable[[float], float], factor: float, table: dict[int, float]) -> None:
        self.reward = weigh(factor) + table[1]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: np.ndarray) -> Any:
        return np.zeros(2, np.float32), self.reward, False, False, {}


gym.register(
    "Weighed-v0", entry_point=Weighed, kwargs={"weigh": abs, "factor": -3.0, "table": {1: 0.0}}, max_episode_steps=5
)


@pytest.mark.parametrize("env_kwargs", [{"factor": -4.0}, {"factor": -4.0, "weigh": str(abs), "table": str({1: 0.0})}])
def test_what_does_not_fit_into_json_is_left_to_the_registration(small, env_kwargs: dict[str, Any]):
    """Older files have it as text."""
    rewards = made(env="Weighed-v0", env_kwargs='{"factor": -4.0}', transitions=10)["rewards"]
    assert set(rewards) == {4.0}
    with h5py.File("data.hdf5", "a") as file:
        assert json.loads(file.attrs["env_kwargs"]) == {"factor": -4.0}
        file.attrs["env_kwargs"] = json.dumps(env_kwargs)
    result = module("bc").train(small("bc", dataset="data.hdf5", env="", offline_steps=1, online_steps=0))
    assert {episode.return_ for episode in result.episodes} == {20.0}


def test_the_layout():
    data = made(transitions=501, ref_scores=(-1200.0, -150.0))  # 251 and 250 steps of episodes of 200
    assert {name: (values.dtype.name, values.shape) for name, values in data.items()} == {
        "observations": ("float32", (501, 3)),
        "actions": ("float32", (501, 1)),
        "rewards": ("float32", (501,)),
        "terminals": ("bool", (501,)),
        "timeouts": ("bool", (501,)),
        "next_observations": ("float32", (501, 3)),
    }
    assert np.flatnonzero(data["timeouts"]).tolist() == [199, 250, 450, 500]
    assert not data["terminals"].any()
    assert 1.9 < np.abs(data["actions"]).max() <= 2  # its own units
    with h5py.File("data.hdf5") as file:
        assert (file.attrs["env"], file.attrs["env_kwargs"]) == ("Pendulum-v1", "{}")
        assert (file.attrs["action_low"].tolist(), file.attrs["action_high"].tolist()) == ([-2], [2])
        assert (file.attrs["ref_min_score"], file.attrs["ref_max_score"]) == (-1200, -150)
    facts = recipe()
    assert (facts["transitions"], facts["episodes"], facts["cut_episodes"]) == (501, 4, 2)
    whole = [data["rewards"][:200].sum(), data["rewards"][251:451].sum()]
    assert facts["return"]["mean"] == pytest.approx(np.mean(whole), rel=1e-5)
    assert facts["sources"] == [{"kind": "random"}]
    assert facts["arguments"]["seed"] == 1
    assert {"python", "torch", "gymnasium", "mujoco", "numpy"} <= facts["versions"].keys()


@pytest.mark.filterwarnings("ignore:.*out of date")
@pytest.mark.parametrize("env", ["InvertedPendulum-v4", "Hopper-v4", "PointMaze_UMaze-v3"])
def test_an_environment_gives_the_same_transitions(env: str):
    """The file's actions, in an environment that knows nothing of our wrappers, from the seed: bit for bit.

    Their boxes are [-3, 3] and [-1, 1]."""
    data = made(env=env, transitions=600)
    environment = gym.make(gym.spec(env))
    environment.reset(seed=seeds(1, "collection 0", 2)[0])
    obs, _ = environment.reset()
    for i in range(300):
        assert (
            flatten(environment.observation_space, obs).astype(np.float32).tobytes()
            == data["observations"][i].tobytes()
        )
        obs, reward, terminated, truncated, _ = environment.step(data["actions"][i])
        following = flatten(environment.observation_space, obs).astype(np.float32)
        assert following.tobytes() == data["next_observations"][i].tobytes()
        assert np.float32(reward) == data["rewards"][i]
        assert terminated == data["terminals"][i]
        assert (truncated or i == 299) == data["timeouts"][i]
        if terminated or truncated:
            obs, _ = environment.reset()


@pytest.mark.parametrize("env", ["Pendulum-v1", "Hopper-v4", "PointMaze_UMaze-v3"])
def test_minari_holds_the_same(env: str):
    data = made(env=env)
    collect(Args("minari:test/own/random-v0", env, ("random",), transitions=500, num_envs=2))
    dataset = minari.load_dataset("test/own/random-v0")
    assert list(minari.list_local_datasets()) == ["test/own/random-v0"]
    assert len(dataset) == len(episodes(data))
    assert dataset.total_steps == 500
    for episode, where in zip(dataset.iterate_episodes(), episodes(data), strict=True):
        space = dataset.observation_space
        leaves = episode.observations if isinstance(space, gym.spaces.Dict) else {"": episode.observations}
        assert space.contains({k: v[0] for k, v in leaves.items()} if "" not in leaves else leaves[""][0])
        obs = np.concatenate([leaves[key] for key in sorted(leaves)], axis=1)
        assert np.array_equal(obs[:-1], data["observations"][where])
        assert np.array_equal(obs[1:], data["next_observations"][where])
        assert episode.actions.dtype == dataset.action_space.dtype
        for name, mine in zip(("actions", "rewards", "terminations", "truncations"), FIELDS[1:5], strict=True):
            assert np.array_equal(getattr(episode, name), data[mine][where]), name
    assert json.loads(dataset.storage.metadata["recipe"])["sources"] == [{"kind": "random"}]
    recovered = dataset.recover_environment()
    assert recovered.spec.id == env
    assert recovered.observation_space == dataset.observation_space


@pytest.mark.parametrize("output", ["data.hdf5", "minari:test/random-v0"])
def test_our_own_reader_gives_it_back(output: str):
    data = made("reference.hdf5")
    collect(Args(output, "Pendulum-v1", ("random",), ref_scores=(-1200.0, -150.0), transitions=500, num_envs=2))
    dataset = load(output.removeprefix("minari:"), max_action=None)
    assert np.array_equal(dataset.column("obs"), data["observations"])
    assert np.array_equal(dataset.column("next_obs"), data["next_observations"])
    assert np.array_equal(dataset.column("actions"), data["actions"] / 2)
    assert np.array_equal(dataset.column("rewards"), data["rewards"])
    assert np.array_equal(dataset.truncations, data["timeouts"])
    assert (dataset.env, dataset.env_kwargs, dataset.reference) == ("Pendulum-v1", {}, (-1200, -150))


def test_several_policies_share_the_transitions(small):
    module("sac").train(small(total_steps=100, eval_episodes=0))
    folder = str(small().run_dir)
    data = made(policy=("random", folder, "random"), transitions=100)
    kinds = [source["kind"] for source in recipe()["sources"]]
    assert kinds == ["random", "run", "random"]
    assert np.flatnonzero(data["timeouts"]).tolist() == [16, 33, 50, 66, 83, 99]
    first = [34, 51]  # of the run's policy, in its two environments
    trained = load_policy(folder, gym.make("Pendulum-v1"), seeds(1, "policy 1", 1)[0], deterministic=False)
    assert np.array_equal(data["actions"][first], 2 * trained(data["observations"][first]))
    for name in ("observations", "actions"):  # of two random policies: another environment, other noise
        assert (data[name][:33] != data[name][67:]).all()
    assert equal(data, made("inferred.hdf5", env=None, policy=("random", folder, "random"), transitions=100))


@pytest.mark.parametrize(
    ("env", "num_envs", "changed"),
    [
        ("Pendulum-v1", 1, {"total_steps": 500}),
        ("Pendulum-v1", 2, {"total_steps": 500}),
        ("Pendulum-v1", 2, {"total_steps": 500, "buffer_size": 301}),  # the ring has lost its oldest
        ("Hopper-v4", 2, {"total_steps": 300}),
    ],
)
def test_a_runs_replay_buffer(small, env: str, num_envs: int, changed: dict[str, Any]):
    args = small(env=env, num_envs=num_envs, eval_episodes=0, learning_starts=500, **changed)
    module("sac").train(args)
    stored = b"".join(path.read_bytes() for path in sorted((args.run_dir / "checkpoint" / "replay").glob("*.rows")))
    rows = np.frombuffer(stored, np.float32).reshape(args.total_steps, -1)
    number = np.arange(args.total_steps)[-args.buffer_size :]
    rows = np.concatenate([rows[number[number % num_envs == i]] for i in range(num_envs)])

    data = made(env=None, replay=args.run_dir)
    scale = 2 if env == "Pendulum-v1" else 1
    parts = [data["observations"], data["actions"] / scale, data["rewards"][:, None], data["next_observations"]]
    assert np.array_equal(np.concatenate([*parts, data["terminals"][:, None]], axis=1), rows)
    for where in episodes(data):  # each an episode, and no two of them one
        assert np.array_equal(data["observations"][where][1:], data["next_observations"][where][:-1])
    after = [where.stop for where in episodes(data)[:-1]]
    assert (data["observations"][after] != data["next_observations"][np.array(after) - 1]).any(axis=1).all()
    if env == "Pendulum-v1":
        assert not data["terminals"].any()
        # The ring of 301 holds 150 of the first environment's 250 steps, from the 100th, and 151 of the second's.
        ends = {(1, 10_000): [200, 400, 500], (2, 10_000): [200, 250, 450, 500], (2, 301): [100, 150, 251, 301]}
        assert [where.stop for where in episodes(data)] == ends[num_envs, args.buffer_size]
    else:
        assert data["terminals"].any()
        assert not (data["terminals"] & data["timeouts"]).any()
        assert data["timeouts"].sum() <= num_envs
    assert recipe()["sources"][0]["kind"] == "replay buffer"
    assert recipe()["cut_episodes"] <= num_envs


def test_a_replay_buffer_takes_the_memory_of_its_transitions(small, monkeypatch: pytest.MonkeyPatch):
    """It must not allocate --buffer-size rows. The run did not either."""
    sizes: list[int] = []

    class Noted(ReplayBuffer):
        def __init__(self, capacity: int, *rest: Any, **others: Any) -> None:
            sizes.append(capacity)
            super().__init__(capacity, *rest, **others)

    module("sac").train(args := small(total_steps=60, eval_episodes=0))
    monkeypatch.setattr("tools.collect.ReplayBuffer", Noted)
    assert len(made(env=None, replay=args.run_dir)["rewards"]) == 60
    assert max(sizes) == 60 < args.buffer_size


@pytest.mark.parametrize(("calibrated", "num_envs"), [(False, 2), (True, 2), (True, 1)])
def test_the_buffer_of_a_run_that_scales_its_rewards(small, calibrated: bool, num_envs: int):
    """The file has the environment's rewards; episodes are whole also where Cal-QL stores them one after the other."""
    changed = {"reward_scale": 10.0, "reward_shift": -5.0, "calibrated": calibrated, "num_envs": num_envs}
    changed |= {"retain": "none", "warmup_steps": 820, "eval_episodes": 0}  # nothing is learned online
    args = small("cql", offline_steps=1, online_steps=820, **changed)
    module("cql").train(args)
    data = made(env=None, replay=args.run_dir)
    cos, sin, speed = data["observations"].T.astype(np.float64)
    expected = -(np.arctan2(sin, cos) ** 2 + 0.1 * speed**2 + 0.001 * data["actions"][:, 0] ** 2)
    assert data["rewards"] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    left_over = 0 if not calibrated else 820 - num_envs * (820 // num_envs // 200 * 200)
    assert len(data["rewards"]) == 820 - left_over
    assert recipe()["cut_episodes"] == (0 if calibrated else num_envs)
    for where in episodes(data):
        assert np.array_equal(data["observations"][where][1:], data["next_observations"][where][:-1])
        assert where.stop - where.start in (200, 820 // num_envs % 200)


@pytest.mark.parametrize(("num_envs", "ends"), [(1, [50, 100, 130]), (2, [50, 65, 115, 130])])
def test_the_buffer_of_a_run_with_chunks(small, num_envs: int, ends: list[int]):
    """Its column of first transitions is not one of returns-to-go."""
    changed = {"chunk": 3, "num_envs": num_envs, "time_limit": 50, "random_steps": 130, "eval_episodes": 0}
    module("rlpd").train(args := small("rlpd", offline_steps=0, online_steps=130, **changed))
    data = made(env=None, replay=args.run_dir)
    assert [where.stop for where in episodes(data)] == ends
    assert recipe()["cut_episodes"] == num_envs
    for where in episodes(data):
        assert np.array_equal(data["observations"][where][1:], data["next_observations"][where][:-1])


def test_a_run_whose_dataset_brings_its_environment(small):
    """The run stores both, so its policy and its replay buffer need no --env."""
    made("offline.hdf5", transitions=400)
    with h5py.File("offline.hdf5", "a") as file:
        file.attrs["env_kwargs"] = json.dumps({"g": 10.0})
    args = small("iql", dataset="offline.hdf5", env="", offline_steps=1, online_steps=20, eval_episodes=0)
    module("iql").train(args)
    stored = json.loads((args.run_dir / "config.json").read_text())["arguments"]
    assert (stored["env"], stored["env_kwargs"]) == ("Pendulum-v1", '{"g": 10.0}')
    assert len(made(env=None, replay=args.run_dir)["rewards"]) == 20


def test_the_same_command_again_does_nothing():
    made()
    collect(Args("minari:random-v0", "Pendulum-v1", ("random",), transitions=500, num_envs=2))
    before = Path("data.hdf5").stat().st_mtime_ns
    for output in ("data.hdf5", "minari:random-v0"):
        with pytest.raises(Finished, match="nothing to do"):
            made(output, vectorizer="async")
        with pytest.raises(InputError, match=r"seed \(1 there, 2 here\)"):
            made(output, seed=2)
    assert Path("data.hdf5").stat().st_mtime_ns == before


def test_the_folder_of_a_policy_does_not_change_the_data(small):
    """Its bytes do. And the words for untrained policies are not folders of the same name."""
    folder = module("sac").train(small(total_steps=60, eval_episodes=0)).folder
    made(policy=(str(folder),))
    shutil.move(folder, "elsewhere")
    with pytest.raises(Finished, match="nothing to do"):
        made(policy=("elsewhere",))
    other = module("sac").train(small(total_steps=80, eval_episodes=0, run_dir=Path("other"))).folder
    with pytest.raises(InputError, match="holds other data: the policies differ"):
        made(policy=(str(other),))
    Path("random").mkdir()
    assert len(made("random.hdf5")["rewards"]) == len(made("again.hdf5")["rewards"])


def test_two_commands_may_make_a_namespace_at_once(monkeypatch: pytest.MonkeyPatch):
    """The other one makes it after this one has looked."""
    monkeypatch.setattr("offline.write.list_local_namespaces", list)
    minari.namespace.create_namespace("shared")
    collect(Args("minari:shared/random-v0", "Pendulum-v1", ("random",), transitions=500, num_envs=2))
    assert minari.load_dataset("shared/random-v0").total_steps == 500


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """`python -m tools.collect FLAGS` in this process: its exit status and what it said."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["collect.py", *arguments])
        with pytest.raises(SystemExit) as stop:
            command_line(collect, Args)
        return int(stop.value.code or 0), capsys.readouterr().err

    return run


PENDULUM = ("--env", "Pendulum-v1", "--policy", "random")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--env", "Pendulum-v1", "--output", "x.hdf5"], ["--policy", "--replay"]),
        ([*PENDULUM], ["--output"]),
        ([*PENDULUM, "--output", "x.h5"], [".hdf5", "minari:"]),
        ([*PENDULUM, "--output", "minari:x"], ["minari:namespace/name-v0"]),
        ([*PENDULUM, "--output", "/proc/no/x.hdf5"], ["/proc/no/x.hdf5 cannot be written", "--output"]),
        ([*PENDULUM, "--output", "/proc/x.hdf5"], ["/proc/x.hdf5 cannot be written"]),
        ([*PENDULUM, "--output", "text.hdf5"], ["text.hdf5 exists and was not written by this"]),
        ([*PENDULUM, "--output", "minari:other-v0"], ["other-v0 exists and was not written by this"]),
        ([*PENDULUM, "--output", "x.hdf5", "--transitions", "9"], ["--transitions is 9", "10"]),
        ([*PENDULUM, "--output", "x.hdf5", "--num-envs", "0"], ["--num-envs is 0: give a number of 1 or more"]),
        ([*PENDULUM, "--output", "x.hdf5", "--seed", "-1"], ["--seed is -1"]),
        ([*PENDULUM, "--output", "x.hdf5", "--ref-scores", "3", "1"], ["--ref-scores"]),
        (["--policy", "random", "--output", "x.hdf5"], ["--env"]),
        (["--env", "Pendulm-v1", "--policy", "random", "--output", "x.hdf5"], ["Pendulum-v1"]),
        (["--env", "Pendulum-v1", "--policy", "no.zip", "--output", "x.hdf5"], ["no.zip does not exist"]),
        (["--policy", "runs/no", "--output", "x.hdf5"], ["runs/no does not exist", '"random"']),
        (["--policy", "random", "sac/Hoper-v4", "--output", "x.hdf5"], ["did you mean sac/Hopper-v4"]),
        (["--replay", "no", "--output", "x.hdf5"], ["no is not a run folder"]),
        (["--replay", "run", "--output", "x.hdf5", "--seed", "3"], ["--seed", "--replay"]),
    ],
)
def test_bad_flags(run, tmp_path: Path, arguments: list[str], named: list[str]):
    (tmp_path / "text.hdf5").write_text("years of work")
    (tmp_path / "minari" / "other-v0").mkdir(parents=True)
    status, said = run(*arguments)
    assert status == 2
    assert len(said.strip().splitlines()) <= 2
    assert all(word in said for word in named), said
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["minari", "other-v0", "text.hdf5"]


def test_runs_that_cannot_be_replayed(small, tmp_path: Path):
    module("ppo").train(args := small("ppo", total_steps=40, eval_episodes=0))
    with pytest.raises(InputError, match="no replay buffer"):
        made(env=None, replay=args.run_dir)
    noise = {"recipe": "sac", "eval_episodes": 0, "run_dir": tmp_path / "noise"}
    module("dsrl").train(args := small("dsrl", offline_steps=1, online_steps=5, warmup_steps=0, **noise))
    with pytest.raises(InputError, match="stores the noise of its policy, not its actions"):
        made(env=None, replay=args.run_dir)
    module("sac").train(args := small(total_steps=60, eval_episodes=0, run_dir=tmp_path / "sac"))
    with pytest.raises(InputError, match=r"--env is Hopper-v4, but .* Pendulum-v1"):
        made(env="Hopper-v4", replay=args.run_dir)
    next((args.run_dir / "checkpoint" / "replay").iterdir()).unlink()
    with pytest.raises(InputError, match="missing or damaged"):
        made(env=None, replay=args.run_dir)
    assert not Path("data.hdf5").exists()


@pytest.mark.parametrize("output", ["data.hdf5", "minari:test/own-v0"])
def test_data_of_a_module_say_so_and_env_allows_it(small, monkeypatch: pytest.MonkeyPatch, output: str):
    """A run names its environment's module, which collect imports; a file names it too, and is not obeyed."""
    monkeypatch.syspath_prepend(Path.cwd())
    name = f"own_{output[:4]}"  # no other test may have imported it
    own, text = f"{name}:{name}-v0", "import gymnasium as gym\nfrom gymnasium.envs.classic_control import PendulumEnv\n"
    Path(f"{name}.py").write_text(f"{text}gym.register('{name}-v0', PendulumEnv, max_episode_steps=50)\n")
    module("sac").train(args := small(env=own, total_steps=60, eval_episodes=0))
    collect(Args(output, None, (str(args.run_dir),), transitions=100, num_envs=2))
    source = output.removeprefix("minari:")
    sys.modules.pop(name)
    dataset = load(source)
    assert (dataset.env, dataset.untrusted_env) == (None, own)
    assert name not in sys.modules
    with pytest.raises(
        InputError, match=rf"names the environment {own}, but .* not imported\ngive --env {own} to allow"
    ):
        module("bc").train(small("bc", dataset=source, env="", run_dir=args.run_dir.with_name("none")))
    bc = small("bc", dataset=source, env=own, offline_steps=20, online_steps=0, run_dir=args.run_dir.with_name("bc"))
    module("bc").train(bc)
    assert (bc.run_dir / "DONE").exists()


class Told(gym.Env[Any, Any]):
    """Ends after 3 steps; `late` is known from the second step, `word` is no number."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.steps = float(self.np_random.uniform()), 0
        return np.full(1, self.place, np.float32), {"place": self.place, "word": "a"}

    def step(self, action: Any) -> Any:
        self.place, self.steps = self.place + float(action[0]), self.steps + 1
        told = {"place": self.place, "is_success": np.bool_(self.steps == 3), "steps": self.steps, "word": "b"}
        told |= {"late": np.float32(self.steps)} if self.steps > 1 else {}
        return np.full(1, self.place, np.float32), 0.0, self.steps == 3, False, told


gym.register("Told-v0", f"{__name__}:Told")
gym.register("Class-v0", Told)
gym.register("Lambda-v0", lambda: Told())


@pytest.mark.parametrize("vectorizer", ["sync", "async"])
def test_minari_episodes_hold_infos(vectorizer: str):
    """All numbers in `info`, from the reset on; what was not there is NaN, and False for a bool."""
    collect(Args("minari:test/told-v0", "Told-v0", ("random", "random"), None, None, 28, 1, 2, vectorizer))
    first = minari.load_dataset("test/told-v0")[0]
    assert set(first.infos) == {"place", "is_success", "success", "steps", "late"}
    assert first.infos["success"].tolist() == first.infos["is_success"].tolist() == [False, False, False, True]
    for episode in minari.load_dataset("test/told-v0"):
        steps = len(episode.rewards)
        assert np.allclose(episode.infos["place"], episode.observations[:, 0], atol=1e-6)
        assert np.array_equal(episode.infos["steps"], [np.nan, 1, 2, 3][: steps + 1], equal_nan=True)
        assert np.array_equal(episode.infos["late"], [np.nan, np.nan, 2, 3][: steps + 1], equal_nan=True)


class Chatty(Told):
    """Tells with names and values that HDF5 or a vector environment takes for something else."""

    def step(self, action: Any) -> Any:
        obs, *result, told = super().step(action)
        told |= {"reward": 1.0, "reward/forward": 2.0, 7: 1.0, "y": 5.0, "_y": 4.0, "large": 10**400, ("a",): 1}
        told |= {"_b": True, "change": False if self.steps == 1 else 2.5, "flag": np.bool_(self.steps == 2)}
        return obs, *result, told


gym.register("Chatty-v0", Chatty)


@pytest.mark.parametrize("vectorizer", ["sync", "async"])
def test_minari_infos_with_odd_names_and_values(vectorizer: str):
    """Nothing is nested, taken for a mask or made a bool by its first value."""
    collect(Args("minari:test/chatty-v0", "Chatty-v0", ("random",), None, None, 14, 1, 2, vectorizer))
    first = minari.load_dataset("test/chatty-v0")[0].infos
    assert set(first) == {
        "place",
        "is_success",
        "success",
        "steps",
        "late",
        "reward",
        "reward.forward",
        "y",
        "change",
        "flag",
    }
    for name, values in {
        "reward": [1, 1, 1],
        "reward.forward": [2, 2, 2],
        "y": [5, 5, 5],
        "change": [0, 2.5, 2.5],
    }.items():
        assert np.array_equal(first[name], [np.nan, *values], equal_nan=True), name
        assert first[name].dtype == np.float64
    assert first["flag"].tolist() == [False, False, True, False]
    assert first["flag"].dtype == bool


def test_infos_that_cannot_be_stored_cost_no_data(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The episodes are written without them, and a line says so."""
    numbers = CanonicalEnv._numbers
    monkeypatch.setattr(CanonicalEnv, "_numbers", lambda self, info: numbers(self, info) | {".": 1.0})
    collect(Args("minari:test/told-v0", "Told-v0", ("random",), transitions=14, num_envs=2))
    dataset = minari.load_dataset("test/told-v0")
    assert (dataset.total_steps, dataset[0].infos) == (14, {})
    assert "warning: the infos cannot be stored, so the dataset has none" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*out of date")
@pytest.mark.parametrize(("env", "limit"), [("Pendulum-v1", 200), ("HalfCheetah-v4", 1000), ("AdroitHandPen-v1", 200)])
def test_minari_recovers_the_whole_environment(env: str, limit: int):
    """The same spec as that of gym.make, time limit included: the recovered environment ends."""
    collect(Args("minari:test/whole-v0", env, ("random",), transitions=20, num_envs=2))
    dataset = minari.load_dataset("test/whole-v0")
    recovered = dataset.recover_environment()
    assert recovered.spec == gym.make(env).spec
    recovered.reset(seed=0)
    ends = [any(recovered.step(recovered.action_space.sample())[2:4]) for _ in range(limit)]
    assert ends == [False] * (limit - 1) + [True]


def test_minari_specs_of_registered_callables(capsys: pytest.CaptureFixture[str]):
    """Minari stores a spec as JSON: a class becomes its name, a lambda has none, which is said."""
    for env in ("Class-v0", "Lambda-v0"):
        collect(Args(f"minari:test/{env}", env, ("random",), transitions=6, num_envs=2))
        assert load(f"test/{env}").env == env
    assert isinstance(minari.load_dataset("test/Class-v0").recover_environment().unwrapped, Told)
    assert minari.load_dataset("test/Lambda-v0").env_spec is None
    warned = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert [line.split(" from ")[0] for line in warned] == ["warning: readers cannot make Lambda-v0"]


class Diverging(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,))
    action_space = gym.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        return np.full(1, np.nan), 0.0, False, False, {}


def test_non_finite_data():
    gym.register("Diverging-v0", entry_point=Diverging)
    with pytest.raises(RunError, match="non-finite obs"):
        made(env="Diverging-v0")
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("output", ["data.hdf5", "minari:test/random-v0"])
def test_a_full_disk_and_a_kill_while_writing(run, tmp_path: Path, output: str):
    """Nothing is left where a reader looks; with room, the same command works."""
    flags = [*PENDULUM, "--transitions", "2000", "--output", output]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20 * 1024, before[1]))
        status, said = run(*flags)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert status == 1
    assert len(said.strip().splitlines()) <= 2, said
    assert "cannot be written" in said
    assert "make room" in said
    assert not [path for path in tmp_path.rglob("*") if "data" in path.name or "random" in path.name]

    def killed_at_its_first_fsync() -> None:
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # of that process alone
        collect(Args(output, "Pendulum-v1", ("random",), transitions=2_000))

    process = multiprocessing.get_context("fork").Process(target=killed_at_its_first_fsync)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "data.hdf5").exists()
    assert not (tmp_path / "minari").exists() or not minari.list_local_datasets()

    collect(Args(output, "Pendulum-v1", ("random",), transitions=2_000))
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.filterwarnings("ignore:'tools.collect' found in sys.modules")
def test_help_lists_every_flag(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["collect.py", "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("tools.collect", run_name="__main__", alter_sys=True)
    assert not stop.value.code
    said = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in said for name in Args.__dataclass_fields__)
