"""OGBench's environments (Park et al. 2025, arXiv 2410.20092), from its package, as it registers them."""

import contextlib
import importlib
import warnings
from collections.abc import Iterator

from common.errors import InputError

INSTALL = "pip install -e '.[ogbench]'"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings of the package: GLFW finds no display, and boxes are rounded to float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def register(name: str) -> None:
    """Import OGBench's package, which registers its environments. Raises InputError if it is missing or fails."""
    try:
        with quiet():
            importlib.import_module("ogbench")
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in ("ogbench", "dm_control"):
            raise InputError(f"{name} needs OGBench's package, which is not installed: {INSTALL}") from None
        reason = " ".join(f"{type(error).__name__} {error}".split())[:300]
        raise InputError(
            f"{name} needs OGBench's package, which fails: {reason}\nInstall its pins: {INSTALL}"
        ) from error
