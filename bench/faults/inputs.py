"""Faults of what a user gives: flags, datasets and suites with hostile values."""

import dataclasses
import functools
import signal
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import h5py
import numpy as np

from bench.faults.runs import (
    DATASET,
    Fault,
    Verdict,
    args_of,
    chance,
    execute,
    judged,
    small_flags,
    train,
)
from bench.sweep import suite, sweep

SECONDS = 4.0  # until a run with an accepted flag is stopped
NUMBERS = (
    "-1", "0", "nan", "inf", "-inf", "1e39", "1e-46", "1000000000000000000", "9" * 400, "", "1.5", "True", "0x10", "-",
    "٣", "x" * 100_000, "/", "1 2", "1", "3", "0.5", "1e5", "1e-30",
)  # fmt: skip
TEXTS = (
    "", "-", "x" * 100_000, "Bücher ✓", "a\nb", "\udcff", "%s{}", "..", "/", "/dev/null", "/dev/zero", "~", "None",
    "null", "[]", "[" * 10_000, '{"a": NaN}', '{"a": 1}', "os:system", "a" * 300, "a/b-v0", "x.toml", "x.hdf5",
)  # fmt: skip
PATHS = (
    "",
    "/",
    ".",
    "..",
    "/dev/null",
    "/dev/full",
    "/dev/zero",
    "/proc/self/mem",
    "x" * 5_000,
    "a/b/c",
    "\udcff",
    "~",
)
CHOICES = ("", "x", "None", "1", "é", "x" * 100_000)


def flags(algo: str, seed: int) -> list[Fault]:
    """Return a hostile value of every flag of an algorithm, in random order."""
    hints = get_type_hints(args_of(algo), include_extras=True)
    each = [
        Fault(f"--{name.replace('_', '-')} {value[:60]!r}", functools.partial(_flagged, algo, name, value))
        for name in args_of(algo).__dataclass_fields__
        for value in hostile(hints[name])
    ]
    chance(seed, "flags", algo).shuffle(each)
    return each


