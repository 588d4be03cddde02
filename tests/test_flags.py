"""What a flag says, it does."""

import ast
import dataclasses
import itertools
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from conftest import OFFLINE, ROOT, SMALL, module

from common.arguments import OnlineArgs, RunArgs
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


def test_sizes_of_files():
    """400 lines are the limit; an algorithm aims at 250 (WSRL's three phases take most)."""
    for folder, limit in (("algos", 400), ("common", 300), ("envs", 300), ("bench", 300), ("offline", 400)):
        for path in (ROOT / folder).glob("*.py"):
            assert len(path.read_text().splitlines()) <= limit, path


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
