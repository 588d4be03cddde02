"""Programs import this first: from here to their command line, Ctrl-C ends them in one line.

Importing PyTorch takes more than a second. Python would answer Ctrl-C with a traceback of its imports, and an import
that catches every exception would ignore it.
"""

import os
import signal
import sys
from types import FrameType


def _end(number: int, _: FrameType | None) -> None:
    os.write(2, b"stopped while starting: nothing was written\n")
    os._exit(128 + number)


def end_imports() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _imported_by() -> str:
    """Return the name of the module that imports this one."""
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_globals is globals() or "importlib" in frame.f_code.co_filename):
        frame = frame.f_back
    return str(frame.f_globals["__name__"])


# A module of another program leaves that program's Ctrl-C alone, and so does a job that ignores it.
if _imported_by() == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end)
