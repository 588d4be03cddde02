"""The same seed gives the same run, and looking more often changes nothing."""

import csv
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    OFFLINE,
    agent_class,
    agent_of,
    arguments_of,
    every_algorithm,
    final_state,
    module,
    networks_of,
    replay_bytes,
    same,
    some,
    with_flag,
)

from common.arguments import RunArgs
from common.seeding import seeds
from envs.make import make

EPISODES = {"time_limit": 50, "eval_episodes": 1}  # some end: CQL stores only finished ones


def run(args: RunArgs) -> tuple[Path, str]:
    module(args.__module__.rpartition(".")[2]).train(args)
    return args.run_dir, (args.run_dir / "evaluations.csv").read_text()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, str]]:
    """The run of SMALL's arguments, made once for all the tests that compare another with it."""
    folder = tmp_path_factory.mktemp("reference")

    @functools.cache
    def reference(algo: str) -> tuple[Path, str]:
        seed_global_generators(1)
        return run(module(algo).Args(**arguments_of(algo, {"run_dir": folder / algo} | EPISODES)))

    return reference


def seed_global_generators(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def logged_steps(folder: Path) -> set[int]:
    """Return the steps at which the run logged its metrics."""
    with (folder / "metrics.csv").open() as file:
        return {int(row["step"]) for row in csv.DictReader(file) if row["name"] == "time/steps_per_second"}


@every_algorithm
def test_logging_evaluating_and_saving_often_changes_nothing(algo: str, small, reference):
    """Bit for bit, evaluations at the same step too. No global generator is used: neither read nor moved."""
    a, rarely = reference(algo)
    seed_global_generators(2)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    b, often = run(small(algo, eval_every=20, checkpoint_every=10, log_every=10, **EPISODES))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
    assert {*rarely.splitlines()} < {*often.splitlines()}
    assert len(often.splitlines()) > 2.5 * len(rarely.splitlines())
    assert logged_steps(a) < logged_steps(b)
    assert same(final_state(a), final_state(b))
    assert replay_bytes(a) == replay_bytes(b)


@pytest.mark.parametrize("algo", some("sac", "ppo", "wsrl"))
def test_a_run_that_is_never_evaluated_is_the_same(algo: str, small, reference):
    a, b = reference(algo)[0], run(small(algo, **EPISODES | {"eval_episodes": 0}))
    assert len(b[1].splitlines()) == 1  # the header
    assert same(final_state(a), final_state(b[0]))
    assert replay_bytes(a) == replay_bytes(b[0])


@pytest.mark.parametrize("algo", some("sac", "ppo", "wsrl", "expo"))
def test_another_seed_is_another_run(algo: str, small, reference):
    (a, evaluations_a), (b, evaluations_b) = reference(algo), run(small(algo, seed=2, **EPISODES))
    assert evaluations_a != evaluations_b
    networks = networks_of(agent_of(algo))
    assert networks
    for name in networks:
        assert not same(final_state(a)["agent"][name], final_state(b)["agent"][name])
    assert algo not in with_flag("buffer_size") or replay_bytes(a)[:400] != replay_bytes(b)[:400]


def test_training_and_evaluation_have_their_own_seeds():
    """And the same ones at every evaluation."""
    assert not set(seeds(1, "training", 10)) & set(seeds(1, "evaluation", 10))
    assert seeds(1, "evaluation", 10) != seeds(2, "evaluation", 10)
    env = make("Pendulum-v1")
    starts = [env.reset(seed=seed)[0].tolist() for seed in seeds(1, "evaluation", 3) * 2]
    assert starts[:3] == starts[3:]
    assert starts[0] != starts[1]


@every_algorithm
def test_no_two_generators_share_a_stream(algo: str, small, monkeypatch: pytest.MonkeyPatch):
    """Networks, agent and evaluation: else exploration noise repeats the weights it was seeded with."""
    streams: list[bytes] = []

    class Seeded(torch.Generator):
        def manual_seed(self, seed: int) -> torch.Generator:
            seeded = super().manual_seed(seed)
            streams.append(self.get_state().numpy().tobytes())
            return seeded

    monkeypatch.setattr(torch, "Generator", Seeded)
    steps = {"offline_steps": 1, "online_steps": 1} if algo in OFFLINE else {"total_steps": 20}
    module(algo).train(small(algo, eval_every=1_000, **steps))
    noisy = hasattr(agent_class(algo), "eval_policy")  # evaluations, which begin with the same noise every time
    assert len(set(streams)) == 2 + noisy
    assert len(streams) == 2 or noisy


def test_exploration_is_not_the_weights():
    """Version 0.1 gave both one seed: the first random actions were the first layer's weights, correlation 1."""
    agent = agent_of("sac")
    weights = agent.actor.net[0].weight.detach().flatten()
    drawn = torch.rand(len(weights), generator=agent.generator)
    assert abs(np.corrcoef(weights, drawn)[0, 1]) < 0.5
