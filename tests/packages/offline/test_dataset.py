"""What algorithms need of a dataset: each against a second, slower way to get it."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from d4rl_file import make

from common.errors import InputError, RunError
from common.replay_buffer import ReplayBuffer
from offline.dataset import TANH_LIMIT, Dataset, _Prepared, load
from offline.recording import TransitionBlock
from offline.rewards import RewardTransform

ENDS = "....t..o.....o.t...o..."  # six episodes and an unfinished one


@pytest.fixture
def path(tmp_path: Path) -> str:
    random = np.random.default_rng(3)
    rewards = random.standard_normal(len(ENDS)).astype(np.float32)
    return str(make(tmp_path / "a.hdf5", ENDS, rewards=rewards, actions=random.uniform(-2, 2, (len(ENDS), 3))))


def episodes(path: str, scale: float = 1.0, shift: float = 0.0) -> list[tuple[list[float], int]]:
    """Each episode's scaled rewards, one it loses included, and how many of them are transitions."""
    with h5py.File(path) as file:
        rewards = file["rewards"][:].astype(np.float64) * scale + shift
    found, first = [], 0
    for row, end in enumerate(ENDS):
        if end in "to" or row == len(ENDS) - 1:
            found.append((rewards[first : row + 1].tolist(), row + 1 - first - (end != "t")))
            first = row + 1
    return found


def test_boundaries(path: str) -> None:
    dataset = load(path)
    assert dataset.lengths.tolist() == [length for _, length in episodes(path)]
    assert dataset.starts.tolist() == [0, *dataset.ends[:-1]]
    assert np.flatnonzero(dataset.truncations).tolist() == [6, 11, 16, 18]
    assert (len(dataset), len(dataset.buffer), dataset.buffer.capacity) == (19, 19, 19)


def test_a_path_is_as_good_as_a_string(path: str) -> None:
    """`load(Path(...))` gives the same dataset, whose id is text."""
    dataset = load(Path(path))
    assert (dataset.id, dataset.fingerprint()) == (path, load(path).fingerprint())


def test_next_actions(path: str) -> None:
    """Each is the next row's, but an episode's last transition has none."""
    dataset = load(path)
    found, actions = dataset.next_actions(), dataset.column("actions")
    for row in range(len(dataset)):
        if row + 1 in dataset.ends:
            assert np.isnan(found[row]).all()
        else:
            assert found[row].tolist() == actions[row + 1].tolist()


def test_returns(path: str) -> None:
    expected = [sum(rewards) for rewards, _ in episodes(path, 2.0, -1.0)]
    assert np.allclose(load(path, rewards=RewardTransform(2.0, -1.0)).returns(), expected, atol=1e-6)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_return_to_go(path: str, gamma: float) -> None:
    expected = []
    for rewards, length in episodes(path, 10.0, -5.0):
        for step in range(length):
            expected.append(sum(gamma**k * reward for k, reward in enumerate(rewards[step:])))
    dataset = load(path, rewards=RewardTransform(10.0, -5.0))
    assert np.allclose(dataset.return_to_go(gamma), expected, rtol=1e-5)


def test_return_to_go_of_an_episode_that_never_succeeds(tmp_path: Path) -> None:
    """Cal-QL: it fails forever; one that succeeds at its very last step, which is lost, does not, and one
    that is cut while failing does from there on.
    """
    rewards = np.array([0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0], np.float32)
    path = str(make(tmp_path / "a.hdf5", "..o....o...o", rewards=rewards))
    to_go = load(path, rewards=RewardTransform(10.0, -5.0)).return_to_go(0.9, failure=-5.0)
    assert np.allclose(to_go[:2], -50.0)
    assert np.allclose(to_go[2:6], [-5 * (1 - 0.9**k) / 0.1 + 5 * 0.9**k for k in (4, 3, 2, 1)])
    assert to_go[8] == pytest.approx(5 - 0.9 * 50)


@pytest.mark.parametrize(("end", "expected"), [("o", [-5 + 0.9 * (5 - 0.9 * 50), 5 - 0.9 * 50, -50]),
                                               ("t", [-5 + 0.9 * (5 - 0.9 * 5), 5 - 0.9 * 5, -5])])  # fmt: skip
