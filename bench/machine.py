"""What a reader of a measured figure must know of where it was measured."""

import platform
import subprocess
from pathlib import Path

PACKAGES = ["torch", "numpy", "gymnasium", "mujoco"]
PACKAGES += ["stable-baselines3", "sbx-rl", "jax", "jaxlib", "flax", "optax", "d3rlpy"]


def versions(python: str | Path) -> str:
    """Python's version and those of the packages that matter, as far as they are installed beside it."""
    code = (
        "import sys, platform, importlib.metadata as m\n"
        "have = {d.name.lower().replace('_', '-'): d.version for d in m.distributions()}\n"
        "print('python', platform.python_version(), *(f'{p} {have[p]}' for p in sys.argv[1:] if p in have), sep=', ')"
    )
    result = subprocess.run([str(python), "-c", code, *PACKAGES], capture_output=True, text=True, check=True)
    return result.stdout.strip().replace("python, ", "python ", 1)


def processor() -> str:
    """The processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def accelerator() -> str:
    """The GPU's name, driver and memory, as its own tool says them."""
    line = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()
