"""What is read from a file has the form that was written, or is refused by the name of the entry that differs."""

import functools
import json
import operator
import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from conftest import arguments_of, module
from safetensors.torch import save_file

from common import checkpoint
from common.arguments import NonNegativeInt
from common.errors import InputError
from common.policy_file import read_policy
from common.schema import mismatch, read_json
from tools.policies import load_agent, read_trained

MISSING = object()


@pytest.mark.parametrize(
    ("value", "schema", "said"),
    [
        ({"a": 1}, {"a": int}, None),
        ({"a": 1, "b": 2}, {"a": int}, None),
        ({}, {"a": int}, "a is missing"),
        ({}, {"a?": int}, None),
        ({"a": None}, {"a?": int}, "a is null, and must be a whole number"),
        ({"a": True}, {"a": int}, r"a is true or false.*, and must be a whole number"),
        ({"a": 1}, {"a": float}, None),
        ({"a": 1.5}, {"a": int}, r"a is a number \(1.5\), and must be a whole number"),
        ({"a": "1"}, {"a": int | None}, "a is text, and must be a whole number or null"),
        ({"a": {"b": [1, "x"]}}, {"a": {"b": [int]}}, "a.b.1 is text, and must be a whole number"),
        ({"a": [1, 2]}, {"a": (int, int, int)}, "a is a list of 2, and must be a list of 3"),
        ({1: "x"}, {str: str}, "1 is a whole number"),
        ([], {"a": int}, "all of it is a list, and must be a dict"),
        ({"a": -1}, {"a": NonNegativeInt}, r"a is a whole number \(-1\), and must be a number of 0 or more"),
        ({"a": -1}, {"a": Annotated[int, range(3)]}, r"a is a whole number \(-1\), and must be range"),
        ({"a": np.ones(2)}, {"a": [np.ndarray]}, "a is an array, and must be a list"),
    ],
)
def test_what_differs_from_a_schema_is_named(value: object, schema: Any, said: str | None):
    """By hand, one case for each rule of the module's head."""
    found = mismatch(value, schema)
    assert (found is None) == (said is None), found
    assert said is None or re.match(said, found or ""), found


SMALL = {"total_steps": 120, "eval_every": 1_000, "eval_episodes": 1, "checkpoint_every": 60}
WRONG: tuple[Any, ...] = ("x", None, [[1]], {"x": {}}, 1.5, torch.ones(2), np.ones((3, 1, 2)))
PLACES = {
    "sac": [
        "agent", "agent.actor", "agent.critic_optimizer", "agent.generator", "agent.log_alpha", "agent.gamma",
        "agent.critic_optimizer.param_groups.0.betas", "agent.critic_optimizer.state.0.exp_avg", "rollout",
        "rollout.envs", "rollout.envs.0", "rollout.envs.0.obs", "rollout.steps",
        "rollout.returns", "rollout.lengths", "rollout.finished",
        "logger", "logger.sizes", "logger.step", "logger.checksums", "buffer", "buffer.added", "buffer.widths",
        "buffer.segments", "buffer.segments.0", "update", "update.count", "update.pending",
    ],
    "iql": ["data", "data.dataset", "data.unfinished", "data.rewards", "data.buffer", "data.buffer.segments"],
}  # fmt: skip


@pytest.mark.parametrize("algo", PLACES)
def test_a_checkpoint_of_another_form_is_refused(algo: str, tmp_path: Path):
    """Each entry in turn is missing, or of another kind. Nothing is a traceback, and the run stays as it was."""
    args = module(algo).Args(**arguments_of(algo, SMALL | {"run_dir": tmp_path / "run"}))
    module(algo).train(args)
    (args.run_dir / "DONE").unlink()
    path = args.run_dir / "checkpoint" / "state.pt"
    whole = checkpoint.load(path)
    for place in PLACES[algo]:
        *way, last = (int(key) if key.isdecimal() else key for key in place.split("."))
        kind = type(functools.reduce(operator.getitem, [*way, last], whole))
        for wrong in (MISSING, *(each for each in WRONG if not isinstance(each, kind))):
            state = copied(whole)
            holder = functools.reduce(operator.getitem, way, state)
            holder[last] = wrong
            if wrong is MISSING:
                if place == "logger.checksums" or isinstance(holder, list):
                    continue  # older runs have none; a shorter list may be right
                del holder[last]
            checkpoint.save(path, state)
            assert len(refusal(args, algo).splitlines()) in (1, 2), f"{place} may be {wrong!r}"
    checkpoint.save(path, [whole])
    with pytest.raises(InputError, match="damaged"):
        module(algo).train(args)
    checkpoint.save(path, whole)
    module(algo).train(args)
    assert (args.run_dir / "DONE").exists()


SHIFTED: dict[str, Any] = {
    "buffer.added": 1_000_000, "buffer.segments": [], "buffer.segments.0.1": 1, "rollout.returns": [0.0, 0.0],
    "rollout.lengths": [], "update.count": -1, "logger.sizes": {"metrics.csv": -5},
}  # fmt: skip


