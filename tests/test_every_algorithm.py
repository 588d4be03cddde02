"""What the algorithms have in common, asked of each: how a run acts, learns and stores, and how an agent begins."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import (
    ALGORITHMS,
    EXAMPLE,
    OFFLINE,
    PENDULUM,
    ROOT,
    agent_class,
    agent_of,
    arguments_of,
    every_algorithm,
    followed_by,
    is_follower,
    module,
    same,
    some,
    stored,
    updates_of,
    with_flag,
)
from formulas import make_batch

from common.optim import Adam, SoftUpdate
from common.replay_buffer import ReplayBuffer
from common.run import Run
from envs import make as environments
from envs import rollout
from envs.rollout import Rollout

with_a_buffer = pytest.mark.parametrize("algo", with_flag("buffer_size"))
AT_ONCE = {"calibrated": False, "warmup_steps": 1, "random_steps": 1, "utd": 1}  # online updates from the switch on
RANDOM: dict[str, dict[str, Any]] = {  # by the flag that gives a random phase, one of 30 steps
    "learning_starts": {"learning_starts": 30},
    "random_steps": {"offline_steps": 0, "random_steps": 30},
    "warmup": {"offline_steps": 10, "warmup_steps": 30, "warmup": "random"},
}


@every_algorithm
def test_each_has_a_small_configuration_and_a_page(algo: str):
    """The page has the name of the file, says where the code is, and begins with a title."""
    assert module(algo).Args(**arguments_of(algo, {}))
    page = ROOT / "docs" / f"{algo}.md"
    assert page.exists(), f"algos/{algo}.py has no page docs/{algo}.md"
    text = page.read_text()
    assert text.startswith("# ")
    assert f"algos/{algo}.py" in text


@with_a_buffer
def test_terminations_alone_cut_the_bootstrap_of_what_is_stored(small: Callable[..., Any], algo: str):
    steps = {"offline_steps": 1, "online_steps": 12} if algo in OFFLINE else {"total_steps": 12}
    module(algo).train(args := small(algo, env="Failing-v0", **steps))
    assert stored(args.run_dir).terminations.tolist() == [0, 0, 0, 1, 0, 1] * 2


@pytest.mark.parametrize(
    ("algo", "num_envs"),
    [(EXAMPLE, 1), *((algo, 3) for algo in some("sac", "td3", "wsrl") if algo in with_flag("buffer_size"))],
)
def test_overlap_chooses_actions_before_the_last_updates(
    algo: str, num_envs: int, small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The policy that acts is one update old, and the number of updates is the same: those of the last step too."""
    agent, events = agent_class(algo), []
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