def hostile(hint: Any) -> tuple[str, ...]:
    """Return the hostile values for a type."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) is Literal:
        return CHOICES
    kinds = {each for each in (get_args(hint) or (hint,)) if each is not NoneType}
    if kinds & {int, float}:
        return NUMBERS
    return PATHS if Path in kinds else CHOICES if bool in kinds else TEXTS


def _flagged(algo: str, name: str, value: str, folder: Path) -> Verdict:
    flag = f"--{name.replace('_', '-')}"
    words = [*small_flags(algo, **{name: ""}), flag, value]
    ended = train(algo, words, folder, terminate_after=SECONDS)
    found = judged(ended, f"{algo}.py", stopped=True)
    if found.outcome != "accepted" or ended.status != 128 + signal.SIGTERM:
        return found
    again = judged(train(algo, words, folder, terminate_after=SECONDS), f"{algo}.py", stopped=True)
    return Verdict("LOST", again.seen) if again.outcome == "refused" else again


ATTRIBUTE_VALUES: tuple[Any, ...] = (
    "", "x" * 60_000, "Bücher ✓", "os:system", "Hopper-v4", "[" * 5_000, '{"a": NaN}', b"\xff\xfe", np.nan, np.inf, -1,
    10**18, 1e300, np.array([]), np.zeros((3, 3)), np.array(["a", "b"], dtype="S1"),
    np.array([np.nan]), True, h5py.Empty("f4"),
)  # fmt: skip
DATA_CHANGES: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "as text": lambda data: data.astype("S8"),
    "as complex": lambda data: data.astype(np.complex64),
    "as int64": lambda data: data.astype(np.int64),
    "as float16": lambda data: data.astype(np.float16),
    "as records": lambda data: np.zeros(len(data), [("a", "f4"), ("b", "i4")]),
    "one row more": lambda data: np.concatenate([data, data[-1:]]),
    "one row less": lambda data: data[:-1],
    "no rows": lambda data: data[:0],
    "a scalar": lambda data: np.float32(1),
    "a text": lambda data: "text",
    "no value": lambda data: h5py.Empty("f4"),
    "one dimension more": lambda data: data[..., None],
    "one dimension less": lambda data: data.reshape(len(data), -1)[:, 0],
    "no columns": lambda data: data.reshape(len(data), -1)[:, :0],
    "transposed": lambda data: data.T if data.ndim > 1 else data[None],
    "all NaN": lambda data: np.full(data.shape, np.nan, np.float32),
    "all zero": lambda data: np.zeros_like(data),
    **{
        f"one {value}": functools.partial(lambda value, data: _with_one(data, value), value)
        for value in (np.nan, np.inf, -np.inf, 1e38, 1e300)
    },
}
LINKS: dict[str, Callable[[Any, str], Any]] = {
    "a group": lambda file, key: file.create_group(key),
    "a link to nowhere": lambda file, key: file.__setitem__(key, h5py.SoftLink("/nowhere")),
    "a link to itself": lambda file, key: file.__setitem__(key, h5py.SoftLink(f"/{key}")),
    "a link to another file": lambda file, key: file.__setitem__(key, h5py.ExternalLink(str(DATASET), f"/{key}")),
    "absent": lambda file, key: None,
}
MUST_REFUSE = ("NaN", "nan", "inf")  # in the name of a change: numbers that no run can use


def _with_one(data: np.ndarray[Any, Any], value: float) -> np.ndarray[Any, Any]:
    changed = data.astype(np.float64)
    changed[len(data) // 3] = value
    return changed


def datasets(algo: str, seed: int) -> list[Fault]:
    """Return a change of every array and attribute of a dataset, and of its bytes, in random order."""
    with h5py.File(DATASET) as file:
        keys, attributes = list(file), list(file.attrs)
    each = [
        Fault(f"{key}: {name}", functools.partial(_changed_data, algo, key, name))
        for key in keys
        for name in (*DATA_CHANGES, *LINKS)
    ]
    each += [
        Fault(f"attribute {name}: {str(value)[:40]!r}", functools.partial(_changed_attribute, algo, name, value))
        for name in (*attributes, "ref_min_score", "ref_max_score")
        for value in (None, *ATTRIBUTE_VALUES)
    ]
    each += [Fault(f"{how} {i}", functools.partial(_changed_bytes, algo, how, (seed, i)))
             for i in range(15) for how in ("cut", "flip a bit in", "fill with random bytes")]  # fmt: skip
    chance(seed, "datasets", algo).shuffle(each)
    return each


def _copied(folder: Path) -> Path:
    path = folder / "data.hdf5"
    path.write_bytes(DATASET.read_bytes())
    return path


def _changed_data(algo: str, key: str, name: str, folder: Path) -> Verdict:
    with h5py.File(_copied(folder), "r+") as file:
        data = file[key][:]
        del file[key]
        if name in LINKS:
            LINKS[name](file, key)
        else:
            file[key] = DATA_CHANGES[name](data)
    found = _trained(algo, folder)
    if found.outcome == "accepted" and any(word in name for word in MUST_REFUSE):
        return Verdict("WRONG", f"{key} with {name} was accepted")
    return found


def _changed_attribute(algo: str, name: str, value: Any, folder: Path) -> Verdict:
    with h5py.File(_copied(folder), "r+") as file:
        if name in file.attrs:
            del file.attrs[name]
        if value is not None:
            file.attrs[name] = value
    return _trained(algo, folder)


def _changed_bytes(algo: str, how: str, case: tuple[int, int], folder: Path) -> Verdict:
    path, luck = _copied(folder), chance(*case)
    data = bytearray(path.read_bytes())
    at = luck.randrange(len(data) if luck.random() < 0.5 else 4_096)  # the first bytes hold the structure
    if how == "cut":
        del data[at:]
    elif how == "flip a bit in":
        data[at] ^= 1 << luck.randrange(8)
    else:
        data[at : at + 100] = luck.randbytes(len(data[at : at + 100]))
    path.write_bytes(data)
    return _trained(algo, folder)


def _trained(algo: str, folder: Path) -> Verdict:
    words = small_flags(algo, dataset="data.hdf5", offline_steps="60", online_steps="40")
    return judged(train(algo, words, folder), f"{algo}.py")


SUITE: dict[str, str] = {
    "algo": '["sac"]', "envs": '["Pendulum-v1"]', "datasets": "[]", "seeds": "[1, 2]", "flags": '"--total-steps 100"',
    "name": '"a"', "label": '"A"', "cpus": "1", "gpus": "0.0", "memory": "0.0",
}  # fmt: skip
SUITE_VALUES = (
    None, "-1", "0", "1", "1.5", "nan", "inf", "-inf", "1e400", "1000000000000000000", "9" * 400, '""', '"x"', '"../x"',
    '"/"', '"a\\nb"', '"Bücher ✓"', f'"{"x" * 100_000}"', "true", "[]", '[""]', "[1]", "[-1]", "[1.5]",
    '["a", 1]', "[[]]", "{}", '{a = 1}', "1979-05-27", '"\\u0000"', '"--run-dir x"', '"--seed"', '"\'"',
    '"{suites} {run} {"', "[1, 1]", '"--total-steps"', "100000000",
)  # fmt: skip
SUITE_TEXTS = (
    "", "[[runs]]", "runs = 1", "runs = []", "[runs]", "[[runs]]\nx = 1", "x = 1", "[", "\udcff", "\x00",
    "[[runs]]\n" * 50_000,     "runs = " + "[" * 5_000, "\ufeff[[runs]]",
)  # fmt: skip


def suites(_: str, seed: int) -> list[Fault]:
    """Return a hostile value of every key of a suite, and damaged files, in random order."""
    keys = {field.name for field in dataclasses.fields(suite.Entry)}
    if keys != SUITE.keys():
        raise RuntimeError(f"SUITE lacks {keys ^ SUITE.keys()}")
    texts = {
        f"{key} = {str(value)[:40]}": "[[runs]]\n" + "".join(
            f"{k} = {v}\n" for k, v in (SUITE | {key: value}).items() if v is not None
        )
        for key in (*SUITE, "unknown")
        for value in SUITE_VALUES
    }  # fmt: skip
    texts |= {f"the text {text[:40]!r}": text for text in SUITE_TEXTS}
    each = [Fault(what, functools.partial(_swept, text)) for what, text in texts.items()]
    chance(seed, "suites").shuffle(each)
    return each


def _swept(text: str, folder: Path) -> Verdict:
    path = folder / "s.toml"
    path.write_text(text, errors="surrogateescape")
    words = [path.name, "--dry-run", "--folder", "runs"]
    return judged(execute("sweep.py", sweep.train, sweep.Args, words, folder), "sweep.py")
