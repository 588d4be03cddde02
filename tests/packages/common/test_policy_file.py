"""Policies as files: they act as their run did, hold no more than that needs, and survive kills."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import agent_of, arguments_of, every_algorithm, flags, killed_at, module
from safetensors.torch import load_file, save_file

from common.acting import eval_policy
from common.errors import InputError, RunError
from common.policy_file import KeptPolicies, load_into, names_for_acting, read_policy, write_policy
from common.run_folder import mean_by_step, read_evaluations
from tools.policies import load_policy, read_trained

PENDULUM = gym.make("Pendulum-v1")
OBS = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)


@every_algorithm
def test_the_last_policy_acts_as_the_run_does(algo: str, small: Callable[..., Any]) -> None:
    """Bit for bit, in evaluations and with the noise of the same seed."""
    folder = module(algo).train(small(algo, total_steps=100)).folder
    file = folder / "policy" / "last.safetensors"
    for deterministic in (True, False):
        run, kept = (load_policy(str(source), PENDULUM, 3, deterministic) for source in (folder, file))
        assert run(OBS).tobytes() == kept(OBS).tobytes()
    assert kept.facts["kind"] == "policy file"
    assert (kept.facts["algorithm"], kept.facts["step"]) == (algo, run.facts["step"])


def networks(agent: Any) -> dict[str, torch.nn.Module]:
    return {name: value for name, value in vars(agent).items() if isinstance(value, torch.nn.Module)}


@every_algorithm
def test_a_file_holds_all_that_acting_depends_on(algo: str) -> None:
    """With other weights in the networks that are not read, and another seed's in those that are, until loaded."""
    agent, other = agent_of(algo, action_dim=1), agent_of(algo, action_dim=1, seed=7)
    before = agent.generator.get_state()
    names = names_for_acting(agent, eval_policy(agent), OBS)
    assert torch.equal(agent.generator.get_state(), before)
    assert not any("optimizer" in name for name in names)
    vars(other).update({"args": agent.args} if hasattr(agent, "args") else {})  # evaluations that draw have its seed
    expected = eval_policy(agent)(OBS).tobytes()
    for name in networks(agent).keys() - names:
        for parameter in getattr(agent, name).parameters():
            torch.nn.init.constant_(parameter, 7.0)
    assert eval_policy(agent)(OBS).tobytes() == expected != eval_policy(other)(OBS).tobytes()
    read = {name: networks(agent)[name].state_dict() for name in networks(agent).keys() & names}
    load_into(other, {f"{name}.{key}": value for name, state in read.items() for key, value in state.items()})
    assert eval_policy(other)(OBS).tobytes() == expected


def test_of_sac_it_is_the_actor() -> None:
    """And the normaliser of observations, which has no tensors by default."""
    agent = agent_of("sac")
    assert networks(agent).keys() & names_for_acting(agent, eval_policy(agent), OBS) == {"actor", "obs_normalizer"}


def test_best_is_the_policy_of_the_highest_mean_return(small: Callable[..., Any]) -> None:
    folder = module("sac").train(small(total_steps=400, eval_every=50, eval_episodes=2, learning_starts=50)).folder
    curve = mean_by_step(read_evaluations(folder / "evaluations.csv"), lambda row: float(row["return"]))
    best = read_policy(folder / "policy" / "best.safetensors").facts
    last = read_policy(folder / "policy" / "last.safetensors").facts
    assert len(set(curve.values())) > 3
    assert best["return"] == pytest.approx(max(curve.values()))
    assert best["step"] == max(curve, key=lambda step: curve[step])
    assert (last["step"], last["return"]) == (400, pytest.approx(curve[400]))
    assert best["arguments"]["env"] == "Pendulum-v1"


def test_kills_change_no_policy(tmp_path: Path) -> None:
    """Also between an evaluation's row and its files, and inside a file's writing."""
    arguments = {"total_steps": 400, "eval_every": 50, "eval_episodes": 2, "checkpoint_every": 150,
                 "learning_starts": 50}  # fmt: skip
    places = [("evaluation", 3), ("rename", 4), ("fsync", 9), ("rename", 9), ("step", 170), ("rename", 7), ("end", 1)]
    module("sac").train(module("sac").Args(**arguments_of("sac", arguments), run_dir=tmp_path / "undisturbed"))
    killed = killed_at("sac", places, *flags("sac", **arguments, run_dir=tmp_path / "killed"))
    assert killed.returncode == 0, killed.stderr
    for name in ("best", "last"):
        one, other = (
            read_policy(tmp_path / run / "policy" / f"{name}.safetensors") for run in ("undisturbed", "killed")
        )
        assert one.tensors.keys() == other.tensors.keys()
        assert all(torch.equal(one.tensors[key], other.tensors[key]) for key in one.tensors)
        assert (one.facts["step"], one.facts["return"]) == (other.facts["step"], other.facts["return"])
    assert not list((tmp_path / "killed" / "policy").glob("*.part"))


