"""`--normalize-obs`: what the networks see, which statistics they get, and that these are part of the policy."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import OFFLINE, PENDULUM, agent_of, final_state, module, same, some, stored, updates_of, with_flag
from formulas import make_batch

from algos.sac import SAC
from common.checkpoint import state_of
from common.errors import InputError
from common.normalize import FixedNormalizer, RunningNormalizer
from common.recorded import Recording
from common.replay_buffer import Batch
from common.run import Run
from envs.make import make
from envs.rollout import Rollout
from offline.dataset import load
from tools.policies import load_policy

SUPPORTING = with_flag("normalize_obs")
ONLINE = [algo for algo in SUPPORTING if algo not in OFFLINE]
MEAN, DEVIATION = np.float32([3.0, -20.0, 0.5]), np.float32([0.1, 7.0, 2.0])
each = pytest.mark.parametrize("algo", SUPPORTING)
each_online = pytest.mark.parametrize("algo", ONLINE)
each_offline = pytest.mark.parametrize("algo", [algo for algo in SUPPORTING if algo in OFFLINE])


def normalized(obs: torch.Tensor, agent: Any) -> torch.Tensor:
    """Normalise by hand, with this agent's ε."""
    mean, deviation = torch.from_numpy(MEAN), torch.from_numpy(DEVIATION)
    if isinstance(agent.obs_normalizer, FixedNormalizer):
        return (obs - mean) / (deviation + 1e-3)
    return ((obs - mean) / (deviation.square() + 1e-8).sqrt()).clamp(-10, 10)


def with_statistics(algo: str) -> Any:
    """Return an agent whose statistics are `MEAN` and `DEVIATION`."""
    agent = agent_of(algo, normalize_obs=True)
    normalizer = agent.obs_normalizer
    if isinstance(normalizer, FixedNormalizer):
        normalizer.set_statistics(MEAN, DEVIATION)
    else:  # two points have this mean and this deviation
        normalizer.update(torch.from_numpy(np.stack([MEAN - DEVIATION, MEAN + DEVIATION])))
    return agent


def batch_of(agent: Any) -> tuple[Batch, Batch]:
    """Return a batch in the units of `MEAN` and `DEVIATION`, and the same batch normalised by hand."""
    batch = Batch(*(part.float() for part in make_batch(32)[:5]))
    batch = batch._replace(returns_to_go=batch.rewards - 3.0, next_actions=batch.actions)
    obs, next_obs = (
        part * torch.from_numpy(DEVIATION) + torch.from_numpy(MEAN) for part in (batch.obs, batch.next_obs)
    )
    raw = batch._replace(obs=obs, next_obs=next_obs)
    return raw, batch._replace(obs=normalized(obs, agent), next_obs=normalized(next_obs, agent))


@each
def test_the_policy_sees_normalised_observations(algo: str) -> None:
    """Equal to an agent without the flag that gets observations normalised by hand."""
    agent, plain = with_statistics(algo), agent_of(algo, normalize_obs=False)
    raw, by_hand = batch_of(agent)
    actions = agent.act(raw.obs.numpy(), deterministic=True)
    expected = plain.act(by_hand.obs.numpy(), deterministic=True)
    scale = np.abs(expected).max()  # small if the actor's last layer begins near 0
    np.testing.assert_allclose(actions / scale, expected / scale, atol=2e-4)
    assert np.abs(actions - plain.act(raw.obs.numpy(), deterministic=True)).max() > 1e-2 * scale


@each
@pytest.mark.parametrize("online", [False, True])
def test_an_update_sees_normalised_observations(algo: str, online: bool) -> None:
    """Both observations of a transition, in every loss: each network moves as with a batch normalised by hand."""
    agent, plain, wrong = with_statistics(algo), *(agent_of(algo, normalize_obs=False) for _ in range(2))
    for each in (agent, plain, wrong):  # last layers that begin near 0 would hide a wrong next_obs
        random = torch.Generator().manual_seed(0)
        for network in (value for value in vars(each).values() if isinstance(value, torch.nn.Module)):
            for parameter in network.parameters():
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=random)
    raw, by_hand = batch_of(agent)
    metrics, wanted = updates_of(agent)(raw, online), updates_of(plain)(by_hand, online)
    for name, value in wanted.items():
        torch.testing.assert_close(metrics[name], value, atol=1e-4, rtol=1e-4)
    others = updates_of(wrong)(by_hand._replace(next_obs=raw.next_obs), online)
    is_used = any(not torch.allclose(others[name], value, atol=5e-4, rtol=5e-4) for name, value in wanted.items())
    assert is_used or algo == "bc" or (algo, online) in [("dsrl", False), ("expo", False)]
    after, expected = state_of(agent), state_of(plain)
    compared = 0
    for name, state in expected.items():
        if isinstance(vars(plain)[name], torch.nn.Module):
            for key, value in state.items():
                torch.testing.assert_close(after[name][key], value, atol=1e-4, rtol=1e-3)
                compared += 1
    assert compared >= 4


