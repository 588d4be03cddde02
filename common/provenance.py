"""What produced a result: versions, commit and hardware."""

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ALGOS = Path(__file__).resolve().parents[1] / "algos"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("onramp", "torch", "gymnasium", "mujoco", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # onramp and mujoco may not be installed
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> str:
    if shutil.which("git") is None:
        return "unknown"
    git = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent)]  # git must not write into the repository
    described = subprocess.run([*git, "describe", "--always", "--dirty", "--abbrev=40"], capture_output=True, text=True)
    return described.stdout.strip() or "unknown"


def algorithm_file(arguments: object) -> Path | None:
    """Return the file of algos/ that defines the class of these arguments, or None if it is defined elsewhere."""
    name = getattr(sys.modules.get(type(arguments).__module__), "__file__", None)
    path = Path(name).resolve() if name else None
    return path if path and path.parent == ALGOS else None


def instructions() -> list[str]:
    """Return the processor's flags for vectors and matrices, as Linux names them."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = re.search(r"^flags\s*: (.*)", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return [flag for flag in flags[1].split() if re.match("avx|amx|fma", flag)] if flags else []


def hardware(device: torch.device) -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    cpu = models[0] if models else platform.processor()
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "gpu": gpu}


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
