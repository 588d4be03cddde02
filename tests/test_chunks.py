"""Chunks of actions: windows of transitions against brute force, plans, targets with known values, exact resume."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import agent_of, command, flags, long, module, small_of, updates_of, with_flag
from d4rl_file import make
from formulas import Drawn, make_batch, parameters
from stand_ins import Counter
from test_fql import flow_actions, joined, make_agent, values
from test_resume import assert_kills_change_nothing

from algos.fql import Args
from common.errors import InputError
from common.evaluate import evaluate
from common.plans import Plans
from common.replay_buffer import Batch, ReplayBuffer
from common.run import Run
from common.seeding import seeds
from common.windows import Windows
from envs.make import make as make_env
from envs.rollout import Transitions
from offline.dataset import load
from offline.offline_to_online import OfflineToOnline
from tools import collect, export
from tools.policies import load_policy

GAMMA = 0.9
chunked = pytest.mark.parametrize("algo", with_flag("chunk"))


def ring(capacity: int, num_envs: int, length: int) -> ReplayBuffer:
    buffer = ReplayBuffer(capacity, 2, 1, starts=True)
    buffer.windows = Windows(length, GAMMA, num_envs, None)
    return buffer


class Told:
    """A buffer of random transitions, and a list of each environment's."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.num_envs, self.length = int(self.rng.integers(1, 5)), int(self.rng.integers(1, 7))
        self.capacity = int(self.rng.integers(self.num_envs, 120))
        self.buffer = ring(self.capacity, self.num_envs, self.length)
        self.starts = np.ones(self.num_envs, bool)
        self.of_env = defaultdict[int, list[dict[str, Any]]](list)

    def add(self, steps: int) -> None:
        for _ in range(steps):
            first, n = self.buffer.added, self.num_envs
            obs, next_obs = self.rng.normal(size=(2, n, 2)).astype(np.float32)
            actions, rewards = self.rng.normal(size=(n, 1)).astype(np.float32), self.rng.normal(size=n)
            terminated, truncated = self.rng.random((2, n)) < 0.15
            self.buffer.add(obs, actions, rewards, next_obs, terminated, self.starts)
            for i in range(n):
                self.of_env[i].append({
                    "number": first + i, "obs": obs[i], "action": actions[i], "reward": rewards[i],
                    "next_obs": next_obs[i], "terminated": terminated[i], "start": self.starts[i],
                })  # fmt: skip
            self.starts = terminated | truncated

    def window(self, env: int, at: int) -> list[dict[str, Any]]:
        """The transitions from the one in this place on, to the end of the episode, of the data or of the window."""
        found = [self.of_env[env][at]]
        for following in self.of_env[env][at + 1 : at + self.length]:
            if following["start"]:
                break
            found.append(following)
        return found

    def assert_right(self) -> int:
        """Compare every window with those of the lists, and return how many passed an episode's end."""
        oldest, cut = max(0, self.buffer.added - self.capacity), 0
        for env, told in self.of_env.items():
            for at, each in enumerate(told):
                if each["number"] < oldest:
                    continue
                batch, expected = self.buffer.at(torch.tensor([each["number"] % self.capacity])), self.window(env, at)
                ends = [i for i, one in enumerate(expected) if one["terminated"]]
                rewards = sum(
                    GAMMA**i * one["reward"] for i, one in enumerate(expected[: ends[0] + 1 if ends else None])
                )
                assert batch.valid.tolist() == [[1.0] * len(expected) + [0.0] * (self.length - len(expected))]
                padded = [*expected, *[expected[-1]] * (self.length - len(expected))]
                np.testing.assert_array_equal(batch.obs[0], each["obs"])
                np.testing.assert_array_equal(batch.actions[0], np.concatenate([one["action"] for one in padded]))
                np.testing.assert_array_equal(batch.next_obs[0], expected[-1]["next_obs"])
                np.testing.assert_allclose(batch.rewards.item(), rewards, rtol=1e-5, atol=1e-6)
                assert batch.terminations.item() == bool(ends)
                cut += len(expected) < self.length
        return cut


def test_windows_equal_brute_force(tmp_path: Path):
    """In 200 buffers: several environments, both kinds of ends, full rings, and half of them saved and loaded."""
    cut = wrapped = 0
    for seed in range(200):
        told = Told(seed)
        told.add(int(told.rng.integers(1, 40)))
        if seed % 2:
            state = told.buffer.save(tmp_path / str(seed))
            told.buffer = ring(told.capacity, told.num_envs, told.length)
            told.buffer.load(tmp_path / str(seed), state)
        told.add(int(told.rng.integers(0, 20)))
        cut, wrapped = cut + told.assert_right(), wrapped + (told.buffer.added > told.capacity)
    assert cut > 1_000
    assert 50 < wrapped < 150


