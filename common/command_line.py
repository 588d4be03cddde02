"""Parse a command's arguments, run it, and report bad input or a failed run in two lines at most."""

import contextlib
import dataclasses
import errno
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch
import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from common import start
from common.arguments import RunArgs, Unset, converted
from common.conditions import without_effect
from common.errors import Finished, InputError, RunError, report_unraisable
from common.memory import report_out_of_memory
from common.messages import exit_if_unread, log, log_error

T = TypeVar("T")
PLACEHOLDERS: dict[Any, Any] = {bool: False, int: 1, float: 0.5, float | None: 0.5}
_registry = ConstructorRegistry()


@_registry.primitive_rule
def _converted(of: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Return tyro's rule for whole numbers (1e5 is one) and paths (not empty), or None for other types."""
    wanted = of.type
    if wanted not in (int, Path):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT" if wanted is int else "PATH",
        instance_from_str=lambda words: converted(words[0], wanted),
        is_instance=lambda value: isinstance(value, int if wanted is int else Path) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )


def command_line(train: Callable[[T], object], arguments: type[T]) -> None:
    """Run `train` with the command line's arguments, and exit with a message of at most two lines if it fails.

    The exit status is 2 for bad input. It is 1 for a failed run, a GPU that is out of memory, a full disk, and a file
    that cannot be read or written.
    """
    program = Path(sys.argv[0]).name
    sys.unraisablehook = report_unraisable
    try:
        start.end_imports()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may lack Greek letters
        _refuse_another_checkout(Path(sys.argv[0]))
        with exit_if_unread():
            args = parse(arguments)
        report_out_of_memory(train)(args)
    except Finished as said:
        log.info(said)
    except KeyboardInterrupt:  # before a run begins; a run handles the signal itself
        raise SystemExit(130) from None
    except InputError as error:
        log_error(f"{program}: {error}", error)
        raise SystemExit(2) from None
    except RunError as error:
        log_error(f"{program}: {error}", error)
        raise SystemExit(1) from None
    except torch.OutOfMemoryError as error:
        full = str(error).partition(". ")[0]  # the first sentence of a paragraph
        cure = "give a smaller --buffer-size or --batch-size, or a larger share of the GPU"
        log_error(f"{program}: {full}: {cure}", error)
        raise SystemExit(1) from None
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if error.errno is None or not (is_full or error.filename):  # not of a file
            raise
        # A rename fails because of what is at its end.
        where = error.filename2 or error.filename or "the run folder"
        cure = "make room" if is_full else "correct that"
        log_error(f"{program}: {error.strerror} ({where}): {cure}, then run the same command again", error)
        raise SystemExit(1) from None


def _refuse_another_checkout(program: Path) -> None:
    """Raise InputError if `program` is part of one checkout, and Python imported this file from another.

    After `pip install -e`, every program in the virtual environment imports the packages of the installed checkout. A
    program of another checkout would run with them, and only the commit in its config.json would tell.
    """
    # Path.exists would raise PermissionError in a folder that may not be searched.
    roots = (root for root in program.resolve().parents if os.path.exists(root / "common" / "command_line.py"))
    imported, own = Path(__file__).resolve().parents[1], next(roots, None)
    if own not in (None, imported):
        raise InputError(
            f"it belongs to {own}, but Python imports `common` from {imported}: run `make setup` in {own} and use its "
            f".venv, or set PYTHONPATH={own}"
        )


def _with_placeholders(arguments: type[T], unset: dict[str, Unset]) -> type[T]:
    """Return the class with a placeholder as the default of each field that is filled in later.

    tyro requires defaults of the field's type. The help shows what fills in each field. The class checks no values.
    """
    if not unset:
        return arguments
    hints, annotations, defaults = get_type_hints(arguments, include_extras=True), {}, {}
    for name, default in unset.items():
        bare = get_args(hints[name])[0] if get_origin(hints[name]) is Annotated else hints[name]
        hint = tyro.conf.arg(help_behavior_hint=_filled_in(arguments, name, default))
        annotations[name] = Annotated[hints[name], hint]
        defaults[name] = get_args(bare)[0] if get_origin(bare) is Literal else PLACEHOLDERS.get(bare, (1,))
    body = {"__annotations__": annotations, "__post_init__": lambda self: None, "__module__": arguments.__module__}
    return dataclasses.dataclass(type(arguments.__name__, (arguments,), defaults | body))


def _filled_in(arguments: type, name: str, default: Unset) -> str:
    """Return the help text on what fills in an argument, with the values in its module's tables."""
    module = vars(sys.modules[arguments.__module__])
    tables = module.get("PRESETS", {}) | module.get("SIZES", {})
    values = [f"{of} {values[name]}" for of, values in tables.items() if name in values]
    return f"(default: {default}{': ' if values else ''}{', '.join(values)})"


def parse(arguments: type[T], words: Sequence[str] | None = None) -> T:
    """Parse `words`, by default the command line's, into arguments. Raises InputError if they are not valid."""
    words = sys.argv[1:] if words is None else words
    printed, description = io.StringIO(), sys.modules[arguments.__module__].__doc__ or ""
    unset = {f.name: f.default for f in dataclasses.fields(arguments) if isinstance(f.default, Unset)}  # type: ignore[arg-type]
    try:
        with contextlib.redirect_stderr(printed):
            filled = _with_placeholders(arguments, unset)
            parsed = tyro.cli(filled, args=words, description=description, registry=_registry)
        flags = [word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")]
        named = {flag.removeprefix("no_") for flag in flags}
        given = [field.name for field in dataclasses.fields(arguments) if field.name in named]  # type: ignore[arg-type]
        args = arguments(**{name: getattr(parsed, name) for name in given}) if unset else parsed
        for sentence in without_effect(args, given) if isinstance(args, RunArgs) else ():
            log.warning(sentence)
        return args
    except SystemExit as stop:
        if not stop.code:
            raise
    # tyro draws a box of many lines. The error stands above its first rule, the suggestion below.
    # Its rules are hyphens where stdout is not UTF-8.
    lines = [re.sub("^[│╭╮╰╯─ -]*$", "", line).strip("│ ") for line in printed.getvalue().splitlines()[1:]]
    if lines and not lines[0]:
        del lines[0]
    wrong = " ".join(lines[: lines.index("")] if "" in lines else lines)
    meant = re.search(r"Perhaps you meant:.*?(--[a-z0-9-]+)", " ".join(lines))
    example = re.search(r"^ *(python .*?) *(?: # .*)?$", description, re.MULTILINE)
    if missing := re.match(r"Missing from \S+: (.*)", wrong):
        needed = re.findall(r"((?:--\S+ )?\S+) (.*?)\.? \(required\)", missing[1])
        wrong = f"give {' and '.join(f'{name} ({text})' for name, text in needed)}"
    hint = f" (perhaps {meant[1]}?)" if meant else ""
    if re.search(r"Unrecognized options: (True|False)$", wrong):
        hint = " (a switch takes no value: --flag or --no-flag)"
    elif re.search(r"['\[]\[?[\d.]+, ?[\d.]", wrong):
        hint = " (give several numbers with spaces between them)"
    line = f"for example: {example[1]}; or " if missing and example else ""
    raise InputError(f"{wrong}{hint}\n{line}see --help for all flags")
