"""Graphs in parts: a step that repeats is compiled once, and the results are those of the whole graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import agent_of, long, updates_of
from test_recorded import Owner, random_batch
from torch import Tensor, fx

from common import recorded
from common.recorded import Recording
from common.replay_buffer import Batch
from common.tracing import cut


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """Every graph that is compiled from now on. They are interpreted instead, which is exact."""
    made: list[fx.GraphModule] = []

    def interpreted(graph: fx.GraphModule, examples: list[Any]) -> Callable[..., list[Tensor]]:
        made.append(graph)
        graph(*(example.clone() for example in examples))  # they must fit
        return graph

    monkeypatch.setattr(recorded, "_compiled", interpreted)
    return made


@pytest.mark.parametrize("algo", ["wsrl", "rlpd", pytest.param("expo", marks=long)])
@pytest.mark.parametrize("slices", [2, 8])
def test_the_critics_steps_of_an_update_share_their_code(algo: str, slices: int, graphs: list[fx.GraphModule]):
    """Of two slices and of eight: what comes before them, one step, and what comes after. The numbers are eager's."""
    agent = agent_of(algo, batch_size=32 // slices)
    update = updates_of(agent)
    recording = Recording(lambda *parts: update(Batch(*parts), True), random_batch(0), agent)
    assert len(graphs) == 3
    moving = 0
    for i in range(5):
        for start, eager, own in recording.compare(*random_batch(i)):
            torch.testing.assert_close(own, eager, rtol=1e-4, atol=1e-6)
            moving += int(not torch.equal(start, eager))
        update(random_batch(i), True)
    assert moving > 50


def steps(owner: Owner, x: Tensor) -> Tensor:
    """Three equal steps on slices of x, each with its random number, and the last one's result."""
    for part in [x[i : i + 1] for i in range(3)]:
        cut()
        noise = torch.randn(3, generator=owner.generator)
        owner.total.mul_(0.5).add_(part[0] * noise)
        moved = owner.total * part.sum()
    cut()
    return moved + owner.total


def changes_an_earlier_result(owner: Owner, x: Tensor) -> Tensor:
    y = x + 1.0
    cut()
    y.mul_(2.0)
    cut()
    return y + owner.total


def reads_a_view_of_what_it_changes(owner: Owner, x: Tensor) -> Tensor:
    first = owner.total[:1]
    cut()
    owner.total += x[0]
    return first + 1.0


def reads_a_list(owner: Owner, x: Tensor) -> Tensor:
    parts = (x + 1.0).unbind()
    cut()
    return parts[0] + parts[1]


@pytest.mark.parametrize(
    ("function", "compiled"),
    [(steps, 3), (changes_an_earlier_result, 1), (reads_a_view_of_what_it_changes, 1), (reads_a_list, 2)],
)
def test_parts_give_what_the_whole_function_gives(
    function: Callable[[Owner, Tensor], Tensor], compiled: int, graphs: list[fx.GraphModule]
):
    """Where a part depends on memory that another one changes, the graph stays whole."""
    one, other = Owner(), Owner()
    recording = Recording(lambda x: function(one, x), [torch.ones(3, 3)], one)
    assert len(graphs) == compiled
    for _ in range(3):
        x = torch.randn(3, 3)
        assert torch.equal(recording(x.clone()), function(other, x))
        assert torch.equal(one.total, other.total)


def test_compiled_parts_equal_the_function():
    """With the real compiler."""
    one, other = Owner(), Owner()
    recording = Recording(lambda x: steps(one, x), [torch.ones(3, 3)], one)
    for _ in range(3):
        x = torch.randn(3, 3)
        torch.testing.assert_close(recording(x), steps(other, x))
        torch.testing.assert_close(one.total, other.total)


def test_a_cut_outside_of_a_recording_does_nothing():
    """Also within torch.compile (`--compile` on CUDA), whose graph it does not break."""
    batch = random_batch(0)

    def sums(batch: Batch) -> list[Tensor]:
        return [part.rewards.sum() for part in batch.slices(8)]

    compiled = torch.compile(sums, backend="eager", fullgraph=True)(batch)
    assert len(compiled) == 4
    torch.testing.assert_close(compiled, sums(batch))
