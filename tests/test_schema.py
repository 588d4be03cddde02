"""What is read from a file has the form that was written, or is refused by the name of the entry that differs."""

import functools
import operator
import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from conftest import arguments_of, module

from common import checkpoint
from common.arguments import NonNegativeInt
from common.errors import InputError
from common.schema import mismatch

MISSING = object()


@pytest.mark.parametrize(
    ("value", "schema", "said"),
    [
        ({"a": 1}, {"a": int}, None),
        ({"a": 1, "b": 2}, {"a": int}, None),
        ({}, {"a": int}, "a is missing"),
        ({}, {"a?": int}, None),
        ({"a": None}, {"a?": int}, "a is null, and must be a whole number"),
        ({"a": True}, {"a": int}, r"a is true or false.*, and must be a whole number"),
        ({"a": 1}, {"a": float}, None),
        ({"a": 1.5}, {"a": int}, r"a is a number \(1.5\), and must be a whole number"),
        ({"a": "1"}, {"a": int | None}, "a is text, and must be a whole number or null"),
        ({"a": {"b": [1, "x"]}}, {"a": {"b": [int]}}, "a.b.1 is text, and must be a whole number"),
        ({"a": [1, 2]}, {"a": (int, int, int)}, "a is a list of 2, and must be a list of 3"),
        ({1: "x"}, {str: str}, "1 is a whole number"),
        ([], {"a": int}, "all of it is a list, and must be a dict"),
        ({"a": -1}, {"a": NonNegativeInt}, r"a is a whole number \(-1\), and must be a number from 0 up"),
        ({"a": -1}, {"a": Annotated[int, range(3)]}, r"a is a whole number \(-1\), and must be range"),
        ({"a": np.ones(2)}, {"a": [np.ndarray]}, "a is an array, and must be a list"),
    ],
)
def test_what_differs_from_a_schema_is_named(value: object, schema: Any, said: str | None):
    """By hand, one case for each rule of the module's head."""
    found = mismatch(value, schema)
    assert (found is None) == (said is None), found
    assert said is None or re.match(said, found or ""), found


SMALL = {"total_steps": 120, "eval_every": 1_000, "eval_episodes": 1, "checkpoint_every": 60}
WRONG: tuple[Any, ...] = ("x", None, [[1]], {"x": {}}, 1.5, torch.ones(2), np.ones((3, 1, 2)))
PLACES = {
    "sac": [
        "agent", "agent.actor", "agent.critic_optimizer", "agent.generator", "agent.log_alpha", "rollout",
        "rollout.envs", "rollout.envs.0", "rollout.steps", "rollout.returns", "rollout.lengths", "rollout.finished",
        "logger", "logger.sizes", "logger.step", "logger.checksums", "buffer", "buffer.added", "buffer.widths",
        "buffer.segments", "buffer.segments.0", "update", "update.count", "update.pending",
    ],
    "iql": ["data", "data.dataset", "data.unfinished", "data.rewards", "data.buffer", "data.buffer.segments"],
}  # fmt: skip


@pytest.mark.parametrize("algo", PLACES)
def test_a_checkpoint_of_another_form_is_refused(algo: str, tmp_path: Path):
    """Each entry in turn is missing, or of another kind. Nothing is a traceback, and the run stays as it was."""
    args = module(algo).Args(**arguments_of(algo, SMALL | {"run_dir": tmp_path / "run"}))
    module(algo).train(args)
    (args.run_dir / "DONE").unlink()
    path = args.run_dir / "checkpoint" / "state.pt"
    whole = checkpoint.load(path)
    for place in PLACES[algo]:
        *way, last = (int(key) if key.isdecimal() else key for key in place.split("."))
        kind = type(functools.reduce(operator.getitem, [*way, last], whole))
        for wrong in (MISSING, *(each for each in WRONG if not isinstance(each, kind))):
            state = copied(whole)
            holder = functools.reduce(operator.getitem, way, state)
            holder[last] = wrong
            if wrong is MISSING:
                if place == "logger.checksums" or isinstance(holder, list):
                    continue  # older runs have none; a shorter list may be right
                del holder[last]
            checkpoint.save(path, state)
            assert len(refusal(args, algo).splitlines()) in (1, 2), f"{place} may be {wrong!r}"
    checkpoint.save(path, [whole])
    with pytest.raises(InputError, match="damaged"):
        module(algo).train(args)
    checkpoint.save(path, whole)
    module(algo).train(args)
    assert (args.run_dir / "DONE").exists()


def refusal(args: Any, algo: str) -> str:
    """What the command says if it refuses to resume, else nothing."""
    try:
        module(algo).train(args)
    except InputError as error:
        return str(error)
    return ""


def copied(state: Any) -> Any:
    """A copy of the dicts and lists. The tensors are shared."""
    if isinstance(state, dict):
        return type(state)({key: copied(value) for key, value in state.items()})
    return [copied(value) for value in state] if isinstance(state, list) else state