def test_a_resumed_run_writes_the_same_file(tmp_path: Path) -> None:
    """Also of an agent that reads other attributes since an earlier evaluation: DSRL, when it begins to steer."""
    agent = agent_of("dsrl", action_dim=1)
    for name, phases in (("whole", (0, 1)), ("resumed", (1,))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "evaluations.csv").touch()
        kept = KeptPolicies(tmp_path / name, {"algo": "dsrl", "arguments": {}})
        for agent.steers in phases:
            kept.keep(agent, eval_policy(agent), OBS, [1.0], step=agent.steers)
    one, other = (load_file(tmp_path / name / "policy" / "last.safetensors") for name in ("whole", "resumed"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("damage", ["appended", "folder", "deleted"])
def test_a_damaged_best_policy_is_named_before_a_run_resumes(small: Callable[..., Any], damage: str) -> None:
    """The run would end with it, if no later policy is better. Nothing is trained, and the cure is a run's."""
    args = small(total_steps=400, eval_every=100)
    folder = module("sac").train(args).folder
    path, logs = folder / "policy" / "best.safetensors", (folder / "metrics.csv").read_bytes()
    if damage == "appended":
        path.write_bytes(path.read_bytes() + b"x")
    else:
        path.unlink()
    if damage == "folder":
        path.mkdir()
    with pytest.raises(InputError, match=r"(?s)best\.safetensors .*--run-dir"):
        module("sac").train(dataclasses.replace(args, total_steps=500))
    assert (folder / "metrics.csv").read_bytes() == logs


def test_another_policy_in_the_place_of_the_best_is_refused(small: Callable[..., Any], tmp_path: Path) -> None:
    """Also a whole one, with its own checksum; the best of a later evaluation, which a kill leaves, is accepted."""
    args = small(total_steps=400, eval_every=100)
    policies = module("sac").train(args).folder / "policy"
    kept = tmp_path / "kept.safetensors"
    (policies / "best.safetensors").rename(kept)
    best = read_policy(kept)
    facts = read_policy(policies / "last.safetensors").facts
    assert facts["return"] < best.facts["return"]  # else they are one policy
    longer = dataclasses.replace(args, total_steps=500)
    for wrong in (facts, best.facts | {"step": 1}):
        save_file(best.tensors, policies / "best.safetensors", {"onramp": json.dumps(wrong)})
        with pytest.raises(InputError, match=rf"of step {wrong['step']}, and the best is of step .*\n?.*--run-dir"):
            module("sac").train(longer)
    better = best.facts | {"return": best.facts["return"] + 1, "step": 500}
    save_file(best.tensors, policies / "best.safetensors", {"onramp": json.dumps(better)})
    assert module("sac").train(longer).step == 500


def test_an_end_between_the_two_files_is_resumed(small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first evaluation, whose last policy is written after the best one."""
    args = small(total_steps=100, eval_every=50, checkpoint_every=20)

    def stop(path: Path, *rest: Any) -> None:
        if path.name == "last.safetensors":
            raise RunError("stopped")
        write_policy(path, *rest)

    monkeypatch.setattr("common.policy_file.write_policy", stop)
    with pytest.raises(RunError, match="stopped"):
        module("sac").train(args)
    monkeypatch.undo()
    assert [path.name for path in (args.run_dir / "policy").iterdir()] == ["best.safetensors"]
    assert module("sac").train(args).folder == args.run_dir


def test_without_evaluations_there_is_no_policy_file(small: Callable[..., Any]) -> None:
    assert not (module("sac").train(small(total_steps=60, eval_episodes=0)).folder / "policy").exists()


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "foreign", "infinite", "facts", "step", "shape"])
def test_a_damaged_file_is_refused(damage: str, small: Callable[..., Any], tmp_path: Path) -> None:
    folder = module("sac").train(small(total_steps=60)).folder
    path = folder / "policy" / "last.safetensors"
    whole, file = path.read_bytes(), read_policy(path)
    if damage in ("cut", "empty", "text"):
        path.write_bytes({"cut": whole[:-9], "empty": b"", "text": b"not a policy at all"}[damage])
    else:
        metadata = {"onramp": '{"algo": 3}'} if damage == "facts" else None
        if damage == "step":
            metadata = {"onramp": json.dumps({k: v for k, v in file.facts.items() if k != "step"})}
        tensors = dict(file.tensors)
        if damage in ("infinite", "shape"):
            name = next(iter(tensors))
            bad = torch.full_like(tensors[name], torch.inf) if damage == "infinite" else torch.zeros(5, 5)
            metadata = {"onramp": json.dumps(file.facts)}
            tensors[name] = bad
        save_file(tensors, path, metadata)
    with pytest.raises(InputError, match=r"damaged|not finite|does not fit"):
        load_policy(str(path), PENDULUM, 0, deterministic=True)


def test_changed_bits_of_a_policy_are_noticed(small: Callable[..., Any]) -> None:
    """Of its weights and of its facts. A file without a checksum is an older one."""
    path = module("sac").train(small(total_steps=60)).folder / "policy" / "last.safetensors"
    whole, file = path.read_bytes(), read_policy(path)
    header = 8 + int.from_bytes(whole[:8], "little")
    facts = whole.index(b"return")
    for at in [*range(header, len(whole), 97), len(whole) - 1, *range(facts, facts + 12)]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(InputError, match="damaged, or not a policy of onramp"):
            read_policy(path)
    save_file(file.tensors, path, {"onramp": json.dumps(file.facts)})
    assert read_policy(path).facts == file.facts


def test_a_file_that_is_missing_or_a_name_that_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist: there is no such file"):
        read_trained(tmp_path / "policy.safetensors")
    with pytest.raises(InputError, match="sac/Nowhere-v0"):
        load_policy("sac/Nowhere-v0", PENDULUM, 0, deterministic=True)


def test_weights_that_would_be_broadcast_are_refused() -> None:
    """A tensor, an array or a number of another shape: PyTorch and NumPy would repeat or convert it."""
    agent = agent_of("sac")
    agent.scale, agent.gain = np.ones(4), 1.0
    for name, shape in (("log_alpha", [1]), ("scale", [1]), ("scale", [2]), ("gain", [2])):
        with pytest.raises(InputError, match=rf"does not fit {name}: its shape is \[.\]"):
            load_into(agent, {name: torch.ones(shape)})
