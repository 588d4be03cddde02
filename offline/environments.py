"""The ids of D4RL's environments, for example offline.environments:d4rl/maze2d-medium-v1.

The environments are in `envs.d4rl`. Their ids begin with this module because the environments were here before. Run
folders and datasets store these ids, and a run resumes with the id that it began with. Importing this module registers
the environments.
"""

import difflib
import re

from common.errors import InputError
from envs import d4rl

# Older Minari datasets name these as entry points.
from envs.d4rl import Adroit, AdroitBinary, AntMaze, Kitchen, PaddedAnt, PointMaze

__all__ = ["Adroit", "AdroitBinary", "AntMaze", "Kitchen", "PaddedAnt", "PointMaze"]


def _id(name: str) -> str:
    """Return the id that `envs.make.make` takes. Gymnasium's own environments keep their names."""
    return f"{__name__}:{name}" if "/" in name else name


ENVIRONMENTS = {dataset_id: _id(name) for dataset_id, name in d4rl.ENVIRONMENTS.items()}
BINARY = {key: _id(name) for key, name in d4rl.BINARY.items()}
# The tasks that continue after success have RLPD's and EXPO's score, the share of the steps solved. These are the
# returns of 0 and 100 %.
BINARY_SCORES = {BINARY[task, False]: (-float(steps), 0.0) for task, steps in d4rl.BINARY_STEPS.items()}


def environment_of(dataset_id: str) -> str:
    """Return the environment of a D4RL dataset ("hopper-medium-v2"), as `envs.make.make` takes it.

    Raises InputError if D4RL has no such dataset.
    """
    if dataset_id not in ENVIRONMENTS:
        close = ", ".join(difflib.get_close_matches(dataset_id, ENVIRONMENTS, cutoff=0.3))
        raise InputError(f"D4RL has no dataset {dataset_id!r}. Nearest: {close or 'none; see docs/d4rl.md'}.")
    return ENVIRONMENTS[dataset_id]


def domain(env: str, dataset: str) -> str:
    """Return the domain, as `with_presets` has it, by the names of the environment and the dataset."""
    name = f"{env} {dataset}".lower()
    words = {"ogbench": "singletask", "antmaze": "antmaze", "kitchen": "kitchen", "maze2d": "maze2d|pointmaze"}
    words["adroit"] = r"adroit|\b(pen|door|hammer|relocate)-"  # not open-, not indoor-
    found = next((found for found, marks in words.items() if re.search(marks, name)), "locomotion")
    binary = "binary" in name or "sparse" in dataset.lower()
    return "adroit-binary" if found == "adroit" and binary else found
