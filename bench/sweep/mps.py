"""Start CUDA's Multi-Process Service, so that runs on one card execute kernels together instead of taking turns."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

CONTROL = "nvidia-cuda-mps-control"
PATIENCE = 60  # seconds
CLIENT = (sys.executable, "-c", "import torch; torch.zeros(1, device='cuda')")


@contextlib.contextmanager
def shared_card() -> Iterator[str]:
    """Start a service for every process that the block starts, and yield a sentence on how the runs share the card.

    A service that runs already is used and not stopped. No setting of the card is changed.
    """
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield "the runs on one card use the MPS that is already running"
        return
    if shutil.which(CONTROL) is None:
        yield f"{CONTROL} is not installed: the runs on one card take turns"
        return
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        own = {f"CUDA_MPS_{name}_DIRECTORY": folder for name in ("PIPE", "LOG")}

        def run(*command: str, said: str = "") -> str | None:
            """Run a command. Return its output if it fails, or a message if it does not end; otherwise None."""
            with tempfile.TemporaryFile("w+") as output:  # no pipe: the service would keep it open
                try:
                    done = subprocess.run(
                        command, input=said, env=os.environ | own, stdout=output, stderr=subprocess.STDOUT,
                        text=True, timeout=PATIENCE, check=False,
                    )  # fmt: skip
                except subprocess.TimeoutExpired:
                    return f"no answer in {PATIENCE} s"
                output.seek(0)
                return output.read().strip() if done.returncode else None

        if (failure := run(CONTROL, "-d")) is not None:
            yield f"MPS does not start ({failure}): the runs on one card take turns"
            return
        try:
            if run(*CLIENT) is not None:  # a service may start and yet serve no client, which then sees no card
                yield "MPS starts but serves no process: the runs on one card take turns"
                return
            os.environ.update(own)
            yield "the runs on one card share it by MPS"
        finally:
            for name in own:
                os.environ.pop(name, None)
            run(CONTROL, said="quit\n")
