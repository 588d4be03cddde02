"""D4RL's layout read right: what becomes a transition, what ends an episode, and files that are not what they seem."""

import gzip
import os
import pickle
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import bound_by_permissions
from d4rl_file import make
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import InputError
from offline import d4rl
from offline.dataset import load
from offline.recording import RawDataset, TransitionBlock


def joined(recording: RawDataset) -> TransitionBlock:
    return TransitionBlock(*(np.concatenate(parts) for parts in zip(*recording.blocks(), strict=True)))


def first_column(recording: RawDataset) -> tuple[list[float], list[float]]:
    """Which rows the transitions lead from and to."""
    block = joined(recording)
    return block.obs[:, 0].tolist(), block.next_obs[:, 0].tolist()


def peak() -> int:
    """The most memory of this process so far, in KiB."""
    return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


class TestEpisodes:
    def test_no_transition_joins_two_episodes(self, tmp_path: Path) -> None:
        recording = d4rl.read(str(make(tmp_path / "a.hdf5", "..t..o..t.")))
        obs, next_obs = first_column(recording)
        assert obs == [0, 1, 2, 3, 4, 6, 7, 8]
        assert next_obs == [1, 2, 2, 4, 5, 7, 8, 8]  # a terminal step leads nowhere; it is its own successor
        assert joined(recording).terminations.tolist() == [0, 0, 1, 0, 0, 0, 0, 1]

    def test_the_step_at_a_time_out_is_dropped_and_still_counts_in_the_return(self, tmp_path: Path) -> None:
        recording = d4rl.read(str(make(tmp_path / "a.hdf5", "..t..o..t.")))
        assert recording.ends.tolist() == [3, 5, 8]
        assert recording.dropped_final_rewards.tolist()[1] == 105
        assert np.isnan(recording.dropped_final_rewards[[0, 2]]).all()
        assert recording.returns().tolist() == [303, 103 + 104 + 105, 106 + 107 + 108]

    def test_it_is_kept_where_its_next_observation_exists(self, tmp_path: Path) -> None:
        following = np.arange(10, dtype=np.float32)[:, None] * [1.0, 10.0] + 0.5
        recording = d4rl.read(str(make(tmp_path / "a.hdf5", "..t..o..t.", next_observations=following)))
        obs, next_obs = first_column(recording)
        assert obs == list(range(10))
        assert next_obs == [row + 0.5 for row in range(10)]
        assert recording.ends.tolist() == [3, 6, 9, 10]
        assert np.isnan(recording.dropped_final_rewards).all()

    def test_a_kitchen_with_all_four_tasks_complete_is_terminal(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path))
        rewards = np.array([1, 3, 4, 4, 0, 2, 3], np.float32)
        path = make(tmp_path / Path(d4rl.IDS["kitchen-mixed-v0"].file).name, "...o..o", rewards=rewards)
        recording = d4rl.read("kitchen-mixed-v0")
        assert joined(recording).terminations.tolist() == [0, 0, 1, 1, 0, 0]
        assert recording.ends.tolist() == [3, 4, 6]
        for others in (d4rl.read("kitchen-mixed-v0", compat=True), d4rl.read(str(path))):  # D4RL's own, and no kitchen
            assert not joined(others).terminations.any()

    def test_a_terminal_step_at_the_time_limit_is_a_termination(self, tmp_path: Path) -> None:
        recording = d4rl.read(str(make(tmp_path / "a.hdf5", "..b..o")))
        assert joined(recording).terminations.tolist() == [0, 0, 1, 0, 0]

    def test_an_episode_whose_only_step_has_no_successor_is_none(self, tmp_path: Path) -> None:
        recording = d4rl.read(str(make(tmp_path / "a.hdf5", "o..too..o")))
        assert recording.ends.tolist() == [3, 5]
        assert first_column(recording)[0] == [1, 2, 3, 6, 7]

    @pytest.mark.parametrize("block_rows", [1, 2, 3, 5, 100])
    def test_blocks_of_any_size_give_the_same_transitions(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_rows: int
    ) -> None:
        path = str(make(tmp_path / "a.hdf5", "..t..oo.t.....b..o."))
        for compat in (False, True):
            whole = joined(d4rl.read(path, compat))
            monkeypatch.setattr(d4rl, "BLOCK_ROWS", block_rows)
            assert all(map(np.array_equal, whole, joined(d4rl.read(path, compat))))
            monkeypatch.undo()

    @pytest.mark.parametrize("compat", [False, True])
    def test_a_block_without_transitions_is_left_out(self, tmp_path: Path, compat: bool) -> None:
        """The last row of the file is alone in its block."""
        path = str(make(tmp_path / "a.hdf5", "." * (d4rl.BLOCK_ROWS + 1)))
        assert len(load(path, compat=compat)) == d4rl.BLOCK_ROWS

    def test_against_brute_force(self, tmp_path: Path) -> None:
        random = np.random.default_rng(0)
        for case in range(50):
            ends = "".join(random.choice(list("....tob"), random.integers(2, 40)))
            path = str(make(tmp_path / f"{case}.hdf5", ends))
            expected, returns, total, kept = [], [], 0.0, 0
            for row, end in enumerate(ends):
                last = end in "tob" or row == len(ends) - 1
                total += 100 + row
                if end in "tb" or not last:
                    expected.append((row, row if last else row + 1, end in "tb"))
                    kept += 1
                if last:
                    returns += [total] if kept else []
                    total, kept = 0.0, 0
            if not expected:
                with pytest.raises(InputError, match="no step has a successor"):
                    d4rl.read(path)
                continue
            recording = d4rl.read(path)
            assert list(zip(*first_column(recording), joined(recording).terminations.tolist(), strict=True)) == expected
            assert recording.returns().tolist() == returns
            assert load(path).returns().tolist() == returns


