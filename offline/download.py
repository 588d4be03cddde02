"""Download a file: resume an interrupted download, check the file, and put it in place in one step."""

import contextlib
import http.client
import json
import os
import shutil
import socket
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock
from tqdm import tqdm

from common.errors import InputError, RunError
from common.files import replacing
from common.provenance import sha256_of

CHUNK = 2**20
TRIES = 3


def cache_folder(variable: str, default: str) -> Path:
    """Return the folder that an environment variable names, or `default`. Raises InputError if its ~ has no folder."""
    name = os.environ.get(variable, default)
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise InputError(f"the home folder of {name} is unknown: set {variable} to an absolute path") from None


def require_connection(url: str) -> None:
    """Raise ConnectionError after a few seconds if the server of `url` does not answer.

    Call it before libraries that try for half a minute and print every try. Behind a proxy it checks nothing, because
    only the proxy knows.
    """
    server = urllib.parse.urlsplit(url)
    port = server.port or {"http": 80, "https": 443}[server.scheme]
    for attempt in range(TRIES if not urllib.request.getproxies() else 0):
        try:
            return socket.create_connection((server.hostname, port), timeout=3).close()
        except OSError as error:
            if attempt == TRIES - 1:
                raise ConnectionError(
                    f"{server.netloc} did not answer in {TRIES} tries: {error.strerror or error}"
                ) from None
            time.sleep(0.5)
    return None


