"""Tiny files in D4RL's layout, made to order."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np


def make(path: Path, ends: str, box: tuple[float, float] | None = (-1.0, 1.0), **changed: Any) -> Path:
    """A file with one row for each letter of `ends`: t terminal, o time-out, b both, else neither. Row i observes i.

    `box`: the attributes action_low and action_high, None for neither.
    """
    rows = len(ends)
    parts: dict[str, Any] = {
        "observations": np.arange(rows, dtype=np.float32)[:, None] * [1.0, 10.0],
        "actions": np.linspace(-0.5, 0.5, rows, dtype=np.float32)[:, None],
        "rewards": 100.0 + np.arange(rows, dtype=np.float32),
        "terminals": np.array([end in "tb" for end in ends]),
        "timeouts": np.array([end in "ob" for end in ends]),
    }
    with h5py.File(path, "w") as file:
        for name, values in (parts | changed).items():
            if values is not None:
                file[name] = values
        if box is not None:
            file.attrs["action_low"], file.attrs["action_high"] = box
    return path