def test_windows_of_one_transition_are_the_transitions():
    told = Told(0)
    told.length, told.buffer = 1, ring(50, 2, 1)
    told.capacity, told.num_envs, told.starts = 50, 2, np.ones(2, bool)
    told.add(20)
    where = torch.arange(40)
    windows, told.buffer.windows = told.buffer.at(where), None
    plain = told.buffer.at(where)
    assert windows.valid.tolist() == [[1.0]] * 40
    for one, other in zip(windows._replace(valid=None), plain, strict=True):
        assert one is other is None or torch.equal(one, other)


@chunked
def test_updates_on_windows_of_one_transition_are_those_without_windows(algo: str):
    """From the same generator state, bit for bit. Runs with h = 1 have no windows."""
    rng, buffer = np.random.default_rng(0), ReplayBuffer(40, 3, 2)
    obs, next_obs = rng.normal(size=(2, 40, 3))
    buffer.add(obs, rng.uniform(-1, 1, (40, 2)), rng.normal(size=40), next_obs, rng.random(40) < 0.2)
    agents = agent_of(algo), agent_of(algo)
    for agent, windows in zip(agents, (None, Windows(1, GAMMA, 1, torch.zeros(40))), strict=True):
        buffer.windows = windows
        for online in (False, True, True):
            updates_of(agent)(buffer.sample(20, agent.generator), online)
    for (name, plain), (_, windowed) in zip(*map(parameters, agents), strict=True):
        assert torch.equal(plain, windowed), name
    assert torch.equal(*(agent.generator.get_state() for agent in agents))


@pytest.fixture
def data(tmp_path: Path) -> Callable[..., OfflineToOnline]:
    """Over 20 transitions in episodes of 8 and 12, whose obs are 0, 1, 2, …; those of online ones are 1000, 1001, …."""

    def build(online: int = 10, num_envs: int = 2, chunk: int = 3, **changed: Any) -> OfflineToOnline:
        path = make(tmp_path / "data.hdf5", ".......t...........t")
        args = Args(
            dataset=str(path), env="Pendulum-v1", run_dir=tmp_path / "run", online_steps=100, offline_steps=1,
            chunk=chunk, num_envs=num_envs, buffer_size=100, **changed,
        )  # fmt: skip
        made = OfflineToOnline(args, Run("fql", args), windows=(chunk, GAMMA))
        for i in range(online):  # both environments' episodes have 5 steps
            obs = 1000.0 + np.arange(num_envs * i, num_envs * (i + 1))[:, None] * np.ones((1, 2))
            cut = np.full(num_envs, i % 5 == 4)
            made.add(Transitions(obs, np.zeros((num_envs, 1)), np.ones(num_envs), obs, np.zeros(num_envs), cut))
        return made

    return build