class TestWithoutTimeouts:
    def test_the_time_limit_cuts(self, tmp_path: Path) -> None:
        path = str(make(tmp_path / "a.hdf5", ".....t......", timeouts=None))
        recording = d4rl.read(path, horizon=4)
        assert first_column(recording)[0] == [0, 1, 2, 4, 5, 6, 7, 8, 10]
        assert recording.ends.tolist() == [3, 5, 8, 9]

    @pytest.mark.parametrize("horizon", [2.5, "4", 0])
    def test_it_is_a_whole_number(self, tmp_path: Path, horizon: Any) -> None:
        """Anything else is refused, from Python too."""
        path = make(tmp_path / "a.hdf5", "....", timeouts=None)
        with pytest.raises(InputError, match=f"--horizon is {horizon}: give .* a whole number of at least 1"):
            load(path, horizon=horizon)

    def test_it_must_be_known(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"no timeouts.*--horizon"):
            d4rl.read(str(make(tmp_path / "a.hdf5", "....", timeouts=None)))

    def test_an_id_has_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path))
        make(tmp_path / "hopper_mixed.hdf5", "." * 1500, timeouts=None)
        assert d4rl.read("hopper-medium-replay-v0").ends.tolist() == [999, 1498]


def qlearning_dataset(ends: str, timeouts: bool, horizon: int) -> list[tuple[int, int, bool]]:
    """D4RL's conversion as its documentation describes it, row by row: where from, where to, terminal."""
    found, step = [], 0
    for row in range(len(ends) - 1):
        final = ends[row] in "ob" if timeouts else step == horizon - 1
        if final:
            step = 0
            continue
        step = 1 if ends[row] in "tb" else step + 1
        found.append((row, row + 1, ends[row] in "tb"))
    return found


@pytest.mark.parametrize("timeouts", [True, False])
def test_compat_is_qlearning_dataset(tmp_path: Path, timeouts: bool) -> None:
    random = np.random.default_rng(1)
    for case in range(30):
        ends = "".join(random.choice(list(".....tob"), 40))
        following = None if case % 2 else np.zeros((40, 2), np.float32)  # never read
        changed = {"next_observations": following} | ({} if timeouts else {"timeouts": None})
        path = str(make(tmp_path / f"{case}.hdf5", ends, **changed))
        horizon = None if timeouts else 5
        recording = d4rl.read(path, compat=True, horizon=horizon)
        found = list(zip(*first_column(recording), joined(recording).terminations.tolist(), strict=True))
        assert found == qlearning_dataset(ends, timeouts, horizon=5)
        assert len(load(path, compat=True, horizon=horizon)) == len(found)


def test_trajectories_leave_nothing_out(tmp_path: Path) -> None:
    path = str(make(tmp_path / "a.hdf5", "..t..o."))
    assert [len(episode["rewards"]) for episode in d4rl.trajectories(path)] == [3, 3, 1]
    assert [len(episode["rewards"]) for episode in d4rl.trajectories(path, compat=True)] == [3, 3]
    rewards = np.concatenate([episode["rewards"] for episode in d4rl.trajectories(path)])
    assert rewards.tolist() == [100 + row for row in range(7)]


