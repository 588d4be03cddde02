"""Our own suite of datasets: what results are of stays described as it was."""

import json
from pathlib import Path

import pytest

from common.errors import InputError, RunError
from offline.dataset import load
from tools import datasets
from tools.collect import Args, collect
from tools.datasets import SUITE, describe


def random_data(path: Path, seed: int) -> None:
    collect(Args(env="Pendulum-v1", policy=("random",), transitions=200, seed=seed, output=str(path)))


def test_another_dataset_of_the_same_name_is_described_beside_itself(tmp_path: Path, capsys):
    described, first, second = (tmp_path / name for name in ("results", "first", "second"))
    for folder, seed in ((first, 1), (second, 2)):
        random_data(folder / "x-medium.hdf5", seed)
        random_data(folder / "x-medium-replay.hdf5", 3)
        describe("x", "medium", folder, described)
    facts = {folder: json.loads((folder / "x-medium.json").read_text()) for folder in (described, second)}
    for folder, of in ((described, first), (second, second)):
        assert facts[folder]["fingerprint"] == load(str(of / "x-medium.hdf5")).fingerprint()
        assert facts[folder]["transitions"] == 200
    assert facts[described]["fingerprint"] != facts[second]["fingerprint"]
    assert "differs from the dataset of the published results" in capsys.readouterr().err


def test_other_experts_are_refused_and_a_command_that_fails_is_named(tmp_path: Path):
    (tmp_path / f"tqc-{next(iter(SUITE))}-v3.zip").write_bytes(b"another")
    with pytest.raises(InputError, match="is not the suite's expert: give other --experts"):
        datasets.build(next(iter(SUITE)), datasets.Args(tmp_path, experts=tmp_path))
    with pytest.raises(InputError, match="--jobs is 0: give a number of 1 or more"):
        datasets.main(datasets.Args(tmp_path, experts=tmp_path, jobs=0))
    with pytest.raises(RunError, match=r"^python -m no_such_module failed: see above$"):
        datasets._run("-m no_such_module --flag 1")
