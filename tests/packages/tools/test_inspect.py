"""What `tools.inspect_dataset` reports, against direct counts on tiny files."""

import json
import runpy
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from d4rl_file import make

from common.command_line import command_line
from common.errors import InputError
from offline.d4rl import read
from tools.inspect_dataset import Args, coverage, describe, draw, facts, main

ENDS = "....t..o.....o.t...o..."


def test_counts(tmp_path: Path) -> None:
    rows = len(ENDS)
    random = np.random.default_rng(0)
    obs, actions = random.standard_normal((rows, 2)), random.uniform(-0.9, 0.9, (rows, 2))
    rewards = random.standard_normal(rows)
    obs[9], actions[9], rewards[9] = obs[8], actions[8], rewards[8]  # alike, but for what follows
    obs[10] = obs[8]  # now row 9 leads where row 8 leads
    actions[1, 0], actions[2, 1], actions[3] = 1.2, -1.0, 1.0
    obs[5, 1], rewards[6] = np.nan, np.inf
    recording = read(str(make(tmp_path / "a.hdf5", ENDS, observations=obs, actions=actions, rewards=rewards)))
    found = facts(recording)
    assert found["transitions"] == rows - 4
    assert (found["episodes"], found["terminated episodes"], found["truncated episodes"]) == (6, 2, 4)
    assert found["last steps without a successor"] == 4
    assert found["terminations inside episodes"] == 0
    assert found["lengths"]["min"] == 2
    assert found["duplicate transitions"] == 1
    assert found["duplicate actions"] == 1
    assert found["transitions with actions outside their bounds"] == 1
    assert found["transitions with actions at their bounds"] == 2
    bad = found["transitions not finite"]
    assert (bad["obs"], bad["next_obs"], bad["rewards"], bad["actions"]) == (1, 0, 1, 0)
    kept = [row for row, end in enumerate(ENDS[:-1]) if end != "o"]
    column = found["columns"]["actions"]
    assert np.allclose(column["mean"], actions[kept].mean(0), atol=1e-6)
    assert np.allclose(column["std"], actions[kept].std(0), atol=1e-6)
    assert np.allclose(column["max"], actions[kept].max(0))
    assert np.allclose(found["columns"]["obs"]["min"], np.nanmin(obs[kept], axis=0))


