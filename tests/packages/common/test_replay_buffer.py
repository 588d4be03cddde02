"""The ring, its bytes, its files."""

from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from common.errors import InputError, RunError
from common.replay_buffer import ReplayBuffer


def numbered(buffer: ReplayBuffer, numbers: range, at_once: int = 1) -> None:
    """Adds transitions whose every entry tells their number."""
    for first in range(numbers.start, numbers.stop, at_once):
        n = np.arange(first, min(first + at_once, numbers.stop), dtype=np.float64)
        obs, actions = n[:, None] + [0.1, 0.2], n[:, None] + [0.5]
        buffer.add(obs, actions, n, obs + 100, (n % 2).astype(bool))


def contents(buffer: ReplayBuffer) -> list[int]:
    return sorted(buffer.rows[: len(buffer), 3].int().tolist())


def test_memory_is_float32_and_within_budget():
    """A million transitions of HalfCheetah within 175 MB."""
    buffer = ReplayBuffer(1_000_000, 17, 6)
    assert buffer.rows.dtype == torch.float32
    assert buffer.rows.nbytes == buffer.num_bytes == 168_000_000
    assert "168 MB" in str(buffer)


def test_what_does_not_fit_is_refused_before_it_is_allocated():
    rows = psutil.virtual_memory().total // (4 * 42) + 1_000_000
    with pytest.raises(InputError, match=r"takes .* GB.*--buffer-size"):
        ReplayBuffer(rows, 17, 6)


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("count", [1, 9, 10, 11, 37])
def test_ring_keeps_the_newest_and_samples_all_of_them(count: int, at_once: int):
    """Exactly full, one more, and wrapped; every row is sampled, none that was overwritten."""
    buffer = ReplayBuffer(10, 2, 1)
    numbered(buffer, range(count), at_once)
    kept = list(range(max(0, count - 10), count))
    assert len(buffer) == len(kept)
    assert contents(buffer) == kept
    batch = buffer.sample(2000, torch.Generator().manual_seed(0))
    assert sorted(set(batch.rewards.int().tolist())) == kept


def test_a_batch_keeps_its_rows_together():
    buffer = ReplayBuffer(10, 2, 1)
    numbered(buffer, range(25))
    batch = buffer.sample(64, torch.Generator().manual_seed(0))
    n = batch.rewards
    assert [tuple(part.shape) for part in batch[:5]] == [(64, 2), (64, 1), (64,), (64, 2), (64,)]
    torch.testing.assert_close(batch.obs, n[:, None] + torch.tensor([0.1, 0.2]))
    torch.testing.assert_close(batch.actions, n[:, None] + 0.5)
    torch.testing.assert_close(batch.next_obs, n[:, None] + torch.tensor([100.1, 100.2]))
    torch.testing.assert_close(batch.terminations, n % 2)


def test_sampling_is_uniform():
    buffer = ReplayBuffer(20, 2, 1)
    numbered(buffer, range(20))
    counts = np.bincount(buffer.sample(200_000, torch.Generator().manual_seed(0)).rewards.int().numpy(), minlength=20)
    assert abs(counts / 10_000 - 1).max() < 0.05  # five standard deviations


@pytest.mark.parametrize(
    ("part", "shape"), [("obs", (1, 3)), ("actions", (1, 2)), ("rewards", (2,)), ("next_obs", (2,))]
)
def test_wrong_shapes_are_refused(part: str, shape: tuple[int, ...]):
    parts = {"obs": (1, 2), "actions": (1, 1), "rewards": (1,), "next_obs": (1, 2), "terminations": (1,)}
    buffer = ReplayBuffer(10, 2, 1)
    with pytest.raises(InputError, match=part):
        buffer.add(**{name: np.zeros(s) for name, s in (parts | {part: shape}).items()})
    assert len(buffer) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e39])