def test_return_to_go_behind_a_success(tmp_path: Path, end: str, expected: list[float]) -> None:
    """A cut episode would continue. One that terminates is over."""
    rewards, next_obs = np.array([0, 1, 0], np.float32), np.zeros((3, 2), np.float32)
    path = str(make(tmp_path / "a.hdf5", ".." + end, rewards=rewards, next_observations=next_obs))
    to_go = load(path, rewards=RewardTransform(10.0, -5.0)).return_to_go(0.9, failure=-5.0)
    assert to_go.tolist() == pytest.approx(expected)


class TestRewards:
    def test_they_are_scaled_once_and_online_ones_alike(self, path: str) -> None:
        raw, dataset = load(path), load(path, rewards=RewardTransform(10.0, -5.0))
        assert np.allclose(dataset.column("rewards"), raw.column("rewards") * 10 - 5, atol=1e-5)
        assert np.allclose(dataset.rewards(raw.column("rewards")), dataset.column("rewards"), atol=1e-5)

    def test_normalized_as_iql_does(self, path: str) -> None:
        raw, dataset = load(path), load(path, normalize_returns=True)
        spread = raw.returns().max() - raw.returns().min()
        assert np.ptp(dataset.returns()) == pytest.approx(1000.0)
        assert dataset.rewards.scale == pytest.approx(1000.0 / spread)

    def test_equal_returns_cannot_be_normalized(self, tmp_path: Path) -> None:
        path = str(make(tmp_path / "a.hdf5", "..t..t", rewards=np.zeros(6)))
        with pytest.raises(InputError, match=r"all returns are equal.*--no-normalize-returns"):
            load(path, normalize_returns=True)

    @pytest.mark.parametrize("options", [{}, {"normalize_returns": True}, {"compat": True}])
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("row", [1, 5, 6])
    def test_a_reward_that_is_not_finite_is_named(
        self, tmp_path: Path, row: int, value: float, options: dict[str, bool]
    ) -> None:
        """Its row in the file; rows 5 and 6 end episodes, and without a successor they are no transitions."""
        rewards = np.arange(8.0)
        rewards[row] = value
        path = str(make(tmp_path / "a.hdf5", "..t..oot", rewards=rewards))
        with pytest.raises(InputError, match=f"rewards of row {row} are not finite") as caught:
            load(path, **options)
        assert "equal" not in str(caught.value)


class TestActions:
    def test_they_are_clipped_so_that_a_tanh_policy_can_take_them(self, path: str) -> None:
        with h5py.File(path) as file:
            raw = file["actions"][:]
        clipped = load(path).column("actions")
        assert np.abs(clipped).max() == np.float32(TANH_LIMIT) < 1
        kept = [row for row, end in enumerate(ENDS[:-1]) if end != "o"]
        assert np.array_equal(load(path, max_action=None).column("actions"), raw[kept].astype(np.float32))
        assert torch.atanh(load(path).buffer.rows[:, 2:5]).isfinite().all()

    def test_the_environments_own_box_becomes_minus_one_to_one(self, tmp_path: Path) -> None:
        actions = np.array([[-0.4, 0.0], [0.4, 5.0], [0.0, 10.0]], np.float32)
        path = make(tmp_path / "a.hdf5", "..t", actions=actions)
        with h5py.File(path, "a") as file:
            file.attrs["action_low"], file.attrs["action_high"] = np.float32([-0.4, 0.0]), np.float32([0.4, 10.0])
        expected = [[-1, -1], [1, 0], [0, 1]]
        assert np.allclose(load(str(path), max_action=None).column("actions"), expected)


def test_obs_statistics(tmp_path: Path) -> None:
    obs = np.random.default_rng(0).normal([0, 1e4, -3], [1, 0.1, 0], (5000, 3))
    path = make(tmp_path / "a.hdf5", "." * 4999 + "t", observations=obs, actions=np.zeros((5000, 1)))
    mean, deviation = load(str(path)).obs_statistics()
    assert np.allclose(mean, obs.mean(0), rtol=1e-6)
    assert np.allclose(deviation, obs.astype(np.float32).astype(np.float64).std(0), rtol=1e-4, atol=1e-6)