class TestIds:
    def test_every_id_has_a_file_a_time_limit_and_its_scores(self) -> None:
        assert len(d4rl.IDS) == 155
        without = {name for name, entry in d4rl.IDS.items() if entry.reference is None}
        assert without == {
            *(f"maze2d-eval-{size}{dense}-v1" for size in ("umaze", "medium", "large") for dense in ("", "-dense")),
            "ant-random-expert-v0",
            "carla-town-full-v0",
        }
        assert all(entry.max_episode_steps > 0 and entry.file.endswith(".hdf5") for entry in d4rl.IDS.values())

    def test_environments_have_the_scores_of_their_datasets(self) -> None:
        assert d4rl.reference("Hopper-v4") == d4rl.reference("hopper-expert-v0") == (-20.272305, 3234.3)
        assert d4rl.reference("offline.environments:d4rl/door-v1") == (-56.512833, 2880.5693087298737)
        assert d4rl.reference("offline.environments:d4rl/ant-v2") == (-325.6, 3879.7)
        assert d4rl.reference("offline.environments:d4rl/maze2d-eval-umaze-v1") is None
        assert d4rl.reference("AdroitHandDoor-v1") is None  # another reward

    def test_d4rls_own_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("D4RL_DATASET_DIR", raising=False)
        assert d4rl.folder() == Path.home() / ".d4rl" / "datasets"
        monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path))
        make(tmp_path / "hopper_medium-v2.hdf5", "..t")
        recording = d4rl.read("hopper-medium-v2")
        assert (len(recording), recording.env) == (3, "Hopper-v4")
        assert recording.reference == (-20.272305, 3234.3)

    @pytest.mark.parametrize(
        ("name", "meant"), [("hoper-medium-v2", "hopper-medium-v2"), ("antmaze-large-v2", "antmaze-large-play-v2")]
    )
    def test_unknown_ones_name_the_nearest(self, name: str, meant: str) -> None:
        with pytest.raises(InputError, match=f"there is no dataset {name}: did you mean .*{meant}"):
            load(name)


def damaged(path: Path, **changed: Any) -> str:
    return str(make(path, "..t..o..t.", **changed))


