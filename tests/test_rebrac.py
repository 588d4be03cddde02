"""ReBRAC against formulas written a second time, known answers, and the authors' settings for each dataset."""

import json
import os
import re
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import COMMON, PENDULUM, ROOT, SHARED, final_state, module
from formulas import Array, forward, layers, make_batch, parameters, values

from algos.rebrac import PRESETS, REBRAC, Args
from common.recorded import Recording
from common.replay_buffer import Batch, ReplayBuffer
from common.run import Run
from envs.rollout import Transitions
from offline.offline_to_online import OfflineToOnline, with_presets

SMALL = COMMON | {"batch_size": 16, "buffer_size": 10_000}


def make_agent(double: bool = True, **changed: Any) -> REBRAC:
    """Make one for 3 observations and 2 actions, whose targets differ from its networks."""
    small = {name: SMALL[name] for name in ("hidden", "batch_size")}
    given = {"dataset": str(PENDULUM)} | PRESETS["locomotion"] | small | changed
    agent = REBRAC(Args(**given), 3, 2, torch.device("cpu"))
    if double:
        generator = torch.Generator().manual_seed(1)
        for network in (agent.actor, agent.target_actor, agent.critic, agent.target_critic):
            network.double()
            with torch.no_grad():  # the last layers begin near 0, where mistakes would not show
                for parameter in network.parameters():
                    parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return agent


def policy(actor: torch.nn.Module, obs: Array) -> Array:
    return np.tanh(forward(obs, layers(actor)))


def batch_with_next_actions(size: int = 40) -> Batch:
    """Return one whose episodes end at every fourth transition, half of them by a truncation."""
    next_actions = np.random.default_rng(7).uniform(-1, 1, (size, 2))
    next_actions[::4] = np.nan
    next_actions[1::8] = np.nan
    return make_batch(size)._replace(next_actions=torch.from_numpy(next_actions))


@pytest.mark.parametrize("penalty", [0.0, 0.01, 0.5])
@pytest.mark.parametrize("critics", [1, 2, 5])
def test_critic_loss_equals_an_independent_formula(critics: int, penalty: float) -> None:
    """With noise so large that it is clipped, and the action with it. One transition at a time."""
    agent = make_agent(critics=critics, target_noise=0.8, critic_penalty=penalty, gamma=0.9)
    batch = batch_with_next_actions()
    obs, actions, rewards, next_obs, terminations = (part.numpy() for part in batch[:5])
    generator = torch.Generator()
    generator.set_state(agent.generator.get_state())
    noise = np.clip(0.8 * torch.randn(40, 2, generator=generator).double().numpy(), -0.5, 0.5)
    smoothed = np.clip(policy(agent.target_actor, next_obs) + noise, -1, 1)
    smallest = np.min(values(agent.target_critic, next_obs, smoothed, critics, norm_last=True), axis=0)
    predicted = values(agent.critic, obs, actions, critics, norm_last=True)
    assert batch.next_actions is not None
    losses = []
    for i in range(40):
        target = rewards[i]
        if not terminations[i]:
            following = batch.next_actions[i].numpy()
            distance = 0.0 if np.isnan(following[0]) else sum((smoothed[i] - following) ** 2)
            target += 0.9 * (smallest[i] - penalty * distance)
        losses.append(sum((q[i] - target) ** 2 for q in predicted))
    assert agent.critic_loss(batch)[0].item() == pytest.approx(np.mean(losses), rel=1e-5)


def test_without_next_actions_the_target_has_no_penalty() -> None:
    """As after the switch."""
    batch = batch_with_next_actions()
    penalised = make_agent(critic_penalty=0.5).critic_loss(batch)[0].item()
    plain = make_agent(critic_penalty=0.0).critic_loss(batch)[0].item()
    online = make_agent(critic_penalty=0.5).critic_loss(batch._replace(next_actions=None))[0].item()
    assert online == plain
    assert abs(penalised - plain) > 1e-3


def terms(agent: REBRAC, obs: Array, actions: Array, critics: int = 2) -> tuple[Array, float]:
    """Return min Q [batch] of the policy's actions, and their mean squared distance, the sum over dimensions."""
    chosen = policy(agent.actor, obs)
    distances = [sum((chosen[i, j] - actions[i, j]) ** 2 for j in range(2)) for i in range(len(obs))]
    return np.min(values(agent.critic, obs, chosen, critics, norm_last=True), axis=0), float(np.mean(distances))


