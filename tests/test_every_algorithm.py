"""What the algorithms have in common, asked of each: how a run acts, learns and stores, and how an agent begins."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import OFFLINE, PENDULUM, SMALL, agent_of, every_algorithm, module, same, stored, updates_of
from formulas import make_batch

from common.networks import Adam
from common.replay_buffer import ReplayBuffer
from envs import make as environments

with_a_buffer = pytest.mark.parametrize("algo", sorted(SMALL.keys() - {"ppo"}))
AT_ONCE = {"calibrated": False, "warmup_steps": 1, "utd": 1}  # online updates from the switch on


@with_a_buffer
def test_terminations_alone_cut_the_bootstrap_of_what_is_stored(small: Callable[..., Any], algo: str):
    steps = {"offline_steps": 1, "online_steps": 12} if algo in OFFLINE else {"total_steps": 12}
    module(algo).train(args := small(algo, env="Failing-v0", **steps))
    assert stored(args.run_dir).terminations.tolist() == [0, 0, 0, 1, 0, 1] * 2


@with_a_buffer
@pytest.mark.parametrize("num_envs", [1, 3])
def test_overlap_chooses_actions_before_the_last_updates(
    algo: str, num_envs: int, small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The policy that acts is one update old, and the number of updates is the same: those of the last step too."""
    agent, events = type(agent_of(algo)), []
    for cls, name in ((agent, "update"), (agent, "act"), (ReplayBuffer, "add")):
        monkeypatch.setattr(cls, name, noted(getattr(cls, name), name, events))
    orders = {}
    for overlap in (False, True):
        events.clear()
        changed = {name: value for name, value in AT_ONCE.items() if hasattr(module(algo).Args, name)}
        module(algo).train(
            small(
                algo,
                overlap=overlap,
                total_steps=120,
                eval_every=1_000,
                num_envs=num_envs,
                run_dir=tmp_path / str(overlap),
                **changed,
            )
        )
        orders[overlap] = "".join({"update": "u", "act": "c", "add": "a"}[name] for name in events).rstrip("c")
    # An action is chosen, its step is added, and what was learned of that is in the next action, or not yet.
    learned = "u" * num_envs
    assert orders[False].endswith(f"ca{learned}" * 5)
    assert orders[True].endswith(f"c{learned}a" * 5 + learned)
    assert orders[False].count("u") == orders[True].count("u")


def noted(method: Callable[..., Any], name: str, events: list[str]) -> Callable[..., Any]:
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        events.append(name)
        return method(self, *args, **kwargs)

    return noting


@pytest.mark.parametrize("algo", ["cql", "wsrl"])
def test_an_episode_that_could_not_be_restored_is_forgotten(
    algo: str, small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    """Else its first part would be joined to another, and the return-to-go of both be wrong."""
    changed = {"offline_steps": 1, "calibrated": True} | ({"online_cql": True} if algo == "wsrl" else {})
    module(algo).train(small(algo, online_steps=150, **changed))
    monkeypatch.setattr(module(algo), "set_states", lambda envs, states: (envs.reset()[0], [False]))
    module(algo).train(args := small(algo, online_steps=400, **changed))
    batch = stored(args.run_dir)  # of the 250 steps behind it one episode is whole
    assert len(batch.obs) == 200
    assert torch.equal(batch.next_obs[:-1], batch.obs[1:])


@pytest.mark.parametrize(
    ("algo", "phase"),
    [
        ("sac", {"learning_starts": 30}),
        ("td3", {"learning_starts": 30}),
        ("expo", {"offline_steps": 0, "random_steps": 30}),
        ("wsrl", {"offline_steps": 10, "warmup_steps": 30, "warmup": "random"}),
    ],
)
def test_the_random_phase_is_as_long_as_said(
    algo: str, phase: dict[str, Any], small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    drawn: list[int] = []
    explore = module(algo).uniform_actions
    monkeypatch.setattr(module(algo), "uniform_actions", lambda *given: drawn.append(1) or explore(*given))
    steps = {"online_steps": 60} if algo in OFFLINE else {"total_steps": 60}
    module(algo).train(small(algo, **steps, **phase))
    assert len(drawn) == 30


@every_algorithm
def test_targets_and_averages_begin_as_copies(algo: str):
    agent = agent_of(algo)
    followers = [name for name in vars(agent) if name.endswith(("_target", "_average"))]
    expected = {"ppo": 0, "bc": 0, "td3": 2, "td3_bc": 2, "expo": 2}
    assert len(followers) == expected.get(algo, 1)
    for name in followers:
        followed = getattr(agent, name.rpartition("_")[0])
        assert same(getattr(agent, name).state_dict(), followed.state_dict())


@every_algorithm
def test_each_loss_reaches_what_its_optimizer_moves_and_nothing_else(algo: str, monkeypatch: pytest.MonkeyPatch):
    agent, batch = agent_of(algo), make_batch(32)
    batch = type(batch)(*(part.float() for part in batch[:5]))._replace(returns_to_go=batch.rewards.float())
    leaves = {parameter for value in vars(agent).values() if isinstance(value, torch.nn.Module | torch.nn.Parameter)
              for parameter in (value.parameters() if isinstance(value, torch.nn.Module) else [value])}  # fmt: skip
    descended = []

    def descend(optimizer: Adam, loss: torch.Tensor, max_gradient_norm: float | None = None) -> None:
        gradients = torch.autograd.grad(loss, list(leaves), allow_unused=True)
        reached = {leaf for leaf, gradient in zip(leaves, gradients, strict=True) if gradient is not None}
        assert reached == set(optimizer.param_groups[0]["params"])
        optimizer.gradient_norm = torch.zeros(())
        descended.append(optimizer)

    monkeypatch.setattr(Adam, "descend", descend)
    updates_of(algo, agent)(batch, True)
    optimizers = {name for name, value in vars(agent).items() if isinstance(value, Adam)}
    unused = {"cql": {"alpha_prime_optimizer"}, "wsrl": {"multiplier_optimizer"}}  # theirs is for --lagrange-gap
    assert {name for name in optimizers if getattr(agent, name) in descended} == optimizers - unused.get(algo, set())


@pytest.mark.parametrize("algo", ["sac", "cql"])
@pytest.mark.parametrize(("bias", "bound"), [(-19.0, None), (-30.0, -20.0), (1.9, None), (5.0, 2.0)])
def test_log_deviation_is_held_in_wide_bounds(algo: str, bias: float, bound: float | None):
    actor = agent_of(algo).actor
    with torch.no_grad():
        actor.net[-1].weight.zero_()
        actor.net[-1].bias[2:] = bias
    torch.testing.assert_close(actor(torch.zeros(1, 3)).log_std, torch.full((1, 2), bias if bound is None else bound))


@pytest.mark.parametrize("algo", OFFLINE)
def test_a_dataset_says_how_its_environment_is_made(
    algo: str, small: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The environments that are trained in, and those of the evaluations."""
    import h5py

    path = tmp_path / "data.hdf5"
    path.write_bytes(PENDULUM.read_bytes())
    with h5py.File(path, "a") as file:
        file.attrs["env_kwargs"] = '{"g": 7.0}'
    made: list[float] = []
    make = environments.gym.make
    monkeypatch.setattr(
        environments.gym, "make", lambda *given, **kwargs: made.append(kwargs.get("g")) or make(*given, **kwargs)
    )
    module(algo).train(small(algo, dataset=str(path), env="", offline_steps=1, online_steps=4))
    assert made
    assert set(made) == {7.0}
