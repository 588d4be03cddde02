"""Arrays of a user: written as a file or as a Minari dataset, read back the same, and refused if something is wrong."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import minari
import numpy as np
import pytest
import torch
from conftest import ROOT

from common.errors import InputError, RunError
from offline.dataset import load
from offline.write import reserved, write_dataset

OUTPUTS = ("data/mine.hdf5", "minari:mine/arrays-v0")
LENGTHS = (4, 1, 3, 5)  # of the episodes; the second and the last terminate
ENDS = np.cumsum(LENGTHS) - 1
BOX = {"action_low": [-2.0, 0.0], "action_high": [2.0, 10.0]}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


def arrays(**changed: Any) -> dict[str, Any]:
    """Thirteen steps with 3 observations and 2 actions, in double precision. None leaves an array out."""
    random, n = np.random.default_rng(1), sum(LENGTHS)
    walks = [random.normal(size=(length + 1, 3)) for length in LENGTHS]
    made = {
        "observations": np.concatenate([walk[:-1] for walk in walks]),
        "next_observations": np.concatenate([walk[1:] for walk in walks]),
        "actions": random.uniform([-2.0, 0.0], [2.0, 10.0], (n, 2)),
        "rewards": random.normal(size=n),
        "terminations": np.isin(np.arange(n), ENDS[[1, 3]]),
        "truncations": np.isin(np.arange(n), ENDS[[0, 2]]),
    }
    return {name: values for name, values in (made | BOX | changed).items() if values is not None}


def edited(name: str, row: int, value: Any) -> dict[str, Any]:
    """Return one of the arrays, as float64, with another value in a row."""
    values = np.array(arrays()[name], np.float64)
    values[row] = value
    return {name: values}


def written(output: str, **changed: Any) -> Any:
    """Write the arrays, and load them as an algorithm does, but without clipping actions."""
    write_dataset(output, **arrays(**changed))
    return load(output.removeprefix("minari:"), max_action=None)


@pytest.mark.parametrize("output", OUTPUTS)
def test_the_loader_gives_the_arrays_back(output: str) -> None:
    """In float32, with actions rescaled from their box to [-1, 1]."""
    dataset, given = written(output, ref_scores=(-10.0, 30.0)), arrays()
    for column, name in (("obs", "observations"), ("next_obs", "next_observations"), ("rewards", "rewards")):
        assert np.array_equal(dataset.column(column), given[name].astype(np.float32)), name
    assert np.array_equal(dataset.column("terminations"), given["terminations"])
    assert np.array_equal(dataset.truncations, given["truncations"])
    assert np.allclose(dataset.column("actions"), given["actions"] / [2.0, 5.0] - [0.0, 1.0], atol=1e-6)
    assert dataset.lengths.tolist() == list(LENGTHS)
    assert (dataset.env, dataset.reference) == (None, (-10.0, 30.0))


def test_a_program_with_h5py_alone_reads_the_file() -> None:
    """Keys, shapes, types and attributes are D4RL's and ours, and docs/data.md lists every one of them."""
    write_dataset("data/mine.hdf5", **arrays(ref_scores=(0.0, 1.0), source="my robot"))
    page = (ROOT / "docs" / "data.md").read_text()
    with h5py.File("data/mine.hdf5") as file:
        assert {name: (values.dtype.name, values.shape) for name, values in file.items()} == {
            "observations": ("float32", (13, 3)),
            "actions": ("float32", (13, 2)),
            "rewards": ("float32", (13,)),
            "terminals": ("bool", (13,)),
            "timeouts": ("bool", (13,)),
            "next_observations": ("float32", (13, 3)),
        }
        assert np.flatnonzero(file["terminals"]).tolist() == ENDS[[1, 3]].tolist()
        assert np.flatnonzero(file["timeouts"]).tolist() == ENDS[[0, 2]].tolist()
        assert np.array_equal(file["actions"], arrays()["actions"].astype(np.float32))
        assert file.attrs["action_high"].tolist() == [2, 10]
        assert set(file.attrs) == {"action_low", "action_high", "ref_min_score", "ref_max_score", "recipe"}
        assert json.loads(file.attrs["recipe"])["sources"] == [{"kind": "my robot"}]
        assert [name for name in (*file, *file.attrs, "env", "env_kwargs") if f"`{name}`" not in page] == []


