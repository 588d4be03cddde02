"""The flags that docs/glossary.md translates are flags of our algorithms."""

import contextlib
import dataclasses
import re

import pytest
from conftest import ALGORITHMS, ROOT, module

from common.command_line import parse
from common.errors import InputError

PAGE = (ROOT / "docs" / "glossary.md").read_text()
FLAGS = PAGE[PAGE.index("## Flags") : PAGE.index("## Metrics and files")]
ROWS = re.findall(r"^\| `--([a-z0-9-]+)(?: (\S+))?` \|", FLAGS, re.MULTILINE)


def test_every_table_of_flags_is_read() -> None:
    """Each row below a head has a flag."""
    lines = [line for line in FLAGS.splitlines() if line.startswith("| ") and not line.startswith("| here")]
    assert len(lines) == len(ROWS) > 60
    heads = re.findall(r"^\| here \| meaning \|.*$", FLAGS, re.MULTILINE)
    assert len(heads) == len(re.findall("^### ", FLAGS, re.MULTILINE)) == 4
    assert all(name in heads[0] for name in ("CleanRL", "Stable-Baselines3", "CORL", "d3rlpy"))


@pytest.mark.parametrize(("flag", "value"), ROWS, ids=lambda each: str(each)[:20])
def test_a_flag_of_the_glossary_is_one_of_our_algorithms(flag: str, value: str) -> None:
    """It is a field of `Args`. A class constant of this name is no flag."""
    name = flag.replace("-", "_")
    having = [module(algo).Args for algo in ALGORITHMS]
    having = [args for args in having if name in {field.name for field in dataclasses.fields(args)}]
    assert having
    if value:
        taken = []
        for args in having:
            with contextlib.suppress(InputError):  # not every algorithm takes every value
                taken.append(getattr(parse(args, [f"--{flag}", value]), name))
        assert set(taken) == {float(value)}


def test_a_setting_of_another_library_is_written_by_the_glossary() -> None:
    """CleanRL's SAC, translated by hand with the table, is accepted."""
    words = "--env Hopper-v4 --actor-lr 3e-4 --critic-lr 1e-3 --alpha-lr 1e-3 --learning-starts 5e3 --tau 0.005"
    args = parse(module("sac").Args, words.split())
    assert (args.actor_lr, args.critic_lr, args.learning_starts) == (3e-4, 1e-3, 5_000)
