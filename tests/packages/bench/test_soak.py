"""The soak test notices what it exists for: other results, failed commands, and growing memory and open files."""

import json
from pathlib import Path

import pytest
from conftest import long

from bench.faults import soak
from bench.faults.soak import Args, Counts, main
from common.errors import InputError, RunError

# A run is a file with a number. It resumes from the last line of "progress".
RUN = """
import os, random, signal, sys, time
from pathlib import Path
Path("run").mkdir(exist_ok=True)
progress = Path("run/progress")
done = len(progress.read_text()) if progress.exists() else 0
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
signal.signal(signal.SIGINT, lambda *_: os._exit(130))
for step in range(done, 15):
    time.sleep(0.1)
    progress.write_text("." * (step + 1))
{end}
Path("run/DONE").write_text("done")
"""


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that soaks a small program, which ends with some lines, and returns the counts."""
    monkeypatch.setattr(soak, "PERIOD", 0.1)

    def run(end: str = "", seconds: float = 8.0, **changed: float) -> dict[str, dict]:
        monkeypatch.setattr(soak, "commands", lambda _: {"small": ["-c", RUN.replace("{end}", end)]})
        values = {"hours": seconds / 3600, "between": (0.3, 0.6), "folder": tmp_path / "soak"} | changed
        main(Args(**values, json=tmp_path / "soak.json"))
        return json.loads((tmp_path / "soak.json").read_text())["parts"][-1]

    return run


def test_equal_results_are_counted_and_the_same_command_resumes(quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also what was counted before, of which the time is a part."""
    first = quick(seconds=7)
    assert first["small"]["rounds"] >= 1
    assert sum(first["small"]["signals"].values()) >= 2
    first["small"]["rounds"], first["seconds"] = 100, 1000
    (tmp_path / "soak" / "soak.json").write_text(json.dumps(first))
    second = quick(seconds=1003)
    assert second["seconds"] > 1000
    assert second["small"]["rounds"] >= 100
    refusal = "was made by other arguments or another commit: give another --folder"
    with pytest.raises(InputError, match=refusal):
        quick(seed=2)
    monkeypatch.setattr(soak, "commit", lambda: "another")  # whose configs would differ
    with pytest.raises(InputError, match=refusal):
        quick()


def test_another_result_is_an_error(quick, tmp_path: Path):
    """Both results stay where they are."""
    with pytest.raises(RunError, match=r"small/disturbed/run differs from .*small/undisturbed/run: result$"):
        quick('print(random.random(), file=open("run/result", "w"))', seconds=60)
    assert len(list((tmp_path / "soak").rglob("result"))) == 2


def test_a_run_that_is_missing_is_an_error(quick):
    with pytest.raises(RunError, match=r"disturbed/run differs from"):
        quick('if Path.cwd().name == "disturbed": sys.exit(0)', seconds=60)


def test_a_command_that_fails_is_an_error(quick):
    with pytest.raises(RunError, match=r"disturbed ended with status 3: no luck$"):
        quick('print("no luck"); sys.exit(3)', seconds=60)


def test_an_exit_status_of_signals_without_a_signal_is_an_error(quick):
    with pytest.raises(RunError, match="ended with status 143"):
        quick("sys.exit(143)", seconds=60, between=(1e6, 1e6))


def test_a_machine_too_busy_for_ray_is_no_error(quick):
    """The command starts again."""
    counts = quick('print("sweep.py: Ray does not start here: timed out"); sys.exit(2)', seconds=4)
    assert counts["small"]["rounds"] == 0


def test_a_command_that_does_not_stop_is_an_error(quick):
    with pytest.raises(RunError, match="disturbed did not end after two signals"):
        quick("signal.signal(15, signal.SIG_IGN); signal.signal(2, signal.SIG_IGN); time.sleep(60)", seconds=60)


def test_growth_is_that_of_one_process_after_its_start():
    """A process that is too young says nothing, nor does one that had no time to start up."""
    counts = Counts()
    counts.add([(5.0 * step, 5.0 * step, 1.0, 1.0) for step in range(40)])
    counts.add([(5.0 * step, 0.1 * step, 1.0 + step, 1.0) for step in range(100)])
    assert counts.processes == 0
    counts.add([(100 + 5.0 * step, 5.0 * step, 50.0 if step < 12 else 100.0 + step, 7.0) for step in range(73)])
    assert (counts.processes, counts.growth["open files"]) == (1, 1.0)
    idle = Counts()
    idle.add([(5.0 * step, 0.0, 50.0 if step < 121 else 100.0, 7.0) for step in range(160)])
    assert (idle.processes, idle.growth["memory"]) == (1, 1.0)
    first, last = 100 + 22.5, 100 + 62.5  # medians of steps 13 to 32 and 53 to 72
    assert counts.growth["memory"] == pytest.approx(last / first)


def test_the_table_of_the_page():
    """A row for each command, between the markers, with the sums of all soaks and the largest growth."""
    known = {"rounds": 3, "runs": 6, "signals": {"SIGKILL": 4}, "processes": 2, "growth": {"memory": 1.01234}}
    first = {"seconds": 5400, "settings": {"commit": "0123456789"}} | dict.fromkeys(soak.commands(1.0), known)
    page = soak.with_table(soak.PAGE.read_text(), [first])
    assert "\n1.5 hours, commit `01234567`:" in page
    assert page.count("| 3 | 6 | 4 | 0 | 0 | 2 | 1.012 |") == 3
    assert soak.with_table(page, [first]) == page
    more = {"rounds": 1, "runs": 2, "signals": {"SIGKILL": 1, "SIGINT": 5}, "processes": 9, "growth": {"memory": 1.0}}
    second = {"seconds": 7200, "settings": {"commit": "abcdef0123"}} | dict.fromkeys(soak.commands(1.0), more)
    page = soak.with_table(page, [first, second])
    assert "1.5 hours, commit `01234567`; 2.0 hours, commit `abcdef01`:" in page
    assert page.count("| 4 | 8 | 5 | 0 | 5 | 11 | 1.012 |") == 3


def test_a_soak_in_another_folder_is_added(quick, tmp_path: Path):
    """And the same one again, which resumes, replaces its own part."""
    for folder, seconds in (("a", 2), ("b", 2), ("b", 3)):
        quick(seconds=seconds, folder=tmp_path / folder)
    parts = json.loads((tmp_path / "soak.json").read_text())["parts"]
    assert [part["settings"]["folder"] for part in parts] == ["a", "b"]
    assert parts[1]["seconds"] >= 3


@long
def test_a_signal_is_due_whether_rounds_are_short_or_long(quick):
    """Rounds of a second or two, a signal every three seconds: they come, although no round lasts as long."""
    assert sum(quick(seconds=10, between=(3.0, 3.0))["small"]["signals"].values()) >= 2


def test_growing_memory_is_an_error(quick, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(soak, "START_UP", 0.0)
    monkeypatch.setattr(soak, "START_UP_IDLE", 0.0)
    grow = "kept = []\nfor _ in range(60):\n    kept.append(b'x' * 2**20)\n    time.sleep(0.1)"
    with pytest.raises(RunError, match="memory or open files of small grew by more than 10%"):
        quick(grow, seconds=9, between=(1e6, 1e6))
