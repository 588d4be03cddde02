"""Convert what an environment returns or raises. What has another kind is refused, with the environment's name."""

from typing import Any

import numpy as np

from common.errors import InputError


def number(key: str, value: Any, name: str) -> float:
    """Return an environment's reward or return. Raises InputError for text, and for what is not one number."""
    try:
        if isinstance(value, str | bytes):  # float() would take "1.0"
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{name} gave a {key} that is not a number, {short(value)}") from None


def is_true(key: str, value: Any, name: str) -> bool:
    """Return an environment's success or end as a bool. Raises InputError for what is neither true nor false."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if np.size(value) != 1 or np.asarray(value).dtype.kind not in "biuf" or np.isnan(value):
        raise InputError(f"{name} gave a {key} of {short(value)}, which is neither true nor false")
    return bool(value)


def entries(info: Any, name: str) -> dict[str, Any]:
    """Return an environment's info. Raises InputError if it is no dict."""
    if not isinstance(info, dict):
        raise InputError(f"{name} gave the info {short(info)}, which is not a dict")
    return info


def reason(error: BaseException) -> str:
    """Return an environment's own error in one line."""
    return " ".join(f"{type(error).__name__} {error}".split())[:300]


def short(value: Any) -> str:
    """Return what an environment gave, in one short line."""
    return " ".join(repr(value).split())[:100]
