"""The search for hyperparameters in docs/many-runs.md: stopped and started again, it ends as if undisturbed."""

import re
from pathlib import Path

import pytest
from conftest import ROOT, contents

from algos import sac
from common.errors import RunError
from common.run import Result

SMALL = 'env="Pendulum-v1", hidden=(16, 16), learning_starts=50, eval_every=100, eval_episodes=1'


def search(monkeypatch: pytest.MonkeyPatch, folder: Path, stop_at: int = 0, failing: str = "") -> list[int]:
    """Run it in this folder with four small settings, and return how many steps each training was asked for.

    The training with the number `stop_at` is stopped before its first step. The setting `failing` cannot be trained.
    """
    found = re.search(r"```python\n(import csv.*?)```", (ROOT / "docs" / "many-runs.md").read_text(), re.DOTALL)
    assert found
    program = found[1]
    for old, new in {
        "range(9)": "range(4)",
        "20_000, 60_000, 180_000": "200, 300, 400",
        'env="Hopper-v4"': SMALL,
    }.items():
        assert program.count(old) == 1
        program = program.replace(old, new)
    asked: list[int] = []
    train = sac.train

    def counted(args: sac.Args) -> Result:
        asked.append(args.total_steps)
        if len(asked) == stop_at:
            raise SystemExit
        if args.run_dir and args.run_dir.name == failing:
            raise RunError("a loss is not finite")
        return train(args)

    folder.mkdir(exist_ok=True)
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sac, "train", counted)
        try:
            exec(compile(program, "docs/many-runs.md", "exec"), {})
        except SystemExit:
            assert stop_at
    return asked


def evaluations(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): data for path, data in contents(folder).items() if path.name == "evaluations.csv"
    }


@pytest.mark.parametrize("stop_at", [3, 6])  # in the first and in the last round
def test_a_search_resumes(stop_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = search(monkeypatch, tmp_path / "a")
    assert undisturbed == [200, 200, 200, 200, 300, 400]
    assert search(monkeypatch, tmp_path / "b", stop_at) == undisturbed[:stop_at]
    assert search(monkeypatch, tmp_path / "b") == undisturbed[stop_at - 1 :]
    assert evaluations(tmp_path / "a") == evaluations(tmp_path / "b")
    assert search(monkeypatch, tmp_path / "b") == []


def test_the_best_setting_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run of 400 steps is the one whose evaluation after 200 is best, and the others stay at 200."""
    search(monkeypatch, tmp_path)
    found = {path.parent.name: path.read_text().splitlines()[1:] for path in tmp_path.rglob("evaluations.csv")}
    at_200 = {name: float(line.split(",")[2]) for name, lines in found.items() for line in lines if line[:4] == "200,"}
    last = {name: int(lines[-1].split(",")[0]) for name, lines in found.items()}
    best = max(at_200, key=at_200.__getitem__)
    assert last == {"0": 200, "1": 200, "2": 200, "3": 200} | {best: 400}
    assert f"400 runs/search/{best} " in capsys.readouterr().out


def test_a_failed_setting_is_the_worst(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The setting that would have been the best, so that another one continues."""
    search(monkeypatch, tmp_path / "all")
    (best,) = re.findall(r"^400 runs/search/(\d) ", capsys.readouterr().out, re.MULTILINE)
    assert search(monkeypatch, tmp_path / "failed", failing=best) == [200, 200, 200, 200, 300, 400]
    said = capsys.readouterr().out
    assert f"runs/search/{best} a loss is not finite" in said
    assert re.search(rf"^400 runs/search/(?!{best})\d ", said, re.MULTILINE)