@pytest.fixture
def stopped(tmp_path: Path) -> Any:
    """The arguments of a run that reached its last checkpoint, and not DONE."""
    args = module("sac").Args(**arguments_of("sac", SMALL | {"run_dir": tmp_path / "run"}))
    module("sac").train(args)
    (args.run_dir / "DONE").unlink()
    return args


def test_numbers_of_a_checkpoint_that_cannot_be_are_refused(stopped: Any):
    """Of the right kind, but not those of this run. Before, the buffer sampled rows of zeros without a word."""
    path = stopped.run_dir / "checkpoint" / "state.pt"
    whole = checkpoint.load(path)
    for place, wrong in SHIFTED.items():
        *way, last = (int(key) if key.isdecimal() else key for key in place.split("."))
        state = copied(whole)
        functools.reduce(operator.getitem, way, state)[last] = wrong
        checkpoint.save(path, state)
        assert "--run-dir" in refusal(stopped, "sac"), place


def test_an_optimiser_of_another_form_is_named(stopped: Any):
    """Before the logs are cut back to the checkpoint, and by programs that read the run as a policy."""
    path = stopped.run_dir / "checkpoint" / "state.pt"
    state = checkpoint.load(path)
    state["agent"]["critic_optimizer"]["param_groups"][0]["betas"] = "x"
    checkpoint.save(path, state)
    said = "agent.critic_optimizer.param_groups.0.betas is text, and must be a list of 2"
    with (stopped.run_dir / "metrics.csv").open("a") as file:
        file.write("a row after the checkpoint")
    before = (stopped.run_dir / "metrics.csv").read_bytes()
    first, second = refusal(stopped, "sac").splitlines()
    assert first.startswith(f"{path} is damaged")
    assert second == said
    assert (stopped.run_dir / "metrics.csv").read_bytes() == before
    with pytest.raises(InputError, match=said.removeprefix("agent.")):
        load_agent(read_trained(stopped.run_dir), 3, 1, 0)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("env", 3), ("env", ["a"]), ("env_kwargs", "{"), ("env_kwargs", 3), ("time_limit", "x"), ("seed", "x"),
        ("seed", MISSING), ("total_steps", "many"), ("total_steps", None),
    ],
)  # fmt: skip
def test_arguments_of_another_kind_are_refused(stopped: Any, name: str, wrong: Any):
    """Of a run that resumes, and of what is read as a policy: a run's folder, or a policy file."""
    folder = stopped.run_dir
    config = json.loads((folder / "config.json").read_text())
    del config["crc32"]
    policy = read_policy(folder / "policy" / "last.safetensors")
    for arguments in (config["arguments"], policy.facts["arguments"]):
        arguments[name] = wrong
        if wrong is MISSING:
            del arguments[name]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(policy.tensors, folder / "other.safetensors", {"onramp": json.dumps(policy.facts)})
    if wrong is not MISSING:  # a flag that is newer than the run has its default
        assert "config.json" in refusal(stopped, "sac")
    for source in (folder, folder / "other.safetensors"):
        with pytest.raises(InputError, match=rf"(?s){source}.*{name}"):
            read_trained(source)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"versions": ["1"]}, "versions is a list"), ({"hardware": None}, "hardware is null"),
        ({"hardware": {"gpu": 3}}, "hardware.gpu is a whole number"), ({"form": {}}, "form is a dict"),
    ],
)  # fmt: skip
def test_facts_of_another_kind_are_refused(stopped: Any, facts: dict[str, Any], reason: str):
    path = stopped.run_dir / "config.json"
    config = json.loads(path.read_text()) | facts
    del config["crc32"]
    path.write_text(json.dumps(config))
    assert reason in refusal(stopped, "sac")


def test_a_run_without_versions_and_hardware_resumes(stopped: Any):
    """They are then unknown, as in a run of other code: no result depends on them."""
    path = stopped.run_dir / "config.json"
    config = json.loads(path.read_text())
    for name in ("crc32", "versions", "hardware", "commit"):
        del config[name]
    path.write_text(json.dumps(config))
    assert not refusal(stopped, "sac")
    assert (stopped.run_dir / "DONE").exists()


def refusal(args: Any, algo: str) -> str:
    """What the command says if it refuses to resume, else nothing."""
    try:
        module(algo).train(args)
    except InputError as error:
        return str(error)
    return ""


def copied(state: Any) -> Any:
    """A copy of the dicts and lists. The tensors are shared."""
    if isinstance(state, dict):
        return type(state)({key: copied(value) for key, value in state.items()})
    return [copied(value) for value in state] if isinstance(state, list) else state


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": "x"}', "[" * 100_000, "\xff"])
def test_a_json_file_that_is_damaged_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    assert read_json(path, {"a?": int}, "is damaged") == {}
    path.write_text('{"a": 3}')
    assert read_json(path, {"a?": int}, "is damaged") == {"a": 3}
    path.write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=r"a\.json is damaged"):
        read_json(path, {"a?": int}, "is damaged")
