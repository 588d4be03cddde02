"""A restored environment continues bit for bit like one that was never stopped."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from conftest import ROOT
from gymnasium.spaces import Box

from common.errors import InputError
from envs.make import make, make_vector
from envs.state import ExactState, get_states, set_states

LENGTH = 20  # of an episode, so that its end comes soon
LOCOMOTION = ["HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid", "Swimmer"]
ROBOTICS = [
    *("AntMaze_UMaze-v4", "AntMaze_UMaze-v5", "PointMaze_UMaze-v3", "AdroitHandPen-v1", "AdroitHandDoor-v1"),
    *("FrankaKitchen-v1", "FetchReach-v4", "HandReach-v3"),
]
IDS = [f"{name}-{version}" for name in LOCOMOTION for version in ("v4", "v5")] + [
    *("InvertedDoublePendulum-v4", "Reacher-v5", "Pusher-v5", "Pendulum-v1", "MountainCarContinuous-v0"),
    *ROBOTICS,
]


def make_short(env_id: str) -> ExactState:
    if env_id in ROBOTICS:
        pytest.importorskip("gymnasium_robotics")
    if env_id in ROBOTICS[-3:] and tuple(map(int, mujoco.__version__.split(".")[:2])) > (3, 11):
        pytest.skip("gymnasium-robotics 1.4.2 cannot start it with this MuJoCo")
    return make(env_id, max_episode_steps=LENGTH)


def rollout(env: gym.Env, actions: np.ndarray) -> list[Any]:
    """What an agent sees, as bytes; resets when an episode ends."""
    seen = []
    for action in actions:
        obs, reward, termination, truncation, info = env.step(action)
        seen.append((obs.tobytes(), np.float64(reward).tobytes(), termination, truncation, info))
        if termination or truncation:
            seen.append(env.reset()[0].tobytes())
    return seen


def some_actions(env: gym.Env, n: int) -> np.ndarray:
    return np.random.default_rng(1).uniform(-1, 1, (n, *env.action_space.shape)).astype(np.float32)


def plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and plain(item) for key, item in value.items())
    return value is None or type(value) in (str, int, float, bool, np.ndarray)


@pytest.mark.parametrize("env_id", IDS)
def test_continues_bit_for_bit(env_id: str) -> None:
    twin, env = make_short(env_id), make_short(env_id)
    actions = some_actions(env, 3 * LENGTH)
    steps = LENGTH + 9  # into an episode that began without a seed
    for each in (twin, env):
        each.reset(seed=7)
    assert rollout(env, actions[:steps]) == rollout(twin, actions[:steps])
    middle = env.get_state()
    assert plain(middle)
    expected = rollout(twin, actions[steps:])  # crosses at least one end of an episode
    assert rollout(env, actions[steps:]) == expected, "saving must not disturb"

    fresh = make_short(env_id)
    for restored in (fresh, env, fresh):  # a new one, one that has lived on, and one more time
        assert restored.set_state(middle)
        assert rollout(restored, actions[steps:]) == expected

    obs, _ = env.reset()
    start = env.get_state()
    expected = rollout(env, actions)
    assert fresh.set_state(start)
    assert fresh.get_state()["obs"].tobytes() == obs.tobytes()
    assert rollout(fresh, actions) == expected


def test_continues_in_another_process(tmp_path: Path) -> None:
    ids = ["HalfCheetah-v4", "Ant-v5", "Pendulum-v1"]
    try:
        import gymnasium_robotics  # noqa: F401

        ids += ["AntMaze_UMaze-v5", "AdroitHandPen-v1"]
    except ImportError:
        pass
    jobs = []
    for env_id in ids:
        env = make_short(env_id)
        env.reset()  # unseeded
        actions = some_actions(env, 3 * LENGTH)
        rollout(env, actions[:30])
        jobs.append((env_id, env.get_state(), actions[30:], rollout(env, actions[30:])))
    (tmp_path / "jobs").write_bytes(pickle.dumps(jobs))
    code = (
        "import pickle, sys; from test_env_state import make_short, rollout\n"
        "for env_id, state, actions, expected in pickle.load(open(sys.argv[1], 'rb')):\n"
        "    env = make_short(env_id); assert env.set_state(state), env_id\n"
        "    assert rollout(env, actions) == expected, env_id\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, tmp_path / "jobs"],
        cwd=Path(__file__).parent,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))},
        check=True,
        timeout=60,
    )


class Toy(gym.Env):
    """A walk on the line. `inner` draws from a hidden generator, `outside` from one that cannot be found."""

    observation_space = Box(-np.inf, np.inf, (1,), np.float32)
    action_space = Box(-1, 1, (1,), np.float32)

    def __init__(self, inner: gym.Env | None = None, outside: bool = False, bits: Any = None) -> None:
        self.inner, self.outside = inner, [np.random.default_rng()] if outside else None
        self.bits = bits and np.random.Generator(bits(3))
        self.outer = self  # a cycle

    def _obs(self) -> np.ndarray:
        return np.array([self.x], np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        if self.inner is not None:
            self.inner.reset()
        self.x = self.np_random.normal() + (options or {"at": np.zeros(1)})["at"][0]
        return self._obs(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        sources = [self.bits, self.inner and self.inner.np_random, *(self.outside or [])]
        self.x += float(action[0]) + sum(source.normal() for source in sources if source is not None)
        if self.outside:
            self.np_random.normal(size=self.outside[0].integers(99))
        action *= 0  # an environment may spoil what it is given
        return self._obs(), self.x, bool(self.x > 40), False, {}


@pytest.mark.parametrize("bits", [np.random.MT19937, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64])
def test_hidden_generators(bits: Any) -> None:
    env = ExactState(Toy(Toy(Toy(bits=bits)), bits=bits))
    env.reset(options={"at": np.array([5.0])})
    rollout(env, np.ones((5, 1)))
    state = env.get_state()
    assert len(state["generators"]) == 5
    expected = rollout(env, np.ones((60, 1)))
    fresh = ExactState(Toy(Toy(Toy(bits=bits)), bits=bits))
    assert fresh.set_state(state)
    assert rollout(fresh, np.ones((60, 1))) == expected


class Legacy(Toy):
    """As Shimmy wraps dm_control: `np_random` is a RandomState that is no attribute. `own` is one that is."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._task, self.own = [np.random.RandomState(seed)], np.random.RandomState(seed + 1)

    @property
    def np_random(self) -> np.random.RandomState:  # type: ignore[override]
        return self._task[0]

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.x += self.np_random.normal() + self.own.normal()  # every second normal number is kept for the next call
        return super().step(action)


