"""What must hold on a GPU; skipped where there is none: `make test ARGS=tests/test_cuda.py` on a machine with one."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import every_algorithm, final_state, module, replay_bytes, same

from common.replay_buffer import ReplayBuffer
from common.run import RunArgs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@every_algorithm
def test_trains_twice_the_same_and_goes_on(algo: str, small: Callable[..., RunArgs], tmp_path: Path):
    """The same seed twice; and once more from the last checkpoint."""
    for name in ("a", "b"):
        module(algo).train(small(algo, device="cuda", run_dir=tmp_path / name))
    assert (tmp_path / "a" / "evaluations.csv").read_text() == (tmp_path / "b" / "evaluations.csv").read_text()
    assert same(final_state(tmp_path / "a")["agent"]["actor"], final_state(tmp_path / "b")["agent"]["actor"])
    (tmp_path / "b" / "DONE").unlink()
    module(algo).train(small(algo, device="cuda", run_dir=tmp_path / "b"))  # takes the last checkpoint up and is done
    assert same(final_state(tmp_path / "a")["agent"]["actor"], final_state(tmp_path / "b")["agent"]["actor"])
    assert replay_bytes(tmp_path / "a") == replay_bytes(tmp_path / "b")


def test_replay_buffer_lives_on_the_device(tmp_path: Path):
    buffer, rng = ReplayBuffer(100, 3, 2, "cuda"), np.random.default_rng(0)
    for _ in range(130):
        buffer.add(rng.normal(size=(1, 3)), rng.normal(size=(1, 2)), [1.0], rng.normal(size=(1, 3)), [False])
    batch = buffer.sample(32, torch.Generator("cuda").manual_seed(0))
    assert {part.device.type for part in batch[:5]} == {"cuda"}
    copy = ReplayBuffer(100, 3, 2)
    copy.load(tmp_path, buffer.save(tmp_path))
    assert torch.equal(copy.rows, buffer.rows.cpu())