@pytest.mark.parametrize("algo", with_flag("calibrated"))
def test_an_episode_that_could_not_be_restored_is_forgotten(
    algo: str, small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    """Else its first part would be joined to another, and the return-to-go of both be wrong."""
    changed = {"offline_steps": 1, "calibrated": True, "time_limit": 200} | (
        {"online_cql": True} if algo in with_flag("online_cql") else {}
    )
    module(algo).train(small(algo, online_steps=150, **changed))
    monkeypatch.setattr(rollout, "set_states", lambda envs, states: (envs.reset()[0], [False]))
    module(algo).train(args := small(algo, online_steps=400, **changed))
    batch = stored(args.run_dir)  # of the 250 steps behind it one episode is whole
    assert len(batch.obs) == 200
    assert torch.equal(batch.next_obs[:-1], batch.obs[1:])


@pytest.mark.parametrize(("algo", "phase"), [(a, phase) for flag, phase in RANDOM.items() for a in with_flag(flag)])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_the_random_phase_is_as_long_as_said(
    algo: str, phase: dict[str, Any], num_envs: int, small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    """The first 30 environment steps take random actions, and no later one does."""
    drawn: list[Any] = []
    taken: list[bool] = []
    random_actions, step = Rollout.random_actions, Rollout.step

    def noted_step(self: Rollout, actions: Any, **given: Any) -> Any:
        taken.append(any(actions is each for each in drawn))
        return step(self, actions, **given)

    monkeypatch.setattr(
        Rollout, "random_actions", lambda *given: drawn.append(actions := random_actions(*given)) or actions
    )
    monkeypatch.setattr(Rollout, "step", noted_step)
    steps = {"online_steps": 60} if algo in OFFLINE else {"total_steps": 60}
    module(algo).train(small(algo, num_envs=num_envs, **steps, **phase))
    assert taken == [True] * (30 // num_envs) + [False] * (30 // num_envs)
    assert np.abs(drawn).max() <= 1


class Resumed(Exception):
    """Ends a run before its first step."""


@pytest.mark.parametrize(
    ("algo", "changed"),
    [
        ("ppo", {"return_scaling": False}),
        ("sac", {"critic": "hl-gauss"}),
        ("td3", {"critic": "c51"}),
        ("simba_v2", {}),
        ("stream_ac", {}),
    ],
)
def test_sums_and_traces_of_an_episode_that_could_not_be_restored_end(
    algo: str, changed: dict[str, Any], small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    """In its environment alone, of two."""
    seen: list[Any] = []

    def stop(run: Run, **_: int) -> None:
        seen.append(run._agent)
        raise Resumed

    args = small(algo, num_envs=2, total_steps=80, time_limit=200, **changed)
    module(algo).train(args)
    monkeypatch.setattr(rollout, "set_states", lambda envs, states: (envs.reset()[0], [True, False]))
    monkeypatch.setattr(Run, "steps", stop)
    (args.run_dir / "DONE").unlink()  # as if it had been killed after its last checkpoint
    with pytest.raises(Resumed):
        module(algo).train(args)
    (agent,) = seen
    sums = agent.reward_scaler.sums
    traces = [getattr(agent, name) for name in ("actor_traces", "critic_traces") if hasattr(agent, name)]
    assert len(traces) == 2 * (algo == "stream_ac")
    for restored, lost in (sums, *traces):
        assert restored.any()
        assert not lost.any()


@every_algorithm
def test_targets_and_averages_begin_as_copies(algo: str):
    agent = agent_of(algo)
    followers = [
        name for name, value in vars(agent).items() if is_follower(name) and isinstance(value, torch.nn.Module)
    ]
    moved = [each for each in vars(agent).values() if isinstance(each, SoftUpdate)]
    assert len(followers) == len(moved)
    for name in followers:
        follower, followed = getattr(agent, name), getattr(agent, followed_by(name))
        assert same(follower.state_dict(), followed.state_dict())
        (polyak,) = (each for each in moved if each.target[0] is next(follower.parameters()))
        assert [*map(id, polyak.target)] == [*map(id, follower.parameters())]
        assert [*map(id, polyak.online)] == [*map(id, followed.parameters())]


# The flag of an optimiser whose name has none of its own.
RATES = {"base": "actor_lr", "edit": "actor_lr", "flow": "actor_lr", "noise_critic": "critic_lr",
         "lagrange": "critic_lr", "raw_lagrange": "critic_lr", "optimizer": "learning_rate"}  # fmt: skip


@every_algorithm
def test_each_rate_reaches_its_own_part(algo: str):
    """The learning rates reach their optimisers, and τ the targets. Most are equal by default."""
    names = [
        field.name
        for field in fields(module(algo).Args)
        if field.name in ("tau", "learning_rate") or field.name.endswith("_lr")
    ]
    given = {name: 1e-5 * (i + 3) for i, name in enumerate(names)}
    agent = agent_of(algo, **given)
    for name, part in vars(agent).items():
        if isinstance(part, Adam):
            name = name.removesuffix("_optimizer")
            flag = f"{name}_lr" if f"{name}_lr" in given else RATES[name]
            assert float(part.param_groups[0]["lr"]) == given[flag], name
        if isinstance(part, SoftUpdate) and name.startswith("update_target"):
            assert part.tau == given["tau"], name


@pytest.mark.parametrize(
    ("algo", "changed"),
    [*((algo, {}) for algo in ALGORITHMS), *((algo, {"lagrange_gap": 1.0}) for algo in with_flag("lagrange_gap"))],
)
def test_each_loss_reaches_what_its_optimizer_moves_and_nothing_else(
    algo: str, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """And each optimiser has its loss, but for that of a multiplier which a flag brings in."""
    agent, batch = agent_of(algo, **changed), make_batch(32)
    batch = type(batch)(*(part.float() for part in batch[:5]))._replace(returns_to_go=batch.rewards.float())
    leaves = {parameter for value in vars(agent).values() if isinstance(value, torch.nn.Module | torch.nn.Parameter)
              for parameter in (value.parameters() if isinstance(value, torch.nn.Module) else [value])}  # fmt: skip
    descended = []

    def minimize(optimizer: Adam, loss: torch.Tensor, max_gradient_norm: float | None = None) -> None:
        gradients = torch.autograd.grad(loss, list(leaves), allow_unused=True)
        reached = {leaf for leaf, gradient in zip(leaves, gradients, strict=True) if gradient is not None}
        assert reached == set(optimizer.param_groups[0]["params"])
        optimizer.gradient_norm = torch.zeros(())
        descended.append(optimizer)

    monkeypatch.setattr(Adam, "minimize", minimize)
    for changing in (True, False):
        updates_of(agent)(batch, changing)
    optimizers = {name for name, value in vars(agent).items() if isinstance(value, Adam)}
    unused = {name for name in optimizers if getattr(agent, name) not in descended}
    assert len(unused) == (algo in with_flag("lagrange_gap") and not changed)
    assert descended or not optimizers  # Stream AC has none: its own tests have its step


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
