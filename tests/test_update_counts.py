"""Which updates of a run move the actor or imitate, counted over the whole run, also one that was stopped."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import OFFLINE, final_state, long, module, with_flag

from algos.cql import CQL
from common.run import Run

OFFLINE_STEPS, RANDOM_STEPS = 20, 20
ONLINE_ALONE = {"total_steps": 60, "learning_starts": RANDOM_STEPS}
FROM_DATA = {"offline_steps": OFFLINE_STEPS, "online_steps": 40, "retain": "append"}  # updates from the switch on
ITERATIONS = 11  # with updates, before the stop: then the number of updates is no multiple of the delay


def train_until(args: Any, algo: str, step: int) -> dict[str, Any]:
    """Train, stopped by a signal at the first iteration that reaches `step`; return the checkpoint."""
    report = Run.report

    def stopping(run: Run, *metrics: Any) -> None:
        if run.step >= step:
            signal.raise_signal(signal.SIGTERM)
        report(run, *metrics)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "report", stopping)
        with pytest.raises(SystemExit) as stopped:
            module(algo).train(args)
    assert stopped.value.code == 128 + signal.SIGTERM
    return final_state(args.run_dir)


def optimizer_steps(state: dict[str, Any], network: str) -> int:
    moments = state["agent"][f"{network}_optimizer"]["state"]
    return int(moments[0]["step"])


@pytest.mark.parametrize(
    ("utd", "num_envs", "overlap"),
    [pytest.param(1, 1, False, marks=long), (3, 1, True), pytest.param(1, 3, True, marks=long), (3, 3, False)],
)
@pytest.mark.parametrize("delay", [pytest.param(2, marks=long), 3])
@pytest.mark.parametrize("algo", with_flag("policy_delay"))
def test_the_actor_moves_at_every_delayed_update_of_a_run(
    algo: str, delay: int, utd: int, num_envs: int, overlap: bool, small: Callable[..., Any], tmp_path: Path
) -> None:
    """It takes floor(updates / policy_delay) steps, also if the run was stopped between two of them."""
    iterations = -(-40 // num_envs)
    steps, offline = (FROM_DATA, OFFLINE_STEPS) if algo in OFFLINE else (ONLINE_ALONE, 0)
    updates = offline + iterations * utd * num_envs
    # An iteration ends at a multiple of num_envs; the first one with updates is the first after the random steps.
    online = ITERATIONS * num_envs + (0 if offline else RANDOM_STEPS - RANDOM_STEPS % num_envs)
    for stop in (None, online):
        args = small(
            algo, policy_delay=delay, utd=utd, num_envs=num_envs, overlap=overlap, eval_every=1_000,
            checkpoint_every=1_000, run_dir=tmp_path / f"stop {stop}", **steps,
        )  # fmt: skip
        if stop is not None:
            state = train_until(args, algo, stop)
            count, pending = state["update"]["count"], len(state["update"]["pending"])
            assert count == offline + ITERATIONS * utd * num_envs
            assert count % delay or (offline, delay) == (0, 3)  # else a count that is lost would not show
            assert pending == (utd * num_envs if overlap else 0)
            assert optimizer_steps(state, "critic") == count - pending
            assert optimizer_steps(state, "actor") == (count - pending) // delay
        module(algo).train(args)
        state = final_state(args.run_dir)
        assert state["update"] == {"pending": [], "count": updates, "metrics": {}}  # which were logged
        assert optimizer_steps(state, "critic") == updates
        assert optimizer_steps(state, "actor") == updates // delay


@pytest.mark.parametrize(("utd", "num_envs", "overlap"), [(1, 1, False), (3, 1, True), (1, 3, False)])
@pytest.mark.parametrize(("bc_steps", "stop"), [(0, None), (5, None), (5, -6), (12, None), (12, 1)])
def test_the_first_updates_of_a_cql_run_imitate(
    bc_steps: int, stop: int | None, utd: int, num_envs: int, overlap: bool, small: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Exactly `bc_steps` of them, before the switch and after it, also if the run was stopped meanwhile."""
    asked, actor_loss = [], CQL.actor_loss
    monkeypatch.setattr(CQL, "actor_loss", lambda self, *args: asked.append(args[1]) or actor_loss(self, *args))
    args = small(
        "cql", offline_steps=10, online_steps=6, bc_steps=bc_steps, utd=utd, num_envs=num_envs, overlap=overlap,
        calibrated=False, retain="append", eval_every=1_000, checkpoint_every=1_000,
    )  # fmt: skip
    if stop is not None:
        train_until(args, "cql", stop)
    module("cql").train(args)
    updates = 10 + 6 * utd
    assert asked == [i < bc_steps for i in range(updates)]


def test_the_steps_of_imitation_are_those_of_a_run(
    small: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that begins with another's networks counts its own updates."""
    asked, actor_loss = [], CQL.actor_loss
    monkeypatch.setattr(CQL, "actor_loss", lambda self, *args: asked.append(args[1]) or actor_loss(self, *args))
    changed = {"offline_steps": 6, "online_steps": 0, "bc_steps": 4}
    first = small("cql", run_dir=tmp_path / "first", **changed)
    module("cql").train(first)
    module("cql").train(small("cql", init_from=first.run_dir, **changed))
    assert asked == 2 * ([True] * 4 + [False] * 2)
