"""Logs are what the run wrote: a change is refused by the resumed run, and by all that read a finished one."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import arguments_of, contents, flags, killed_at, module

from bench.pages.runs_page import read_runs
from bench.report.archive_run import keep, kept_runs
from bench.report.compare import Args, compare
from common import checkpoint
from common.errors import InputError
from common.run_folder import read_last_evaluation, require_unchanged

LOGS = ("evaluations.csv", "metrics.csv", "events.out.tfevents.run")


def flipped(data: bytearray, chance: random.Random) -> bytes:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


def other_digit(data: bytearray, chance: random.Random) -> bytes:
    data[chance.choice([i for i, byte in enumerate(data) if byte in b"012345678"])] += 1
    return bytes(data)


def moved(data: bytearray, chance: random.Random) -> bytes:
    place = chance.randrange(1, len(data))
    return bytes(data[place:] + data[:place])


MUTATIONS = [flipped, other_digit, moved]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of SAC that was killed after its checkpoint of step 100."""
    folder = tmp_path_factory.mktemp("stopped") / "1"
    assert killed_at("sac", [("update", 250)], *flags(run_dir=folder)).returncode == 0
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "sac" / "Pendulum-v1" / "1"
    module("sac").train(small_args(run_dir=folder))
    return folder


def small_args(**changed: Any) -> Any:
    return module("sac").Args(**arguments_of("sac", changed))


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("log", LOGS)
def test_a_changed_log_is_not_resumed(log: str, mutation: Callable[..., bytes], stopped: Path) -> None:
    """20 changes of each kind up to the checkpoint. The command is refused, and all files stay as they are."""
    path = stopped / log
    content, size = path.read_bytes(), checkpoint.load(stopped / "checkpoint" / "state.pt")["logger"]["sizes"][log]
    try:
        for seed in range(20):
            path.write_bytes(mutation(bytearray(content[:size]), random.Random(seed)) + content[size:])
            before = contents(stopped)
            with pytest.raises(InputError, match=f"{log} has changed since its checkpoint: restore the run folder"):
                module("sac").train(small_args(run_dir=stopped))
            assert contents(stopped) == before
    finally:
        path.write_bytes(content)


def test_rows_after_the_checkpoint_may_be_anything(stopped: Path, tmp_path: Path) -> None:
    """A kill may tear them. The run cuts them off and writes them again."""
    folder = tmp_path / "1"
    folder.mkdir()
    for path, data in contents(stopped).items():
        (folder / path.relative_to(stopped)).parent.mkdir(parents=True, exist_ok=True)
        (folder / path.relative_to(stopped)).write_bytes(data + (b"torn" if path.name in LOGS else b""))
    module("sac").train(small_args(run_dir=folder))
    assert len(read_last_evaluation(folder)) == 1


READERS: dict[str, Callable[[Path], Any]] = {
    "the same command": lambda folder: module("sac").train(small_args(run_dir=folder)),
    "more steps": lambda folder: module("sac").train(small_args(run_dir=folder, total_steps=500)),
    "archive_run": lambda folder: keep(folder, Path("kept")),
    "compare": lambda folder: compare(Args(folder.parents[2], names=("sac", "td3"), tasks=("Pendulum-v1",))),
    "report": lambda folder: read_runs([folder]),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("file", [*LOGS, "config.json"])
def test_a_changed_file_of_a_finished_run_is_read_by_nothing(
    file: str, reader: str, finished: Path, tmp_path: Path
) -> None:
    path = finished / file
    content = path.read_bytes()
    said = f"{file} (has changed since the run (ended|wrote it)|is damaged|is of another)"
    said += "|other arguments" if file == "config.json" else ""
    try:
        for mutation in MUTATIONS[:2]:
            path.write_bytes(mutation(bytearray(content), random.Random(0)))
            with pytest.raises(InputError, match=said):
                READERS[reader](finished)
    finally:
        path.write_bytes(content)
    copy = tmp_path / "sac" / "Pendulum-v1" / "1"  # which more steps change
    shutil.copytree(finished, copy)
    READERS[reader](copy)


def test_no_bit_of_the_mark_of_the_end_may_change(finished: Path) -> None:
    """One that left it readable would switch the comparison off, or compare with another checksum."""
    path = finished / "DONE"
    before = path.read_bytes()
    for at in range(len(before)):
        path.write_bytes(before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])
        with pytest.raises(InputError, match="DONE is damaged: restore it from a copy"):
            require_unchanged(finished)
    path.write_bytes(before)
    require_unchanged(finished)


def test_a_log_that_is_a_link_to_nothing_has_changed(finished: Path) -> None:
    """Unlike one that is absent, which is not missed."""
    log, kept = finished / "metrics.csv", finished / "kept"
    log.rename(kept)
    require_unchanged(finished)
    log.symlink_to("nowhere")
    with pytest.raises(InputError, match=r"metrics\.csv has changed since the run ended"):
        require_unchanged(finished)
    kept.rename(log)


@pytest.mark.parametrize("content", ["{", "[]", '"done"', "[" * 100_000, '{"step": 400, "checksums": ["x"]}'])
def test_a_damaged_mark_of_the_end_is_named(content: str, finished: Path) -> None:
    path = finished / "DONE"
    before = path.read_text()
    path.write_text(content)
    with pytest.raises(InputError, match="DONE is damaged: restore it from a copy"):
        keep(finished, Path("kept"))
    path.write_text(before)


def test_the_mark_of_an_older_run_has_no_checksums(finished: Path) -> None:
    path = finished / "DONE"
    before = path.read_text()
    for content in ("", json.dumps({"step": 400})):
        path.write_text(content)
        keep(finished, Path("kept"))
    path.write_text(before)


def test_a_damaged_archive_is_named(finished: Path) -> None:
    keep(finished, Path("results/sac/Pendulum-v1/1"))
    path = Path("results/sac/Pendulum-v1/1/evaluations.csv.gz")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"evaluations\.csv\.gz is damaged .*: restore it from a copy"):
        list(kept_runs(Path("results")))
