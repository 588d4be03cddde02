"""Read and write files that are either complete or absent, and name the file in every error."""

import contextlib
import errno
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from filelock import FileLock

from common.errors import InputError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write. It replaces `path` in one step if the block succeeds, and is deleted otherwise."""
    aside = path.with_name(path.name + ".part")
    aside.unlink(missing_ok=True)  # a link or a pipe that was put there is removed, and never written through
    try:
        with aside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)


def prepare_output(path: Path, flag: str) -> None:
    """Make the folder of a file that is written after long work.

    Raises InputError, which names `flag`, if the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "Is not a regular file")
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}): give another {flag}") from None


@contextlib.contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Keep other processes that ask for the same out. Raises filelock.Timeout if one is inside, or OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    place = path.with_name(f".{path.name}.lock")
    place.touch()  # the lock would take a folder that cannot be written for one that is locked
    with FileLock(place, timeout=0, fallback_to_soft=False):
        try:
            yield
        finally:
            place.unlink(missing_ok=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a JSON file in one step. Make its folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())


def open_regular(path: Path, mode: str) -> IO[bytes]:
    """Open a file. Raises OSError for a folder, a pipe, a socket or a device, and to write, for a symbolic link.

    To open a pipe (FIFO) in the usual way would wait for its other end, possibly for ever. A link in a folder that
    came from elsewhere may point to a file of the user.
    """
    return open(path, mode, opener=_descriptor)


def _descriptor(path: str, flags: int) -> int:
    is_written = flags & (os.O_WRONLY | os.O_RDWR)
    try:
        number = os.open(path, flags | os.O_NONBLOCK | (os.O_NOFOLLOW if is_written else 0), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise OSError(errno.ELOOP, "Is a symbolic link", path) from None
        raise
    mode = os.fstat(number).st_mode
    if stat.S_ISREG(mode):
        return number
    os.close(number)
    code, reason = (errno.EISDIR, "Is a directory") if stat.S_ISDIR(mode) else (errno.EINVAL, "Is not a regular file")
    raise OSError(code, reason, path)


def sync(path: Path) -> None:
    """Sync a file, or a folder, so that the creation and renaming of files in it survive a power cut."""
    number = os.open(path, os.O_RDONLY)
    os.fsync(number)
    os.close(number)


def exists(path: Path) -> bool:
    """Return whether the file exists. Raises InputError if the path cannot be accessed."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(path, error) from None
    return True


def read_bytes(path: Path) -> bytes:
    """Return the file's bytes.

    Raises InputError if it cannot be read or does not fit into memory, FileNotFoundError if there is none. Neither
    means that the content is damaged.
    """
    try:
        with open_regular(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unreadable(path, error) from None
    except MemoryError:
        raise does_not_fit(path) from None


def _unreadable(path: Path, error: OSError) -> InputError:
    allowed = isinstance(error, PermissionError)
    cure = "give this user permission to read it and its folders" if allowed else "correct that"
    return InputError(f"{path} cannot be read ({error.strerror}): {cure}, then run the same command again")


def does_not_fit(path: Path) -> InputError:
    """Return the error for a file that is larger than the free memory."""
    size = path.stat().st_size / 1e6
    return InputError(f"{path} ({size:,.1f} MB) does not fit into memory: free memory, then run the same command again")
