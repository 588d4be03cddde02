"""Undo what a run changes in its process: a program may train many times and catch errors."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any

import numpy as np
import torch

from common.errors import Stopped

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ending: ContextVar[list[Callable[[], None]] | None] = ContextVar("_ending", default=None)  # of this thread


@contextlib.contextmanager
def as_before() -> Iterator[None]:
    """At the end, call what `at_end` was given, and restore signal handlers and PyTorch's settings.

    On CUDA, the settings of memory, workspace and TF32 stay (`common.cuda.device`).
    """
    handlers = [(number, signal.getsignal(number)) for number in STOPS]
    threads, is_flushed = torch.get_num_threads(), bool(np.float64(5e-324) * 1.0 == 0.0)
    products: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    precision, determinism = products.fp32_precision, torch.get_deterministic_debug_mode()
    ending: list[Callable[[], None]] = []
    token = _ending.set(ending)
    try:
        yield
    except Stopped:  # at once: an environment may not answer
        ending.clear()
        raise
    finally:
        for function in ending:
            with contextlib.suppress(Exception):  # the error that ends the run matters more
                function()
        _ending.reset(token)
        for number, handler in handlers:
            with contextlib.suppress(ValueError, TypeError):  # not the main thread; a handler that is not Python's
                signal.signal(number, handler)
        torch.set_num_threads(threads)
        torch.set_flush_denormal(is_flushed)
        products.fp32_precision = precision
        torch.set_deterministic_debug_mode(determinism)


def on_stop(handler: Callable[[int], None]) -> None:
    """Call `handler` with the number of each signal of STOPS that comes, if this is the main thread.

    A closed terminal may send SIGHUP twice, from the kernel and from the shell. So a SIGHUP after another signal is
    ignored. A process that ignores SIGHUP, as under nohup, still does.
    """
    has_come = False

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal has_come
        if not (has_come and number == signal.SIGHUP):
            has_come = True
            handler(number)

    for number in STOPS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            with contextlib.suppress(ValueError):  # only the main thread can handle signals
                signal.signal(number, handle)


def at_end(*functions: Callable[[], None]) -> None:
    """Call these at the end of `as_before`, also after an error. They may have been called before."""
    if (registered := _ending.get()) is not None:
        registered.extend(functions)