class TestBadFiles:
    """Each ends with a message that names the file and what is wrong."""

    @pytest.mark.parametrize("key", ["observations", "actions", "rewards", "terminals"])
    def test_a_missing_key(self, tmp_path: Path, key: str) -> None:
        with pytest.raises(InputError, match=f"has no {key}"):
            d4rl.read(damaged(tmp_path / "a.hdf5", **{key: None}))

    @pytest.mark.parametrize(
        ("key", "value", "said"),
        [
            ("observations", np.zeros((9, 2)), "observations has shape"),
            ("observations", np.zeros(10), "observations has shape"),
            ("observations", np.zeros((10, 3, 3)), "observations has shape"),
            ("observations", np.zeros((10, 0)), "observations has shape"),
            ("actions", np.zeros((11, 1)), "actions has shape"),
            ("rewards", np.zeros((10, 2)), "rewards has shape"),
            ("terminals", np.zeros(3, bool), "terminals has shape"),
            ("timeouts", np.zeros(11, bool), "timeouts has shape"),
            ("terminals", np.array([0.0] * 7 + [np.nan, 0, 1]), "terminals of row 7 is nan: give 0 or 1"),
            ("timeouts", np.array([0.0, -np.inf] + [1.0] * 8), "timeouts of row 1 is -inf: give 0 or 1"),
            ("next_observations", np.zeros((10, 3)), "different widths"),
            ("observations", np.full((10, 2), b"text"), "array of numbers"),
            ("actions", np.zeros((10, 1), complex), "array of numbers"),
            ("rewards", 3.0, "array of numbers"),
            ("observations", np.full((10, 2), np.nan), "obs of transition 0 are not finite.*inspect"),
            ("actions", np.full((10, 1), np.inf), "actions of transition 0 are not finite"),
            ("rewards", np.where(np.arange(10) == 4, np.nan, 0), "rewards of row 4 are not finite"),
            ("rewards", np.full(10, 1e300), "rewards of transition 0 are not finite"),
        ],
    )
    def test_a_key_that_is_not_what_it_should_be(self, tmp_path: Path, key: str, value: Any, said: str) -> None:
        with pytest.raises(InputError, match=said):
            load(damaged(tmp_path / "a.hdf5", **{key: value}))

    def test_one_column_rewards_and_flags_of_any_type(self, tmp_path: Path) -> None:
        rows = np.zeros((10, 1), np.float32)
        terminals = np.array([0, 0, 1, 0, 0, 0, 0, 0, 1, 0], np.float64)[:, None]
        recording = d4rl.read(damaged(tmp_path / "a.hdf5", rewards=rows, terminals=terminals))
        assert recording.ends.tolist() == [3, 5, 8]

    def test_no_rows(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="is empty"):
            d4rl.read(str(make(tmp_path / "a.hdf5", "", actions=np.zeros((0, 1)), observations=np.zeros((0, 2)))))

    def test_an_empty_file_another_kind_of_file_and_none(self, tmp_path: Path) -> None:
        (tmp_path / "empty.hdf5").touch()
        (tmp_path / "page.hdf5").write_text("<html>403 Forbidden</html>")
        for name, said in (("empty.hdf5", "is an empty file"), ("page.hdf5", "is a web page, not an HDF5 file")):
            with pytest.raises(InputError, match=f"{name} {said}"):
                d4rl.read(str(tmp_path / name))
        with pytest.raises(InputError, match=r"there is no file .*none\.hdf5"):
            d4rl.read(str(tmp_path / "none.hdf5"))

    def test_one_cut_short(self, tmp_path: Path) -> None:
        path = Path(damaged(tmp_path / "a.hdf5"))
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(InputError, match=r"a\.hdf5 is cut short"):
            d4rl.read(str(path))

    def test_numbers_that_lie_in_another_file_are_not_read(self, tmp_path: Path) -> None:
        secret = make(tmp_path / "secret.hdf5", "..t")
        for name in ("link", "soft", "raw", "virtual"):
            path = make(tmp_path / f"{name}.hdf5", "..t", observations=None)
            with h5py.File(path, "a") as file:
                if name == "link":
                    file["observations"] = h5py.ExternalLink(str(secret), "observations")
                elif name == "soft":
                    file["observations"] = h5py.SoftLink("/rewards")
                elif name == "raw":
                    file.create_dataset("observations", (3, 2), "f4", external=[(str(secret), 0, h5py.h5f.UNLIMITED)])
                else:
                    layout = h5py.VirtualLayout((3, 2), "f4")
                    layout[:] = h5py.VirtualSource(str(secret), "observations", (3, 2))
                    file.create_virtual_dataset("observations", layout)
            with pytest.raises(InputError, match="stored outside this file"):
                d4rl.read(str(path))

    def test_a_file_that_promises_more_than_it_holds_fills_no_memory(self, tmp_path: Path) -> None:
        path, rows = tmp_path / "a.hdf5", 10**10
        with h5py.File(path, "w") as file:
            for name, shape in (("observations", (rows, 50)), ("actions", (rows, 5)), ("rewards", (rows,))):
                file.create_dataset(name, shape, "f4", chunks=(1000, *shape[1:]), compression="gzip")
            file.create_dataset("terminals", (rows,), bool, chunks=(1000,))
        Path("/proc/self/clear_refs").write_text("5")  # the peak of earlier tests is forgotten
        before = peak()
        with pytest.raises(InputError, match="promises"):
            load(str(path))
        assert peak() - before < 100_000

    def test_flags_that_were_never_written_are_false(self, tmp_path: Path) -> None:
        path = make(tmp_path / "a.hdf5", "....", terminals=None, timeouts=None)
        with h5py.File(path, "a") as file:
            for name in ("terminals", "timeouts"):
                file.create_dataset(name, (4,), bool)
        assert len(d4rl.read(str(path))) == 3

    def test_an_environment_whose_making_would_import_a_module_is_not_taken(self, tmp_path: Path) -> None:
        path = make(tmp_path / "a.hdf5", "..t")
        for name, taken in (("this:Env-v0", None), ("Hopper-v4", "Hopper-v4"), (np.bytes_("Hopper-v4"), "Hopper-v4")):
            with h5py.File(path, "a") as file:
                file.attrs["env"] = name
            assert d4rl.read(str(path)).env == taken