def download(
    url: str, path: Path, check: Callable[[Path], object], variable: str = "D4RL_DATASET_DIR", size: int | None = None
) -> None:
    """Download `url` to `path`, which appears only once it is whole: it has the promised size and passed `check`.

    What was received is kept in `path`.part. The next call resumes from there if the server still has the same file.
    `check` gets the path of the received file and raises InputError if its content is wrong. `variable` selects the
    folder, for messages. A file of another `size` in bytes than is published is refused.

    Raises InputError if the file cannot be downloaded, RunError if the disk is full or the connection is cut.
    """
    part, facts = path.with_name(path.name + ".part"), path.with_name(path.name + ".part.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(part):  # another process may be downloading it: wait for that file
            if not path.exists():
                _insist(url, part, facts, size)
                _land(url, part, path, facts, check)
    except urllib.error.URLError as error:
        reason = " ".join(str(error.reason).split())  # that of a redirect to itself has three lines
        raise InputError(
            f"{url} cannot be downloaded ({reason}): get the file by other means and put it at {path}"
        ) from None
    except PermissionError as error:
        raise InputError(f"{path.parent} cannot be written ({error.strerror}): set {variable}") from None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process holds this lock of `path`, and hold it."""
    lock = path.with_name(f"{path.name}.lock")
    with FileLock(lock):
        try:
            yield
        finally:
            lock.unlink()  # while it is held; a process that waits for it makes a new one


def note_of(path: Path) -> Path:
    """Return the path of the note that `require_same` writes."""
    return path.with_name(f"{path.name}.sha256")


def require_same(path: Path) -> None:
    """Raise InputError if the file is not the one that was first used at `path`.

    The first call writes the file's SHA-256 to `path`.sha256, which `sha256sum -c` reads. Later calls compare it, also
    after another download. A folder that cannot be written remembers nothing.
    """
    note, line = note_of(path), f"{sha256_of(path)}  {path.name}\n"
    if not note.exists():
        with contextlib.suppress(OSError), locked(note), replacing(note) as file:  # several runs may begin at once
            file.write(line.encode())
    elif note.read_bytes() != line.encode():
        raise InputError(
            f"{path} is not the file that was first used here: restore it, "
            f"or delete {note.name} next to it to accept the new one"
        )


def _land(url: str, part: Path, path: Path, facts: Path, check: Callable[[Path], object]) -> None:
    try:
        check(part)
    except InputError as error:
        part.unlink()
        facts.unlink(missing_ok=True)
        raise InputError(f"the file from {url} is not the right one, so the download was discarded: {error}") from None
    part.replace(path)
    facts.unlink(missing_ok=True)


def _insist(url: str, part: Path, facts: Path, size: int | None) -> None:
    """Call `_receive`, and again if the connection breaks or the server refuses the range.

    Raises RunError if the connection breaks in each of TRIES tries.
    """
    for attempt in range(TRIES):
        try:
            return _receive(url, part, facts, size)
        except urllib.error.HTTPError as error:
            if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE or attempt == TRIES - 1:
                raise
            facts.unlink(missing_ok=True)  # so that the whole file is requested
        except (http.client.HTTPException, ConnectionError, TimeoutError, urllib.error.URLError) as error:
            if isinstance(error, urllib.error.URLError) and not (part.exists() and isinstance(error.reason, OSError)):
                raise  # a wrong address, or no network; if a part is here, the new connection failed
            if attempt == TRIES - 1:
                raise RunError(
                    f"{url} was cut short in {TRIES} tries ({error}): run the same command to resume the download"
                ) from None
    raise AssertionError


@contextlib.contextmanager
def _network() -> Iterator[None]:
    """Turn an error of the connection into ConnectionError, and one of the address into URLError.

    Use it around calls of the network only, because a full disk also raises OSError.
    """
    try:
        yield
    except urllib.error.URLError:
        raise
    except OSError as error:
        raise ConnectionError(str(error)) from error
    except (ValueError, http.client.InvalidURL) as error:
        raise urllib.error.URLError(f"this address is malformed: {error}") from None


def _receive(url: str, part: Path, facts: Path, size: int | None) -> None:
    """Append what is missing to `part`. Raises IncompleteRead if its size is not the promised one."""
    if part.is_symlink() or not part.is_file():  # a link or a pipe that was put there is never written through
        part.unlink(missing_ok=True)
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "onramp", "Accept-Encoding": "identity"}
    if have and (same_file := _validator(facts)):
        headers |= {"Range": f"bytes={have}-", "If-Range": same_file}
    with _network():
        reply = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30)
    with reply:
        if reply.status != http.client.PARTIAL_CONTENT:
            have = 0  # the server sends the whole file: it has no ranges, or the file has changed
        length = reply.headers.get("Content-Length")
        total = have + int(length) if length and length.isdecimal() else None
        if size is not None and total not in (size, None):
            raise _wrong_size(url, total, size, part)
        total = size if total is None else total
        free = shutil.disk_usage(part.parent).free
        if total is not None and total - have > free:
            raise RunError(f"{part.parent} has {free:,} bytes free, {url} takes {total - have:,} more: make room")
        if not have:  # before its facts change, so that a kill leaves no old part with the new file's validator
            part.unlink(missing_ok=True)
        with replacing(facts) as file:
            validator = reply.headers.get("ETag") or reply.headers.get("Last-Modified")
            file.write(json.dumps({"validator": validator}).encode())
        with (
            part.open("r+b" if have else "wb") as file,
            tqdm(total=total, initial=have, unit="B", unit_scale=True, desc=part.stem, file=sys.stderr) as bar,
        ):
            file.seek(have)
            read = _network()(reply.read)
            while chunk := read(CHUNK):
                file.write(chunk)
                bar.update(len(chunk))
            have = file.tell()
            file.flush()
            os.fsync(file.fileno())
    if size is not None and have > size:  # which the server did not announce
        part.unlink()
        raise _wrong_size(url, have, size, part)
    if total is not None and have != total:
        raise http.client.IncompleteRead(b"", total - have)


def _wrong_size(url: str, found: int, published: int, part: Path) -> InputError:
    return InputError(
        f"{url} has {found:,} bytes, and the published file has {published:,}: "
        f"get the file by other means and put it at {part.with_suffix('')}"
    )


def _validator(facts: Path) -> str | None:
    """Return what identifies the server's file that a part belongs to. None, also if `facts` is torn: begin again."""
    try:
        found = json.loads(facts.read_text())["validator"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) and found.isprintable() else None
