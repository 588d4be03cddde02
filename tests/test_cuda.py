"""What must hold on a GPU; skipped where there is none: `make test ARGS=tests/test_cuda.py` on a machine with one."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import (
    OFFLINE,
    ROOT,
    agent_of,
    assert_same_run,
    command,
    every_algorithm,
    final_state,
    flags,
    killed_at,
    module,
    networks_of,
    updates_of,
    with_flag,
)
from formulas import make_batch

from common.arguments import RunArgs
from common.checkpoint import state_of
from common.cuda import GPU_SHARE_ENV
from common.replay_buffer import Batch, ReplayBuffer

SOON = {"learning_starts": 5, "warmup_steps": 5, "random_steps": 5, "utd": 1}  # updates
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@every_algorithm
def test_trains_twice_the_same_and_continues(algo: str, small: Callable[..., RunArgs], tmp_path: Path):
    """The same seed twice; and once more from the last checkpoint."""
    for name in ("a", "b"):
        module(algo).train(small(algo, device="cuda", run_dir=tmp_path / name))
    assert_same_run(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "DONE").unlink()
    module(algo).train(small(algo, device="cuda", run_dir=tmp_path / "b"))  # takes the last checkpoint up and is done
    assert_same_run(tmp_path / "a", tmp_path / "b")


@every_algorithm
def test_resume_is_exact(algo: str, tmp_path: Path):
    """Killed in the middle and taken up: eager updates first, as in every run, then graphs."""
    more = {"device": "cuda", "checkpoint_every": 100}
    assert command(*flags(algo, **more, run_dir=tmp_path / "undisturbed"), algo=algo).returncode == 0
    # "step" counts the evaluations' too, of which the first has 400.
    place = ("online step", 150) if algo in OFFLINE else ("step", 550)
    killed = killed_at(algo, [place], *flags(algo, **more, run_dir=tmp_path / "killed"))
    assert killed.returncode == 0, killed.stderr
    assert final_state(tmp_path / "killed")["logger"]["step"] == 100
    assert command(*flags(algo, **more, run_dir=tmp_path / "killed"), algo=algo).returncode == 0
    assert_same_run(tmp_path / "undisturbed", tmp_path / "killed")


@every_algorithm
@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_run_equals_an_eager_one(algo: str, compiled: bool, small: Callable[..., RunArgs], tmp_path: Path):
    """A hundred updates in each phase; without the compiler bit for bit, with it to rounding, which learning magnifies:
    there the networks after the first updates count, by how far the eager ones moved in them."""
    soon = {name: steps for name, steps in SOON.items() if algo in with_flag(name)}
    steps: dict[str, Any] = {"total_steps": 60} | soon if compiled else {}
    for cuda_graph in (False, True):
        args = small(
            algo, device="cuda", cuda_graph=cuda_graph, compile=compiled and cuda_graph,
            run_dir=tmp_path / str(cuda_graph), **steps,
        )  # fmt: skip
        module(algo).train(args)
    if not compiled:
        assert_same_run(tmp_path / "False", tmp_path / "True")
        return
    first = state_of(agent := agent_of(algo, action_dim=1))
    eager, captured = (final_state(tmp_path / name)["agent"] for name in ("False", "True"))
    assert networks_of(agent)
    for name in networks_of(agent):
        start, one, other = (torch.cat([w.cpu().flatten() for w in s[name].values()]) for s in (first, eager, captured))
        assert (other - one).norm() < 0.01 * (one - start).norm(), name


@every_algorithm
def test_an_update_waits_for_nothing(algo: str):
    """Nothing on the host reads a number from the device, which would stop it, and cannot be recorded."""
    agent, batch = agent_of(algo, device="cuda"), Batch(*(part.float().cuda() for part in make_batch(32)[:5]))
    update = updates_of(agent)
    for mode in ("default", "error"):  # the first makes what is made once
        torch.cuda.set_sync_debug_mode(mode)
        try:
            update(batch._replace(returns_to_go=batch.rewards), True)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_run_keeps_to_its_share_of_the_memory():
    code = (
        "import torch\nfrom common.cuda import device\n"
        "d = device('cuda')\ntotal = torch.cuda.get_device_properties(d).total_memory\n"
        "torch.empty(total // 20, dtype=torch.uint8, device=d)\n"
        "try: torch.empty(total // 5, dtype=torch.uint8, device=d)\n"
        "except torch.cuda.OutOfMemoryError: print('refused')\n"
    )
    environment = os.environ | {GPU_SHARE_ENV: "0.1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"


def test_replay_buffer_lives_on_the_device(tmp_path: Path):
    buffer, rng = ReplayBuffer(100, 3, 2, "cuda"), np.random.default_rng(0)
    for _ in range(130):
        buffer.add(rng.normal(size=(1, 3)), rng.normal(size=(1, 2)), [1.0], rng.normal(size=(1, 3)), [False])
    batch = buffer.sample(32, torch.Generator("cuda").manual_seed(0))
    assert {part.device.type for part in batch[:5]} == {"cuda"}
    copy = ReplayBuffer(100, 3, 2)
    copy.load(tmp_path, buffer.save(tmp_path))
    assert torch.equal(copy.rows, buffer.rows.cpu())
