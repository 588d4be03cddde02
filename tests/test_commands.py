"""Every command of README and docs: its program exists and accepts its flags, and most run in a short form.

Not run: what needs a trained policy, another library or a GPU, and what takes minutes in any form (`make speed`).
"""

import dataclasses
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import OFFLINE, PENDULUM, ROOT, arguments_of

from common.command_line import parse

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHORT = {"total_steps": 64, "eval_every": 64, "eval_episodes": 1}  # the short form of a long training
EXAMPLES = re.compile(r"\b(mine|my_\w+)\b|--env [a-z_]+:|…|\.\.\.")  # what stands for a reader's own files


def commands() -> list[tuple[str, str]]:
    """Return (page, command) for each command in a block of code, without its comment."""
    found = []
    for page in PAGES:
        inside = False
        for line in page.read_text().replace("\\\n", " ").splitlines():
            inside ^= line.startswith("```")
            if inside or line.startswith("    "):
                command = re.sub(r"\s#.*", "", line).strip().removeprefix("$ ")
                if re.match(r"(\w+=\S+ )*(python|make)\s", command):
                    found.append((page.name, " ".join(command.split())))
    return list(dict.fromkeys(found))


def words_of(command: str) -> list[str]:
    """Return the words of a command, without variables of the environment in front."""
    words = shlex.split(command)
    return words[next(i for i, word in enumerate(words) if "=" not in word) :]


def program_and_flags(command: str) -> tuple[Path, list[str]] | None:
    """Return the Python file that a command runs and its arguments, or None if it is another program."""
    words = words_of(command)
    if words[0] == "make":
        shown = subprocess.run(["make", "-n", "-C", str(ROOT), *words[1:]], capture_output=True, text=True, check=False)
        assert shown.returncode == 0, shown.stderr
        lines = re.findall(r"^\S*/python (.*\.py.*)$", shown.stdout, re.MULTILINE)
        words = ["python", *shlex.split(lines[-1])] if lines else []
    if words[1:2] == ["-m"]:
        words[1:3] = [words[2].replace(".", "/") + ".py"]
    if len(words) < 2 or not words[1].endswith(".py") or not (ROOT / words[1]).exists():
        return None
    return ROOT / words[1], words[2:]


def imported(path: Path) -> ModuleType:
    name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    return importlib.import_module(name)


def test_there_are_commands_on_the_pages():
    found = commands()
    assert len(found) > 50
    assert len({page for page, _ in found}) > 10


@pytest.mark.parametrize(("page", "command"), commands())
def test_a_command_of_the_docs_is_accepted(page: str, command: str):
    """Its file exists, and it takes the flags. What stands for a reader's own file is left out."""
    if EXAMPLES.search(command):
        pytest.skip("an example with a name of the reader's own")
    found = program_and_flags(command)
    if found is None:
        assert words_of(command)[0] == "make" or words_of(command)[1] in ("-m", "-c", "-"), command
        return
    path, flags = found
    module = imported(path)
    if "--help" not in flags and hasattr(module, "Args") and "Args)" in path.read_text():
        parse(module.Args, flags)


def trainings() -> list[str]:
    """Return each distinct training, without those on a GPU and those that start from another run."""
    found = []
    for _, command in commands():
        words = words_of(command)
        elsewhere = "--help" in words or "cuda" in command or "--init-from" in words or EXAMPLES.search(command)
        if re.fullmatch(r"algos/\w+\.py", words[1]) and not elsewhere:
            found.append(" ".join(words[1:]))
    return sorted(set(found))


@pytest.mark.parametrize("command", trainings())
def test_a_training_of_the_docs_runs(command: str, tmp_path: Path):
    """In a short form: 64 steps online, or the size of SMALL on Pendulum's dataset, with the command's other flags."""
    program, *flags = shlex.split(command)
    module: Any = imported(ROOT / program)
    args = parse(module.Args, flags)
    if getattr(args, "vectorizer", None) == "envpool":
        pytest.importorskip("envpool")
    offline = (ROOT / program).stem in OFFLINE
    short = arguments_of((ROOT / program).stem, {"total_steps": 40}) | {"env": module.Args.env} if offline else SHORT
    result = module.train(dataclasses.replace(args, **short, run_dir=tmp_path / "run"))
    assert len(result.episodes) == short["eval_episodes"]


def others() -> list[str]:
    """Return the commands that inspect a dataset, collect one without a trained policy, or run a suite."""
    found = []
    for _, command in commands():
        parts = program_and_flags(command) if not EXAMPLES.search(command) else None
        if parts is None:
            continue
        trained = any(word.startswith(("runs/", "data/runs/")) for word in parts[1])
        if parts[0].name in ("inspect_dataset.py", "collect.py", "sweep.py") and not trained:
            found.append(shlex.join([str(parts[0].relative_to(ROOT)), *parts[1]]))
    return sorted(set(found))


@pytest.mark.parametrize("command", others())
def test_another_command_of_the_docs_runs(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """In a short form: on Pendulum's dataset, 50 transitions, or the list of a suite's commands."""
    program, *flags = shlex.split(command)
    module: Any = imported(ROOT / program)
    args = parse(module.Args, flags)
    if program.endswith("inspect_dataset.py"):
        module.main(dataclasses.replace(args, dataset=str(PENDULUM), picture=None, json=None))
        assert "transitions" in capsys.readouterr().out
    elif program.endswith("collect.py"):
        output = tmp_path / "collected.hdf5"
        module.collect(dataclasses.replace(args, transitions=50, output=str(output)))
        assert output.exists()
    else:
        suite = "smoke" if args.suite.endswith(".toml") else args.suite  # a reader's own file
        module.train(dataclasses.replace(args, suite=suite, dry_run=True, folder=tmp_path))
        assert "algos/" in capsys.readouterr().out


if __name__ == "__main__":
    sys.stdout.write("\n".join(f"{page}: {command}" for page, command in commands()))
