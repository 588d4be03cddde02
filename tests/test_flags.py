"""What a flag says, it does."""

import ast
import dataclasses
import itertools
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import OFFLINE, ROOT, SMALL, command, every_algorithm, module

from common.arguments import OnlineArgs, RunArgs
from common.command_line import parse
from common.errors import InputError
from offline.switch import OfflineArgs


def attributes_read(path: Path) -> set[str]:
    return {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("algorithm", sorted(p.stem for p in (ROOT / "algos").glob("[a-z]*.py")))
def test_every_flag_is_read_somewhere(algorithm: str):
    """No dead flags."""
    module = __import__(f"algos.{algorithm}", fromlist=["Args"])
    files = [ROOT / "algos" / f"{algorithm}.py", *(ROOT / "common" / f"{name}.py" for name in ("arguments", "run"))]
    files += [ROOT / "offline" / "switch.py"] if algorithm in OFFLINE else []
    read = set().union(*map(attributes_read, files))
    assert {field.name for field in dataclasses.fields(module.Args)} <= read


@pytest.mark.parametrize("algorithm", sorted(p.stem for p in (ROOT / "algos").glob("[a-z]*.py")))
def test_every_flag_is_documented_by_its_docstring(algorithm: str):
    shared = [("common/arguments.py", name) for name in ("RunArgs", "OffPolicyArgs", "OnlineArgs")]
    for file, name in [(f"algos/{algorithm}.py", "Args"), ("offline/switch.py", "OfflineArgs"), *shared]:
        path = ROOT / file
        (tree,) = (n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef) and n.name == name)
        body = [node for node in tree.body if not isinstance(node, ast.FunctionDef)]
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation):
                assert isinstance(text, ast.Expr), ast.unparse(field)
                assert isinstance(text.value, ast.Constant)


@pytest.mark.parametrize(
    ("algo", "flag"),
    [(a, f.name) for a in sorted(SMALL) for f in dataclasses.fields(module(a).Args) if isinstance(f.default, bool)],
)
def test_both_branches_of_every_boolean_flag(
    algo: str, flag: str, small: Callable[..., RunArgs], monkeypatch: pytest.MonkeyPatch
):
    """A run with either value gets to its end. (--track with a stand-in: Weights & Biases itself needs an account.)"""
    wandb = types.ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)
    wandb.init = lambda **_: types.SimpleNamespace(log=lambda values, step: None, finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for value in (False, True):
        args = small(algo, total_steps=60, **{flag: value}, run_dir=small(algo).run_dir / str(value))
        module(algo).train(args)
        assert (args.run_dir / "DONE").exists()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"run_dir": "x"}, Path("x")),
        ({"run_dir": None}, None),
        ({"env": Path("Hopper-v4")}, "Hopper-v4"),
        ({"total_steps": 1e3}, 1000),
        ({"total_steps": "700"}, 700),
        ({"total_steps": "1e3"}, 1000),
        ({"total_steps": np.int64(7)}, 7),
        ({"seed": str(2**63 - 1)}, 2**63 - 1),  # more digits than a float has
        ({"gamma": "0.9"}, 0.9),
        ({"gamma": 1}, 1.0),
        ({"hidden": [64, 32.0]}, (64, 32)),
        ({"device": "cpu"}, "cpu"),
        ({"overlap": True}, True),
        ({"overlap": None}, None),
        ({"overlap": np.True_}, True),
        ({"track": np.False_}, False),
        ({"hidden": np.array([64, 64])}, (64, 64)),
        ({"hidden": np.array([64.0, 32.0], np.float32)}, (64, 32)),
        ({"seed": np.array(3)}, 3),
        ({"gamma": np.float64(0.9)}, 0.9),
        ({"env": np.str_("Hopper-v4")}, "Hopper-v4"),
        ({"device": np.str_("cpu")}, "cpu"),
        ({"run_dir": np.str_("x")}, Path("x")),
    ],
)
def test_a_value_from_python_is_converted(given: dict[str, Any], expected: Any):
    """To the type of its field, in a first object and in a changed copy."""
    (name,) = given
    for args in (module("sac").Args(**given), dataclasses.replace(module("sac").Args(), **given)):
        assert getattr(args, name) == expected
        assert type(getattr(args, name)) in (type(expected), type(Path()))
        assert dataclasses.replace(args) == args


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"total_steps": 1.5}, "--total-steps is 1.5: give a whole number"),
        ({"total_steps": "many"}, "--total-steps is 'many': give a whole number"),
        ({"total_steps": True}, "--total-steps is True: give a whole number"),
        ({"total_steps": float("inf")}, "--total-steps is inf: give a whole number"),
        ({"total_steps": None}, "--total-steps is None: give a whole number"),
        ({"gamma": "high"}, "--gamma is 'high': give a number"),
        ({"gamma": False}, "--gamma is False: give a number"),
        ({"env": 3}, "--env is 3: give a string"),
        ({"run_dir": 3}, "--run-dir is 3: give a path or None"),
        ({"hidden": 64}, "--hidden is 64: give a list of whole numbers"),
        ({"hidden": [64, 1.5]}, r"--hidden is \[64, 1.5\]: give a list of whole numbers"),
        ({"hidden": np.array([64, 1.5])}, r"--hidden is array\(.*\): give a list of whole numbers"),
        ({"total_steps": np.True_}, r"--total-steps is (np.)?True_?: give a whole number"),
        ({"run_dir": ""}, "--run-dir is '': give a path or None"),
        ({"target_entropy": float("nan")}, "--target-entropy is nan: give a finite number"),
        ({"device": "tpu"}, "--device is 'tpu': give one of 'auto', 'cpu', 'cuda'"),
        ({"device": ["cpu"]}, r"--device is \['cpu'\]: give one of 'auto', 'cpu', 'cuda'"),
        ({"track": "no"}, "--track is 'no': give True or False"),
        ({"compile": 1}, "--compile is 1: give True or False"),
        ({"overlap": "yes"}, "--overlap is 'yes': give True, False or None"),
    ],
)
def test_a_value_of_another_type_is_refused(given: dict[str, Any], wanted: str):
    """With the flag, the value and the type; none reaches PyTorch."""
    with pytest.raises(InputError, match=f"^{wanted}$"):
        module("sac").Args(**given)
    with pytest.raises(InputError, match=f"^{wanted}$"):
        dataclasses.replace(module("sac").Args(), **given)