def test_minaris_own_package_reads_the_dataset() -> None:
    write_dataset("minari:mine/arrays-v0", **arrays())
    dataset, given = minari.load_dataset("mine/arrays-v0"), arrays()
    assert (len(dataset), dataset.total_steps) == (4, 13)
    assert dataset.action_space.high.tolist() == [2, 10]
    for episode, end, length in zip(dataset.iterate_episodes(), ENDS, LENGTHS, strict=True):
        rows = slice(end + 1 - length, end + 1)
        walk = np.concatenate([given["observations"][rows], given["next_observations"][end : end + 1]])
        assert np.array_equal(episode.observations, walk.astype(np.float32))
        assert dataset.observation_space.contains(episode.observations[0])
        assert all(map(dataset.action_space.contains, episode.actions))
        for name in ("terminations", "truncations"):
            assert np.array_equal(getattr(episode, name), given[name][rows])


def test_without_next_observations_both_forms_hold_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """The last step of a cut episode is no transition. The file's reader still counts its reward."""
    file, of_minari = (written(output, next_observations=None) for output in OUTPUTS)
    assert file.buffer.rows.equal(of_minari.buffer.rows)
    assert file.lengths.tolist() == of_minari.lengths.tolist() == [3, 1, 2, 5]
    assert np.flatnonzero(file.column("terminations")).tolist() == [3, 10]
    kept = np.delete(np.arange(13), ENDS[[0, 2]])
    assert np.array_equal(file.column("obs"), arrays()["observations"][kept].astype(np.float32))
    assert file.returns().sum() == pytest.approx(arrays()["rewards"].sum(), rel=1e-5)
    said = capsys.readouterr().err
    assert "the last steps of 2 cut episodes count in the returns only" in said
    assert "the last steps of 2 cut episodes are left out" in said


def test_episode_ends_instead_of_truncations(capsys: pytest.CaptureFixture[str]) -> None:
    """An end without a termination is a truncation. A termination elsewhere ends an episode, and that is printed."""
    ends = np.isin(np.arange(13), ENDS)
    by_ends = written("ends.hdf5", truncations=None, episode_ends=ends)
    assert by_ends.buffer.rows.equal(written("truncations.hdf5").buffer.rows)
    assert by_ends.truncations.tolist() == arrays()["truncations"].tolist()
    assert "warning" not in capsys.readouterr().err
    with h5py.File("ends.hdf5") as file:
        assert np.array_equal(file["timeouts"], arrays()["truncations"])
    inside = written("inside.hdf5", truncations=None, episode_ends=ends, **edited("terminations", 1, 1))
    assert inside.lengths.tolist() == [2, 2, 1, 3, 5]
    assert "1 terminations are not among the episode_ends" in capsys.readouterr().err


