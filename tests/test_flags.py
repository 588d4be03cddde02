"""What a flag says, it does."""

import ast
import dataclasses
import io
import itertools
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from conftest import (
    ALGORITHMS,
    OFFLINE,
    PENDULUM,
    ROOT,
    assert_same_run,
    command,
    every_algorithm,
    flags,
    module,
    with_flag,
)

from common import arguments
from common.arguments import POSITIVE, Interval, OnlineArgs, RunArgs, Unset, checked
from common.command_line import parse
from common.conditions import CONDITION, conditions
from common.errors import InputError
from offline.offline_to_online import OfflineArgs, with_presets


def booleans(arguments: type) -> list[str]:
    """The flags of two values, those included that are filled in later."""
    return [name for name, wanted in get_type_hints(arguments).items() if wanted is bool]


def unset(arguments: Any) -> dict[str, Unset]:
    """The defaults of a class, or the values of an object, that are still to be filled in."""
    found = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(arguments)}
    return {name: value for name, value in found.items() if isinstance(value, Unset)}


def attributes_read(path: Path) -> set[str]:
    return {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}


@every_algorithm
def test_every_flag_is_read_somewhere(algo: str):
    """No dead flags."""
    files = [
        ROOT / "algos" / f"{algo}.py",
        *(ROOT / "common" / f"{name}.py" for name in ("arguments", "launch", "run", "run_folder")),
    ]
    files += [ROOT / "envs" / "rollout.py"]
    files += [ROOT / "offline" / "offline_to_online.py"] if algo in OFFLINE else []
    read = set().union(*map(attributes_read, files))
    assert {field.name for field in dataclasses.fields(module(algo).Args)} <= read


@every_algorithm
def test_every_flag_is_documented_by_its_docstring(algo: str):
    shared = [("common/arguments.py", name) for name in ("RunArgs", "OffPolicyArgs", "OnlineArgs")]
    for file, name in [(f"algos/{algo}.py", "Args"), ("offline/offline_to_online.py", "OfflineArgs"), *shared]:
        path = ROOT / file
        (tree,) = (n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef) and n.name == name)
        body = [node for node in tree.body if not isinstance(node, ast.FunctionDef)]
        for field, text in itertools.zip_longest(body, body[1:]):
            if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation):
                assert isinstance(text, ast.Expr), ast.unparse(field)
                assert isinstance(text.value, ast.Constant)


IN_VAIN: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # flags without effect next to others
    ("sac", {}, {"bins": 31}),
    ("td3", {}, {"bins": 31}),
    ("ppo", {"orthogonal": False}, {"actor_gain": 0.5, "critic_gain": 0.5}),
    ("simba_v2", {"critic_hidden": (16,)}, {"size": "small"}),
    ("iql", {"retain": "append"}, {"offline_ratio": 0.3, "weighting_temperature": 0.3, "warmup_steps": 1}),
    ("cql", {"calibrated": False}, {"failure_reward": 0.0}),
    ("wsrl", {"calibrated": False, "lagrange_gap": 5.0}, {"failure_reward": 0.0, "cql_weight": 0.3}),
    ("bc", {}, {"flow_steps": 2, "denoising_steps": 2, "width": 8, "blocks": 2}),
    ("bc", {"policy": "diffusion", "width": 8}, {"hidden": (8,)}),
    ("fql", {}, {"samples": 3}),
    ("dsrl", {"retain": "append"}, {"denoising_steps": 2, "warmup_steps": 1}),
    ("dsrl", {"policy": "diffusion"}, {"flow_hidden": (8,), "flow_steps": 2}),
    ("pa_rl", {"critic_loss": "iql"},
     {"denoising_steps": 2, "cql_weight": 0.3, "cql_actions": 3, "calibrated": True, "failure_reward": 0.0}),
    ("pa_rl", {"policy": "diffusion"}, {"expectile": 0.6, "flow_hidden": (8,), "flow_steps": 2}),
]  # fmt: skip


@every_algorithm
def test_every_condition_in_a_docstring_is_tested(algo: str):
    args, path = module(algo).Args, ROOT / "algos" / f"{algo}.py"
    texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    begun = [text for text in texts if isinstance(text, str) and text.startswith(("With --", "Without --"))]
    own = {flag for flag in conditions(args) if flag in vars(args) or flag not in conditions(OfflineArgs)}
    assert all(map(CONDITION.match, begun))  # none is misspelt
    assert own <= {flag for of, _, given in IN_VAIN for flag in given if of == algo}
    assert conditions(OfflineArgs).keys() <= {flag for of, _, given in IN_VAIN for flag in given if of == "iql"}
    assert all(args.allows(other, value) for _, other, values in conditions(args).values() for value in values)


