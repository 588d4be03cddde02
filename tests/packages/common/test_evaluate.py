"""Episodes side by side equal episodes one by one."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from numpy.typing import NDArray

from common.errors import RunError
from common.evaluate import Episode, evaluate
from envs.make import make


class Countdown(gym.Env[NDArray[np.float32], NDArray[np.float32]]):
    """Ends after (seed % 7) + 1 steps, terminated for even seeds and truncated for odd; reward 1, success at step 3."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[np.float32], dict[str, Any]]:
        assert seed is not None
        self.seed, self.steps = seed, 0
        return np.array([seed], np.float32), {}

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        assert self.steps <= self.seed % 7, "stepped after its end"
        assert action[0] == self.seed * 2, "given another episode's action"
        self.steps += 1
        over = self.steps > self.seed % 7
        terminated, truncated = over and self.seed % 2 == 0, over and self.seed % 2 == 1
        return np.array([self.seed], np.float32), 1.0, terminated, truncated, {"success": self.steps == 3}


def test_each_episode_ends_by_itself_and_gets_its_own_actions():
    seeds = [0, 1, 2, 3, 13, 5]
    episodes = evaluate(lambda obs: 2 * obs, [Countdown() for _ in seeds], seeds)
    assert episodes == [Episode(float(s % 7 + 1), s % 7 + 1, s % 7 + 1 >= 3) for s in seeds]


def test_an_episode_without_end_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("common.evaluate.MAX_EPISODE_STEPS", 5)
    assert evaluate(lambda obs: 2 * obs, [Countdown()], [4])[0].length == 5
    with pytest.raises(RunError, match=r"did not end in 5 steps: .*max_episode_steps"):
        evaluate(lambda obs: 2 * obs, [Countdown(), Countdown()], [3, 6])


class PaysAtTheEnd(Countdown):
    """Its return is not the sum of its rewards."""

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        *rest, info = super().step(action)
        return *rest, info | {"return": 0.5 * self.steps}


def test_a_return_that_the_environment_gives_itself():
    episodes = evaluate(lambda obs: 2 * obs, [PaysAtTheEnd() for _ in range(3)], [1, 2, 3])
    assert [episode.return_ for episode in episodes] == [1.0, 1.5, 2.0]


class Diverges(Countdown):
    """Its third reward is not a number."""

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        obs, reward, *rest = super().step(action)
        return obs, np.nan if self.steps == 3 else reward, *rest


def test_a_reward_that_is_not_finite_ends_the_evaluation():
    """With its place: the second episode's third step; a shorter episode never gets there."""
    assert evaluate(lambda obs: 2 * obs, [Diverges()], [1]) == [Episode(2.0, 2, False)]
    with pytest.raises(
        RunError, match="gave a non-finite reward of nan in step 3 of evaluation episode 1\ncheck whether it diverges"
    ):
        evaluate(lambda obs: 2 * obs, [Diverges(), Diverges()], [1, 5])


class Vanishes(Countdown):
    """Its second observation is not a number."""

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        obs, *rest = super().step(action)
        return obs * np.nan if self.steps == 2 else obs, *rest


def test_an_observation_that_is_not_finite_ends_the_evaluation():
    """Also an episode's last, on which no policy acts."""
    for start in (5, 1):
        with pytest.raises(RunError, match="gave a non-finite observation in step 2 of evaluation episode 0\n"):
            evaluate(lambda obs: 2 * obs, [Vanishes()], [start])


class PaysTooMuch(Countdown):
    """Its rewards are finite; the sum of two is not."""

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        obs, _, *rest = super().step(action)
        return obs, 1e308, *rest


class PaysNaN(Countdown):
    """Its own return is not a number in its second step; its rewards are finite."""

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        *rest, info = super().step(action)
        return *rest, info | {"return": np.nan if self.steps == 2 else 1.0}


def test_a_return_that_is_not_finite_is_named():
    """The environment's own return or the sum, not the reward, which is finite."""
    with np.errstate(over="ignore"), pytest.raises(RunError, match="gave a non-finite return in step 2 of"):
        evaluate(lambda obs: 2 * obs, [PaysTooMuch()], [5])
    with pytest.raises(RunError) as caught:
        evaluate(lambda obs: 2 * obs, [PaysNaN()], [5])
    said = str(caught.value)
    assert said.startswith(
        'the environment gave a non-finite info["return"] of nan in step 2 of evaluation episode 0\n'
    )
    assert all(len(sentence.split()) <= 25 for sentence in said.splitlines())


@pytest.mark.parametrize("envs", [4, 3, 1])
def test_side_by_side_equals_one_by_one(envs: int):
    """Also with fewer environments than episodes. Raw rewards are reported, undiscounted.

    Hopper ends early under these actions, each episode elsewhere.
    """

    def act(obs: Any) -> Any:
        return np.tanh(obs[:, :3]).astype(np.float32)

    together = evaluate(act, [make("Hopper-v4") for _ in range(envs)], [1, 2, 3, 4])
    for seed, episode in zip([1, 2, 3, 4], together, strict=True):
        env = make("Hopper-v4")
        obs, _ = env.reset(seed=seed)
        total, length, over = 0.0, 0, False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(act(obs[None])[0])
            total, length, over = total + float(reward), length + 1, terminated or truncated
        assert episode == Episode(total, length, None)


def test_evaluating_again_gives_the_same():
    envs = [make("Pendulum-v1") for _ in range(3)]

    def act(obs: Any) -> Any:
        return -obs[:, :1]

    assert evaluate(act, envs, [5, 6, 7]) == evaluate(act, envs, [5, 6, 7])