@each_online
def test_running_statistics_are_those_of_all_observations(algo: str, small: Callable[..., Any]) -> None:
    """In which the agent acted, random steps included. They are stored as the environment gave them."""
    args = small(algo, normalize_obs=True)
    module(algo).train(args)
    seen = stored(args.run_dir).obs.double().numpy()
    assert len(seen) == args.total_steps
    normalizer = final_state(args.run_dir)["agent"]["obs_normalizer"]
    np.testing.assert_allclose(normalizer["mean"], seen.mean(0), rtol=1e-6)
    np.testing.assert_allclose(normalizer["variance"], seen.var(0), rtol=1e-6)


@each_offline
def test_statistics_of_a_dataset_are_computed_once(algo: str, small: Callable[..., Any]) -> None:
    """They stay the dataset's after the switch to online training."""
    args = small(algo, normalize_obs=True, offline_steps=20, online_steps=20)
    module(algo).train(args)
    obs = load(PENDULUM).column("obs").astype(np.float64)
    normalizer = final_state(args.run_dir)["agent"]["obs_normalizer"]
    np.testing.assert_allclose(normalizer["mean"], obs.mean(0), atol=1e-5)
    np.testing.assert_allclose(normalizer["scale"], obs.std(0) + 1e-3, rtol=1e-5)


@each_online
def test_a_stopped_run_resumes_with_its_statistics(algo: str, small: Callable[..., Any], tmp_path: Any) -> None:
    """Bit for bit: extended from the half, it equals a run in one piece."""
    args = {"normalize_obs": True, "checkpoint_every": 50}
    module(algo).train(small(algo, total_steps=200, run_dir=tmp_path / "a", **args))
    for steps in (100, 200):
        module(algo).train(small(algo, total_steps=steps, run_dir=tmp_path / "b", **args))
    assert same(final_state(tmp_path / "a")["agent"], final_state(tmp_path / "b")["agent"])


@each
def test_statistics_are_in_the_policy_file(algo: str, small: Callable[..., Any]) -> None:
    """The file of the last policy acts as the checkpoint, whose statistics are not the initial ones."""
    folder = module(algo).train(small(algo, normalize_obs=True, total_steps=200)).folder
    obs = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    sources = (str(folder), str(folder / "policy" / "last.safetensors"))
    one, other = (load_policy(source, make("Pendulum-v1"), 0, deterministic=True)(obs) for source in sources)
    np.testing.assert_array_equal(one, other)
    assert final_state(folder)["agent"]["obs_normalizer"]["mean"].abs().max() > 0.01


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("algo", [algo for algo in some("sac") if algo in ONLINE])
def test_a_recorded_update_reads_the_statistics_of_the_moment(algo: str) -> None:
    """They change between updates, so they must not be constants of the recorded graph."""
    agent = with_statistics(algo)
    batch = batch_of(agent)[0]._replace(valid=torch.ones(32, 1))
    recording = Recording(lambda *parts: updates_of(agent)(Batch(*parts), True), batch, agent)
    for _ in range(3):
        agent.obs_normalizer.update(batch.obs * 3.0)
        for start, eager, compiled in recording.compare(*batch):
            scale = (eager - start).abs().max() + 1e-3 * start.abs().max()
            assert (compiled - eager).abs().max() <= 1e-3 * scale + 1e-6


@each_offline
def test_networks_of_a_run_with_another_flag_are_refused(algo: str, small: Callable[..., Any], tmp_path: Any) -> None:
    """They learned from other numbers."""
    module(algo).train(small(algo, normalize_obs=False, offline_steps=10, online_steps=0, run_dir=tmp_path / "a"))
    with pytest.raises(InputError, match="was trained with --normalize-obs False: give the same here"):
        module(algo).train(small(algo, normalize_obs=True, init_from=tmp_path / "a", run_dir=tmp_path / "b"))
    assert not (tmp_path / "b").exists()


def test_an_algorithm_that_ignores_the_flag_is_refused(small: Callable[..., Any]) -> None:
    """A new algorithm inherits the flag with the offline arguments."""
    args = small(normalize_obs=True)
    agent = SAC(args, 3, 1, torch.device("cpu"))
    del agent.obs_normalizer
    with pytest.raises(InputError, match="--normalize-obs has no effect on sac: leave it out"):
        Run("sac", args).resume(agent=agent, rollout=Rollout(args.env, args))
    assert not args.run_dir.exists()


def test_a_run_from_before_the_flag_resumes(small: Callable[..., Any]) -> None:
    """Its config.json and its checkpoint do not mention normalisation."""
    args = small(total_steps=100)
    module("sac").train(args)
    config = json.loads((args.run_dir / "config.json").read_text())
    del config["arguments"]["normalize_obs"], config["crc32"]
    (args.run_dir / "config.json").write_text(json.dumps(config))
    (args.run_dir / "DONE").write_text("{}")
    assert "obs_normalizer" not in final_state(args.run_dir)["agent"]
    assert module("sac").train(small(total_steps=120)).step == 120


def test_the_running_normalizer_is_ppos(small: Callable[..., Any]) -> None:
    """Clip and ε are the same, so that the flags can be compared."""
    agents = agent_of("ppo"), agent_of("sac", normalize_obs=True)
    assert all(isinstance(agent.obs_normalizer, RunningNormalizer) for agent in agents)
    assert agents[0].obs_normalizer.clip == agents[1].obs_normalizer.clip == 10.0