@pytest.mark.parametrize(("critics", "penalty"), [(1, 0.01), (2, 0.01), (5, 0.3)])
def test_actor_loss_equals_an_independent_formula(critics: int, penalty: float) -> None:
    """λ = 1 / mean |min Q|, where the values have both signs, so that it is not 1 / |mean min Q|."""
    agent, batch = make_agent(critics=critics, actor_penalty=penalty), make_batch(40)
    data = batch.obs.numpy(), batch.actions.numpy(), critics
    q, _ = terms(agent, *data)
    with torch.no_grad():
        agent.critic.net[-1].bias += 0.5 * q.std() - q.mean()
    q, distance = terms(agent, *data)
    assert q.min() < 0 < q.max()
    loss, metrics = agent.actor_loss(batch)
    assert loss.item() == pytest.approx(penalty * distance - q.mean() / np.abs(q).mean(), rel=1e-5)
    assert metrics["losses/imitation"].item() == pytest.approx(distance, rel=1e-5)


def test_the_weight_has_no_gradient() -> None:
    """Against finite differences of the formula with λ held fixed. Where all Q > 0 its own would cancel theirs."""
    agent, batch = make_agent(actor_penalty=0.1), make_batch(40)
    with torch.no_grad():
        agent.critic.net[-1].bias.add_(20.0)
    weight, data = agent.actor.net[0].weight, (batch.obs.numpy(), batch.actions.numpy())
    gradient = torch.autograd.grad(agent.actor_loss(batch)[0], weight)[0]
    q, _ = terms(agent, *data)
    assert q.min() > 0
    for i, j in [(0, 0), (3, 2), (7, 1), (15, 0)]:
        sides = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                weight[i, j] += step
                moved, distance = terms(agent, *data)
                sides.append(0.1 * distance - moved.mean() / np.abs(q).mean())
                weight[i, j] -= step
        assert gradient[i, j].item() == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-4, abs=1e-8)


D3RLPY = ROOT / ".venv-d3rlpy" / "bin" / "python"
# Prints the losses of d3rlpy's ReBRAC, with the weights, the batch and the noise in the file that it is given.
PEER = """
import json, sys
import numpy as np, torch
import d3rlpy
from d3rlpy.models import VectorEncoderFactory
from d3rlpy.torch_utility import TorchMiniBatch
saved = np.load(sys.argv[1])
given = {name: torch.from_numpy(saved[name]) for name in saved.files}
hidden = [16, 16]
agent = d3rlpy.algos.ReBRACConfig(
    actor_encoder_factory=VectorEncoderFactory(hidden),
    critic_encoder_factory=VectorEncoderFactory(hidden, use_layer_norm=True),
    actor_beta=0.01, critic_beta=0.5, gamma=0.9,
).create(device="cpu:0")
agent.create_impl((3,), 2)
impl, modules = agent.impl, agent.impl._modules
for name, network in {
    "actor": modules.policy, "target_actor": modules.targ_policy,
    "critic": modules.q_funcs, "target_critic": modules.targ_q_funcs,
}.items():
    for i, parameter in enumerate(network.parameters()):
        assert parameter.shape == given[f"{name}{i}"].shape
        parameter.data.copy_(given[f"{name}{i}"])
    assert f"{name}{i + 1}" not in given
    for layer in network.modules():
        if isinstance(layer, torch.nn.LayerNorm):
            layer.eps = 1e-6  # d3rlpy's is PyTorch's, ours is Flax's
torch.randn = lambda *_, **__: given["noise"]
ones = torch.ones(40, 1)
batch = TorchMiniBatch(
    given["obs"], given["actions"], given["rewards"][:, None], given["next_obs"], given["next_actions"], ones,
    given["terminations"][:, None], ones, "cpu:0",
)
critic = impl.compute_critic_loss(batch, impl.compute_target(batch)).critic_loss
actor = impl.compute_actor_loss(batch, modules.policy(batch.observations)).actor_loss
print(json.dumps([critic.item(), actor.item()]))
"""


