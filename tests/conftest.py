"""What several test files use."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # networks this small gain nothing from more; shared machines lose much

import torch

from algos import sac
from common import checkpoint

ROOT = Path(__file__).parents[1]
SMALL = {
    "env": "Pendulum-v1",
    "hidden": (16, 16),
    "batch_size": 16,
    "learning_starts": 50,
    "total_steps": 400,
    "buffer_size": 10_000,
    "eval_every": 200,
    "eval_episodes": 2,
    "checkpoint_every": 100,
    "device": "cpu",
}


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., sac.Args]:
    """Arguments of a run of seconds, in a folder of this test's."""
    return lambda **changed: sac.Args(**(SMALL | {"run_dir": tmp_path / "run"} | changed))


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    import signal

    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def flags(**arguments: Any) -> list[str]:
    """The command-line flags for these arguments."""
    said: list[str] = []
    for name, value in (SMALL | arguments).items():
        said += [f"--{name.replace('_', '-')}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return said


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """`python algos/sac.py` with these flags, to its end."""
    line = [sys.executable, str(ROOT / "algos" / "sac.py"), *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=600, check=False, **options)


def final_state(folder: Path) -> dict[str, Any]:
    """All that the last checkpoint holds, but for the log sizes, which include wall-clock figures."""
    state = checkpoint.load(folder / "checkpoint" / "state.pt")
    state["logger"].pop("sizes")
    return state


def same(a: Any, b: Any) -> bool:
    """Equality bit for bit through dicts, lists, tensors and arrays."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return a.tobytes() == b.tobytes() if hasattr(a, "tobytes") else a == b


def replay_bytes(folder: Path) -> bytes:
    """The rows of the replay buffer, in order."""
    return b"".join(path.read_bytes() for path in sorted((folder / "checkpoint" / "replay").glob("*.rows")))
