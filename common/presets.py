"""Read the values of `--preset NAME/TASK`: published hyperparameters, or a reader's own, in a TOML file.

NAME.toml lies next to the algorithm's file. A NAME that ends in .toml is the path of another file. The settings of a
task are the table `[algorithm."TASK"]`, whose keys are flags with underscores. The key `source` says where they were
published.
"""

import difflib
import re
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from common.errors import InputError

NAMED = re.compile(r"(.+\.toml|[\w-]+)/(.+)")


def read_preset(preset: str, algorithm: Path, flags: Collection[str]) -> dict[str, Any]:
    """Return the values of a preset, with its task as `task`. They are not converted yet.

    `algorithm` is the algorithm's file, and `flags` are the names of its arguments. Raises InputError if the preset has
    another form, does not exist or is not valid TOML, or if a key is not a flag.
    """
    if not (named := NAMED.fullmatch(preset)):
        known = " or ".join(path.stem for path in sorted(algorithm.parent.glob("*.toml"))) or "one"
        raise InputError(
            f"--preset is {preset!r}: give NAME/TASK, of which NAME is {known}, or the path of a .toml file"
        )
    name, task = named.groups()
    path = Path(name) if name.endswith(".toml") else algorithm.parent / f"{name}.toml"
    algo = algorithm.stem
    tables = _of_algorithm(path, algo, preset)
    if not isinstance(values := tables.get(task), dict):
        raise InputError(f"{path} has no settings of {algo} for {task}: give one of {', '.join(sorted(tables))}")
    allowed = {*flags} - {"preset"}
    for key in values.keys() - allowed - {"source"}:
        near = difflib.get_close_matches(key, allowed, 1)
        meant = f" (perhaps {near[0]}?)" if near else ""
        raise InputError(f'{path}: {key} in [{algo}."{task}"] is not a flag that a preset can set{meant}')
    return {"task": task} | {key: value for key, value in values.items() if key != "source"}


def _of_algorithm(path: Path, algo: str, preset: str) -> dict[str, Any]:
    """Return the file's tables of the algorithm, by task."""
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        others = ", ".join(other.stem for other in sorted(path.parent.glob("*.toml"))) or "none"
        raise InputError(f"--preset {preset}: {path} does not exist (presets in its folder: {others})") from None
    except OSError as error:
        raise InputError(f"--preset {preset}: {path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
        raise InputError(f"--preset {preset}: {path} is not valid TOML ({error})") from None
    if not (isinstance(tables := found.get(algo), dict) and tables):
        having = ", ".join(name for name, table in found.items() if isinstance(table, dict)) or "no algorithm"
        raise InputError(f"{path} has no settings of {algo}: it has those of {having}")
    return tables