@pytest.mark.skipif(not D3RLPY.exists(), reason="needs d3rlpy: make .venv-d3rlpy/installed")
def test_losses_equal_those_of_d3rlpy(tmp_path: Path) -> None:
    """In float32, with the same weights, batch and noise, and our ε in its layer norms."""
    agent = make_agent(hidden=(16, 16), gamma=0.9, actor_penalty=0.01, critic_penalty=0.5)
    found: dict[str, Any] = {}
    for name in ("actor", "target_actor", "critic", "target_critic"):
        network = getattr(agent, name).float()
        members = [0, 1] if name.endswith("critic") else [None]
        parts = [part for member in members for weight, *rest in layers(network, member) for part in (weight.T, *rest)]
        found |= {f"{name}{i}": part for i, part in enumerate(parts)}
    generator = torch.Generator()
    generator.set_state(agent.generator.get_state())
    found["noise"] = torch.randn((40, 2), generator=generator).numpy()
    next_actions = torch.from_numpy(np.random.default_rng(7).uniform(-1, 1, (40, 2))).float()
    batch = Batch(*(part.float() for part in make_batch(40)[:5]), next_actions=next_actions)
    fields = ("obs", "actions", "rewards", "next_obs", "terminations", "next_actions")
    np.savez(tmp_path / "given.npz", **found, **{name: getattr(batch, name).numpy() for name in fields})
    command = [str(D3RLPY), "-c", PEER, str(tmp_path / "given.npz")]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": ""})
    ours = [agent.critic_loss(batch)[0].item(), agent.actor_loss(batch)[0].item()]
    assert ours == pytest.approx(json.loads(told.stdout.splitlines()[-1]), rel=1e-6)


def test_actor_and_targets_move_at_every_second_update_only() -> None:
    agent, batch = make_agent(False, tau=0.1), Batch(*(part.float() for part in make_batch()[:5]))
    for update in range(1, 7):
        before = {name: parameter.detach().clone() for name, parameter in parameters(agent)}
        agent.update(batch, with_actor=update % 2 == 0)
        for name, parameter in parameters(agent):
            network = name.partition(".")[0]
            assert torch.equal(parameter, before[name]) == (update % 2 == 1 and network != "critic"), (update, name)
            if network.startswith("target_") and update % 2 == 0:
                online = dict(parameters(agent))[name.removeprefix("target_")]
                torch.testing.assert_close(parameter.data, 0.9 * before[name] + 0.1 * online.data)


def test_networks_begin_as_the_authors() -> None:
    agent = make_agent(False, hidden=(64, 64, 64))
    for net, bound in ((agent.actor.net, 1e-3), (agent.critic.net, 3e-3)):
        *hidden, last = [layer for layer in net if hasattr(layer, "bias") and layer.bias.shape[-1] <= 64]
        biases = [layer.bias for layer in hidden if type(layer).__name__.endswith("Linear")]
        assert len(biases) == 3
        assert all((bias == 0.1).all() for bias in biases)
        for part in (last.weight, last.bias):
            assert 0.5 * bound < part.abs().max() <= bound
    norms = [layer for layer in agent.critic.net if type(layer).__name__ == "LayerNorm"]
    assert len(norms) == 3
    assert not any(type(layer).__name__ == "LayerNorm" for layer in agent.actor.net)


def test_the_actors_penalty_falls_to_a_half_online() -> None:
    agent = make_agent(actor_penalty=0.2, penalty_decay_steps=1_000)
    expected = {-500: 0.2, 0: 0.2, 1: 0.1998, 250: 0.15, 500: 0.1, 5_000: 0.1}
    for step, penalty in expected.items():
        agent.decay(step)
        assert agent.actor_penalty.item() == pytest.approx(penalty)


def test_critics_reach_the_values_of_a_known_mdp() -> None:
    """Two states that take turns for ever, reward 1 in the first, and a third that ends with reward 5; γ = 0.5.

    The policy and the data take action 0 everywhere but in the second state, where the data's is (1, 1): β₂ = 0.1
    makes each visit there cost 0.1 · 2 in the target of the first state. V(0) = 1 + 0.5 (V(1) - 0.2), V(1) = 0.5 V(0).
    """
    agent = make_agent(False, hidden=(32, 32), gamma=0.5, tau=0.05, critic_penalty=0.1, target_noise=0.0)
    with torch.no_grad():
        for actor in (agent.actor, agent.target_actor):
            for parameter in (actor.net[-1].weight, actor.net[-1].bias):
                parameter.zero_()
    states = torch.eye(3)
    following = torch.tensor([[1.0, 1.0], [0.0, 0.0], [torch.nan, torch.nan]])
    batch = Batch(
        states, torch.zeros(3, 2), torch.tensor([1.0, 0.0, 5.0]), states[[1, 0, 0]], torch.tensor([0.0, 0.0, 1.0]),
        next_actions=following,
    )  # fmt: skip
    for _ in range(1_500):
        agent.critic_optimizer.minimize(agent.critic_loss(batch)[0])
        agent.update_target_critic()
    first = (1 - 0.5 * 0.2) / (1 - 0.25)
    expected = torch.tensor([first, 0.5 * first, 5.0])
    torch.testing.assert_close(agent.critic(states, torch.zeros(3, 2)), expected.expand(2, -1), rtol=0, atol=0.05)


