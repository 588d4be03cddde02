"""The environments of a run: transitions, training episodes' statistics, overlapped steps, exact save and load."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import module, same
from gymnasium.spaces import Box
from stand_ins import Counter, Short

from common import checkpoint
from common.errors import RunError
from common.seeding import generator
from envs.make import make
from envs.rollout import Rollout, Transitions

FOLDER = Path("replay")  # a rollout writes nothing into it


class Drifting(gym.Env[Any, Any]):
    """Observes noise that no generator of its own holds, if `drifts`; an episode has 5 steps."""

    observation_space = Box(-np.inf, np.inf, (1,), np.float32)
    action_space = Box(-1, 1, (1,), np.float32)
    noise = np.random.default_rng(0)
    made = 0

    def __init__(self) -> None:
        self.drifts, Drifting.made = Drifting.made % 2 == 0, Drifting.made + 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: np.ndarray) -> Any:
        self.count += 1
        obs = np.float32([self.noise.random() if self.drifts else self.count])
        return obs, 1.0, False, self.count == 5, {}


class OwnNoise(gym.Env[Any, Any]):
    """An episode is one step, which pays a number of a generator of its own that no seed sets."""

    observation_space = Box(-np.inf, np.inf, (1,), np.float32)
    action_space = Box(-1, 1, (1,), np.float32)

    def __init__(self) -> None:
        self.noise = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: np.ndarray) -> Any:
        return np.zeros(1, np.float32), self.noise.normal(), True, False, {}


gym.register("OwnNoise-v0", entry_point=OwnNoise)
gym.register("Apart-v0", entry_point=Short)  # whose episodes end apart
gym.register("Counter-v0", entry_point=Counter)
gym.register("RolloutDrifting-v0", entry_point=Drifting)


@pytest.fixture
def rollout(small: Callable[..., Any]) -> Any:
    """Make one that stands at the start of its first episodes."""
    made: list[Rollout] = []

    def build(env: str = "Counter-v0", num_envs: int = 2, **changed: Any) -> Rollout:
        made.append(Rollout(env, small(env=env, num_envs=num_envs, **changed)))
        made[-1].reset()
        return made[-1]

    yield build
    for each in made:
        each.close()


def moves(rollout: Rollout, count: int, scale: float = 1.0, seed: int = 0) -> list[Transitions]:
    """The transitions of `count` steps with random actions."""
    rng = np.random.default_rng(seed)
    actions = rng.uniform(-scale, scale, (count, rollout.envs.num_envs, rollout.action_dim)).astype(np.float32)
    return [rollout.step(each) for each in actions]


@pytest.mark.parametrize("vectorizer", ["sync", "async"])
def test_next_obs_is_the_true_successor_at_an_episodes_end(rollout: Any, vectorizer: str) -> None:
    """Not the next episode's start, which the policy sees next; and no stored obs changes afterwards."""
    made = rollout(vectorizer=vectorizer)
    first = int(made.obs[0, 0])
    taken = moves(made, 10)
    terminations = truncations = 0
    episode, step = first, 0
    for t in taken:
        step += 1
        ends = (episode % 2 == 1 and step == 2, step == 3)
        for i in range(2):
            assert t.obs[i, :2].tolist() == [episode, step - 1]
            assert t.next_obs[i].tolist() == [episode, step, t.actions[i, 0]]
            assert (t.terminations[i], t.truncations[i]) == ends
            assert t.rewards[i] == 10.0 * step
        terminations, truncations = terminations + ends[0], truncations + ends[1]
        if any(ends):
            episode, step = episode + 1, 0
    assert (terminations, truncations) == (2, 2)
    assert made.obs[:, :2].tolist() == [[episode, step]] * 2
    assert made.steps == 20


def test_actions_are_clipped_for_the_environment_alone(rollout: Any) -> None:
    """A Gaussian policy's transition holds the action that it chose: PPO needs its density."""
    made = rollout()
    chosen = np.array([[-1.5], [0.25]], np.float32)
    transitions = made.step(chosen)
    assert transitions.next_obs[:, 2].tolist() == [-1.0, 0.25]
    assert transitions.actions.tolist() == [[-1.5], [0.25]]
    assert chosen.tolist() == [[-1.5], [0.25]]


def test_statistics_are_of_each_environments_own_episodes(rollout: Any) -> None:
    """Returns and lengths recomputed from the transitions, one environment after another."""
    made = rollout("Apart-v0", num_envs=3)
    taken = moves(made, 40)
    returns, lengths = [], []
    for i in range(3):
        total, length = 0.0, 0
        for t in taken:
            total, length = total + t.rewards[i], length + 1
            if t.terminations[i] or t.truncations[i]:
                returns.append(total)
                lengths.append(length)
                total, length = 0.0, 0
    assert len(set(lengths)) > 2
    statistics = made.statistics()
    assert statistics["charts/episodic_return"] == pytest.approx(np.mean(returns), rel=1e-12)
    assert statistics["charts/episodic_length"] == pytest.approx(np.mean(lengths))