def test_legacy_generators() -> None:
    env, fresh = ExactState(Legacy(1)), ExactState(Legacy(5))
    env.reset()
    rollout(env, np.ones((6, 1)))
    state = env.get_state()
    assert plain(state)
    expected = rollout(env, np.ones((60, 1)))
    assert fresh.set_state(state)
    assert rollout(fresh, np.ones((60, 1))) == expected


def test_irreproducible_environment_starts_a_new_episode() -> None:
    env = ExactState(Toy(outside=True))
    env.reset(seed=0)
    rollout(env, np.ones((5, 1)))
    state = env.get_state()
    obs, _ = env.reset()
    assert not env.set_state(state)
    now = env.get_state()
    assert len(now["actions"]) == 0
    np.testing.assert_array_equal(now["obs"], obs)  # the episode that would have come next
    rollout(env, np.ones((100, 1)))


def test_end_of_replay_is_compared_with_more_than_the_observation() -> None:
    env = ExactState(Toy())
    env.reset(seed=0)
    rollout(env, np.ones((5, 1)))
    for key, other in (("return", 0.0), ("done", True), ("generators", env.get_state()["generators_before"])):
        state = env.get_state()
        if state[key] != other:
            assert not ExactState(Toy()).set_state(state | {key: other})


def test_refuses_what_is_not_its_state() -> None:
    env, other = make("Pendulum-v1"), make("MountainCarContinuous-v0")
    with pytest.raises(InputError, match="reset it first"):
        env.get_state()
    env.reset(seed=0)
    other.reset(seed=0)
    state = env.get_state()
    for wrong in (
        None,
        {},
        [],
        *({key: value for key, value in state.items() if key != missing} for missing in state),
        state | {"actions": [[0.0]]},
        state | {"actions": np.zeros((2, 3), np.float32)},
        state | {"actions": np.zeros((2, 1))},
        state | {"generators_before": {"env.nothing._np_random": "{}"}},
        state | {"generators_before": {"env.env._np_random": "{}"}},
        state | {"generators_before": {"env.env._np_random": "not json"}},
        state | {"generators_before": {"env.env._np_random": '{"has_gauss": 0}'}},
        state | {"generators_before": {"env.env._np_random": '{"bit_generator": "save"}'}},
        other.get_state(),
    ):
        with pytest.raises(InputError):
            env.set_state(wrong)  # type: ignore[arg-type]
    assert env.set_state(state)


@pytest.mark.parametrize("vectorizer", ["sync", "async"])
def test_vector_continues_bit_for_bit(vectorizer: Any) -> None:
    def play(envs: Any, obs: np.ndarray, actions: np.ndarray, dones: np.ndarray) -> tuple[list[bytes], Any, Any]:
        seen = [obs.tobytes()]
        for action in actions:
            if dones.any():
                obs, _ = envs.reset(options={"reset_mask": dones})
            seen.append(obs.tobytes())
            obs, rewards, terminations, truncations, _ = envs.step(action)
            seen += [obs.tobytes(), rewards.tobytes(), terminations.tobytes(), truncations.tobytes()]
            dones = terminations | truncations
        return seen, obs, dones

    envs = make_vector("Hopper-v4", 3, seed=5, vectorizer=vectorizer)
    obs, _ = envs.reset()
    actions = np.random.default_rng(0).uniform(-1, 1, (300, 3, 3)).astype(np.float32)
    dones = np.zeros(3, bool)
    for t in range(100):  # until some episode has just ended, but not all
        _, obs, dones = play(envs, obs, actions[t : t + 1], dones)
        if t > 50 and dones.any() and not dones.all():
            break
    assert dones.any()
    assert not dones.all()
    states = get_states(envs)
    expected, _, ends = play(envs, obs, actions[100:], dones)
    other = make_vector("Hopper-v4", 3, seed=6, vectorizer=vectorizer)
    restored, exact = set_states(other, states)
    assert exact == [True] * 3
    np.testing.assert_array_equal(restored, obs)
    actual, _, other_ends = play(other, restored, actions[100:], dones)
    assert actual == expected
    np.testing.assert_array_equal(ends, other_ends)
    set_states(other, states)
    with pytest.raises(AssertionError, match="reset it first"):
        other.step(actions[0])
    with pytest.raises(InputError, match="3 environments were saved, but there are 2"):
        set_states(make_vector("Hopper-v4", 2, seed=5), states)
    with pytest.raises(InputError, match="make_vector"):
        get_states(gym.vector.SyncVectorEnv([Toy]))
