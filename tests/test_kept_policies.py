"""The policies in results/policies: each still acts as well as its file states, under its name."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, module

from common.errors import InputError
from common.policy_file import read_policy
from tools import keep_policy, policies
from tools.keep_policy import TO_REPORT, Args, main, returns_of
from tools.policies import read_trained

NAMES = sorted(
    path.relative_to(ROOT / "results" / "policies").with_suffix("").as_posix()
    for path in (ROOT / "results" / "policies").glob("*/*.safetensors")
)


def test_there_are_policies_and_they_are_small() -> None:
    assert NAMES
    sizes = [path.stat().st_size for path in (ROOT / "results" / "policies").rglob("*.safetensors")]
    assert sum(sizes) < 20e6


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_returns_what_its_file_states(name: str) -> None:
    """The first five of its episodes. Another machine may round differently, which long episodes amplify."""
    trained = read_trained(name)
    facts = read_policy(trained.path).facts
    assert f"{trained.algo}/{trained.arguments['env']}" == name
    assert len(facts["returns"]) == TO_REPORT[1]
    assert facts["return"] == pytest.approx(statistics.mean(facts["returns"]))
    returns = returns_of(trained, TO_REPORT[0], 5)
    spread = max(statistics.stdev(facts["returns"]), 0.01 * abs(facts["return"]))
    assert statistics.mean(returns) == pytest.approx(statistics.mean(facts["returns"][:5]), abs=2 * spread)


def test_the_best_is_kept(small: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen by some episodes, and reported by others."""
    monkeypatch.setattr(policies, "POLICIES", tmp_path / "kept")
    monkeypatch.setattr(keep_policy, "POLICIES", tmp_path / "kept")
    monkeypatch.setattr(keep_policy, "TO_CHOOSE", (1, 3))
    monkeypatch.setattr(keep_policy, "TO_REPORT", (2, 4))
    runs = [module("sac").train(small(seed=i, total_steps=60, run_dir=tmp_path / str(i))).folder for i in range(3)]
    facts = read_policy(main(Args("sac/Pendulum-v1", tuple(map(str, runs))))).facts
    means = dict(facts["chosen_from"])
    assert means == {
        i: pytest.approx(statistics.mean(returns_of(read_trained(run), 1, 3))) for i, run in enumerate(runs)
    }
    assert facts["arguments"]["seed"] == max(means, key=lambda seed: means[seed])
    assert facts["returns"] == returns_of(read_trained("sac/Pendulum-v1"), 2, 4)
    with pytest.raises(InputError, match="is a policy of sac/Pendulum-v1: give runs of td3/Pendulum-v1"):
        main(Args("td3/Pendulum-v1", (str(runs[0]),)))
