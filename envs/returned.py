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
        raise InputError(f"{name} gave a {key} that is not a number, {_text(value)}") from None


def is_true(key: str, value: Any, name: str) -> bool:
    """Return an environment's success or end as a bool. Raises InputError for what is neither true nor false."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if np.size(value) != 1 or np.asarray(value).dtype.kind not in "biuf" or np.isnan(value):
        raise InputError(f"{name} gave a {key} of {_text(value)}, which is neither true nor false")
    return bool(value)


def reason(error: BaseException) -> str:
    """Return an environment's own error in one line."""
    return " ".join(f"{type(error).__name__} {error}".split())[:300]


def _text(value: Any) -> str:
    return " ".join(repr(value).split())[:100]