def test_statistics_are_those_since_the_last_time(rollout: Any) -> None:
    """Five steps are an episode of 2 steps and one of 3. None ends in the sixth."""
    made = rollout()
    for count, has_episodes in ((5, True), (1, False), (4, True)):
        moves(made, count)
        statistics = made.statistics()
        assert statistics.pop("time/env_step_ms") > 0
        expected = {"charts/episodic_return": (30 + 60) / 2, "charts/episodic_length": 2.5}
        assert statistics == (expected if has_episodes else {})
    assert made.statistics() == {}


def test_a_runs_metrics_hold_its_training_episodes(small: Callable[..., Any]) -> None:
    """Those of Failing-v0 last two steps, with reward -1 each."""
    args = small("sac", env="Failing-v0", total_steps=1_000, learning_starts=999)
    module("sac").train(args)
    rows = csv.DictReader((args.run_dir / "metrics.csv").open())
    logged = {row["name"]: float(row["value"]) for row in rows if row["step"] == "1000"}
    assert (logged["charts/episodic_return"], logged["charts/episodic_length"]) == (-2.0, 2.0)


@pytest.mark.parametrize(
    ("vectorizer", "expected"),
    [("sync", ["meanwhile", "step"]), ("async", ["step_async", "meanwhile", "step_wait"])],
)
def test_meanwhile_runs_once_and_while_processes_step(
    rollout: Any, monkeypatch: pytest.MonkeyPatch, vectorizer: str, expected: list[str]
) -> None:
    """Before the step where there is one process: else updates would see an action that is not chosen yet."""
    made, events = rollout("Pendulum-v1", vectorizer=vectorizer), []

    def noted(name: str) -> Callable[..., Any]:
        original = getattr(made.envs, name)
        return lambda *args: events.append(name) or original(*args)

    for name in expected:
        if name != "meanwhile":
            monkeypatch.setattr(made.envs, name, noted(name))
    for repeats in (1, 2):
        made.step(np.zeros((2, 1), np.float32), meanwhile=lambda: events.append("meanwhile"))
        assert events == expected * repeats


@pytest.mark.parametrize("vectorizer", ["sync", "async"])
@pytest.mark.parametrize("env", ["Apart-v0", "Pendulum-v1"])
def test_save_and_load_are_exact_in_the_middle_of_episodes(
    rollout: Any, tmp_path: Path, env: str, vectorizer: str
) -> None:
    """Through a checkpoint's file: what follows is the same bit for bit, the statistics too."""
    made = rollout(env, 3, vectorizer=vectorizer)
    moves(made, 13)
    checkpoint.save(tmp_path / "state.pt", made.save(FOLDER))
    resumed = rollout(env, 3, vectorizer=vectorizer, seed=7)  # nothing of another seed's remains
    moves(resumed, 5, seed=2)
    resumed.load(FOLDER, checkpoint.load(tmp_path / "state.pt"))
    assert resumed.exact == [True] * 3
    assert (resumed.steps, resumed.obs.tobytes()) == (made.steps, made.obs.tobytes())
    for t, other in zip(moves(made, 210, seed=1), moves(resumed, 210, seed=1), strict=True):
        assert [part.tobytes() for part in t] == [part.tobytes() for part in other]
    assert same(made.save(FOLDER), resumed.save(FOLDER))
    charts = [{name: v for name, v in each.statistics().items() if "charts" in name} for each in (made, resumed)]
    assert charts[0] == charts[1] != {}


