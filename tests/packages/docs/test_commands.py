"""Every command of README and docs: its program exists and accepts its flags, and most run in a short form.

Not run here: `make play`, which opens a window; `make binary` and `make speed`, which take minutes and run in parts in
test_adroit_binary.py and test_speed.py; `make d3rlpy`, which is another library; and what needs a GPU.
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
from conftest import OFFLINE, PENDULUM, ROOT, arguments_of, module
from pages import commands
from stand_ins import Film, write_run

from common.command_line import parse
from common.errors import InputError
from envs.ogbench import is_task

SHORT = {"total_steps": 64, "eval_every": 64, "eval_episodes": 1}  # the short form of a long training
EXAMPLES = re.compile(r"\b(mine|my_\w+)\b|--env [a-z_]+:|…|\.\.\.")  # what stands for a reader's own files


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
        lines = re.findall(r"^\S*/python (.*\.py.*|-m (?:tools|bench)\..*)$", shown.stdout, re.MULTILINE)
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


@pytest.mark.parametrize("target", ["ogbench", "soak"])
def test_a_wrong_flag_of_a_target_that_runs_a_module_is_found(target: str):
    """Their program is found although `make` prints `python -m`."""
    found = program_and_flags(f'make {target} ARGS="--no-such-flag 3"')
    assert found is not None
    with pytest.raises(InputError, match="--no-such-flag"):
        parse(imported(found[0]).Args, found[1])


def trainings() -> list[str]:
    """Return each distinct training, without those on a GPU and those that start from another run."""
    found = []
    for _, command in commands():
        words = words_of(command)
        elsewhere = "--help" in words or "cuda" in command or "--init-from" in words or EXAMPLES.search(command)
        if re.fullmatch(r"algos/\w+\.py", words[1]) and not elsewhere:
            found.append(shlex.join(words[1:]))
    return sorted(set(found))


def in_short(program: str, flags: list[str], folder: Path) -> Any:
    """Return the arguments of the short form of a training."""
    algo = Path(program).stem
    args = parse(imported(ROOT / program).Args, flags)
    if algo not in OFFLINE:
        return dataclasses.replace(args, **SHORT, run_dir=folder)
    short = arguments_of(algo, {"total_steps": 40}) | {"env": args.env and type(args).env}
    steps = {name: 20 if getattr(args, name) else 0 for name in ("offline_steps", "online_steps")}
    return dataclasses.replace(args, **short | steps, run_dir=folder)


@pytest.mark.parametrize("command", trainings())
def test_a_training_of_the_docs_runs(command: str, tmp_path: Path):
    """In a short form: 64 steps online, or the size of SMALL on Pendulum's dataset, with the command's other flags."""
    program, *flags = shlex.split(command)
    args = in_short(program, flags, tmp_path / "run")
    if getattr(args, "vectorizer", None) == "envpool":
        pytest.importorskip("envpool")
    if is_task(args.env or ""):
        pytest.importorskip("ogbench", reason="needs OGBench's package: make .venv/ogbench")
    result = imported(ROOT / program).train(args)
    assert len(result.episodes) == args.eval_episodes


def that_start_from_runs() -> list[tuple[str, str]]:
    """Return each training that starts from another run, and the command of the same page that makes that run.

    If the page has no such command, it is the algorithm that the run's name begins with.
    """
    found = []
    for page, command in commands():
        if "--init-from" not in command or EXAMPLES.search(command):
            continue
        first = command.split("--init-from ")[1].split()[0]
        makes = [c for p, c in commands() if p == page and c.endswith(f"--run-dir {first}")]
        algo = Path(first).name.split("__")[0]
        found.append((command, makes[0] if makes else f"python algos/{algo}.py --dataset data.hdf5"))
    return found


@pytest.mark.parametrize(("command", "before"), that_start_from_runs())
def test_a_training_of_the_docs_that_starts_from_a_run_runs(command: str, before: str, tmp_path: Path):
    """After a short form of the run that it starts from, whose sizes are those that the training has too."""
    _, program, *flags = shlex.split(command)
    args = dataclasses.replace(in_short(program, flags, tmp_path / "second"), init_from=tmp_path / "first")
    _, first, *flags = shlex.split(before)
    base = in_short(first, flags, tmp_path / "first")
    fixed = {f.name: f.default for f in dataclasses.fields(base) if f.name in ("width", "blocks")}
    sizes = {name: getattr(args, name, default) for name, default in fixed.items()}
    steps = {
        name: getattr(args, name)
        for name in ("denoising_steps", "critics")
        if hasattr(base, name) and hasattr(args, name)
    }
    imported(ROOT / first).train(dataclasses.replace(base, online_steps=0, **sizes | steps))
    assert len(imported(ROOT / program).train(args).episodes) == args.eval_episodes


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
        module.collect(dataclasses.replace(args, transitions=max(50, 10 * len(args.policy)), output=str(output)))
        assert output.exists()
    else:
        suite = "smoke" if args.suite.endswith(".toml") else args.suite  # a reader's own file
        module.train(dataclasses.replace(args, suite=suite, dry_run=True, folder=tmp_path))
        assert "algos/" in capsys.readouterr().out


def that_take_runs(*programs: str) -> list[str]:
    """Return the distinct commands that run these programs and need runs, as a program's path and its flags."""
    found = []
    for _, command in commands():
        parts = program_and_flags(command) if not EXAMPLES.search(command) else None
        if parts and parts[0].name in programs:
            found.append(shlex.join([str(parts[0].relative_to(ROOT)), *parts[1]]))
    return sorted(set(found) - set(others()))