class TestUnreadableFiles:
    """The message says what the file is, and never that a file of the user should be deleted."""

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("npz", r"is a NumPy archive \(\.npz\), not an HDF5 file: convert it by `python -m tools\.convert`"),
            ("npy", r"is a NumPy array \(\.npy\), not an HDF5 file"),
            ("zip", "is a zip archive, not an HDF5 file"),
            ("pickle", "is a pickle, not an HDF5 file"),
            ("gzip", "is compressed by gzip, not an HDF5 file"),
            ("text", "is a text file, not an HDF5 file"),
            ("page", "is a web page, not an HDF5 file"),
            ("noise", "is not an HDF5 file"),
            ("empty", "is an empty file"),
            ("cut", "is cut short"),
            ("head", "is damaged or unfinished"),
            ("damaged", "is damaged or unfinished"),
            ("not closed", "was never closed by the program that wrote it"),
            ("env_kwargs", "the attribute env_kwargs is '{': it must be a dict in JSON"),
        ],
    )
    def test_are_named(self, tmp_path: Path, name: str, said: str) -> None:
        """Each kind in words; its content is as it was, and no handle stays open."""
        path, rows = tmp_path / "a.hdf5", {"observations": np.random.default_rng(0).random((300, 40))}
        content = make(path, "." * 299 + "t", **rows).read_bytes()
        with (tmp_path / "arrays").open("wb") as file:
            np.savez(file, **rows) if name == "npz" else np.save(file, rows["observations"])
        with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
            archive.writestr("readme", "hello")
        arrays, archived = (tmp_path / "arrays").read_bytes(), (tmp_path / "b.zip").read_bytes()
        contents = {
            "npz": arrays, "npy": arrays, "zip": archived, "pickle": pickle.dumps(rows), "gzip": gzip.compress(content),
            "text": "root:x:0:0:Müller".encode(), "page": b"<!DOCTYPE html><html>403", "noise": bytes(range(256)),
            "empty": b"", "cut": content[:-100], "head": content[:20],
            "damaged": content[:64] + content[80:] + bytes(16),
        }  # fmt: skip
        path.write_bytes(contents.get(name, content))
        if name == "not closed":
            write = "import h5py, os, sys; f = h5py.File(sys.argv[1], 'a', libver='latest'); f['x'] = 1; f.flush(); "
            path.unlink()
            subprocess.run([sys.executable, "-c", write + "os._exit(0)", path], check=True)
        elif name == "env_kwargs":
            with h5py.File(path, "a") as file:
                file.attrs["env_kwargs"] = "{"
        before = path.read_bytes()
        with pytest.raises(InputError, match=said) as caught:
            d4rl.read(path)
        assert str(path) in str(caught.value)
        assert len(str(caught.value).splitlines()) <= 2
        assert not re.search("delete|remove", str(caught.value))
        assert path.read_bytes() == before
        assert not handles(path)

    def test_one_that_may_not_be_read(self) -> None:
        """The message names the permission, and not a damage."""
        with tempfile.TemporaryDirectory() as home:  # another user may enter it, unlike pytest's own
            os.chmod(home, 0o755)
            folder = Path(home, "data")
            folder.mkdir()
            path = make(folder / "a.hdf5", "..t")
            path.chmod(0)
            with (
                bound_by_permissions(folder),
                pytest.raises(InputError, match=r"a\.hdf5 cannot be read \(Permission denied\)") as caught,
            ):
                d4rl.read(path)
            assert "damaged" not in str(caught.value)
            path.chmod(0o644)
            assert len(d4rl.read(path)) == 3

    def test_the_callers_open_file_is_read_all_the_same(self, tmp_path: Path) -> None:
        """In every mode, also if its changes are not on the disk yet."""
        for mode in ("r", "r+", "a"):
            path = make(tmp_path / "a.hdf5", "..t..o")
            with h5py.File(path, mode) as own:
                if mode == "a":
                    own["rewards"][:] = 7.0
                assert len(load(path)) == 5
                assert own["rewards"].shape == (6,)
            assert load(path).column("rewards")[0] == (7 if mode == "a" else 100)

    def test_the_caller_can_open_it_afterwards(self, tmp_path: Path) -> None:
        """In every mode, whether the recording is still in use or could not be made."""
        good = make(tmp_path / "good.hdf5", "..t..o")
        bad = make(tmp_path / "bad.hdf5", "..t..o", rewards=None)
        recording = d4rl.read(good)
        next(recording.blocks())
        next(d4rl.trajectories(good))
        with pytest.raises(InputError, match="has no rewards"):
            d4rl.read(bad)
        for path in (good, bad):
            for mode in ("r", "r+", "a"):
                with h5py.File(path, mode) as own:
                    assert "actions" in own
        assert len(recording.rewards()) == 5
        assert sum(len(block.rewards) for block in recording.blocks()) == 5  # it opens the file again

    def test_one_that_another_program_is_writing(self, tmp_path: Path) -> None:
        """What that program has not written yet is not there: it must close the file first."""
        path = tmp_path / "a.hdf5"
        write = (
            "import h5py, numpy, sys; f = h5py.File(sys.argv[1], 'w'); f['rewards'] = numpy.zeros(10**5); "
            "print('written', flush=True); sys.stdin.read()"
        )
        line = [sys.executable, "-c", write, str(path)]
        with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout.readline() == "written\n"
            with pytest.raises(InputError, match="is open for writing elsewhere: close it there first"):
                d4rl.read(path)
            writer.stdin.close()

    def test_one_that_changes_while_it_is_read(self, tmp_path: Path) -> None:
        """The recording is of the first file, so that episodes and rows would not fit."""
        path = make(tmp_path / "a.hdf5", "..t..o")
        recording = d4rl.read(path)
        make(path, "..t")
        with pytest.raises(InputError, match="was changed while it was read"):
            next(recording.blocks())