def test_policy_reaches_the_balance_of_a_known_bandit() -> None:
    """One step, reward 5 + a₁ + a₂, the data's actions uniform about 0.

    β₁ (a₁² + a₂²) - Q / |Q|, with λ = 1 / (5 + 2 a) held fixed, is stationary at 2 β₁ a (5 + 2 a) = 1 in each.
    """
    penalty = 0.5
    agent = make_agent(False, hidden=(64, 64), actor_penalty=penalty, critic_penalty=0.0)
    buffer, rng = ReplayBuffer(2_000, 3, 2), np.random.default_rng(0)
    obs, actions = np.ones((2_000, 3)), rng.uniform(-1, 1, (2_000, 2))
    actions -= actions.mean(0)
    buffer.add(obs, actions, 5.0 + actions.sum(1), obs, np.ones(2_000))
    found = []
    for update in range(1, 2_001):
        agent.update(buffer.sample(64, agent.generator), with_actor=update % 2 == 0)
        found.append(agent.act(np.ones((1, 3), np.float32), deterministic=True)[0])
    expected = (np.sqrt(25 + 4 / penalty) - 5) / 4  # 0.186
    np.testing.assert_allclose(np.mean(found[-500:], axis=0), [expected] * 2, atol=0.03)


class TestSettings:
    def test_every_datasets_penalties_are_the_authors(self) -> None:
        """Against the list of the reference, read from CORL's configurations."""
        path = SHARED / "reference" / "algorithms.md"
        if not path.exists():
            pytest.skip(f"{path} is absent")
        text = path.read_text()
        text = text[text.index("β1 (actor) / β2 (critic)") :].partition("\n")[2].partition("Fine-tuning")[0]
        short = {"mr": "medium-replay", "me": "medium-expert", "u-div": "umaze-diverse", "m-play": "medium-play",
                 "m-div": "medium-diverse", "l-play": "large-play", "l-div": "large-diverse"}  # fmt: skip
        count = 0
        for group in re.split(r" · |\n", text):
            robot, _, rest = group.strip().partition(" ")
            for kind, actor, critic in re.findall(r"([\w-]+) ([\d.]+)/([\d.]+)", rest):
                name = {"all": "umaze"}.get(kind, short.get(kind, kind))
                found = PRESETS["maze2d" if robot == "maze2d" else f"{robot}-{name}-v*"]
                assert (found["actor_penalty"], found["critic_penalty"]) == (float(actor), float(critic)), group
                count += 1
        assert count == 18 + 6 + 1 + 12

    @pytest.mark.parametrize(
        ("task", "domain", "expected"),
        [
            ("halfcheetah-medium-v2", "locomotion", (0.001, 0.01, 0.99, 1e-3, 1e-3, 1024, 0.2, 1.0)),
            ("antmaze-large-play-v2", "antmaze", (0.002, 0.001, 0.999, 3e-4, 5e-5, 256, 0.2, 100.0)),
            ("pen-cloned-v1", "adroit", (0.05, 0.5, 0.99, 3e-4, 3e-4, 256, 0.2, 1.0)),
            ("scene-play-singletask-task1-v0", "ogbench", (0.03, 0.0, 0.99, 3e-4, 3e-4, 256, 0.0, 1.0)),
            ("antmaze-medium-navigate-singletask-v0", "ogbench", (0.01, 0.0, 0.99, 3e-4, 3e-4, 256, 0.2, 1.0)),
            ("puzzle-mine", "locomotion", (0.01, 0.01, 0.99, 1e-3, 1e-3, 1024, 0.2, 1.0)),
            ("antmaze-giant-navigate-singletask-v0", "ogbench", (0.01, 0.0, 0.995, 3e-4, 3e-4, 256, 0.0, 1.0)),
            ("mine", "adroit", (0.1, 0.01, 0.99, 3e-4, 3e-4, 256, 0.2, 1.0)),
        ],
    )
    def test_settings_of_a_dataset(self, task: str, domain: str, expected: tuple[float, ...]) -> None:
        names = ["actor_penalty", "critic_penalty", "gamma", "actor_lr", "critic_lr", "batch_size", "target_noise"]
        found = next((PRESETS[key] for key in PRESETS if "*" in key and fnmatchcase(task, key)), PRESETS[domain])
        assert tuple(found[name] for name in [*names, "reward_scale"]) == expected

    def test_a_flag_overrides_them(self) -> None:
        given = Args(dataset=str(PENDULUM), actor_penalty=0.7)
        args = with_presets(given, PRESETS)
        assert (args.actor_penalty, args.critic_penalty) == (0.7, 0.01)

    def test_the_rest_is_the_authors(self) -> None:
        args = Args(dataset="none.hdf5")
        assert (args.hidden, args.critics, args.tau, args.policy_delay) == ((256, 256, 256), 2, 5e-3, 2)
        assert (args.target_noise_clip, args.exploration_noise, args.normalize_obs) == (0.5, 0.0, False)
        assert (args.retain, args.offline_ratio, args.offline_steps) == ("mix", 0.5, 1_000_000)


