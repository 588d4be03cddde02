"""Print results to stdout, and messages to stderr by Python's `logging`, under the name `onramp`."""

import contextlib
import errno
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from common.files import open_regular

LONGEST_LINE = 1_500  # characters; a value that a user gave may be longer


class _Console(logging.Handler):
    """Write above the progress bar, to `sys.stderr` as it is at that moment.

    A run continues without messages if the reader of a pipe has left (`2>&1 | head`), or if its terminal was closed.
    """

    def emit(self, record: logging.LogRecord) -> None:
        mark = "warning: " if record.levelno == logging.WARNING else ""
        try:
            tqdm.write("\n".join(map(_cut, (mark + self.format(record)).split("\n"))), file=sys.stderr)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            self.setLevel(logging.CRITICAL + 1)

    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage()  # without the traceback


def _cut(line: str) -> str:
    """Return the line, without its middle if it is too long: the start says what is wrong, the end what to do."""
    half = LONGEST_LINE // 2
    return line if len(line) <= LONGEST_LINE else f"{line[:half]} … {line[-half:]}"


class _ErrorFile(logging.Handler):
    """Append errors with their tracebacks to a file, which the first one makes."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError), open_regular(self.path, "ab") as file:
            file.write(f"{self.format(record)}\n\n".encode())


# tqdm's own lock is shared by forked processes. One that is killed while it prints would keep it for ever.
tqdm.set_lock(threading.RLock())
log = logging.getLogger("onramp")
log.setLevel(logging.INFO)
log.propagate = False  # a notebook's own handler would print each message again
log.addHandler(_Console())


def keep_errors(path: Path | None) -> None:
    """From now on, append each error with its traceback to the file `path`. With None, to no file."""
    for handler in _error_files():
        log.removeHandler(handler)
    if path:
        log.addHandler(_ErrorFile(path))


def log_error(message: str, error: Exception) -> None:
    """Log an error. If it has a cause, the message ends with the file of its traceback."""
    files = _error_files() if error.__cause__ or hasattr(error, "__notes__") else []
    where = "".join(f" (traceback: {file.path})" for file in files)
    log.error(message + where, exc_info=error)


def _error_files() -> list[_ErrorFile]:
    return [handler for handler in log.handlers if isinstance(handler, _ErrorFile)]


def print_result(text: str) -> None:
    """Print `text` to stdout at once. Exit with status 1 if its reader has left (`| head`)."""
    with exit_if_unread():
        sys.stdout.write(f"{text}\n")


@contextlib.contextmanager
def exit_if_unread() -> Iterator[None]:
    """Exit with status 1, without a traceback, if what is printed inside has no reader any more."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its exit
        raise SystemExit(1) from None