def handles(path: Path) -> list[str]:
    """The open files of this process that are this one."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return [target for link in links if link.is_symlink() and (target := os.readlink(link)) == str(path)]


class TestHorizon:
    """The time limit of a file that marks no time-outs; anything else is refused."""

    @pytest.mark.parametrize("horizon", [0, -1])
    def test_must_be_positive(self, tmp_path: Path, horizon: int) -> None:
        """0 would otherwise mean that none was given."""
        for timeouts in ({"timeouts": None}, {}):
            path = make(tmp_path / "a.hdf5", "....", **timeouts)
            with pytest.raises(
                InputError, match=f"--horizon is {horizon}: give the time limit in steps, a whole number"
            ):
                load(path, horizon=horizon)
            with pytest.raises(InputError, match="--horizon"):
                next(d4rl.trajectories(path, horizon=horizon))

    def test_and_time_outs_in_the_file_contradict_each_other(self, tmp_path: Path) -> None:
        """The file would win without a word."""
        path = make(tmp_path / "a.hdf5", "..o...")
        with pytest.raises(InputError, match=r"marks its time-outs itself.*leave --horizon out"):
            load(path, horizon=2)

    @pytest.mark.parametrize("horizon", [0, 5])
    def test_is_not_for_minari(self, horizon: int) -> None:
        """0 was ignored."""
        with pytest.raises(InputError, match="--horizon"):
            load("D4RL/pen/human-v2", horizon=horizon)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with chunks, checksums and compression, as D4RL and `tools.collect` write them."""
    path = tmp_path_factory.mktemp("whole") / "a.hdf5"
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for name, shape in (("observations", (60, 3)), ("actions", (60, 2)), ("rewards", (60,))):
            file.create_dataset(name, data=random.random(shape, np.float32), compression="gzip", fletcher32=True)
        for name in ("terminals", "timeouts"):
            file[name] = random.random(60) < 0.1
        file.attrs["env"], file.attrs["action_low"], file.attrs["action_high"] = "Hopper-v4", np.full(2, -1.0), 1.0
    return path.read_bytes()


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_damage_ends_in_a_message_or_in_transitions(data: st.DataObject, whole: bytes, tmp_path: Path) -> None:
    """Bytes changed, cut out, doubled or cut off: never another exception, never a number that is not finite."""
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(content) - 1)))
        kind = data.draw(st.sampled_from(["flip", "fill", "remove", "double", "cut"]))
        width = data.draw(st.integers(1, 16))
        if kind == "flip" and content:
            content[at] ^= data.draw(st.integers(1, 255))
        elif kind == "fill":
            content[at : at + width] = data.draw(st.binary(min_size=width, max_size=width))
        elif kind == "remove":
            del content[at : at + width]
        elif kind == "double":
            content[at:at] = content[at : at + width]
        else:
            del content[at:]
    path = tmp_path / "damaged.hdf5"
    path.write_bytes(content)
    try:
        dataset = load(path)
    except InputError as error:
        said = str(error)
    else:
        said = ""
        assert len(dataset) == len(dataset.buffer) > 0
        assert dataset.buffer.rows.isfinite().all()
    assert not said or (str(path) in said and len(said.splitlines()) <= 2)