class TestTop:
    def test_the_best_episodes_that_together_hold_so_many_transitions(self, path: str) -> None:
        dataset = load(path)
        best = np.argsort(-dataset.returns())
        for fraction in (0.05, 0.3, 0.6, 1.0):
            top = dataset.top(fraction)
            assert np.array_equal(top.returns(), dataset.returns()[best][: len(top.ends)])
            assert len(top) <= max(fraction * len(dataset), dataset.lengths[best[0]])
            if len(top.ends) < len(best):  # one more would be too many
                assert len(top) + dataset.lengths[best[len(top.ends)]] > fraction * len(dataset)
            one = best[len(top.ends) - 1]
            rows = dataset.buffer.rows[dataset.starts[one] : dataset.ends[one]]
            assert torch.equal(top.buffer.rows[top.starts[-1] : top.ends[-1]], rows)

    @pytest.mark.parametrize("fraction", [0.0, -1.0, 1.5])
    def test_a_fraction_that_is_none(self, path: str, fraction: float) -> None:
        with pytest.raises(InputError, match="the top fraction"):
            load(path).top(fraction)


class TestWeights:
    def test_return_weighting(self, path: str) -> None:
        """Hong et al.'s formula, transition by transition."""
        dataset = load(path)
        returns = dataset.returns()
        normal = (returns - returns.min()) / (returns.max() - returns.min())
        each = [np.exp(normal[i] / 0.1) for i, length in enumerate(dataset.lengths) for _ in range(length)]
        assert np.allclose(dataset.weights(0.1), np.array(each) / sum(each))
        assert np.allclose(dataset.weights(1e9), 1 / len(dataset))

    def test_advantage_weighting_takes_out_what_the_start_explains(self, tmp_path: Path) -> None:
        """Episodes whose returns are a linear function of their first obs are all equally good."""
        obs = np.random.default_rng(0).standard_normal((30, 2)).astype(np.float32)
        rewards = np.zeros(30)
        rewards[::3] = 3 * obs[::3, 0] - obs[::3, 1] + 7
        dataset = load(str(make(tmp_path / "a.hdf5", "..t" * 10, observations=obs, rewards=rewards)))
        assert np.ptp(dataset.weights(0.1)) > 1e-2
        rewards[3] += 1.0
        better = load(str(make(tmp_path / "b.hdf5", "..t" * 10, observations=obs, rewards=rewards)))
        weights = better.weights(0.1, baseline=True).reshape(10, 3)
        assert weights[:, 0].argmax() == 1


class TestFingerprint:
    def test_equal_data_equal_fingerprint(self, path: str) -> None:
        ways = [load(path), load(path, mapped=True), load(path, capacity=50)]
        assert len({dataset.fingerprint() for dataset in ways}) == 1

    def test_it_tells_everything_apart(self, path: str) -> None:
        ways: list[Dataset] = [
            load(path), load(path, rewards=RewardTransform(2.0)), load(path, max_action=0.5), load(path, compat=True),
            load(path).top(0.5),
        ]  # fmt: skip
        assert len({dataset.fingerprint() for dataset in ways}) == len(ways)


