"""CUDA's Multi-Process Service: the kernels of runs that share a card run side by side, where else they take turns."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

CONTROL = "nvidia-cuda-mps-control"
CLIENT = (sys.executable, "-c", "import torch; torch.zeros(1, device='cuda')")


@contextlib.contextmanager
def shared_card() -> Iterator[str]:
    """Starts a service of our own for every process begun in the block; says what became of that.

    One that runs already is left to whoever started it. Nothing on the card itself is set.
    """
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield "the runs on one card use the MPS that runs already"
        return
    if shutil.which(CONTROL) is None:
        yield f"{CONTROL} is not installed: the runs on one card take turns"
        return
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        own = {f"CUDA_MPS_{name}_DIRECTORY": folder for name in ("PIPE", "LOG")}

        def run(*command: str, said: str | None = None) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                command, input=said, env=os.environ | own, capture_output=True, text=True, check=False
            )

        started = run(CONTROL, "-d")
        if started.returncode:
            yield f"MPS does not start ({(started.stderr or started.stdout).strip()}): the runs on one card take turns"
            return
        try:
            if run(*CLIENT).returncode:  # a service that starts may still serve nobody, and its clients see no card
                yield "MPS starts but serves nobody: the runs on one card take turns"
                return
            os.environ.update(own)
            yield "the runs on one card share it by MPS"
        finally:
            for name in own:
                os.environ.pop(name, None)
            run(CONTROL, said="quit\n")