def test_non_finite_numbers_are_refused(bad: float):
    """1e39 is finite in float64, infinite in float32."""
    buffer = ReplayBuffer(10, 2, 1)
    with pytest.raises(RunError, match="non-finite rewards in transition 0"):
        buffer.add(np.zeros((1, 2)), np.zeros((1, 1)), np.array([bad]), np.zeros((1, 2)), np.zeros(1))
    assert len(buffer) == 0


@pytest.mark.parametrize("segment_rows", [4, 7, 100])
@pytest.mark.parametrize("counts", [(3, 3, 9), (10, 10, 11), (8, 25, 61, 62), (5, 400)])
def test_round_trip_through_appended_files(tmp_path: Path, counts: tuple[int, ...], segment_rows: int):
    """Every earlier state stays loadable until drop_old, whatever was saved after it."""
    buffer = ReplayBuffer(10, 2, 1)
    buffer.segment_rows = segment_rows
    states, kept = [], []
    for start, stop in zip((0, *counts), counts, strict=False):
        numbered(buffer, range(start, stop))
        states.append(buffer.save(tmp_path))
        kept.append(buffer.rows.clone())
    for state, rows in zip(states, kept, strict=True):
        copy = ReplayBuffer(10, 2, 1)
        copy.load(tmp_path, state)
        assert torch.equal(copy.rows[: len(copy)], rows[: len(copy)])
        assert copy.added == state["added"]
    buffer.drop_old(tmp_path)
    copy = ReplayBuffer(10, 2, 1)
    copy.segment_rows = segment_rows
    copy.load(tmp_path, states[-1])
    assert torch.equal(copy.rows, buffer.rows)
    numbered(copy, range(counts[-1], counts[-1] + 6))  # and it continues from there
    again = ReplayBuffer(10, 2, 1)
    again.load(tmp_path, copy.save(tmp_path))
    assert torch.equal(again.rows, copy.rows)


def test_a_save_writes_what_is_new_and_the_files_stay_bounded(tmp_path: Path):
    buffer = ReplayBuffer(100, 2, 1)
    buffer.segment_rows = 20
    row_bytes = 4 * 7
    for i in range(50):
        numbered(buffer, range(i * 10, i * 10 + 10))
        before = {f.name: f.stat().st_size for f in tmp_path.glob("*")}
        buffer.save(tmp_path)
        grown = sum(f.stat().st_size - before.get(f.name, 0) for f in tmp_path.glob("*"))
        assert grown == 10 * row_bytes
        buffer.drop_old(tmp_path)
        assert sum(f.stat().st_size for f in tmp_path.glob("*")) <= (100 + 20) * row_bytes


def test_what_a_killed_save_left_is_ignored_and_overwritten(tmp_path: Path):
    buffer = ReplayBuffer(50, 2, 1)
    numbered(buffer, range(10))
    state = buffer.save(tmp_path)
    numbered(buffer, range(1000, 1007))
    buffer.save(tmp_path)  # killed before its state was safe: the run resumes from `state`
    copy = ReplayBuffer(50, 2, 1)
    copy.load(tmp_path, state)
    numbered(copy, range(10, 13))
    again = ReplayBuffer(50, 2, 1)
    again.load(tmp_path, copy.save(tmp_path))
    assert contents(again) == list(range(13))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone"])
def test_damaged_files_are_refused(tmp_path: Path, damage: str):
    buffer = ReplayBuffer(50, 2, 1)
    numbered(buffer, range(10))
    state = buffer.save(tmp_path)
    (path,) = tmp_path.glob("*")
    data = bytearray(path.read_bytes())
    data[17] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flipped" else data[:-1])
    with pytest.raises(InputError, match="missing or damaged"):
        ReplayBuffer(50, 2, 1).load(tmp_path, state)


def test_rows_of_another_environment_are_refused(tmp_path: Path):
    state = ReplayBuffer(10, 2, 1).save(tmp_path)
    with pytest.raises(InputError, match="this environment gives"):
        ReplayBuffer(10, 3, 1).load(tmp_path, state)