class TestCapacity:
    def test_online_transitions_go_behind_the_data(self, path: str) -> None:
        for mapped in (False, True):
            dataset = load(path, capacity=25, mapped=mapped)
            before = dataset.buffer.rows[:19].clone()
            for _ in range(3):
                dataset.buffer.add([[1, 2]], [[0, 0, 0]], [3], [[4, 5]], [True])
            assert torch.equal(dataset.buffer.rows[:19], before)
            assert dataset.buffer.rows[19:22, 0].tolist() == [1, 1, 1]
            assert (len(dataset), len(dataset.buffer)) == (19, 22)

    def test_a_buffer_that_the_data_fill_exactly_takes_the_next_in_place_of_the_oldest(self, path: str) -> None:
        """The trap of CORL (its pointer ran past the end) and of fql (its last row was never sampled)."""
        for mapped in (False, True):
            dataset = load(path, mapped=mapped)
            second, last = dataset.buffer.rows[1].clone(), dataset.buffer.rows[-1].clone()
            dataset.buffer.add([[1, 2]], [[0, 0, 0]], [3], [[4, 5]], [True])
            assert (len(dataset.buffer), dataset.buffer.rows[0, 0].item()) == (19, 1)
            assert torch.equal(dataset.buffer.rows[1], second)
            sampled = dataset.buffer.sample(2_000, torch.Generator().manual_seed(0)).obs
            assert {tuple(row) for row in sampled.tolist()} == {tuple(r) for r in dataset.buffer.rows[:, :2].tolist()}
            assert tuple(last[:2].tolist()) in {tuple(row) for row in sampled.tolist()}

    def test_its_checkpoint_can_be_loaded(self, path: str, tmp_path: Path) -> None:
        """The trap of rlpd, WSRL and EXPO, whose pickled buffers nothing reads."""
        for mapped in (False, True):
            dataset, folder = load(path, capacity=25, mapped=mapped), tmp_path / f"replay {mapped}"
            for step in range(10):  # past the end: the oldest are overwritten
                dataset.buffer.add([[step, 2]], [[0, 0, 0]], [3], [[4, 5]], [True])
            again = ReplayBuffer(25, 2, 3)
            again.load(folder, dataset.buffer.save(folder))
            assert again.added == dataset.buffer.added == 29
            assert torch.equal(again.rows, dataset.buffer.rows)

    def test_a_smaller_one_is_refused(self, path: str) -> None:
        with pytest.raises(InputError, match="has 19 transitions, the replay buffer has room for 18"):
            load(path, capacity=18)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONRAMP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def memory_taken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    """Of loading and sampling: bytes of the buffer, and by how much a line of /proc/self/status is raised.

    "peak": the most memory above the process's own, of a file with the chunks of D4RL's v2. "mapped", "in memory": what
    remains of the process's own, of another file, whose rows are on the disk already.
    """
    folder, random = tmp_path_factory.mktemp("large"), np.random.default_rng(0)
    chunked = {"chunks": (15_625, 1), "compression": "gzip", "compression_opts": 1}
    for name, rows, widths, options in (("chunked", 600_000, (17, 6), chunked), ("plain", 200_000, (48, 2), {})):
        with h5py.File(folder / f"{name}.hdf5", "w") as file:
            for key, width in zip(("observations", "actions"), widths, strict=True):
                data = random.integers(0, 2, (rows, width)).astype(np.float32)  # soon compressed
                file.create_dataset(key, data=data, **options)
            file["rewards"] = random.random(rows, np.float32)
            file["terminals"] = np.zeros(rows, bool)
            file["timeouts"] = np.arange(rows) % 1000 == 999
            file.attrs["action_low"], file.attrs["action_high"] = -1.0, 1.0
    program = (
        "import re, torch\nfrom pathlib import Path\nfrom offline.dataset import load\n"
        "def memory(kind):\n    status = Path('/proc/self/status').read_text()\n"
        "    return 1024 * int(re.search(kind + r':\\s*(\\d+)', status)[1])\n"
        "def measure(kind, name, **options):\n"
        "    Path('/proc/self/clear_refs').write_text('5')\n"  # the peak so far is forgotten
        "    before, dataset = memory(kind), load(f'{name}.hdf5', **options)\n"
        "    dataset.buffer.sample(1000, torch.Generator().manual_seed(0))\n"
        "    print(dataset.buffer.num_bytes, memory(kind) - before)\n"
        "measure('VmHWM', 'chunked')\nload('plain.hdf5', mapped=True)\n"
        "for mapped in (True, False):\n    measure('RssAnon', 'plain', mapped=mapped)"
    )
    environment = os.environ | {"ONRAMP_CACHE": str(folder)}
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    found = [tuple(map(int, said.split())) for said in done.stdout.splitlines()]
    return dict(zip(("peak", "mapped", "in memory"), found, strict=True))


