"""What off-policy algorithms without a dataset share: a known answer, honest steps, a real environment."""

import csv
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import OFFLINE, agent_class, long, module, small_of, with_flag

from common.acting import uniform_actions
from common.replay_buffer import ReplayBuffer

off_policy = pytest.mark.parametrize("algo", sorted({*with_flag("buffer_size")} - {*OFFLINE}))


def make_agent(algo: str, **changed: Any) -> Any:
    return agent_class(algo)(module(algo).Args(**(small_of(algo) | changed)), 3, 2, torch.device("cpu"))


def update(algo: str, agent: Any, batch: Any, number: int) -> None:
    """Call the agent's `number`-th update as the training loop does."""
    delay = getattr(module(algo).Args, "policy_delay", None)
    delayed = {} if delay is None else {"with_actor": number % delay == 0}
    agent.update(batch, **delayed)


@off_policy
def test_critics_reach_the_values_of_a_known_mdp(algo: str):
    """Two states that take turns for ever, reward 1 in the first; and a third that ends with reward 5.

    With γ = 0.5 and no entropy: Q = 4/3, 2/3 and 5, whatever the action. A truncated episode (the first state's, in
    half of its rows) bootstraps like any other; a terminated one does not.
    """
    followers = {"tau": 0.05} if algo in with_flag("tau") else {}
    agent = make_agent(algo, gamma=0.5, critic_lr=3e-3, **followers)
    buffer, rng, states = ReplayBuffer(600, 3, 2), np.random.default_rng(0), np.eye(3)
    for _ in range(200):
        actions = rng.uniform(-1, 1, (3, 2))
        buffer.add(states, actions, [1.0, 0.0, 5.0], states[[1, 0, 0]], [0, 0, 1])
    for number in range(1, 1_501 if followers else 4_001):  # batch renormalisation approaches the values more slowly
        if hasattr(agent, "log_alpha"):
            agent.log_alpha.data.fill_(-30.0)  # no entropy
        update(algo, agent, buffer.sample(64, agent.generator), number)
    batch = buffer.sample(300, agent.generator)
    expected = batch.obs @ torch.tensor([4 / 3, 2 / 3, 5.0])
    torch.testing.assert_close(agent.critic(batch.obs, batch.actions), expected.expand(2, -1), rtol=0, atol=0.1)


@off_policy
def test_actions_lie_in_the_box_and_differ_where_they_should(algo: str):
    agent, obs = make_agent(algo), np.zeros((4, 3), np.float32)
    uniform = uniform_actions(1_000, 2, agent.generator)
    assert uniform.dtype == np.float32
    assert abs(uniform.mean()) < 0.05
    assert uniform.min() < -0.99
    assert uniform.max() > 0.99
    assert agent.act(obs).shape == (4, 2)
    assert not np.array_equal(agent.act(obs), agent.act(obs))
    assert np.array_equal(agent.act(obs, deterministic=True), agent.act(obs, deterministic=True))


@off_policy
@pytest.mark.parametrize(("utd", "num_envs"), [pytest.param(1, 1, marks=long), pytest.param(3, 1, marks=long), (2, 4)])
def test_updates_for_each_environment_step(
    algo: str, small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, utd: int, num_envs: int
):
    """`--utd` updates a step of each environment after the first random steps; every step is stored, none twice."""
    updates, added = [], []
    update, add = agent_class(algo).update, ReplayBuffer.add
    monkeypatch.setattr(agent_class(algo), "update", lambda self, *args: updates.append(1) or update(self, *args))
    monkeypatch.setattr(ReplayBuffer, "add", lambda self, *parts: added.append(parts) or add(self, *parts))
    module(algo).train(small(algo, utd=utd, num_envs=num_envs, total_steps=440, learning_starts=40))
    assert len(updates) == utd * 400
    assert sum(len(parts[2]) for parts in added) == 440


@pytest.mark.parametrize(
    ("algo", "flag"), [(algo, flag) for flag in ("learning_starts", "random_steps") for algo in with_flag(flag)]
)
@pytest.mark.parametrize("steps", [40, 41])
def test_a_run_too_short_to_learn_says_so(
    algo: str, flag: str, steps: int, small: Callable[..., Any], capsys: pytest.CaptureFixture[str]
):
    asked = {"online_steps": steps, "offline_steps": 0} if algo in OFFLINE else {"total_steps": steps}
    args = small(algo, **asked, **{flag: 40})
    module(algo).train(args)
    said = f"nothing is learned in 40 environment steps: --{flag.replace('_', '-')} covers 40"
    assert (said in capsys.readouterr().err) is (steps == 40)
    rows = csv.DictReader((args.run_dir / "metrics.csv").open())
    assert any(row["name"] == "losses/critic" for row in rows) is (steps == 41)


@off_policy
def test_truncated_episodes_are_not_stored_as_terminated(algo: str, small: Callable[..., Any]):
    """Pendulum only ever times out: no stored transition may cut the bootstrap."""
    args = small(algo, total_steps=110, time_limit=50)
    module(algo).train(args)
    rows = np.fromfile(next((args.run_dir / "checkpoint" / "replay").glob("*.rows")), np.float32).reshape(110, -1)
    assert not rows[:, -1].any()
    joined = (rows[:-1, 5:8] == rows[1:, 0:3]).all(1)  # next_obs of a row is obs of the next, but at the two ends
    assert np.flatnonzero(~joined).tolist() == [49, 99]


@pytest.mark.parametrize(("algo", "steps", "seed"), [("sac", 6_000, 3), pytest.param("td3", 8_000, 2, marks=long)])
def test_learns_pendulum(algo: str, steps: int, seed: int, small: Callable[..., Any]):
    """From about -1 200 (random) to better than -250 (its best is about -150); TD3's actor moves half as often."""
    args = small(algo, seed=seed, hidden=(64, 64), batch_size=128, total_steps=steps, learning_starts=500,
                 eval_every=steps, eval_episodes=10, checkpoint_every=steps)  # fmt: skip
    module(algo).train(args)
    step, returns = np.loadtxt(args.run_dir / "evaluations.csv", delimiter=",", skiprows=1, usecols=(0, 2)).T
    assert returns[step == 0].mean() < -800
    assert returns[step == steps].mean() > -250
