"""Downloads from a local server that breaks off, changes its mind, lies and refuses."""

import errno
import http.client
import http.server
import re
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from d4rl_file import make

from common.errors import InputError, RunError
from offline import d4rl, dataset, ogbench
from offline import download as module
from offline.d4rl import IDS, read
from offline.download import download, require_same

CONTENT = bytes(range(256)) * 4000  # just over a million bytes


class Server:
    """Serves `content` at any address; what it does wrong is set by its attributes."""

    def __init__(self) -> None:
        self.content, self.tag, self.ranges_known = CONTENT, '"1"', True
        self.cut_at: list[int] = []  # of the next replies, after how many bytes each is cut
        self.delay, self.status = 0.0, 200
        self.length: str | None = None  # what the header says instead
        self.redirects = False  # to itself
        self.asked: list[str | None] = []  # the Range of each request
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.reply(self)

            def log_message(self, *_: object) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.handle_error = lambda *_: None  # a client that went away
        self.url = f"http://127.0.0.1:{self.http.server_port}/file.hdf5"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def reply(self, request: http.server.BaseHTTPRequestHandler) -> None:
        wanted = request.headers.get("Range")
        self.asked.append(wanted)
        first = 0
        if self.redirects:
            request.send_response(302)
            request.send_header("Location", self.url)
            request.end_headers()
            return
        if self.status != 200:
            request.send_error(self.status)
            return
        if wanted and self.ranges_known and request.headers.get("If-Range") in (None, self.tag):
            first = int(re.findall(r"\d+", wanted)[0])
            if first >= len(self.content):
                request.send_error(416)
                return
            request.send_response(206)
        else:
            request.send_response(200)
        body = self.content[first:]
        request.send_header("Content-Length", self.length or str(len(body)))
        request.send_header("ETag", self.tag)
        request.end_headers()
        time.sleep(self.delay)
        request.wfile.write(body[: self.cut_at.pop(0)] if self.cut_at else body)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def anything(_: Path) -> None:
    """A check that every file passes."""