@pytest.mark.parametrize(("algo", "others", "given"), IN_VAIN)
def test_a_flag_without_effect_is_warned_of(
    algo: str,
    others: dict[str, Any],
    given: dict[str, Any],
    small: Callable[..., RunArgs],
    capsys: pytest.CaptureFixture[str],
):
    """The sentence is true: a run with the flag equals one without."""
    parse(module(algo).Args, flags(algo, **others | given))
    printed = "".join(capsys.readouterr())
    for flag in given:
        assert f"--{flag.replace('_', '-')} has no effect with" in printed
    for name, changed in {"without": {}, "with": given}.items():
        module(algo).train(small(algo, total_steps=60, run_dir=Path(name), **others | changed))
    assert_same_run(Path("with"), Path("without"))


@pytest.mark.parametrize(
    ("algo", "given", "sentence"),
    [
        ("sac", ["--bins", "31"], "--bins has no effect without --critic hl-gauss or c51"),
        ("sac", ["--bins", "31", "--critic", "c51"], None),
        ("ppo", ["--no-orthogonal", "--actor-gain", "1"], "--actor-gain has no effect without --orthogonal"),
        ("ppo", ["--actor-gain", "1"], None),
        ("simba_v2", ["--size=small", "--critic-hidden", "8", "8"], "--size has no effect with --critic-hidden"),
        ("simba_v2", ["--size=small"], None),
        ("rlpd", ["--dataset", "x", "--offline-ratio", "0.3"], None),  # it mixes by default
        ("wsrl", ["--dataset", "x", "--retain", "mix", "--warmup-steps", "3"], None),  # its own docstring differs
        ("wsrl", ["--dataset", "x", "--cql-weight", "3"], None),  # the domain decides on the gap later
    ],
)
def test_what_a_warning_of_no_effect_says(
    algo: str, given: list[str], sentence: str | None, capsys: pytest.CaptureFixture[str]
):
    parse(module(algo).Args, given)
    printed = "".join(capsys.readouterr())
    assert sentence in printed if sentence else "no effect" not in printed