@pytest.mark.parametrize(
    "command", [c for c in that_take_runs("video.py", "collect.py", "archive_run.py") if "--play" not in c]
)
def test_a_command_of_the_docs_that_takes_a_run_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the run of 100 steps; the video without imageio-ffmpeg."""
    program, *flags = shlex.split(command)
    tool: Any = imported(ROOT / program)
    args, run, output = parse(tool.Args, flags), tmp_path / "run", tmp_path / "output"
    module("sac").train(module("sac").Args(**arguments_of("sac", {"env": "Drawn-v0", "total_steps": 100}), run_dir=run))
    if program.endswith("video.py"):
        monkeypatch.setitem(sys.modules, "imageio_ffmpeg", film := Film())  # type: ignore[arg-type]
        tool.watch(dataclasses.replace(args, policy=str(run)))
        assert film.frames
    elif program.endswith("collect.py"):
        of_run = {"replay": run} if args.replay else {"policy": (str(run),), "env": None, "transitions": 50}
        tool.collect(dataclasses.replace(args, **of_run, output=str(output.with_suffix(".hdf5"))))
        assert output.with_suffix(".hdf5").exists()
    else:
        tool.main(dataclasses.replace(args, run=run, kept=output))
        assert (output / "evaluations.csv.gz").exists()


@pytest.mark.parametrize("command", that_take_runs("compare.py"))
def test_a_comparison_of_the_docs_runs(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """On results/, on two runs, or, with a suite, up to the runs that it would make."""
    program, *flags = shlex.split(command)
    compare: Any = imported(ROOT / program)
    args = parse(compare.Args, flags)
    if args.suite:
        suite = "online-1m" if args.suite.endswith(".toml") else args.suite  # a reader's own file
        args, _ = compare.of_suite(dataclasses.replace(args, folder=tmp_path), suite)
        assert len(compare.next_seeds(compare.compare(args))) >= 2 * args.seeds
        return
    for name in ("sac", "td3"):
        write_run(tmp_path / "lr" / name / "Hopper-v4" / "1", {0: [0.0], 1_000: [1.0]})
    compare.main(
        dataclasses.replace(args, folder=ROOT / "results" if str(args.folder) == "results" else tmp_path / "lr")
    )
    assert re.search(r"(sac|td3) against (td3|ppo): ", capsys.readouterr().out)


@pytest.mark.parametrize("command", [c for c in that_take_runs("report.py") if "--runs" in c])
def test_a_report_of_own_runs_is_made(command: str, tmp_path: Path):
    program, *flags = shlex.split(command)
    report: Any = imported(ROOT / program)
    module("sac").train(module("sac").Args(**arguments_of("sac", {"total_steps": 40}), run_dir=tmp_path / "first"))
    report.main(dataclasses.replace(parse(report.Args, flags), runs=tmp_path))
    assert "Pendulum-v1" in (tmp_path / "report.html").read_text()


if __name__ == "__main__":
    sys.stdout.write("\n".join(f"{page}: {command}" for page, command in commands()))