def test_it_lands_whole_and_alone(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.hdf5"
    download(server.url, path, anything)
    assert path.read_bytes() == CONTENT
    assert left(path.parent) == {"file.hdf5"}


def test_a_cut_reply_is_gone_on_with_at_once(server: Server, tmp_path: Path) -> None:
    server.cut_at = [300_000, 200_000]
    download(server.url, tmp_path / "file.hdf5", anything)
    assert (tmp_path / "file.hdf5").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=300000-", "bytes=500000-"]


def test_a_server_that_cuts_every_time_leaves_a_part_to_go_on_with(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "file.hdf5"
    server.cut_at = [100_000] * module.TRIES
    with pytest.raises(RunError, match=r"was cut short in 3 tries.*run the same command to resume"):
        download(server.url, path, anything)
    assert not path.exists()
    download(server.url, path, anything)
    assert path.read_bytes() == CONTENT
    assert server.asked[-1] == f"bytes={100_000 * module.TRIES}-"
    assert left(tmp_path) == {"file.hdf5"}


@pytest.mark.parametrize("how", ["another file", "no ranges"])
def test_parts_of_two_files_are_never_joined(server: Server, tmp_path: Path, how: str) -> None:
    path = tmp_path / "file.hdf5"
    server.cut_at = [100_000] * module.TRIES
    with pytest.raises(RunError):
        download(server.url, path, anything)
    server.content = CONTENT[::-1]
    server.tag, server.ranges_known = ('"2"', True) if how == "another file" else ('"1"', False)
    download(server.url, path, anything)
    assert path.read_bytes() == CONTENT[::-1]


def test_a_part_that_was_whole_already(server: Server, tmp_path: Path) -> None:
    """Killed between the last byte and the rename: there is nothing left to ask for."""
    (tmp_path / "file.hdf5.part").write_bytes(CONTENT)
    (tmp_path / "file.hdf5.part.json").write_text('{"validator": "\\"1\\""}')
    download(server.url, tmp_path / "file.hdf5", anything)
    assert (tmp_path / "file.hdf5").read_bytes() == CONTENT
    assert left(tmp_path) == {"file.hdf5"}


@pytest.mark.parametrize("facts", ["", "{", "[]", "{}", '{"validator": 3}', '{"validator": "a\\nb: c"}', "\udc80"])
def test_a_torn_note_of_what_was_received_begins_again(facts: str, server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.hdf5.part").write_bytes(b"of which file?")
    (tmp_path / "file.hdf5.part.json").write_text(facts, errors="surrogateescape")
    download(server.url, tmp_path / "file.hdf5", anything)
    assert (tmp_path / "file.hdf5").read_bytes() == CONTENT
    assert server.asked == [None]
    assert left(tmp_path) == {"file.hdf5"}


@pytest.mark.parametrize("length", ["abc", "-5", "1e3"])
def test_a_length_that_is_no_number(length: str, server: Server, tmp_path: Path) -> None:
    """It promises nothing, so the check of the content alone decides."""
    server.length = length
    download(server.url, tmp_path / "file.hdf5", anything)
    assert (tmp_path / "file.hdf5").read_bytes() == CONTENT


def test_a_redirect_to_itself(server: Server, tmp_path: Path) -> None:
    server.redirects = True
    with pytest.raises(InputError, match=r"infinite loop.*put it at .*file\.hdf5") as error:
        download(server.url, tmp_path / "file.hdf5", anything)
    assert len(str(error.value).splitlines()) == 1


def test_content_that_fails_the_check_is_deleted(server: Server, tmp_path: Path) -> None:
    def refuse(_: Path) -> None:
        raise InputError("it is a page")

    with pytest.raises(InputError, match=r"is not the right one.*it is a page"):
        download(server.url, tmp_path / "file.hdf5", refuse)
    assert left(tmp_path) == set()


@pytest.mark.parametrize(("status", "said"), [(404, "Not Found"), (403, "Forbidden"), (500, "Internal")])
def test_a_refusal_says_what_to_do(server: Server, tmp_path: Path, status: int, said: str) -> None:
    server.status = status
    with pytest.raises(InputError, match=rf"{said}.*put it at .*file\.hdf5"):
        download(server.url, tmp_path / "file.hdf5", anything)


def test_no_network(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be downloaded.*by other means"):
        download("http://127.0.0.1:9/file.hdf5", tmp_path / "file.hdf5", anything)
    with pytest.raises(InputError, match="cannot be downloaded"):
        download("http://no-such-host.invalid/file.hdf5", tmp_path / "file.hdf5", anything)
    assert not (tmp_path / "file.hdf5").exists()


MIRRORED: dict[str, Callable[[Path], object]] = {
    "D4RL": lambda _: read("relocate-human-v1"),
    "OGBENCH": lambda folder: ogbench._download("file", folder / "file.npz", None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("mirror", ["foo", "", "http://[::1", "http://localhost:abc", "http://a b/", "http://a..b"])
@pytest.mark.parametrize("library", MIRRORED)
def test_a_malformed_mirror_is_named(
    library: str, mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{library}_MIRROR", mirror)
    monkeypatch.setenv(f"{library}_DATASET_DIR", str(tmp_path))
    address = re.escape(mirror.rstrip("/"))
    with pytest.raises(InputError, match=f"^{address}/.*this address is malformed"):
        MIRRORED[library](tmp_path)
    assert left(tmp_path) == set()


FOLDERS: dict[str, Callable[[], object]] = {
    "D4RL_DATASET_DIR": d4rl.folder,
    "OGBENCH_DATASET_DIR": ogbench.folder,
    "ONRAMP_CACHE": lambda: dataset._on_disk(None),  # type: ignore[arg-type]  # the folder comes first
}


@pytest.mark.parametrize("variable", FOLDERS)
def test_the_home_folder_of_no_user(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "~nosuchuser/x")
    with pytest.raises(InputError, match=f"~nosuchuser/x is unknown: set {variable} to an absolute path"):
        FOLDERS[variable]()


NETWORK_ERRORS = [
    *(OSError(code, "gone") for code in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)),
    PermissionError(errno.EPERM, "gone"),  # from a firewall
    TimeoutError("gone"),
    ssl.SSLError(1, "gone"),
]


@pytest.mark.parametrize("error", NETWORK_ERRORS, ids=repr)
@pytest.mark.parametrize("call", ["begin", "read"])  # before the reply's headers, and after
def test_a_network_error_is_retried(
    call: str, error: OSError, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply, failures = http.client.HTTPResponse, [error]
    original = getattr(reply, call)

    def fails_at_times(self: Any, *args: Any) -> Any:
        if failures:
            raise failures.pop()
        return original(self, *args)

    monkeypatch.setattr(reply, call, fails_at_times)
    download(server.url, tmp_path / "file.hdf5", anything)
    assert (tmp_path / "file.hdf5").read_bytes() == CONTENT
    assert not failures  # so the first request failed, which the server may not have read in time
    failures += [error] * module.TRIES
    with pytest.raises(RunError, match=r"was cut short in 3 tries \(.*gone.*\): run the same command to resume"):
        download(server.url, tmp_path / "other.hdf5", anything)


def test_a_failed_reconnection_is_retried(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as nothing was received, the address is to blame."""
    path, opened, refuses = tmp_path / "file.hdf5", urllib.request.urlopen, [False, True]

    def urlopen(*args: Any, **kwargs: Any) -> Any:
        if refuses and refuses.pop(0):
            raise urllib.error.URLError(ConnectionRefusedError(errno.ECONNREFUSED, "refused"))
        return opened(*args, **kwargs)

    monkeypatch.setattr(module.urllib.request, "urlopen", urlopen)
    server.cut_at = [300_000]
    download(server.url, path, anything)
    assert path.read_bytes() == CONTENT
    assert server.asked == [None, "bytes=300000-"]
    refuses += [True]
    with pytest.raises(InputError, match=r"cannot be downloaded \(.*refused.*\): get the file by other means"):
        download(server.url, tmp_path / "other.hdf5", anything)
    refuses += [False, True, True]
    server.cut_at = [300_000]
    with pytest.raises(RunError, match=r"was cut short in 3 tries \(.*refused.*\): run the same command to resume"):
        download(server.url, tmp_path / "third.hdf5", anything)


def test_a_full_disk_is_not_retried(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", fails)
    with pytest.raises(OSError, match="No space left"):
        download(server.url, tmp_path / "file.hdf5", anything)
    assert len(server.asked) == 1


def test_a_disk_that_is_too_small_is_not_filled(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(RunError, match=r"10 bytes free.*make room"):
        download(server.url, tmp_path / "file.hdf5", anything)
    assert not (tmp_path / "file.hdf5").exists()


def test_two_processes_at_once_make_one_file(server: Server, tmp_path: Path) -> None:
    server.delay = 0.5
    path = tmp_path / "file.hdf5"
    call = f"download({server.url!r}, Path({str(path)!r}), print)"
    program = f"from offline.download import download; from pathlib import Path; {call}"
    both = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert path.read_bytes() == CONTENT
    assert len(server.asked) == 1
    assert left(tmp_path) == {"file.hdf5"}


def serve_d4rl(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server be D4RL's, and `tmp_path`/cache the folder of its files."""
    monkeypatch.setenv("D4RL_MIRROR", server.url.rpartition("/")[0])
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path / "cache"))


def test_an_id_is_downloaded_once_into_d4rls_folder(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.content = make(tmp_path / "theirs.hdf5", "..t..o").read_bytes()
    serve_d4rl(server, tmp_path, monkeypatch)
    for _ in range(2):
        assert len(read("relocate-human-v1")) == 5
    assert len(server.asked) == 1
    assert left(tmp_path / "cache") == {"relocate-human-v1.hdf5", "relocate-human-v1.hdf5.sha256"}


@pytest.mark.parametrize("again", [False, True])
def test_another_file_under_the_same_id_is_refused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Whether it was changed on the disk, or is what the server has after the first was deleted."""
    serve_d4rl(server, tmp_path, monkeypatch)
    server.content = make(tmp_path / "theirs.hdf5", "..t..o").read_bytes()
    read("relocate-human-v1")
    path = tmp_path / "cache" / "relocate-human-v1.hdf5"
    other = make(tmp_path / "other.hdf5", "..t..o...o").read_bytes()
    if again:
        path.unlink()
        server.content = other
    else:
        path.write_bytes(other)
    for _ in range(2):
        with pytest.raises(
            InputError, match=r"not the file that was first used here: .* relocate-human-v1\.hdf5\.sha256"
        ):
            read("relocate-human-v1")
    path.with_name(path.name + ".sha256").unlink()
    assert len(read("relocate-human-v1")) == 8


def test_a_broken_file_is_not_the_one_that_is_asked_for_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path))
    path = make(tmp_path / "relocate-human-v1.hdf5", "..t..o")
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(InputError, match="put a whole copy in its place"):
        read("relocate-human-v1")
    path.write_bytes(whole)
    assert len(read("relocate-human-v1")) == 5


def test_the_note_is_that_of_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    require_same(tmp_path / "a")
    subprocess.run(["sha256sum", "--check", "--strict", "a.sha256"], cwd=tmp_path, check=True)


def test_an_id_whose_download_is_no_dataset(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_d4rl(server, tmp_path, monkeypatch)
    with pytest.raises(InputError, match=r"is not the right one.*not an HDF5 file"):
        read("relocate-human-v1")
    assert left(tmp_path / "cache") == set()


def test_a_file_of_another_size_than_is_published_is_refused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is received, so nothing is left."""
    server.content = make(tmp_path / "theirs.hdf5", "..t..o").read_bytes()
    serve_d4rl(server, tmp_path, monkeypatch)
    with pytest.raises(InputError, match=r"and the published file has 2,040,573: .*cache/pen-human-v1\.hdf5$"):
        read("pen-human-v1")
    assert left(tmp_path / "cache") == set()


@pytest.mark.parametrize("length", [None, "abc"])
def test_the_published_size_is_that_of_the_whole_file(server: Server, tmp_path: Path, length: str | None) -> None:
    """Also of a download that resumes, and if the server does not announce it."""
    server.cut_at, server.length = ([5000] if length is None else []), length
    download(server.url, tmp_path / "a", anything, size=len(CONTENT))
    assert (tmp_path / "a").read_bytes() == CONTENT
    for name, more in (("b", 1), ("c", -1)):
        is_short = length is not None and more == 1  # it may also be the connection's fault
        with pytest.raises(RunError if is_short else InputError, match="cut short" if is_short else "published"):
            download(server.url, tmp_path / name, anything, size=len(CONTENT) + more)
        assert not (tmp_path / name).exists()


def test_published_sizes_are_those_of_ids_that_share_a_file() -> None:
    sizes = {entry.file: entry.size for entry in IDS.values()}
    assert all(entry.size == sizes[entry.file] for entry in IDS.values())
    assert sizes["gym_mujoco_v2/hopper_medium-v2.hdf5"] == 152_756_557


def test_a_folder_that_cannot_be_written_remembers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only disk is no reason not to read from it."""
    (tmp_path / "a").write_bytes(CONTENT)

    def fails(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(module, "replacing", fails)
    require_same(tmp_path / "a")
    assert left(tmp_path) == {"a"}


def test_many_first_uses_at_once(tmp_path: Path) -> None:
    """As of the runs of a sweep: none fails, and one note is left."""
    (tmp_path / "a").write_bytes(CONTENT * 10)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: require_same(tmp_path / "a"), range(40)))
    require_same(tmp_path / "a")
    assert {"a", "a.sha256"} <= left(tmp_path) <= {"a", "a.sha256", "a.sha256.lock"}