@every_algorithm
def test_arguments_in_strings_train(algo: str, small: Callable[..., RunArgs], tmp_path: Path):
    """Every argument of a small run as a string or a list, as a notebook's form or a JSON file has them."""
    arguments = dataclasses.asdict(small(algo, run_dir=tmp_path / "strings"))
    numbers = {name: str(v) for name, v in arguments.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    numbers |= {name: list(map(str, v)) for name, v in arguments.items() if isinstance(v, tuple)}
    args = module(algo).Args(**arguments | numbers | {"run_dir": str(tmp_path / "strings")})
    assert args == small(algo, run_dir=tmp_path / "strings")
    module(algo).train(args)
    assert (tmp_path / "strings" / "DONE").exists()


def test_whole_numbers_may_be_written_as_1e5():
    """On the command line, one, several and one that may be left out; --help still names the kind."""
    args = parse(
        module("expo").Args, ["--dataset", "x", "--online-steps", "1e5", "--hidden", "2e2", "64", "--utd", "1e1"]
    )
    assert (args.online_steps, args.hidden, args.utd) == (100_000, (200, 64), 10)
    assert "--online-steps INT" in command("--help", algo="expo").stdout


def test_sizes_of_files():
    """400 lines are the limit."""
    for folder in ("algos", "common", "envs", "bench", "offline"):
        for path in (ROOT / folder).glob("*.py"):
            assert len(path.read_text().splitlines()) <= 400, path


def test_imports_run_one_way():
    allowed = {
        "algos": {"common", "envs", "offline"}, "offline": {"common", "envs"}, "envs": {"common"}, "common": set(),
        "bench": {"common", "envs", "offline"},
    }  # fmt: skip
    for folder, below in allowed.items():
        for path in (ROOT / folder).glob("*.py"):
            tree = ast.walk(ast.parse(path.read_text()))
            imported = {n.module.split(".")[0] for n in tree if isinstance(n, ast.ImportFrom) and n.module}
            assert imported & allowed.keys() <= below | {folder}, path


def test_shared_arguments_are_in_every_file():
    names = {field.name for field in dataclasses.fields(OnlineArgs)}
    assert {"env", "seed", "total_steps", "device", "compile", "run_dir", "eval_every", "eval_episodes",
            "checkpoint_every", "track"} <= names  # fmt: skip
    names = {field.name for field in dataclasses.fields(OfflineArgs)}
    assert {"dataset", "offline_steps", "online_steps", "retain", "offline_ratio", "init_from"} <= names