def batch_of(data: OfflineToOnline, online: bool, size: int = 4_000) -> Batch:
    data._set_batch_sizes(size, size)
    return data.sample(online, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("retain", ["none", "append", "mix"])
def test_windows_of_both_sources_end_with_their_episodes(data: Callable[..., OfflineToOnline], retain: str):
    """Also at the seam between dataset and online transitions, with every --retain."""
    made = data(retain=retain)
    for online in (False, True):
        batch = batch_of(made, online)
        first = batch.obs[:, 0]
        is_online = first >= 1000
        left = torch.where(first < 8, 8 - first, 20 - first)  # transitions to the end of the episode
        left = torch.where(is_online, 5 - (first - 1000).div(2, rounding_mode="floor") % 5, left)
        assert torch.equal(batch.valid.sum(1), left.clamp(max=3))
        assert is_online.any() == online
        assert (~is_online).any() == (not online or retain != "none")
        assert torch.equal(batch.terminations == 1, ~is_online & (left <= 3))


@pytest.mark.parametrize("exact", [True, False])
def test_an_environment_that_starts_again_starts_an_episode(data: Callable[..., OfflineToOnline], exact: bool):
    """After a resume that could not restore it, its last episode is cut, although no flag of its end is stored."""
    made, resumed = data(online=3), data(online=0)
    folder = made._folder / "replay"
    resumed.load(folder, made.save(folder))
    resumed.discard_unfinished_episodes([True, exact])
    for each in (made, resumed):
        obs = np.full((2, 2), 2000.0)
        each.add(Transitions(obs, np.zeros((2, 1)), np.ones(2), obs, np.zeros(2), np.zeros(2, bool)))
    whole, now = (each.online.at(torch.arange(8)).valid for each in (made, resumed))
    assert torch.equal(whole[::2], now[::2])
    assert torch.equal(whole, now) == exact
    assert now[5].tolist() == ([1.0, 1.0, 0.0] if exact else [1.0, 0.0, 0.0])


def test_a_chunk_longer_than_all_episodes_is_refused(data: Callable[..., OfflineToOnline]):
    """Also than those of the environment, from which the critics would learn nothing."""
    assert batch_of(data(chunk=12), False).whole.sum() > 0
    with pytest.raises(InputError, match=r"no episode of .* has 13 transitions: give a --chunk of at most 12"):
        data(chunk=13)
    with pytest.raises(
        InputError, match="no episode of the environment has 4 transitions: give a --chunk of at most 3"
    ):
        data(chunk=4, time_limit=3)
    with pytest.raises(InputError, match="give a --chunk of at most 2"):
        data(chunk=3, time_limit=3, action_repeat=2)


class TestTargets:
    """A chain of 12 states; each step pays 1. Its values do not depend on actions, and are known."""

    @pytest.fixture
    def chain(self) -> Callable[[bool], Batch]:
        def windows(terminates: bool) -> Batch:
            buffer = ReplayBuffer(12, 3, 2)
            starts = torch.zeros(12)
            starts[0] = 1.0
            buffer.windows = Windows(3, GAMMA, 1, starts)
            obs = np.arange(12.0)[:, None] * np.ones((1, 3))
            ends = np.arange(12) == (11 if terminates else -1)
            buffer.add(obs, np.zeros((12, 2)), np.ones(12), obs + 1, ends)
            return buffer.at(torch.arange(12))

        return windows

    @pytest.mark.parametrize("terminates", [True, False])
    @chunked
    def test_known_values_have_no_error(self, algo: str, terminates: bool, chain: Any, monkeypatch: Any):
        """Of an endless chain the value is 1 / (1 - γ), for every h; with γ instead of γʰ it would not be."""
        agent, batch = agent_of(algo, gamma=GAMMA, chunk=3), chain(terminates)
        if hasattr(agent, "log_alpha"):  # without the entropy
            agent.log_alpha.data.fill_(-torch.inf)

        def value(obs: torch.Tensor, *_: Any) -> torch.Tensor:
            left = 12 - obs[:, 0] if terminates else torch.full((len(obs),), torch.inf)
            return ((1 - GAMMA**left) / (1 - GAMMA)).expand(2, -1)

        for name in ("critic", "target_critic"):
            monkeypatch.setattr(agent, name, value)
        assert agent.critic_loss(batch)[0].item() < 1e-8
        assert batch.whole.tolist() == [1.0] * 10 + [0.0] * 2
        monkeypatch.setattr(agent, "target_critic", lambda *parts: value(*parts) + 0.1)
        bootstrapped = 9 if terminates else 10  # of 12 windows, 2 pass the end
        expected = bootstrapped * (0.1 * GAMMA**3) ** 2 / 12
        assert agent.critic_loss(batch)[0].item() == pytest.approx(expected, rel=1e-3)

    def test_rewards_after_a_termination_do_not_count(self):
        """OGBench's episodes continue after it; the window is whole, and does not bootstrap."""
        buffer = ring(5, 1, 3)
        for i in range(5):
            buffer.add(np.full((1, 2), i), [[0.0]], [1.0], np.full((1, 2), i + 1), [i == 1], [i == 0])
        batch = buffer.at(torch.tensor([0, 1, 2]))
        np.testing.assert_allclose(batch.rewards, [1 + GAMMA, 1.0, 1 + GAMMA + GAMMA**2], rtol=1e-6)
        assert batch.terminations.tolist() == [1.0, 1.0, 0.0]
        assert batch.whole.tolist() == [1.0] * 3


def chunk_batch(size: int, valid: np.ndarray) -> Batch:
    """Of 3 observations and chunks of 2 actions of 2 dimensions."""
    batch, rng = make_batch(size), np.random.default_rng(5)
    actions = torch.from_numpy(rng.uniform(-1, 1, (size, 4)))
    return batch._replace(actions=actions, valid=torch.from_numpy(valid.astype(np.float64)))


class TestFQL:
    VALID = np.array([[1, 1], [1, 0], [1, 1], [1, 0], [1, 1]] * 8)

    @pytest.mark.parametrize("extraction", ["one-step", "best-of-n"])
    def test_losses_equal_independent_formulas(self, extraction: str):
        """The critics' with γ² and the weight of the last place, the flow's with a weight for each action."""
        agent = make_agent(chunk=2, extraction=extraction, samples=5, gamma=GAMMA, q_aggregation="min")
        batch = chunk_batch(40, self.VALID)
        obs, actions, rewards, next_obs, terminations = (part.numpy() for part in batch[:5])
        before = agent.generator.get_state()
        if extraction == "one-step":
            chosen = np.clip(joined(agent.actor, next_obs, Drawn(agent.generator).normal(40, 4)), -1, 1)
        else:
            noise = Drawn(agent.generator).normal(5, 40, 4)
            found = np.stack([flow_actions(agent, next_obs, each) for each in noise])
            best = np.stack([values(agent.critic, next_obs, each, 2).min(0) for each in found]).argmax(0)
            chosen = found[best, np.arange(40)]
            assert len(set(best.tolist())) > 2
        following = values(agent.target_critic, next_obs, chosen, 2).min(0)
        target = rewards + GAMMA**2 * (1 - terminations) * following
        errors = (values(agent.critic, obs, actions, 2) - target) ** 2
        agent.generator.set_state(before)
        loss = agent.critic_loss(batch)[0].item()
        assert loss == pytest.approx((errors * self.VALID[:, 1]).sum() / errors.size, rel=1e-5)

        before = agent.generator.get_state()
        drawn = Drawn(agent.generator)
        noise, t = drawn.normal(40, 4), torch.rand(40, generator=drawn.generator).double().numpy()[:, None]
        found = joined(agent.flow, obs, (1 - t) * noise + t * actions, t)
        errors = (found - (actions - noise)) ** 2 * np.repeat(self.VALID, 2, axis=1)
        agent.generator.set_state(before)
        assert agent.flow_loss(batch)[0].item() == pytest.approx(errors.sum() / actions.size, rel=1e-6)

    def test_windows_that_pass_the_end_teach_the_critics_nothing(self):
        agent, batch = make_agent(chunk=2), chunk_batch(40, np.array([[1, 0]] * 40))
        loss, _ = agent.critic_loss(batch)
        assert loss.item() == 0.0
        assert all(not gradient.any() for gradient in torch.autograd.grad(loss, [*agent.critic.parameters()]))

    def test_best_of_n_trains_no_one_step_policy(self):
        agent, batch = make_agent(chunk=2, extraction="best-of-n", double=False), chunk_batch(40, self.VALID)
        batch = Batch(*(None if part is None else part.float() for part in batch))
        before = [parameter.clone() for parameter in agent.actor.parameters()]
        metrics = agent.update(batch)
        assert all(torch.equal(a, b) for a, b in zip(before, agent.actor.parameters(), strict=True))
        assert metrics.keys() == {"losses/critic", "losses/q", "losses/flow"}


def test_the_entropy_of_a_chunk_is_that_of_its_actions():
    assert agent_of("rlpd", chunk=4).target_entropy == 4 * agent_of("rlpd").target_entropy


class TestPlans:
    def test_actions_are_executed_in_order_and_an_end_drops_them(self):
        plans, asked = Plans(2, 1), list[float]()

        def policy(obs: np.ndarray) -> np.ndarray:
            asked.append(float(obs[0, 0]))
            return np.float32([[10 * obs[0, 0] + k for k in range(3)], [-10 * obs[0, 0] - k for k in range(3)]])

        taken = []
        for step in range(6):
            taken.append(plans.act(policy, np.float32([[step], [step]])).ravel().tolist())
            plans.drop(np.array([False, step == 1]))
        # The second plans again at step 2. The first still has an action then.
        assert taken == [[0, 0], [1, -1], [2, -20], [30, -21], [31, -22], [32, -50]]
        assert asked == [0.0, 2.0, 3.0, 5.0]

    def test_episodes_of_evaluations_are_open_loop(self):
        """Counter's obs are (episode, step, last action); its episodes have 2 or 3 steps."""
        seen = list[list[float]]()

        def policy(obs: np.ndarray) -> np.ndarray:
            seen.append(obs[:, 1].tolist())
            return np.tile(np.float32([0.25, 0.5]), (len(obs), 1))

        envs = [Counter(), Counter()]
        envs[0].episode = 0  # its next one is the second, which ends after 2 steps
        episodes = evaluate(policy, envs, [0, 1])
        assert [episode.length for episode in episodes] == [2, 3]
        assert seen == [[0.0, 0.0], [2.0]]
        assert envs[1].count == 3


EXTRACTIONS = [*((algo, {}) for algo in with_flag("chunk")), ("fql", {"extraction": "best-of-n", "samples": 4})]


@pytest.mark.parametrize(
    ("algo", "changed", "retain"),
    [("fql", {}, "append"), ("rlpd", {}, "mix"),
     pytest.param("fql", {"extraction": "best-of-n", "samples": 4}, "none", marks=long),
     pytest.param("dsrl", {}, "none", marks=long)],
)  # fmt: skip
def test_kills_in_the_middle_of_a_chunk_change_nothing(algo: str, changed: dict[str, Any], retain: str, tmp_path: Path):
    """In two environments whose episodes have 1 to 6 steps, so that their plans are at different places."""
    arguments = {"env": "stand_ins:Short-v0", "num_envs": 2, "chunk": 3, "retain": retain, "warmup_steps": 60,
                 "offline_steps": 50, "online_steps": 550, "checkpoint_every": 10} | changed  # fmt: skip
    places = [("online step", 20), ("online step", 81), ("update", 120), ("any", 3)]
    assert_kills_change_nothing(algo, arguments, places, tmp_path)


@pytest.mark.parametrize(("algo", "changed"), EXTRACTIONS)
def test_a_chunked_policy_is_exported_and_collects(
    algo: str, changed: dict[str, Any], small: Callable[..., Any], tmp_path: Path
):
    """The file's chunk has the shape [1, h, action_dim]. Collected actions are those planned at each third step.

    No episode ends among them.
    """
    module(algo).train(small(algo, chunk=3, online_steps=20, offline_steps=20, time_limit=200, **changed))
    run = tmp_path / "run"
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(export.main(export.Args(str(run))))
    (output,) = session.get_outputs()
    assert output.shape == [1, 3, 1]
    collect.collect(collect.Args(str(tmp_path / "c.hdf5"), policy=(str(run),), transitions=60, num_envs=1))
    dataset = load(str(tmp_path / "c.hdf5"), max_action=None)
    env = make_env("Pendulum-v1")
    policy = load_policy(str(run), env, seeds(1, "policy 0", 1)[0], deterministic=False)
    obs, actions = dataset.column("obs"), dataset.column("actions")
    planned = np.concatenate([policy(obs[first : first + 1]).reshape(3, 1) for first in range(0, 60, 3)])
    np.testing.assert_allclose(actions, planned, atol=1e-6)


@pytest.mark.parametrize("retain", ["append", "mix"])
def test_weighted_episodes_give_windows_too(data: Callable[..., OfflineToOnline], retain: str):
    """The second episode has the higher return; its windows are drawn more often, and end with it."""
    made = data(weighting="return", retain=retain)
    for online in (False, True):
        batch = batch_of(made, online)
        of_data = batch.obs[:, 0] < 1000
        assert (batch.obs[of_data, 0] >= 8).float().mean() > 0.9
        ends = batch.obs[:, 0] == 19
        assert batch.valid[ends].tolist() == [[1.0, 0.0, 0.0]] * int(ends.sum())


def test_windows_of_a_dataset_on_the_disk_are_the_same(tmp_path: Path):
    path = make(tmp_path / "data.hdf5", ".......t...........t")
    found = []
    for mapped in (False, True):
        buffer = load(str(path), mapped=mapped, env="Pendulum-v1").buffer
        starts = torch.zeros(20)
        starts[[0, 8]] = 1.0
        buffer.windows = Windows(3, GAMMA, 1, starts)
        found.append(buffer.at(torch.arange(20)))
    for one, other in zip(*found, strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.usefixtures("interpreted", "checked_once")
def test_updates_on_windows_are_recorded(small: Callable[..., Any], capsys: pytest.CaptureFixture[str]):
    """Of both sources, and of the buffer alone."""
    changed = {"chunk": 3, "compile": True, "total_steps": 150, "warmup_steps": 20}
    for retain in ("append", "mix", "none"):
        module("fql").train(small("fql", retain=retain, run_dir=Path(f"run-{retain}"), **changed))
        said = capsys.readouterr().err
        assert said.count("compiled in ") == 3  # the update in two phases, and the action
        assert "eager" not in said


def test_absurd_chunks_are_refused(tmp_path: Path):
    """By the flag's name."""
    for flag in ("--chunk", "--samples"):
        small = flags("fql", **small_of("fql") | {"run_dir": tmp_path / "run"})
        done = command(*small, flag, "1000000000000", "--extraction", "best-of-n", algo="fql")
        assert done.returncode == 2
        assert flag in done.stderr.splitlines()[-1]
