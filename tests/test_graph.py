"""Updates as CUDA graphs, with a graph of the tests' own where there is no GPU; the GPU's part is in test_cuda.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import every_algorithm, final_state, module, replay_bytes, same
from cpu_graph import CPUGraph

from common import networks
from common.cuda import WARM_UP, Captured
from common.run import Run


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Captured[Any]]:
    """Runs capture as with CUDA, by a graph on the CPU, and compute as there; all that was captured."""
    made: list[Captured[Any]] = []

    def captured(function: Callable[..., Any], generator: torch.Generator) -> Captured[Any]:
        made.append(Captured(function, generator, CPUGraph))
        return made[-1]

    monkeypatch.setattr(networks, "WORTHWHILE", 2**60)  # oneDNN's networks are the CPU's alone
    monkeypatch.setattr("common.run.Captured", captured)
    monkeypatch.setattr(Run, "_captures", property(lambda self: self.args.cuda_graph))
    return made


@every_algorithm
@pytest.mark.parametrize("overlap", [False, True])
def test_a_captured_run_equals_an_eager_one(
    algo: str, overlap: bool, small: Callable[..., Any], tmp_path: Path, as_on_a_gpu: list[Captured[Any]]
):
    """To its end and bit for bit: more than a hundred updates, in every phase, and all that a checkpoint holds."""
    more = {} if algo == "ppo" else {"overlap": overlap}
    for cuda_graph in (False, True):
        module(algo).train(small(algo, cuda_graph=cuda_graph, run_dir=tmp_path / str(cuda_graph), **more))
    replays = [kind.calls - WARM_UP for each in as_on_a_gpu for kind in each._kinds.values()]
    assert len(as_on_a_gpu) == 2  # update, act
    assert sum(replays) > 100
    eager, captured = tmp_path / "False", tmp_path / "True"
    assert (eager / "evaluations.csv").read_text() == (captured / "evaluations.csv").read_text()
    assert same(final_state(eager), final_state(captured))
    assert replay_bytes(eager) == replay_bytes(captured)
