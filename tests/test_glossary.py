"""The flags that docs/glossary.md translates are flags of the algorithms that it names."""

import dataclasses
import re

import pytest
from conftest import ALGORITHMS, ROOT, module

from common.command_line import parse

PAGE = (ROOT / "docs" / "glossary.md").read_text()
FLAGS = PAGE[PAGE.index("## Flags") : PAGE.index("## Metrics and files")]
ROWS = re.findall(r"^\| `--([a-z0-9-]+)(?: (\S+))?` \| ([^|]+) \|", FLAGS, re.MULTILINE)


def named(of: str) -> list[str]:
    """Return the algorithms of a cell: their files' names, from their titles."""
    return list(ALGORITHMS) if of == "all" else [each.lower().replace("+", "_") for each in of.split(", ")]


def has_flag(algo: str, name: str) -> bool:
    """Return whether it is a field of `Args`. A class constant of this name is no flag."""
    return name in {field.name for field in dataclasses.fields(module(algo).Args)}


def test_every_table_of_flags_is_read() -> None:
    """Each row below a head has a flag and its algorithms."""
    lines = [line for line in FLAGS.splitlines() if line.startswith("| ") and not line.startswith("| here")]
    assert len(lines) == len(ROWS) > 60
    heads = re.findall(r"^\| here \| of \| meaning \|.*$", FLAGS, re.MULTILINE)
    assert len(heads) == len(re.findall("^### ", FLAGS, re.MULTILINE)) == 4
    assert all(name in heads[0] for name in ("CleanRL", "Stable-Baselines3", "CORL", "d3rlpy"))


@pytest.mark.parametrize(("flag", "value", "of"), ROWS, ids=lambda each: str(each)[:20])
def test_a_flag_of_the_glossary_is_one_of_its_algorithms(flag: str, value: str, of: str) -> None:
    """And of no other of those that the tables name."""
    name, algorithms = flag.replace("-", "_"), named(of)
    for algo in algorithms:
        assert has_flag(algo, name), f"algos/{algo}.py has no --{flag}"
    listed = {algo for row, _, cell in ROWS if row == flag for algo in named(cell)}
    known = {algo for _, _, cell in ROWS if cell != "all" for algo in named(cell)}  # not one that is new
    assert {algo for algo in known if has_flag(algo, name)} <= listed
    if value:
        assert getattr(parse(module(algorithms[0]).Args, [f"--{flag}", value]), name) == float(value)


def test_a_setting_of_another_library_is_written_by_the_glossary() -> None:
    """CleanRL's SAC, translated by hand with the table, is accepted."""
    words = "--env Hopper-v4 --actor-lr 3e-4 --critic-lr 1e-3 --alpha-lr 1e-3 --learning-starts 5e3 --tau 0.005"
    args = parse(module("sac").Args, words.split())
    assert (args.actor_lr, args.critic_lr, args.learning_starts) == (3e-4, 1e-3, 5_000)
