"""Compare the folders of two runs, in everything but wall-clock times and the folders' own paths."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

from common import checkpoint
from common.policy_file import SUFFIX, read_policy
from common.run_folder import CHECKSUM, CONFIG, DONE, LOCK, METRICS


def differences(run: Path, whole: Path) -> list[str]:
    """Return the files of a run that differ from those of an undisturbed run, in anything but wall-clock times.

    Both runs may have a --run-dir of their own.
    """
    found, wanted = files_of(run), files_of(whole)
    return sorted(
        name
        for name in found | wanted
        if name not in found or name not in wanted or not _same_file(run / name, whole / name)
    )


def files_of(run: Path) -> set[str]:
    return {str(p.relative_to(run)) for p in run.rglob("*") if p.is_file() and p.name not in (LOCK, "errors.log")}


def _same_file(path: Path, other: Path) -> bool:
    if path.read_bytes() == other.read_bytes():
        return True
    try:
        return _same(_content(path), _content(other))
    except Exception:  # what cannot be read is not what the run wrote
        return False


def _content(path: Path) -> Any:
    """Return what a file holds, without wall-clock times, the run's path, and the checksums that follow from them."""
    if path.name == METRICS:
        return [row for row in csv.reader(path.open(newline="")) if not row[1].startswith("time/")]
    if path.name == DONE:
        done = json.loads(path.read_text())
        own = [name for name in done["checksums"] if name in (METRICS, CONFIG) or name.startswith("events")]
        return done | {"checksums": {k: v for k, v in done["checksums"].items() if k not in own}, CHECKSUM: None}
    if path.name == CONFIG:
        return _without_path(json.loads(path.read_text())) | {CHECKSUM: None}
    if path.suffix == SUFFIX:
        tensors, facts = read_policy(path)
        return tensors, _without_path(facts)
    if path.name.startswith("events"):
        events = [Event.FromString(record) for record in RawEventFileLoader(str(path)).Load()]
        values = [[(v.tag, v.simple_value) for v in each.summary.value if v.tag[:5] != "time/"] for each in events]
        return [(each.step, each.file_version) for each in events], values
    if path.name == "state.pt":
        state = checkpoint.load(path)
        return state | {"logger": (state["logger"]["step"], state["logger"].get("is_evaluated", True))}
    return path.read_bytes()


def _without_path(facts: dict[str, Any]) -> dict[str, Any]:
    return facts | {"arguments": facts["arguments"] | {"run_dir": None}}


def _same(a: Any, b: Any) -> bool:
    """Return whether two states are equal in types, shapes and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, torch.Tensor):
        return _same(a.numpy(), b.numpy())
    if isinstance(a, np.ndarray | np.generic):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return repr(a) == repr(b)  # also of floats: 0.0 is not -0.0, and NaN is itself