class TestRuns:
    @pytest.mark.parametrize("retain", ["none", "append", "mix"])
    def test_batches_have_next_actions_before_the_switch_only(self, retain: str, small: Any) -> None:
        args = with_presets(small("rebrac", retain=retain, batch_size=500), PRESETS)
        data = OfflineToOnline(args, Run("rebrac", args), next_actions=True)
        batch = data.sample(False, torch.Generator().manual_seed(0))
        assert batch.next_actions is not None
        rows = {tuple(row): i for i, row in enumerate(data.dataset.column("obs").tolist())}
        actions, last = data.dataset.column("actions"), {*(data.dataset.ends - 1).tolist()}
        for obs, following in zip(batch.obs.tolist(), batch.next_actions.numpy(), strict=True):
            row = rows[tuple(obs)]
            if row in last:
                assert np.isnan(following).all()
            else:
                assert following.tolist() == actions[row + 1].tolist()
        for _ in range(20):
            data.add(Transitions(np.zeros((1, 3)), np.zeros((1, 1)), np.zeros(1), np.zeros((1, 3)), *np.zeros((2, 1))))
        assert data.sample(True, torch.Generator().manual_seed(0)).next_actions is None

    def test_the_critics_penalty_matters(self, small: Any, tmp_path: Path) -> None:
        states = []
        for penalty in (0.0, 5.0):
            run_dir = tmp_path / str(penalty)
            args = small("rebrac", critic_penalty=penalty, offline_steps=50, online_steps=0, run_dir=run_dir)
            module("rebrac").train(args)
            states.append(final_state(args.run_dir)["agent"]["critic"])
        weights = [next(iter(state.values())) for state in states]
        assert np.isfinite(np.asarray(weights[0])).all()
        assert not np.array_equal(*map(np.asarray, weights))

    def test_a_new_run_keeps_its_own_penalty(self, small: Any, tmp_path: Path) -> None:
        """`--init-from` loads networks, and no β₁."""
        common = {"offline_steps": 20, "online_steps": 0}
        first = small("rebrac", actor_penalty=0.3, run_dir=tmp_path / "first", **common)
        module("rebrac").train(first)
        args = small("rebrac", actor_penalty=0.6, init_from=first.run_dir, **common)
        module("rebrac").train(args)
        assert float(np.asarray(final_state(args.run_dir)["agent"]["actor_penalty"])) == pytest.approx(0.6)


@pytest.mark.usefixtures("interpreted")
def test_a_recorded_loss_reads_the_penalty_of_the_moment() -> None:
    """It falls between updates, so it must not be a constant of the recorded graph."""
    agent = make_agent(False, actor_penalty=0.2, penalty_decay_steps=1_000)
    batch = Batch(*(part.float() for part in make_batch(16)[:5]))
    recording = Recording(lambda *parts: agent.actor_loss(Batch(*parts))[0].detach(), batch[:5], agent)
    found = []
    for step in (0, 500):
        agent.decay(step)
        found.append(recording(*batch[:5]).item())
        assert found[-1] == pytest.approx(agent.actor_loss(batch)[0].item(), abs=1e-5)
    assert abs(found[0] - found[1]) > 1e-2