def test_numbers_that_are_large(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """A time in seconds since 1970 hides no deviation, and what float32 cannot hold counts as not finite."""
    random = np.random.default_rng(0)
    obs = np.stack([1.7e9 + random.standard_normal(6), random.standard_normal(6)], axis=1)
    obs[3, 1] = 1e300
    found = facts(read(str(make(tmp_path / "a.hdf5", ".....t", observations=obs))))
    assert found["transitions not finite"]["obs"] == 1
    column = found["columns"]["obs"]
    assert column["std"][0] == pytest.approx(obs[:, 0].std(), rel=1e-6)
    assert column["mean"][0] == pytest.approx(obs[:, 0].mean(), rel=1e-12)
    assert not recwarn.list


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_lost_reward_that_is_not_finite_counts(tmp_path: Path, value: float) -> None:
    """The step at a time-out is no transition here, but its reward is in the return."""
    recording = read(str(make(tmp_path / "a.hdf5", "..o..t", rewards=np.array([1, 2, value, 4, 5, 6.0]))))
    found = facts(recording)
    assert found["transitions not finite"]["rewards"] == 1
    assert found["last steps without a successor"] == 1
    assert recording.returns().tolist() == [np.inf, 15.0]


def test_trajectory_quality_is_the_mean_return_between_random_and_expert(tmp_path: Path) -> None:
    path = make(tmp_path / "a.hdf5", "..t..o", rewards=np.array([1, 2, 3, 4, 5, 6.0]))
    with h5py.File(path, "a") as file:
        file.attrs["ref_min_score"], file.attrs["ref_max_score"] = 0.5, 20.5
    found = facts(read(str(path)))
    assert found["TQ"] == pytest.approx(((6 + 15) / 2 - 0.5) / 20)
    assert found["score"] == pytest.approx(100 * found["TQ"])
    assert facts(read(str(make(tmp_path / "b.hdf5", "..t"))))["TQ"] is None


class TestCoverage:
    def test_counts_of_cells(self, tmp_path: Path) -> None:
        """By a set of tuples, with numpy's own digitize, over as many transitions as the smaller dataset has."""
        random = np.random.default_rng(0)
        pairs = {}
        for name, rows, spread in (("reference", 400, 1.0), ("narrow", 300, 0.3)):
            pairs[name] = spread * random.standard_normal((rows, 3)).astype(np.float32)
            parts = {"observations": pairs[name][:, :2], "actions": pairs[name][:, 2:]}
            make(tmp_path / f"{name}.hdf5", "t" * rows, **parts)

        def ratio(ours: np.ndarray, reference: np.ndarray) -> float:
            edges = [np.linspace(column.min(), column.max(), 5) for column in reference.T]
            cells = [
                {tuple(int(np.digitize(v, e)) for v, e in zip(row, edges, strict=True)) for row in values}
                for values in (ours, reference)
            ]
            return len(cells[0]) / len(cells[1])

        narrow = read(str(tmp_path / "narrow.hdf5"))
        whole = read(str(tmp_path / "reference.hdf5"))
        assert coverage(narrow, whole) == pytest.approx(ratio(pairs["narrow"], pairs["reference"][:300]))
        assert coverage(whole, narrow) == pytest.approx(ratio(pairs["reference"][:300], pairs["narrow"]))
        assert coverage(narrow, whole) < 0.9
        assert coverage(whole, whole) == 1.0

    def test_datasets_of_different_widths(self, tmp_path: Path) -> None:
        make(tmp_path / "wide.hdf5", "t" * 10, observations=np.zeros((10, 5)))
        with pytest.raises(InputError, match="have different observations or actions"):
            coverage(read(str(make(tmp_path / "a.hdf5", "t" * 10))), read(str(tmp_path / "wide.hdf5")))


@pytest.mark.filterwarnings("ignore:'tools.inspect_dataset' found in sys.modules")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = make(tmp_path / "a.hdf5", ENDS)
    with h5py.File(path, "a") as file:
        file.attrs["env"] = "Hopper-v4"
    out, picture = tmp_path / "facts.json", tmp_path / "returns.png"
    flags = [str(path), "--reference", str(path), "--json", str(out), "--picture", str(picture)]
    monkeypatch.setattr(sys, "argv", ["inspect_dataset.py", *flags])
    runpy.run_module("tools.inspect_dataset", run_name="__main__", alter_sys=True)
    said = capsys.readouterr()
    assert said.err == ""
    assert "19 transitions in 6 episodes of Hopper-v4" in said.out
    assert "SACo       1.000" in said.out
    assert json.loads(out.read_text())["transitions"] == 19
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bad_input_ends_in_two_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for argument in ("hoper-medium-v2", str(tmp_path / "none.hdf5"), "--nonsense"):
        monkeypatch.setattr(sys, "argv", ["inspect_dataset.py", argument])
        with pytest.raises(SystemExit) as stop:
            command_line(main, Args)
        assert stop.value.code == 2
        assert 1 <= len(capsys.readouterr().err.splitlines()) <= 2


def test_data_of_which_nothing_is_finite_are_described(tmp_path: Path) -> None:
    recording = read(
        str(make(tmp_path / "a.hdf5", "..t", rewards=np.full(3, np.nan), observations=np.full((3, 2), np.inf)))
    )
    assert "3 obs" in describe(facts(recording), recording.returns())
    main(Args(str(tmp_path / "a.hdf5"), json=tmp_path / "a.json"))
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["transitions"] == 3


@pytest.mark.parametrize(
    "rewards", [[1e16, 1e16 + 2.0, 1e16 + 2.0], [5.0, 5.0, 5.0], [np.nan, np.inf, 1.0], [np.nan, np.inf, -np.inf]]
)
def test_returns_that_are_hard_to_draw(tmp_path: Path, rewards: list[float]) -> None:
    """Huge and nearly equal, all equal, or not finite: three episodes of one step."""
    recording = read(str(make(tmp_path / "a.hdf5", "ttt", rewards=np.array(rewards))))
    returns = recording.returns()
    assert np.array_equal(returns, rewards, equal_nan=True)
    bars = describe(facts(recording), returns)
    assert bars.count("█") == np.isfinite(returns).any()
    draw(returns, "three", tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_compat_is_passed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(make(tmp_path / "a.hdf5", ENDS))
    main(Args(path))
    main(Args(path, d4rl_compat=True))
    first, second = capsys.readouterr().out.split("a.hdf5: ")[1:]
    assert first.startswith("19 transitions")
    assert second.startswith("19 transitions")
    assert first != second


def test_a_horizon_beside_a_reference_that_marks_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is for the file alone; a reference without time-outs gets it too, and the file's refusal stays."""
    without, marked = (
        str(make(tmp_path / "a.hdf5", "." * 12, timeouts=None)),
        str(make(tmp_path / "b.hdf5", ".....o" * 2)),
    )
    for reference in (marked, without):
        main(Args(without, reference, horizon=4))
        assert "9 transitions in 3 episodes" in (said := capsys.readouterr().out)
        assert "SACo" in said
    with pytest.raises(InputError, match="marks its time-outs itself"):
        main(Args(marked, without, horizon=4))


def test_a_picture_in_any_format(tmp_path: Path) -> None:
    for kind in ("png", "pdf", "svg"):
        draw(np.arange(10.0), "ten", tmp_path / f"a.{kind}")
        assert (tmp_path / f"a.{kind}").stat().st_size > 1000
    draw(np.arange(10.0), "a path with two $: x^_$", tmp_path / "b.png")


@pytest.mark.parametrize("flag", ["picture", "json"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    flag: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(make(tmp_path / "a.hdf5", "..t"))
    with pytest.raises(InputError, match=rf"/proc/no/x\.png cannot be written .*: give another --{flag}"):
        main(Args(path, **{flag: Path("/proc/no/x.png")}))
    assert capsys.readouterr().out == ""


def test_what_cannot_be_drawn_or_compared_is_refused(tmp_path: Path) -> None:
    path, nothing = (str(make(tmp_path / f"{name}.hdf5", "..t", **rows))
                     for name, rows in (("a", {}), ("b", {"observations": np.full((3, 2), np.nan)})))  # fmt: skip
    with pytest.raises(InputError, match=r"--json and --picture are both a\.png: give two files"):
        main(Args(path, json=Path("a.png"), picture=Path("a.png")))
    with pytest.raises(InputError, match=r"--picture a\.xyz: give a file that ends in \.png, \.pdf or \.svg"):
        main(Args(path, picture=Path("a.xyz")))
    with pytest.raises(InputError, match=r"b\.hdf5 has no finite observations and actions: give another --reference"):
        main(Args(path, reference=nothing))
