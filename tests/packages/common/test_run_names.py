"""Names of runs: the same command finds its own run, and two experiments never share a folder."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from conftest import OFFLINE, PENDULUM, every_algorithm, module

from common.arguments import LONGEST_LABEL, MAY_DIFFER
from common.errors import InputError
from common.run_folder import name_and_folder
from offline.offline_to_online import with_presets


def args_of(algo: str, **changed: Any) -> Any:
    return module(algo).Args(**({"dataset": str(PENDULUM)} if algo in OFFLINE else {}) | changed)


def name(algo: str, **changed: Any) -> str:
    return name_and_folder(algo, args_of(algo, **changed))[0]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "sac__HalfCheetah-v4__1"),
        ({"env": "Hopper-v4", "seed": 3}, "sac__Hopper-v4__3"),
        ({"actor_lr": 3e-4}, "sac__HalfCheetah-v4__actor-lr-0.0003__1"),
        ({"hidden": (64, 64), "compile": False}, "sac__HalfCheetah-v4__no-compile_hidden-64-64__1"),
        ({"total_steps": 5_000, "track": True, "checkpoint_every": 7}, "sac__HalfCheetah-v4__1"),
        ({"run_name": "mine", "seed": 3, "tau": 0.1}, "mine"),
    ],
)
def test_the_name_states_what_differs_from_the_defaults(changed: dict[str, Any], expected: str) -> None:
    assert name("sac", **changed) == expected
    assert name_and_folder("sac", args_of("sac", **changed))[1] == Path("runs") / expected
    assert name_and_folder("sac", args_of("sac", **changed | {"run_dir": "there"}))[1] == Path("there")


def values_of(algo: str, field: Any) -> list[dict[str, Any]]:
    """Return valid arguments in which this field differs from its default."""
    hint = get_type_hints(module(algo).Args)[field.name]
    candidates = [
        *(get_args(hint) if get_origin(hint) is Literal else ()),
        True,
        False,
        2,
        7,
        4_096,
        0.25,
        (3, 4),
        "x",
        '{"g": 5}',
    ]
    found = []
    for value in candidates:
        try:
            args = args_of(algo, **{field.name: value})
        except InputError:
            continue
        if getattr(args, field.name) not in (field.default, *(f[field.name] for f in found)):
            found.append({field.name: getattr(args, field.name)})
    return found


@every_algorithm
def test_every_flag_that_changes_a_run_changes_its_name(algo: str) -> None:
    """As does another value of it. What a resumed run may increase, and what changes nothing, does not."""
    plain, args = name(algo), args_of(algo)
    kept = {*MAY_DIFFER, *args.extendable}
    for field in dataclasses.fields(args):
        found = values_of(algo, field)
        names = [name(algo, **changed) for changed in found]
        if field.name == "run_name":
            assert names == [each["run_name"] for each in found]
        elif field.name in kept:
            assert set(names) <= {plain}, field.name
        else:
            without = ("init_from", "dataset", "horizon", "preset")  # test_presets.py has values of this one
            assert found or field.name in without, f"no other value of {field.name}"
            assert len({plain, *names}) == 1 + len(names), field.name


def test_labels_are_short_and_differ() -> None:
    """Long ones end in a hash, as do those of characters that a file system may refuse."""
    long = {"actor_lr": 3e-4, "critic_lr": 3e-4, "alpha_lr": 3e-4, "batch_size": 512, "utd": 2}
    labels = [args_of("sac", **long | {"buffer_size": size}).label for size in range(1_000, 1_200)]
    labels += [args_of("cql", init_from=path).label for path in ("a/b", "a-b", "a b", "ä", "b_tau-0.1")]
    labels.append(args_of("cql", init_from="b", tau=0.1).label)
    assert len(set(labels)) == len(labels)
    for label in labels:
        assert len(label) <= LONGEST_LABEL
        assert label.isascii()
        assert not set(label) & set(' /\\:*?"<>|')


@pytest.mark.parametrize("algo", OFFLINE)
def test_presets_are_not_part_of_the_name(algo: str) -> None:
    """A preset that changes in a later version then finds the same folder, and is refused there in words."""
    args = args_of(algo, online_steps=10)
    tables = vars(module(algo))
    by_size = tables.get("SIZES", {}).get(getattr(args, "size", ""), {})
    filled = with_presets(args, {domain: values | by_size for domain, values in tables.get("PRESETS", {}).items()})
    assert filled.env == "Pendulum-v1"
    assert name_and_folder(algo, filled) == name_and_folder(algo, args)


@pytest.mark.parametrize("given", ["", "a/b", "..", ".x", "a b"])
def test_a_run_name_is_one_folder(given: str) -> None:
    with pytest.raises(InputError, match="--run-name is"):
        args_of("sac", run_name=given)


def test_two_experiments_get_two_folders(small: Callable[..., Any], tmp_path: Path) -> None:
    runs = [small(run_dir=None, total_steps=60, tau=tau) for tau in (0.01, 0.02)]
    folders = [module("sac").train(args).folder for args in runs]
    assert len({*folders}) == 2
    for args, folder in zip(runs, folders, strict=True):
        assert module("sac").train(args).folder == folder  # finished: found again


def test_other_arguments_in_the_same_folder_are_refused_with_the_flag_that_was_given(small: Callable[..., Any]) -> None:
    for given, flag in (({"run_dir": None, "run_name": "mine"}, "--run-name"), ({}, "--run-dir")):
        module("sac").train(small(total_steps=60, **given))
        with pytest.raises(InputError, match=rf"tau .*\n.* another {flag}"):
            module("sac").train(small(total_steps=60, tau=0.5, **given))


def test_a_finished_offline_run_that_shall_continue_online_names_init_from(small: Callable[..., Any]) -> None:
    args = small("iql", run_dir=None, offline_steps=5, online_steps=0)
    folder = module("iql").train(args).folder
    with pytest.raises(InputError, match=f"online_steps .*\n.*--init-from {folder} and another --run-name"):
        module("iql").train(dataclasses.replace(args, online_steps=5))
    with pytest.raises(InputError, match=r"give the same arguments"):  # the cause is another flag
        module("iql").train(dataclasses.replace(args, env="Pendulum-v1", run_name=folder.name, tau=0.5))


def test_pairs_of_flags_do_not_collide() -> None:
    changes = [{"tau": 0.1}, {"gamma": 0.1}, {"actor_lr": 0.1}, {"hidden": (1, 0 + 1)}, {"hidden": (11,)}]
    changes += [a | b for a, b in itertools.combinations(changes, 2)]
    labels = [args_of("sac", **changed).label for changed in changes]
    assert len(set(labels)) == len({tuple(sorted(changed.items())) for changed in changes})