@pytest.mark.parametrize("part", ["next_obs", "rewards"])
def test_non_finite_transitions_are_refused(rollout: Any, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """The message names the part and the number of the transition; no statistic counts it."""
    made = rollout()
    moves(made, 1)
    before = made.save(FOLDER)
    monkeypatch.setattr(Counter, "faulty", part)
    with pytest.raises(RunError, match=f"gave non-finite {part} in transition 2:"):
        moves(made, 1)
    after = made.save(FOLDER)
    assert {k: v for k, v in after.items() if k != "envs"} == {k: v for k, v in before.items() if k != "envs"}


def test_an_episode_not_restored_exactly_loses_its_statistics(rollout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first environment drifts, and begins a new episode; the second one's continues."""
    monkeypatch.setattr(Drifting, "made", 0)
    made = rollout("RolloutDrifting-v0", eval_episodes=0)
    assert [env.unwrapped.drifts for env in made.envs.envs] == [True, False]
    moves(made, 3)
    monkeypatch.setattr(Drifting, "made", 0)
    resumed = rollout("RolloutDrifting-v0", eval_episodes=0)
    resumed.load(FOLDER, made.save(FOLDER))
    assert resumed.exact == [False, True]
    assert resumed.obs.tolist() == [[0.0], [3.0]]
    state = resumed.save(FOLDER)
    assert (state["returns"], state["lengths"], state["steps"]) == ([0.0, 3.0], [0, 3], 6)
    moves(resumed, 5)
    assert resumed.save(FOLDER)["finished"] == [[5.0, 5], [5.0, 5]]


def test_evaluations_leave_training_alone_and_start_alike(rollout: Any) -> None:
    """Two evaluations are the same, and the training environments and their statistics do not move."""
    made = rollout("Pendulum-v1", eval_episodes=2)
    moves(made, 3)
    before = made.save(FOLDER)
    first, second = (made.evaluate(lambda obs: -obs[:, 1:2].clip(-1, 1)) for _ in range(2))
    assert [episode.length for episode in first] == [200, 200]
    assert first == second
    assert same(before, made.save(FOLDER))


def test_evaluations_start_alike_with_a_generator_of_the_environments_own(rollout: Any) -> None:
    """Also after a resume, and also if several episodes use one environment."""
    made = rollout("OwnNoise-v0", eval_episodes=25)
    first, second = (made.evaluate(lambda obs: 0 * obs) for _ in range(2))
    assert first == second
    assert len({episode.return_ for episode in first}) == 25
    resumed = rollout("OwnNoise-v0", eval_episodes=25)
    assert resumed.evaluate(lambda obs: 0 * obs) != first
    resumed.load(FOLDER, made.save(FOLDER))
    assert resumed.evaluate(lambda obs: 0 * obs) == first


def test_many_evaluation_episodes_need_few_environments(rollout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may take more than a hundred megabytes."""
    made: list[str] = []

    def counted(env: str, **settings: Any) -> Any:
        made.append(env)
        return make(env, **settings)

    monkeypatch.setattr("envs.rollout.make", counted)
    assert len(rollout("Apart-v0", eval_episodes=50).evaluate(lambda obs: 0 * obs)) == 50
    assert len(made) <= 10


def test_random_actions_are_uniform_and_of_the_generator(rollout: Any) -> None:
    """In [-1, 1], one row for each environment; the same generator gives the same ones."""
    made = rollout("Hopper-v4", num_envs=3)
    draws = [np.stack([made.random_actions(g) for _ in range(500)]) for g in [generator(1, "agent") for _ in range(2)]]
    assert draws[0].shape == (500, 3, 3)
    assert draws[0].tobytes() == draws[1].tobytes()
    for edge in (-1.0, -0.5, 0.0, 0.5):  # a quarter of 4,500 in each half unit, within five standard deviations
        inside = ((draws[0] >= edge) & (draws[0] < edge + 0.5)).sum()
        assert abs(inside - 1_125) < 5 * (4_500 * 0.25 * 0.75) ** 0.5
    assert np.abs(draws[0]).max() <= 1.0


def test_an_end_drops_the_plan_of_its_own_environment(rollout: Any) -> None:
    """And the other executes the rest of its own: with plans of 3 and episodes of 1 to 6 steps, both kinds occur."""
    made, asked = rollout("Short-v0", num_envs=2), list[int]()

    def policy(obs: np.ndarray) -> np.ndarray:
        asked.append(len(asked))
        return np.tile(np.float32([0.1, 0.2, 0.3]) + len(asked), (2, 1))

    planned_at, taken, apart = [0, 0], [0, 0], 0
    for _ in range(200):
        actions = made.act(policy)
        for i in range(2):
            if taken[i] == 0:
                planned_at[i] = len(asked)
            assert actions[i, 0] == pytest.approx(planned_at[i] + (taken[i] + 1) / 10)
        transitions = made.step(actions)
        ended = transitions.terminations | transitions.truncations
        taken = [0 if end else (count + 1) % 3 for count, end in zip(taken, ended, strict=True)]
        apart += taken[0] != taken[1]
    assert apart > 50


def test_a_checkpoint_of_an_older_version_has_no_plans(rollout: Any) -> None:
    """It resumes with empty ones."""
    made, other = rollout("Counter-v0"), rollout("Counter-v0")
    state = made.save(FOLDER)
    del state["plans"]
    other.load(FOLDER, state)
    assert [len(plan) for plan in other.save(FOLDER)["plans"]] == [0, 0]


def test_an_environment_that_starts_again_drops_its_plan(rollout: Any) -> None:
    """As after a resume that could not restore it."""
    made = rollout("Counter-v0", num_envs=2)
    made.act(lambda obs: np.zeros((2, 4), np.float32))
    assert [len(plan) for plan in made.save(FOLDER)["plans"]] == [3, 3]
    made.discard_unfinished_episodes([True, False])
    assert [len(plan) for plan in made.save(FOLDER)["plans"]] == [3, 0]
