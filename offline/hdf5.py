"""Open HDF5 files, also those that the caller has open, and explain what is wrong with one that cannot be read."""

import codecs
import contextlib
import fcntl
from pathlib import Path

import h5py

from common.errors import InputError
from common.memory import is_out_of_memory

# Bytes a key. With HDF5's default of 1 MB, a chunk would be unpacked again for every block that touches it.
CHUNK_CACHE = 8 * 2**20
# What h5py raises on a file that is damaged, missing or not HDF5.
BAD_FILE = (OSError, RuntimeError, KeyError, ValueError)
SIGNATURE = b"\x89HDF\r\n\x1a\n"
KINDS: dict[str, bytes | tuple[bytes, ...]] = {
    "a zip archive": b"PK\x03\x04",
    "a NumPy array (.npy)": b"\x93NUMPY",
    "a pickle": (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
    "compressed by gzip": b"\x1f\x8b",
}


def opened(path: Path) -> h5py.File:
    """Open `path` for reading. Raises InputError with the reason and what to do if that fails."""
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    failed: Exception = OSError()
    # First without HDF5's lock, which many network file systems lack. A file that this process already has open must be
    # opened with the same locking.
    for locking in (False, True, "best-effort"):
        try:
            return h5py.File(path, "r", locking=locking, rdcc_nbytes=CHUNK_CACHE, rdcc_nslots=10_007)
        except BAD_FILE as error:
            failed = error
            if "file locking" not in str(error):
                break
    raise unreadable(path, failed)


def unreadable(path: Path, error: Exception) -> InputError:
    """Return the InputError for h5py's `error` on `path`: why it cannot be read, and what to do."""
    return InputError(f"{path} {_complaint(path, error)}")


def _complaint(path: Path, error: Exception) -> str:
    reason = " ".join(str(error).split())[:200]
    if is_out_of_memory(error):
        return f"needs more memory than there is ({reason}): free some, or raise the limit"
    if isinstance(error, PermissionError):
        return "cannot be read (Permission denied): change its permissions, or give another file"
    try:
        with path.open("rb") as file:
            head, locked = file.read(512), _is_locked(file.fileno())
    except OSError as refused:
        return f"cannot be read ({refused.strerror}): change its permissions, or give another file"
    if not head:
        return "is an empty file: give an HDF5 file in D4RL's layout (docs/data.md)"
    if not head.startswith(SIGNATURE) and not h5py.is_hdf5(path):  # a user block may precede the signature
        kind = kind_of(head)
        cure = "convert it by `python -m tools.convert`" if "npz" in kind else "give one in D4RL's layout"
        return f"is {kind}not an HDF5 file: {cure} (docs/data.md)"
    if locked:
        return "is open for writing elsewhere: close it there first"
    if "open for write" in reason:
        return "was never closed by the program that wrote it: close it there, or run `h5clear -s` on a copy"
    if "truncated" in reason:
        return f"is cut short ({reason}): put a whole copy in its place"
    return f"is damaged or unfinished ({reason}): put a whole copy in its place"


def _is_locked(number: int) -> bool:
    """Return whether a writer holds HDF5's lock on the open file with the descriptor `number`."""
    with contextlib.suppress(OSError):  # this file system has no locks
        try:
            fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def kind_of(head: bytes) -> str:
    """Return what a file that begins with `head` is, with a comma at the end; empty if it is not known."""
    if b".npy" in head and head.startswith(b"PK"):
        return "a NumPy archive (.npz), "
    found = next((kind for kind, magic in KINDS.items() if head.startswith(magic)), None)
    if found is None and b"\0" not in head:
        with contextlib.suppress(UnicodeDecodeError):
            text = codecs.getincrementaldecoder("utf-8")().decode(head).lstrip().lower()  # the last letter may be cut
            found = "a web page" if text.startswith(("<!doctype html", "<html")) else "a text file"
    return f"{found}, " if found else ""