@every_algorithm
@pytest.mark.parametrize("value", [False, True])
def test_both_branches_of_every_boolean_flag(
    algo: str, value: bool, small: Callable[..., RunArgs], monkeypatch: pytest.MonkeyPatch
):
    """A run with every one of them set, and one with none, get to their ends.

    --track with a stand-in: Weights & Biases itself needs an account. --compile is in test_recorded.py.
    """
    wandb = types.ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)
    wandb.init = lambda **_: types.SimpleNamespace(log=lambda values, step: None, finish=lambda exit_code: None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    chosen = {flag: value for flag in booleans(module(algo).Args) if flag != "compile"}
    module(algo).train(args := small(algo, total_steps=60, **chosen))
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
        ({"overlap": None}, "--overlap is None: give True or False"),
        ({"overlap": "yes"}, "--overlap is 'yes': give True or False"),
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
    arguments = dataclasses.asdict(small(algo, total_steps=60, run_dir=tmp_path / "strings"))
    numbers = {name: str(v) for name, v in arguments.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    numbers |= {name: list(map(str, v)) for name, v in arguments.items() if isinstance(v, tuple)}
    args = module(algo).Args(**arguments | numbers | {"run_dir": str(tmp_path / "strings")})
    assert args == small(algo, total_steps=60, run_dir=tmp_path / "strings")
    module(algo).train(args)
    assert (tmp_path / "strings" / "DONE").exists()


def test_whole_numbers_may_be_written_as_1e5():
    """On the command line, one, several and one that may be left out; --help still names the kind."""
    args = parse(
        module("expo").Args, ["--dataset", "x", "--online-steps", "1e5", "--hidden", "2e2", "64", "--utd", "1e1"]
    )
    assert (args.online_steps, args.hidden, args.utd) == (100_000, (200, 64), 10)
    assert "--online-steps INT" in command("--help", algo="expo").stdout


def test_shared_arguments_are_in_every_file():
    names = {field.name for field in dataclasses.fields(OnlineArgs)}
    assert {"env", "seed", "total_steps", "device", "compile", "run_dir", "eval_every", "eval_episodes",
            "checkpoint_every", "track"} <= names  # fmt: skip
    names = {field.name for field in dataclasses.fields(OfflineArgs)}
    assert {"dataset", "offline_steps", "online_steps", "retain", "offline_ratio", "init_from"} <= names


def required(algo: str) -> dict[str, Any]:
    """What an algorithm cannot do without; of steps, those that no preset fills in."""
    steps = {"online_steps": 9} if algo in OFFLINE and "online_steps" not in unset(module(algo).Args) else {}
    return {"dataset": str(PENDULUM)} | steps if algo in OFFLINE else {}


def needed(algo: str) -> list[str]:
    """The same as words of a command line."""
    return [word for name, value in required(algo).items() for word in (f"--{name.replace('_', '-')}", str(value))]


def tables(algo: str) -> list[dict[str, Any]]:
    """What its presets fill in, by domain and by size."""
    found = vars(module(algo))
    return [*found.get("PRESETS", {}).values(), *found.get("SIZES", {}).values()]


@every_algorithm
def test_nothing_given_leaves_every_default_unset(algo: str):
    """On the command line as in Python."""
    kind = module(algo).Args
    from_python = kind(**required(algo))
    assert parse(kind, needed(algo)) == from_python
    assert unset(from_python) == unset(kind)


@every_algorithm
def test_arguments_come_back_from_a_run_folder(algo: str):
    """As config.json holds them: lists, paths and what is not filled in yet."""
    args = module(algo).Args(**required(algo), run_dir="x")
    kept = json.loads(json.dumps(dataclasses.asdict(args), default=str))
    assert module(algo).Args(**kept) == args
    assert unset(module(algo).Args(**kept)) == unset(args)


@every_algorithm
def test_a_given_value_is_known_even_if_a_preset_has_the_same(algo: str):
    """Each value that a preset would fill in, written on the command line, is that value and no default."""
    seen = {"overlap", "compile"}
    for table in tables(algo):
        given = {name: value for name, value in table.items() if name in unset(module(algo).Args) and value is not None}
        words = []
        for name, value in given.items():
            flag = name.replace("_", "-")
            values = value if isinstance(value, tuple) else () if isinstance(value, bool) else (value,)
            words += [f"--no-{flag}" if value is False else f"--{flag}", *map(str, values)]
        args = parse(module(algo).Args, [*needed(algo), *words])
        for name, value in given.items():
            assert getattr(args, name) == value
            assert type(getattr(args, name)) is type(value)
        assert unset(args).keys() == unset(module(algo).Args).keys() - given.keys()
        seen |= given.keys()
    assert seen == unset(module(algo).Args).keys() | {"overlap"}  # each has a preset


@every_algorithm
def test_each_boolean_flag_has_both_forms(algo: str):
    """And no third; those too that a preset or the device fills in, for which the parser has a default of its own."""
    names = booleans(module(algo).Args)
    assert len(names) > 3
    for form, value in (("", True), ("no-", False)):
        said = [f"--{form}{name.replace('_', '-')}" for name in names]
        args = parse(module(algo).Args, [*needed(algo), *said])
        assert all(getattr(args, name) is value for name in names)
    with pytest.raises(InputError, match="True"):
        parse(module(algo).Args, [*needed(algo), "--track", "True"])


def test_the_flags_of_the_tests_are_those_of_the_command_line():
    """`conftest.flags` writes booleans in their own form; those filled in by domain too."""
    algo = with_flag("calibrated")[0]
    for value in (True, False):
        assert parse(module(algo).Args, flags(algo, calibrated=value)).calibrated is value


@pytest.mark.parametrize(
    "algo", [algo for algo in ALGORITHMS if unset(module(algo).Args).keys() - {"overlap", "compile"}]
)
def test_help_shows_what_a_preset_fills_in(algo: str, capsys: pytest.CaptureFixture[str]):
    """For each such flag the values of all domains or sizes, one after the other."""
    with pytest.raises(SystemExit):
        parse(module(algo).Args, ["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    found = vars(module(algo))
    named = found.get("PRESETS", {}) | found.get("SIZES", {})
    for name, default in unset(module(algo).Args).items():
        values = ", ".join(f"{of} {table[name]}" for of, table in named.items() if name in table)
        assert f"(default: {default}{': ' if values else ''}{values})" in shown
    assert "(default: with CUDA)" in shown


@pytest.mark.parametrize("env", ["Hopper-v4", "AntMaze_Large-v4", "PointMaze_Large-v3", "AdroitHandPen-v1",
                                 "adroit-binary/pen-v0", "FrankaKitchen-v1"])  # fmt: skip
@pytest.mark.parametrize("algo", OFFLINE)
def test_presets_fill_in_all_but_what_the_device_does(algo: str, env: str):
    """In every domain. Sizes come with the domain's presets where an algorithm has them."""
    found = vars(module(algo))
    presets = found.get("PRESETS", {})
    if sizes := found.get("SIZES"):
        presets = {domain: preset | sizes[found["Args"].size] for domain, preset in presets.items()}
    args = with_presets(found["Args"](**required(algo), env=env), presets)
    assert unset(args) == {"overlap": Unset.WITH_CUDA, "compile": Unset.IF_IT_PAYS}


@pytest.mark.parametrize("bounds", [each for each in vars(arguments).values() if get_origin(each) is Annotated])
def test_the_bounds_of_an_annotation(bounds: Any):
    """At both ends, next to them inside, and next to them outside: each named kind of number."""
    kind, interval = get_args(bounds)
    step = 1 if int in (kind, *get_args(kind)) else 1e-9
    wanted = {interval.low: interval.has_low, interval.low + step: True, interval.low - step: False}
    if interval.high < np.inf:
        wanted |= {interval.high: interval.has_high, interval.high - step: True, interval.high + step: False}
    wanted = {value: accepted for value, accepted in wanted.items() if np.isfinite(value)}
    wanted |= {float("inf"): False, float("-inf"): False, float("nan"): False}
    for value, accepted in wanted.items():
        if accepted:
            assert checked("--x", value, kind, interval) == value
        else:
            with pytest.raises(InputError, match=r"^--x is .*: give a "):
                checked("--x", value, kind, interval)
    assert checked("--x", None, kind | None, interval) is None


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("NonNegativeInt", [0, 1], [-1]),
        ("NonNegative", [0.0, 1e-300], [-1e-300]),
        ("AnyNumber", [-3e38, 0.0, 3e38], [float("inf"), 1e39, -1e300]),
        ("OptionalNumber", [None, -3e38, 0.0], [float("-inf"), float("nan"), 1e300]),
        ("UnitInterval", [0.0, 0.5, 1.0], [-1e-300, 1.0000001]),
        ("Fraction", [1e-300, 1.0], [0.0, 1.0000001]),
        ("OpenFraction", [1e-300, 0.9999999], [0.0, 1.0]),
        ("Probability", [0.0, 0.9999999], [-1e-300, 1.0]),
    ],
)
def test_the_bounds_of_each_kind_by_hand(name: str, inside: list[Any], outside: list[float]):
    kind, interval = get_args(getattr(arguments, name))
    for value in inside:
        assert checked("--x", value, kind, interval) == value
    for value in outside:
        with pytest.raises(InputError, match=r"^--x is "):
            checked("--x", value, kind, interval)


@pytest.mark.parametrize("kind", [int, float])
def test_a_number_without_bounds_of_its_own_is_above_0(kind: type):
    """And one that may be None, and each of a list."""
    for wanted in (kind, kind | None):
        assert checked("--x", 1, wanted) == 1
        for value in (0, -1):
            with pytest.raises(InputError, match=f"^--x is {kind(value)}: give a number above 0$"):
                checked("--x", value, wanted)
    assert checked("--x", [1, 2], tuple[kind, ...]) == (1, 2)
    for value in ([], [1, 0], [-1]):
        with pytest.raises(InputError, match="give one or more numbers above 0"):
            checked("--x", value, tuple[kind, ...])
    assert Interval(0) == POSITIVE


@every_algorithm
def test_every_number_is_held_in_the_bounds_of_its_annotation(algo: str):
    """Given in Python: beyond an end, and at an end that does not belong to them, it is refused."""
    for name, hint in get_type_hints(module(algo).Args, include_extras=True).items():
        bare, *rest = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        bounds = rest[0] if rest else POSITIVE
        if bare not in (int, float, int | None, float | None) or bounds.low == -np.inf:
            continue
        refused = [bounds.low - 1] + ([] if bounds.has_low else [bounds.low])
        refused += [bounds.high + 1] + ([] if bounds.has_high else [bounds.high])
        for value in refused:
            with pytest.raises(InputError, match=rf"^--{name.replace('_', '-')} is "):
                module(algo).Args(**required(algo) | {name: value})


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bogus", "3"], "Unrecognized options: --bogus, 3\nsee --help"),
        (["--actor-l", "3"], "Unrecognized options: --actor-l, 3 (perhaps --actor-lr?)\nsee --help"),
        (["--tf3"], "Unrecognized options: --tf3 (perhaps --tf32?)\nsee --help"),
        (["--track", "True"], "Unrecognized options: True (a switch takes no value: --flag or --no-flag)\nsee --help"),
        (
            ["--hidden", "[16, 16]"],
            "Error parsing --hidden: Could not find valid parse for arguments: ['[16, 16]'] (give several numbers with "
            "spaces between them)\nsee --help",
        ),
        (["--actor-lr", "x"], "Error parsing --actor-lr: could not convert string to float: 'x'\nsee --help"),
        (["--actor-lr"], "Missing value for argument '--actor-lr'. Expected 1 values.\nsee --help"),
    ],
)
def test_an_error_is_the_same_in_any_terminal(
    words: list[str], said: str, encoding: str, monkeypatch: pytest.MonkeyPatch
):
    """The parser draws its box in characters that the terminal has."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    with pytest.raises(InputError) as error:
        parse(module("sac").Args, words)
    assert str(error.value).startswith(said)


def test_the_help_in_a_terminal_without_greek_letters():
    line = [sys.executable, "algos/sac.py", "--help"]
    poor = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(line, cwd=ROOT, env=poor, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()
    assert rb"\u03b1" in done.stdout
