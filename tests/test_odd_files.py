"""Files and folders of a run that are of the wrong kind, or deleted, moved or replaced while it runs."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import arguments_of, flags, module
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from common import checkpoint
from common.command_line import command_line
from common.errors import InputError
from common.files import open_regular, read_bytes, replacing
from common.run import Run
from common.run_folder import lock_of

LOGS = ("metrics.csv", "evaluations.csv", "events.out.tfevents.run")
ROWS = "checkpoint/replay/000000000000.rows"


def outcome(folder: Path, capsys: pytest.CaptureFixture[str], **changed: Any) -> tuple[int, str]:
    """Train in this process; return the exit status and what was printed after the program's name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sac.py", *flags(run_dir=folder, **changed)])
        capsys.readouterr()
        try:
            command_line(module("sac").train, module("sac").Args)
        except SystemExit as stop:
            return int(stop.code or 0), capsys.readouterr().err.rpartition("sac.py: ")[2]
    return 0, ""


def clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def put(path: Path, kind: str) -> None:
    """Replace what is at `path` by a folder, a pipe or a link to nothing."""
    clear(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "link": lambda: path.symlink_to("nowhere/x")}[kind]()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its checkpoint of step 100."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    report = Run.report

    def killed(run: Run, metrics: Any) -> None:
        report(run, metrics)
        if run.step == 120:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "report", killed)
        with pytest.raises(KeyboardInterrupt):
            module("sac").train(module("sac").Args(**_arguments(folder)))
    lock_of(folder).release(force=True)
    return folder


def _arguments(folder: Path) -> dict[str, Any]:
    return arguments_of("sac", {"run_dir": folder})


@pytest.fixture
def copied(stopped: Path) -> Path:
    """The run itself, whose path is among its arguments, as it was before the last test."""
    kept = stopped.with_name("kept")
    if not kept.exists():
        shutil.copytree(stopped, kept)
    lock_of(stopped).release(force=True)
    clear(stopped)
    shutil.copytree(kept, stopped)
    return stopped


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_a_file_of_the_wrong_kind_ends_in_one_line(copied: Path, capsys: pytest.CaptureFixture[str], kind: str):
    """Each file in turn is refused by its name, or replaced. Nothing waits for the other end of a pipe."""
    files = ["config.json", *LOGS, "checkpoint/state.pt", ROWS, "policy", "policy/last.safetensors", "DONE", ".lock"]
    replaced = {"link": {"checkpoint/state.pt", "policy/last.safetensors", "DONE"}}
    replaced |= {"folder": {"policy"}, "pipe": {"policy/last.safetensors", ".lock"}}
    kept = copied.with_name("kept")
    for name in files:
        clear(copied)
        shutil.copytree(kept, copied)
        put(copied / name, kind)
        status, said = outcome(copied, capsys)
        if name in replaced[kind]:
            assert status == 0, (name, said)
        else:
            assert status in (1, 2), (name, said)
            assert len(said.strip().splitlines()) <= 2
            named = copied if (name, kind) == ("config.json", "link") else copied / name
            assert str(named) in said, (name, said)
            assert ".part" not in said


@pytest.mark.parametrize("name", ["config.json", "checkpoint/state.pt", "policy/last.safetensors", "DONE"])
def test_a_folder_where_a_file_is_written_first(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str):
    part, open_folder = tmp_path / "run" / f"{name}.part", Run._open
    if name == "config.json":
        put(part, "folder")

    def then_put(run: Run) -> Any:
        saved = open_folder(run)
        put(part, "folder")
        return saved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "_open", then_put)
        status, said = outcome(tmp_path / "run", capsys)
    assert (status, said) == (1, f"Is a directory ({part}): correct that, then run the same command again\n")


def test_a_link_or_pipe_at_a_part_file_is_replaced(tmp_path: Path):
    """What the link points to keeps its content, and no pipe is waited for."""
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    for make in (lambda p: p.symlink_to(precious), lambda p: p.symlink_to(tmp_path / "new"), os.mkfifo):
        make(tmp_path / "file.part")
        with replacing(tmp_path / "file") as file:
            file.write(b"state")
        assert (tmp_path / "file").read_bytes() == b"state"
        assert not (tmp_path / "file").is_symlink()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "precious"]
    (tmp_path / "file.part").symlink_to(precious)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # the link is put there just after the check
        with pytest.raises(FileExistsError), replacing(tmp_path / "file") as file:
            file.write(b"state")
    assert precious.read_text() == "years of work"


@pytest.mark.parametrize("name", [*LOGS, ROWS])
def test_a_link_at_a_file_that_grows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str):
    """A run writes into these files. In a folder without a checkpoint, nothing else tells whose they are."""
    folder, precious = tmp_path / "run", tmp_path / "precious"
    precious.write_text("years of work")
    outcome(folder, capsys)
    clear(folder / "checkpoint")
    (folder / "DONE").unlink()
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    clear(folder / name)
    (folder / name).symlink_to(precious)
    status, said = outcome(folder, capsys)
    assert (status in (1, 2), "(Is a symbolic link)" in said or "Is a symbolic link (" in said) == (True, True), said
    assert str(folder / name) in said
    assert len(said.strip().splitlines()) <= 2
    assert precious.read_text() == "years of work"


