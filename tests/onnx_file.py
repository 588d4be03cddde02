"""Exported policies: whether their packages are installed, and what a file's policy does."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime", "onnxscript")),
    reason="ONNX is not installed: pip install -e '.[export]'",
)


def run(path: Path, obs: Any, seed: int = 0) -> Any:
    """Return the actions of the file, with noise of this seed."""
    import onnxruntime

    session, random, actions = onnxruntime.InferenceSession(path), np.random.default_rng(seed), []
    for one in np.split(obs, len(obs)):
        given = {"obs": one}
        for each in session.get_inputs()[1:]:
            draw = random.standard_normal if each.name.startswith("normal") else random.random
            given[each.name] = draw(each.shape).astype(np.float32)
        actions.append(session.run(None, given)[0])
    return np.concatenate(actions)
