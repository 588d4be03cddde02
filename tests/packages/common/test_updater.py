"""When an update runs: at once, or with --overlap after the next action; what a checkpoint keeps of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common import checkpoint
from common.timings import Timings
from common.updater import Updater

FOLDER = Path("replay")  # an updater writes nothing into it


class Agent:
    """Notes the updates it was asked for."""

    def __init__(self) -> None:
        self.updates: list[dict[str, Any]] = []

    def update(self, **constants: Any) -> dict[str, Tensor]:
        self.updates.append(constants)
        metrics = {"losses/critic": torch.tensor(float(len(self.updates)))}
        if constants.get("with_actor"):
            metrics["losses/actor"] = torch.tensor(10.0 * len(self.updates))
        return metrics


def updater(agent: Agent, defer: bool) -> Updater:
    return Updater(agent.update, lambda: defer, Timings())


def test_nothing_is_deferred_without_overlap() -> None:
    """Each call is an update of its own, at once; a flush does none."""
    agent = Agent()
    update = updater(agent, defer=False)
    for i in range(3):
        update(with_actor=i == 1)
        assert (len(agent.updates), update.count, update.pending) == (i + 1, i + 1, [])
    update.flush()
    assert agent.updates == [{"with_actor": i == 1} for i in range(3)]


def test_pending_updates_run_at_the_flush_in_their_order() -> None:
    """With the arguments of their calls, and once."""
    agent = Agent()
    update = updater(agent, defer=True)
    for i in range(3):
        update(online=i)
    assert (agent.updates, update.count, update.metrics) == ([], 3, {})
    update.flush()
    assert agent.updates == [{"online": i} for i in range(3)]
    update.flush()
    assert (len(agent.updates), update.pending) == (3, [])


def test_an_update_that_is_not_deferred_runs_after_pending_ones() -> None:
    """As at a run's last step, which no action follows."""
    agent, deferred = Agent(), [True]
    update = Updater(agent.update, lambda: deferred[0], Timings())
    update(online=1)
    deferred[0] = False
    update(online=2)
    assert agent.updates == [{"online": 1}, {"online": 2}]


@pytest.mark.parametrize("pending", [0, 1, 3])
def test_pending_and_count_survive_a_checkpoint(pending: int, tmp_path: Path) -> None:
    """What was saved does not change with the updates that follow; another updater performs them."""
    agents = [Agent(), Agent()]
    saved, loaded = (updater(agent, defer=True) for agent in agents)
    for i in range(2):
        saved(online=i)
    saved.flush()
    for i in range(pending):
        saved(with_actor=i % 2 == 1)
    state = saved.save(FOLDER)
    saved.flush()
    checkpoint.save(tmp_path / "state.pt", {"update": state})
    loaded.load(FOLDER, checkpoint.load(tmp_path / "state.pt")["update"])
    assert (loaded.count, agents[1].updates) == (2 + pending, [])
    loaded.flush()
    assert agents[1].updates == agents[0].updates[2:] == [{"with_actor": i % 2 == 1} for i in range(pending)]
    for each in (saved.save(FOLDER), loaded.save(FOLDER)):
        assert each | {"metrics": None} == {"pending": [], "count": 2 + pending, "metrics": None}


def test_metrics_since_the_last_log_survive_a_checkpoint(tmp_path: Path) -> None:
    """Also those that no later update gives: PA-RL's imitation loss, when the critics begin to learn."""
    agents = [Agent(), Agent()]
    saved, loaded = (updater(agent, defer=False) for agent in agents)
    saved(with_actor=True)
    checkpoint.save(tmp_path / "state.pt", {"update": saved.save(FOLDER)})
    loaded.load(FOLDER, checkpoint.load(tmp_path / "state.pt")["update"])
    for each in (saved, loaded):
        each(with_actor=False)
        assert each.metrics["losses/actor"].item() == 10.0
    loaded.load(FOLDER, {"pending": [], "count": 3})  # an older checkpoint has none
    assert loaded.metrics == {}


def test_metrics_keep_the_latest_of_each_name() -> None:
    """TD3's actor is updated every second time: its loss stays until the next one. Clearing forgets them all."""
    agent = Agent()
    update = updater(agent, defer=False)
    for with_actor in (True, False, False):
        update(with_actor=with_actor)
    assert {name: value.item() for name, value in update.metrics.items()} == {"losses/critic": 3, "losses/actor": 10}
    update.metrics.clear()
    update(with_actor=False)
    assert {name: value.item() for name, value in update.metrics.items()} == {"losses/critic": 4}


def test_each_update_is_timed_where_it_runs() -> None:
    """Not its deferral, which takes no time."""
    timings = Timings()
    update = Updater(Agent().update, lambda: True, timings)
    update()
    assert timings.take() == {}
    update.flush()
    assert timings.take().keys() == {"time/update_ms"}