@pytest.mark.parametrize("output", OUTPUTS)
def test_an_open_end_is_cut(output: str, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = written(output, **edited("terminations", 12, 0))
    assert dataset.truncations[-1]
    assert dataset.lengths.tolist() == list(LENGTHS)
    if output in OUTPUTS[:1]:
        with h5py.File(output) as file:
            assert file["timeouts"][-1]
    assert "warning: the last row does not end an episode: it is stored as cut there" in capsys.readouterr().err


@pytest.mark.parametrize("output", OUTPUTS)
def test_the_environment_gives_its_box_and_its_arguments(output: str) -> None:
    changed = {"actions": np.linspace(-2.0, 2.0, 13)[:, None], "action_low": None, "action_high": None}
    kwargs = {"g": 9.0, "max_episode_steps": 50}
    dataset = written(output, **changed, env="Pendulum-v1", env_kwargs=kwargs)
    assert (dataset.env, dataset.env_kwargs) == ("Pendulum-v1", kwargs)
    assert np.allclose(dataset.column("actions")[:, 0], np.linspace(-1, 1, 13))


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_box_of_the_datas_own_comes_before_that_of_the_environment(output: str) -> None:
    """The actions then have other units than the environment's."""
    actions = np.linspace(0.0, 10.0, 13)[:, None]
    dataset = written(output, actions=actions, action_low=0.0, action_high=10.0, env="Pendulum-v1")
    assert np.allclose(dataset.column("actions")[:, 0], np.linspace(-1, 1, 13), atol=1e-6)


def test_columns_and_numbers_of_any_type() -> None:
    """Rewards and flags [n, 1], flags of integers, lists, and a box of one number."""
    given = arrays(action_low=-2, action_high=10)
    columns = {name: given[name][:, None].astype(int).tolist() for name in ("terminations", "truncations")}
    changed = columns | {"rewards": given["rewards"][:, None], "action_low": -2, "action_high": 10}
    assert written("a.hdf5", **changed).buffer.rows.equal(written("b.hdf5", action_low=-2, action_high=10).buffer.rows)


NONE = np.zeros((0, 3))
REFUSED = [
    ({"observations": np.zeros(13)}, r"observations has shape \(13,\): give \(n, dim\)"),
    ({"observations": np.zeros((13, 4, 4))}, "observations has shape"),
    ({"observations": NONE}, "observations has no rows"),
    ({"observations": np.full((13, 3), None)}, "observations holds object: give an array of numbers"),
    ({"observations": [[1.0], [1.0, 2.0]]}, "observations is not an array of numbers"),
    ({"observations": torch.zeros(13, 3, requires_grad=True)}, "observations is not an array of numbers"),
    ({"actions": np.zeros((14, 2))}, "actions has 14 rows, observations has 13"),
    ({"next_observations": np.zeros((13, 2))}, r"next_observations has shape \(13, 2\): give \(n, 3\)"),
    ({"rewards": np.zeros((13, 2))}, r"rewards has shape \(13, 2\): give \(n,\)"),
    ({"terminations": np.arange(13)}, r"terminations holds 2: give only 1 \(or True\)"),
    (edited("terminations", 3, np.nan), "terminations of row 3 is not finite"),
    (edited("truncations", 3, -1), "truncations holds -1"),
    ({"truncations": None}, "give either truncations or episode_ends"),
    ({"episode_ends": np.ones(13)}, "give either truncations or episode_ends"),
    ({"truncations": np.ones(13), "terminations": np.zeros(13), "next_observations": None}, "no step has a successor"),
    *((edited(name, 7, value), f"{name} of row 7 is not finite")
      for name in ("observations", "actions", "rewards", "next_observations") for value in (np.nan, -np.inf, 1e39)),
    ({"action_low": None}, "only one of the attributes action_low and action_high"),
    ({"action_low": None, "action_high": None}, "the box of the actions is unknown: give action_low and action_high"),
    ({"action_low": [-2.0]}, r"action_low and action_high have shapes \(1,\) and \(2,\)"),
    ({"action_low": [2.0, 0.0]}, "action_low is 2 and action_high is 2 in dimension 0"),
    ({"action_high": np.inf}, "action_high is inf: it must be finite"),
    ({"ref_scores": (3.0, 1.0)}, "give two numbers, the smaller one first"),
    ({"ref_scores": (np.nan, 1.0)}, "give two numbers, the smaller one first"),
    ({"ref_scores": (1.0,)}, "give two numbers, the smaller one first"),
    ({"ref_scores": ("a", "b")}, "give two numbers, the smaller one first"),
    ({"env": None, "env_kwargs": {"g": 5.0}}, "env_kwargs are given without env"),
    ({"env": "Pendulm-v1"}, "Did you mean Pendulum-v1"),
    ({"env": "Pendulum-v1"}, "the arrays have 3 observations and 2 actions, Pendulum-v1 has 3 and 1"),
    ({"env": "Pendulum-v1", "env_kwargs": {"g": {1}}}, "env_kwargs do not fit into JSON"),
    ({"env": "Pendulum-v1", "env_kwargs": {"g": {1: 2}}}, "env_kwargs do not fit into JSON"),
    ({"env": "Pendulum-v1", "env_kwargs": {"seed": 1}}, "env_kwargs is .* without the keys"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "said"), REFUSED)
@pytest.mark.parametrize("output", OUTPUTS)
def test_what_is_wrong_is_named_and_nothing_written(output: str, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        write_dataset(output, **arrays(**changed))
    assert list(Path().rglob("*.hdf5")) == []
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"next_observations": arrays()["observations"]}, "of 9 rows inside episodes, the first in row 0"),
        (edited("truncations", 3, 0), "next_observations of 1 rows inside episodes, the first in row 3"),
        (edited("next_observations", 3, arrays()["observations"][4]), "of 1 cut episodes, the first in row 3"),
        (edited("actions", 5, [2.1, 3.0]), "7.69% of the steps have actions outside their box: they are clipped"),
    ],
)  # fmt: skip
def test_what_is_suspicious_is_printed(changed: Any, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Shifted arrays, an end that is not marked, the observation of a reset, and actions outside the box."""
    write_dataset("mine.hdf5", **arrays(**changed))
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert len(warned) == 1
    assert said in warned[0]
    assert Path("mine.hdf5").exists()


def test_good_arrays_give_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset("mine.hdf5", **arrays())
    assert capsys.readouterr().err == "13 steps in 4 episodes (2 terminated, 2 cut) are written to mine.hdf5\n"


@pytest.mark.parametrize("output", OUTPUTS)
def test_an_existing_dataset_is_left_alone(output: str) -> None:
    before = written(output).fingerprint()
    with pytest.raises(InputError, match="exists: give another output"):
        written(output, rewards=np.zeros(13))
    assert load(output.removeprefix("minari:"), max_action=None).fingerprint() == before
    Path("notes.hdf5").write_text("years of work")
    with pytest.raises(InputError, match=r"notes\.hdf5 exists"):
        written("notes.hdf5")
    assert Path("notes.hdf5").read_text() == "years of work"


@pytest.mark.parametrize("output", ["mine.h5", "minari:mine"])
def test_an_output_that_is_none_of_both(output: str) -> None:
    with pytest.raises(InputError, match=r"minari:namespace/name-v0"):
        written(output)


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_full_disk_leaves_nothing(output: str) -> None:
    large = {name: np.tile(values, (500, 1)[: np.ndim(values)]) for name, values in arrays().items() if name not in BOX}
    large["observations"] = np.random.default_rng(0).normal(size=large["observations"].shape)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20 * 1024, before[1]))
        with pytest.raises(RunError, match="cannot be written"):
            write_dataset(output, **large, **BOX)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path for path in Path().rglob("*") if "mine.hdf5" in path.name or "arrays" in path.name] == []


def example(page: str, first: str) -> str:
    """Return the block of Python of a page that begins with these words."""
    (found,) = re.findall(rf"```python\n({re.escape(first)}.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    return found


@pytest.mark.parametrize(
    ("page", "first", "file", "transitions"),
    [
        ("data.md", "import numpy as np\n", "mine.hdf5", 1_000),
        ("your-data.md", "import gymnasium as gym\nimport numpy as np\n\nfrom offline", "pendulum.hdf5", 10_000),
    ],
)
def test_an_example_of_the_docs_runs(page: str, first: str, file: str, transitions: int) -> None:
    """As a program of its own, without a warning. Its file is loaded with all of its transitions."""
    code = example(page, first)
    assert page != "data.md" or len(code.strip().splitlines()) == 10
    Path("make_data.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    line = [sys.executable, "make_data.py"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    dataset = load(f"data/{file}")
    assert (len(dataset), dataset.env) == (transitions, "Pendulum-v1")
    assert dataset.truncations.sum() == transitions / 200


@pytest.mark.parametrize("output", OUTPUTS)
def test_two_writers_of_one_dataset(output: str) -> None:
    """The second is refused while the first is at work, whose dataset is whole; nothing else is left."""
    with reserved(output) as before:
        assert before is None
        with pytest.raises(InputError, match=f"another command is writing {output}: wait for it, or give another"):
            written(output)
    folder = Path("data") if output.endswith("hdf5") else Path(os.environ["MINARI_DATASETS_PATH"]) / "mine"
    assert list(folder.iterdir()) == []
    assert len(written(output)) == 13
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_dataset_that_was_made_in_the_meantime_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a command that ended between the question whether it exists and the lock."""
    whole = written("data/mine.hdf5").fingerprint()
    exists, asked = Path.exists, []
    monkeypatch.setattr(Path, "exists", lambda path: exists(path) and bool(asked or asked.append(path)))
    with pytest.raises(InputError, match="exists: give another output"):
        written("data/mine.hdf5", rewards=np.zeros(13))
    assert load("data/mine.hdf5", max_action=None).fingerprint() == whole
