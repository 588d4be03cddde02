"""Check the form of what was read from a file, by one description for each file."""

import json
from collections.abc import Iterable
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import numpy as np
from torch import Tensor

from common import files
from common.errors import InputError

# What a value must be. This is one of:
# - a type, or several joined by `|`. A whole number is also a float. True and False are no numbers.
# - Annotated[type, bounds], such as `common.arguments.NonNegativeInt`.
# - {"key": schema}: a dict with these entries, and possibly others. A key that ends in "?" may be absent.
# - {str: schema}: a dict of any size. Its keys have that type, and its values have that schema.
# - [schema]: a list of any length. (schema, schema): a list or tuple of exactly these.
Schema = Any

NAMES: dict[Any, str] = {
    dict: "a dict", list: "a list", tuple: "a list", str: "text", bool: "true or false", int: "a whole number",
    float: "a number", NoneType: "null", Tensor: "a tensor", np.ndarray: "an array",
}  # fmt: skip
_MISSING = object()


def require(value: object, schema: Schema, path: Path, otherwise: str) -> None:
    """Raise InputError if the value, which was read from `path`, does not have the schema.

    The first line of the message is the path and `otherwise`. The second line names the entry that differs.
    """
    if wrong := mismatch(value, schema):
        raise InputError(f"{path} {otherwise}\n{wrong}")


def read_json(path: Path, schema: Schema, otherwise: str) -> dict[str, Any]:
    """Return the dict in a JSON file, or {} if there is no file.

    Raises InputError if it is damaged or does not have the schema. The message is the path, then `otherwise`.
    """
    if not files.exists(path):
        return {}
    try:
        found: dict[str, Any] = json.loads(files.read_bytes(path))
    except (ValueError, RecursionError):
        raise InputError(f"{path} {otherwise}") from None
    require(found, schema, path, otherwise)
    return found


def mismatch(value: object, schema: Schema, at: str = "") -> str | None:
    """Return how the value at the key `at` differs from the schema, or None."""
    entries: Iterable[tuple[object, object, Schema]]  # key, value, schema
    if isinstance(schema, dict) and isinstance(value, dict):
        entries = _entries(value, schema)
    elif isinstance(schema, list) and isinstance(value, list | tuple):
        entries = ((i, item, schema[0]) for i, item in enumerate(value))
    elif isinstance(schema, tuple) and isinstance(value, list | tuple) and len(value) == len(schema):
        entries = zip(range(len(schema)), value, schema, strict=True)
    elif isinstance(schema, dict | list | tuple):
        size = f" of {len(schema)}" if isinstance(schema, tuple) else ""
        return _differs(at, value, f"{NAMES[type(schema)]}{size}")
    else:
        return _mismatch_of_type(value, schema, at)
    wrong = (mismatch(item, part, f"{at}.{key}" if at else str(key)) for key, item, part in entries)
    return next(filter(None, wrong), None)


def _entries(value: dict[Any, object], schema: dict[Any, Schema]) -> Iterable[tuple[object, object, Schema]]:
    for key, part in schema.items():
        if isinstance(key, type):
            for own, item in value.items():
                yield from ((own, own, key), (own, item, part))
        elif (name := key.removesuffix("?")) in value or name == key:
            yield name, value.get(name, _MISSING), part


def _mismatch_of_type(value: object, schema: Schema, at: str) -> str | None:
    plain, *bounds = get_args(schema) if hasattr(schema, "__metadata__") else (schema,)
    kinds = get_args(plain) or (plain,)
    found = type(value)
    if found is bool or (found is int and int not in kinds):  # Python takes True for 1, and 1 for no float
        is_one = {bool: bool, int: float}[found] in kinds or object in kinds
    else:
        is_one = isinstance(value, kinds) and value is not _MISSING
    if not is_one:
        return _differs(at, value, " or ".join(NAMES[kind] for kind in kinds))
    return next((_differs(at, value, str(each)) for each in bounds if value not in each), None)


def _differs(at: str, value: object, wanted: str) -> str:
    if value is _MISSING:
        return f"{at} is missing"
    kind = next((name for kind, name in NAMES.items() if type(value) is kind), type(value).__name__)
    shown = f" ({value})" if isinstance(value, int | float) else ""
    size = f" of {len(value)}" if " of " in wanted and isinstance(value, list | tuple) else ""
    return f"{at or 'all of it'} is {kind}{size}{shown}, and must be {wanted}"