class TestMapped:
    def test_the_same_rows_from_the_disk(self, path: str, own_cache: Path) -> None:
        mapped = load(path, mapped=True, rewards=RewardTransform(3.0))
        assert torch.equal(mapped.buffer.rows, load(path, rewards=RewardTransform(3.0)).buffer.rows)
        assert mapped.buffer.file is not None
        assert mapped.buffer.file.parent == own_cache

    def test_a_changed_file_or_other_arguments_make_another(self, path: str, own_cache: Path) -> None:
        load(path, mapped=True)
        load(path, mapped=True, rewards=RewardTransform(2.0))
        assert len(list(own_cache.glob("*.rows"))) == 2
        make(Path(path), ENDS, rewards=np.ones(len(ENDS)))
        assert load(path, mapped=True).column("rewards").tolist() == [1] * 19
        assert len(list(own_cache.glob("*.rows"))) == 3

    def test_a_cut_file_is_written_again(self, path: str, own_cache: Path) -> None:
        """A short file would be filled with zeros. A longer one has room for added rows, and stays."""
        expected = load(path, mapped=True, capacity=25).buffer.rows[:19].clone()
        (file,) = own_cache.glob("*.rows")
        inode, size = file.stat().st_ino, 19 * 4 * expected.shape[1]
        assert torch.equal(load(path, mapped=True).buffer.rows, expected)
        assert file.stat().st_ino == inode
        for end in (size - 1, size // 2, 0):
            os.truncate(file, end)
            assert torch.equal(load(path, mapped=True).buffer.rows, expected)
            assert file.stat().st_size == size

    def test_of_two_that_make_it_at_once_the_second_waits(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        read, calls = _Prepared.read, []

        def slowly(blocks: _Prepared) -> Iterator[TransitionBlock]:
            calls.append(blocks)
            for block in read(blocks):
                time.sleep(0.2)
                yield block

        monkeypatch.setattr(_Prepared, "read", slowly)
        with ThreadPoolExecutor() as both:
            datasets = list(both.map(lambda _: load(path, mapped=True), range(2)))
        assert len(calls) == 1
        expected = load(path).buffer.rows
        assert all(torch.equal(dataset.buffer.rows, expected) for dataset in datasets)

    def test_what_is_written_to_it_stays_in_memory(self, path: str) -> None:
        for _ in range(2):
            dataset = load(path, mapped=True)
            assert dataset.buffer.rows.isfinite().all()
            dataset.buffer.rows.fill_(float("nan"))

    def test_it_comes_by_itself_where_memory_does_not_hold_it(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        assert load(path).buffer.file is None
        monkeypatch.setattr("offline.dataset.free_memory", lambda _: 100)
        assert load(path).buffer.file is not None

    def test_a_device_that_cannot(self, path: str) -> None:
        with pytest.raises(InputError, match="meta cannot do"):
            load(path, device="meta", mapped=True)

    def test_a_full_disk_leaves_nothing(self, path: str, own_cache: Path) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
            with pytest.raises(RunError, match=r"cannot be written \(File too large\): make room"):
                load(path, mapped=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert [path.name for path in own_cache.iterdir()] in ([], [".lock"])  # an empty file

    def test_a_cache_that_cannot_be_written(self, path: str, own_cache: Path) -> None:
        own_cache.write_text("a file")
        with pytest.raises(RunError, match="cannot be written"):
            load(path, mapped=True)

    def test_memory_holds_only_what_is_read(self, memory_taken: dict[str, tuple[int, int]]) -> None:
        """80 MB mapped, of which a thousand rows are read: next to nothing is memory that the disk does not back."""
        (num_bytes, mapped), (same_bytes, in_memory) = memory_taken["mapped"], memory_taken["in memory"]
        assert num_bytes == same_bytes > 75e6
        assert mapped < 0.3 * num_bytes
        assert in_memory > 0.7 * num_bytes  # the rest is memory that the process had freed before


def test_loading_takes_little_more_memory_than_the_buffer(memory_taken: dict[str, tuple[int, int]]) -> None:
    """At its peak, above what the process had: 1.3 times the buffer's own memory."""
    num_bytes, taken = memory_taken["peak"]
    assert num_bytes > 100e6
    assert num_bytes * 0.9 < taken <= 1.3 * num_bytes