def test_a_link_at_the_lock_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder, precious = tmp_path / "run", tmp_path / "precious"
    folder.mkdir()
    precious.write_text("years of work")
    for target in (precious, tmp_path / "new"):
        (folder / ".lock").symlink_to(target)
        status, said = outcome(folder, capsys)
        assert (status, said.split(":")[0]) == (2, f"{folder}/.lock cannot be locked (it is a symbolic link)")
        (folder / ".lock").unlink()
    assert precious.read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "run"]


def test_only_regular_files_are_opened(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(path, "rb")
    with pytest.raises(InputError, match=r"pipe cannot be read \(Is not a regular file\)"):
        read_bytes(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path, "rb")


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


def copied_back(folder: Path) -> None:
    moved(folder)
    shutil.copytree(folder.with_name("moved"), folder)


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


LIVE: dict[str, tuple[Callable[[Path], object], str]] = {
    "moved": (moved, "is no longer the folder that this run locked"),
    "replaced by a copy": (copied_back, "is no longer the folder that this run locked"),
    "deleted": (shutil.rmtree, "is no longer the folder that this run locked"),
    "replaced by an empty one": (emptied, "is no longer the folder that this run locked"),
    "without its rows": (lambda folder: (folder / ROWS).unlink(), f"{ROWS} was deleted, cut or replaced"),
    "without its config": (lambda folder: (folder / "config.json").unlink(), "No such file or directory"),
} | {
    f"without {name}": (lambda folder, name=name: (folder / name).unlink(), f"{name} was moved, deleted or replaced")
    for name in LOGS
}  # fmt: skip


@pytest.mark.parametrize("case", LIVE)
def test_a_run_notices_what_happens_to_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str):
    """It never ends as if all were well, and writes nothing into a folder that it did not lock."""
    folder, (change, reason) = tmp_path / "run", LIVE[case]
    report = Run.report

    def changed(run: Run, metrics: Any) -> None:
        if run.step == 150:
            change(folder)
        report(run, metrics)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "report", changed)
        status, said = outcome(folder, capsys)
    assert status == 1
    assert reason in said
    assert len(said.strip().splitlines()) <= 2
    assert not (folder / "DONE").exists()
    if case == "replaced by an empty one":
        assert not list(folder.iterdir())
    if case in ("moved", "replaced by a copy"):
        clear(folder)
        (tmp_path / "moved").rename(folder)  # as the message asks
        assert outcome(folder, capsys)[0] == 0


def test_a_failed_run_of_this_process_does_not_hold_a_folder_that_is_gone(tmp_path: Path):
    """As in a notebook: the second run locks the new folder, and another process is kept out of it."""
    held = lock_of(tmp_path / "run")
    (tmp_path / "run").mkdir()
    held.acquire()
    shutil.rmtree(tmp_path / "run")
    module("sac").train(module("sac").Args(**_arguments(tmp_path / "run") | {"total_steps": 20}))
    assert (tmp_path / "run" / ".lock").exists()
    assert not held.is_locked


@pytest.mark.parametrize("length", [236, 255])
def test_a_folder_with_the_longest_name(tmp_path: Path, capsys: pytest.CaptureFixture[str], length: int):
    folder = tmp_path / ("x" * length)
    assert outcome(folder, capsys)[0] == 0
    assert outcome(folder, capsys, total_steps=450)[0] == 0  # it is extended, too
    assert [path.name for path in folder.glob("events*")] == ["events.out.tfevents.run"]


def test_an_older_run_keeps_the_name_of_its_event_file(copied: Path, capsys: pytest.CaptureFixture[str]):
    """Its name was that of its folder; whether from a checkpoint or before the first one, there is no second file."""
    old = copied / f"events.out.tfevents.{copied.name}x"
    for before_checkpoint in (False, True):
        clear(copied)
        shutil.copytree(copied.with_name("kept"), copied)
        (copied / LOGS[2]).rename(old)
        if before_checkpoint:
            shutil.rmtree(copied / "checkpoint")
        else:
            state = checkpoint.load(copied / "checkpoint" / "state.pt")
            for facts in (state["logger"]["sizes"], state["logger"]["checksums"]):
                facts[old.name] = facts.pop(LOGS[2])
            checkpoint.save(copied / "checkpoint" / "state.pt", state)
        assert outcome(copied, capsys)[0] == 0
        assert list(copied.glob("events*")) == [old]
        steps = [event.step for event in EventFileLoader(str(old)).Load() if event.HasField("summary")]
        assert steps == sorted(steps)
        assert {0, 100, 200} <= set(steps)


def test_a_log_that_may_not_be_written(copied: Path, capsys: pytest.CaptureFixture[str]):
    """It is named before anything is changed."""
    before = (copied / "evaluations.csv").read_bytes()

    def denied(path: str, *arguments: Any, **options: Any) -> int:
        if str(path).endswith("metrics.csv"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *arguments, **options)

    real = os.open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", denied)
        status, said = outcome(copied, capsys)
    assert (status, said.split(":")[0]) == (2, f"{copied}/metrics.csv cannot be written (Permission denied)")
    assert (copied / "evaluations.csv").read_bytes() == before
