"""What several test files use."""

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box

os.environ.setdefault("OMP_NUM_THREADS", "1")  # networks this small gain nothing from more; shared machines lose much

import torch

from common import checkpoint, process, recorded
from common.arguments import RunArgs
from common.launch import Launch
from common.replay_buffer import Batch, ReplayBuffer
from offline.offline_to_online import OfflineArgs, with_presets
from tools import export

# `make test ARGS=…` exports its variables, which a `make` that a test starts would take.
for variable in ("ARGS", "MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS"):
    os.environ.pop(variable, None)

# A shell's background job ignores Ctrl-C, and one under nohup SIGHUP. So would every program that the tests start,
# those of Ctrl-C and of closed terminals too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

ROOT = Path(__file__).parents[1]
# Data that is not part of the project: next to the repository, or where ONRAMP_SHARED points. It may be absent.
SHARED = Path(os.environ.get("ONRAMP_SHARED", ROOT.parent / "shared"))
COMMON = {
    "env": "Pendulum-v1",
    "hidden": (16, 16),
    "total_steps": 200,
    "eval_every": 100,
    "eval_episodes": 1,
    "checkpoint_every": 50,
    "device": "cpu",
}
ALGORITHMS = tuple(sorted(path.stem for path in (ROOT / "algos").glob("*.py") if path.stem != "__init__"))
EXAMPLE = "sac"  # of tests for which any algorithm would do
EVERYTHING = os.environ.get("ONRAMP_TESTS") == "all"
PENDULUM = ROOT / "tests" / "pendulum-random.hdf5"  # its recipe is inside


def module(algo: str) -> ModuleType:
    return importlib.import_module(f"algos.{algo}")


OFFLINE = tuple(algo for algo in ALGORITHMS if issubclass(module(algo).Args, OfflineArgs))  # begin with a dataset
every_algorithm = pytest.mark.parametrize("algo", ALGORITHMS)
long = pytest.mark.skipif(not EVERYTHING, reason="long, and much like another: ONRAMP_TESTS=all runs it")


def some(*algos: str) -> list[str]:
    """These algorithms, for a test whose cases are long and much alike; every one with ONRAMP_TESTS=all."""
    assert {*algos} <= {*ALGORITHMS}
    return [algo for algo in ALGORITHMS if EVERYTHING or algo in algos]


OTHER_USER = 65534


@contextlib.contextmanager
def bound_by_permissions(folder: Path) -> Iterator[None]:
    """Permissions do not bind root: another user, to whom the folder then belongs."""
    if os.geteuid() != 0:
        yield
        return
    for path in (folder, *folder.rglob("*")):
        os.chown(path, OTHER_USER, -1)
    os.seteuid(OTHER_USER)
    try:
        yield
    finally:
        os.seteuid(0)


def with_flag(*names: str) -> list[str]:
    """The algorithms that have all of these flags."""
    return [algo for algo in ALGORITHMS if all(hasattr(module(algo).Args, name) for name in names)]


def small_of(algo: str) -> dict[str, Any]:
    """The arguments of a run of seconds: SMALL at the top of tests/test_<algo>.py, which is imported only here.

    Raises LookupError if there is none.
    """
    cure = "give it SMALL = COMMON | {...}, a run of seconds"
    path = ROOT / "tests" / f"test_{algo}.py"
    if not path.exists():
        raise LookupError(f"algos/{algo}.py has no tests/{path.name}: {cure}")
    found: dict[str, Any] | None = getattr(importlib.import_module(path.stem), "SMALL", None)
    if found is None:
        raise LookupError(f"tests/{path.name} has no SMALL: {cure}")
    return found


def arguments_of(algo: str, changed: dict[str, Any]) -> dict[str, Any]:
    """SMALL's, changed; where an algorithm begins with a dataset, half of the total steps are offline."""
    arguments = small_of(algo) | changed
    if algo in OFFLINE:
        total = arguments.pop("total_steps")
        arguments.pop("learning_starts", None)
        arguments = {
            "dataset": str(PENDULUM),
            "offline_steps": total // 2,
            "online_steps": total - total // 2,
        } | arguments
    return arguments


class Failing(gym.Env[Any, Any]):
    """Every step fails, with reward -1; episodes of two steps end in turn by truncation, by termination and by both."""

    observation_space = Box(-np.inf, np.inf, (3,), np.float32)
    action_space = Box(-1, 1, (1,), np.float32)
    steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action: np.ndarray) -> Any:
        self.steps += 1
        end = {2: "truncation", 4: "termination", 0: "both"}.get(self.steps % 6)
        return np.zeros(3, np.float32), -1.0, end in ("termination", "both"), end in ("truncation", "both"), {}


gym.register("Failing-v0", entry_point=Failing)  # its spaces are Pendulum's
gym.register("Unscored-v0", entry_point=Failing)


def agent_class(algo: str) -> Any:
    """The class of an algorithm's agent: its file's name in capitals, without underscores."""
    name, found = algo.replace("_", "").upper(), vars(module(algo))
    assert name in found, f"algos/{algo}.py has no class {name}: its agent's is the file's name in capitals"
    return found[name]


def agent_of(algo: str, action_dim: int = 2, device: str = "cpu", **changed: Any) -> Any:
    """One for 3 observations, as in SMALL."""
    args = module(algo).Args(**arguments_of(algo, changed))
    if algo in OFFLINE:
        args = with_presets(args, vars(module(algo)).get("PRESETS", {}))
    return agent_class(algo)(args, 3, action_dim, torch.device(device))


def is_follower(name: str) -> bool:
    """Whether an attribute of this name is a network that follows another."""
    return followed_by(name) != name


def followed_by(name: str) -> str:
    """The name of the network that it follows: "critic" for "target_critic", "base" for "base_average"."""
    return name.removeprefix("target_").removesuffix("_average")


def networks_of(agent: Any) -> dict[str, torch.nn.Module]:
    """The networks that learn, without targets and averages."""
    found = {name: value for name, value in vars(agent).items() if isinstance(value, torch.nn.Module)}
    return {
        name: network for name, network in found.items()
        if not is_follower(name) and any(parameter.requires_grad for parameter in network.parameters())
    }  # fmt: skip


def updates_of(agent: Any) -> Callable[[Batch, bool], Any]:
    """An update on a batch; the second argument is what changes from one to the next, where something does.

    That is `update`. An agent whose `update` takes no Batch has a method `step`, on a named tuple of tensors.
    """
    _, *changing = hints = {k: v for k, v in get_type_hints(agent.update).items() if k != "return"}
    if next(iter(hints.values())) is Batch:
        return agent.update if changing else lambda b, _: agent.update(b)
    minibatch = next(iter(get_type_hints(agent.step).values()))
    return lambda b, _: agent.step(minibatch(*(getattr(b, name, b.rewards) for name in minibatch._fields)))


def modes_of(agent: Any) -> tuple[bool, ...]:
    """The second arguments with which the update differs."""
    _, *changing = (hint for name, hint in get_type_hints(agent.update).items() if name != "return")
    return (False, True) if bool in changing else (False,)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings are interpreted, not compiled, which takes no time."""
    monkeypatch.setattr(recorded, "_compiled", lambda graph, _: graph)


@pytest.fixture
def checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings are compared with new ones only at the end of a run, not at its 10th and 100th report."""
    check = Launch.check
    monkeypatch.setattr(Launch, "check", lambda launch, now: check(launch, now=now) if now else None)


@pytest.fixture(autouse=True)
def few_observations(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exported policy is compared with its agent at 20 observations, not at a thousand."""
    monkeypatch.setattr(export, "OBSERVATIONS", 20)


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., RunArgs]:
    """Arguments of a run of seconds, in a folder of this test's."""
    return lambda algo=EXAMPLE, **changed: module(algo).Args(
        **arguments_of(algo, {"run_dir": tmp_path / "run"} | changed)
    )


@pytest.fixture(autouse=True)
def current_folder_of_its_own(tmp_path: Path) -> Iterator[None]:
    """Run each test in an empty folder: a path without a folder, `runs/` for one, never means the user's own files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        yield


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test cuts the power, and a short run spends a third of its time waiting for the disk."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """A `Run` that no `train` wraps leaves what it changes, and on CUDA every run its kernels."""
    with process.as_before():
        yield
    torch.use_deterministic_algorithms(False)


def flags(algo: str = EXAMPLE, **arguments: Any) -> list[str]:
    """The command-line flags for these arguments."""
    said: list[str] = []
    for name, value in arguments_of(algo, arguments).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            said += [f"--{flag}" if value else f"--no-{flag}"]
        else:
            said += [f"--{flag}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return said


def command(*arguments: str, algo: str = EXAMPLE, **options: Any) -> subprocess.CompletedProcess[str]:
    """`python algos/<algo>.py` with these flags, to its end."""
    line = [sys.executable, str(ROOT / "algos" / f"{algo}.py"), *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=600, check=False, **options)


@cache
def killer() -> subprocess.Popen[str]:
    """kill_at.py, which ends when this process does."""
    line = [sys.executable, str(ROOT / "tests" / "kill_at.py")]
    return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def killed_at(algo: str, places: list[tuple[str, int]], *arguments: str) -> subprocess.CompletedProcess[str]:
    """A training killed at each of these places in turn (kill_at.py); status 0 if it was killed every time.

    After ("end", 1), the last place, it is finished.
    """
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as said:
        asked, status = (pipe for pipe in (killer().stdin, killer().stdout) if pipe)
        asked.write(f"{json.dumps([algo, arguments, places, str(Path.cwd()), said.name])}\n")
        asked.flush()
        return subprocess.CompletedProcess(arguments, int(status.readline()), stderr=said.read())


def final_state(folder: Path) -> dict[str, Any]:
    """All that the last checkpoint holds, but for sizes and checksums of the logs, which include wall-clock figures."""
    state = checkpoint.load(folder / "checkpoint" / "state.pt")
    del state["logger"]["sizes"], state["logger"]["checksums"]
    return state


def same(a: Any, b: Any) -> bool:
    """Equality bit for bit through dicts, lists, tensors and arrays."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return a.tobytes() == b.tobytes() if hasattr(a, "tobytes") else a == b


def assert_same_run(run: Path, other: Path) -> None:
    """Evaluations, the last state and the replay rows are equal. Logs may differ, as after an extension."""
    assert (run / "evaluations.csv").read_bytes() == (other / "evaluations.csv").read_bytes()
    assert same(final_state(run), final_state(other))
    assert replay_bytes(run) == replay_bytes(other)


def assert_same_folder(run: Path, undisturbed: Path) -> None:
    """Every file is equal, but for wall-clock times: logs, checkpoint, replay rows and policies."""
    from bench.faults.comparison import differences  # its readers of events take a second to import

    assert (undisturbed / "DONE").exists()
    assert differences(run, undisturbed) == []


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file's bytes, without the lock and the log of errors."""
    paths = [path for path in folder.rglob("*") if path.name not in (".lock", "errors.log")]
    return {path: path.read_bytes() for path in paths if path.is_file()}


def replay_bytes(folder: Path) -> bytes:
    """The rows of the replay buffer, in order."""
    return b"".join(path.read_bytes() for path in sorted((folder / "checkpoint" / "replay").glob("*.rows")))


def stored(folder: Path) -> Batch:
    """The online transitions of a run's last checkpoint, in order; of 3 observations and 1 action."""
    state = final_state(folder)
    state = state["buffer"] if "buffer" in state else state["data"]["buffer"]
    buffer = ReplayBuffer(state["added"], 3, 1, returns_to_go=len(state["widths"]) == 6)
    buffer.load(folder / "checkpoint" / "replay", state)
    return buffer.at(torch.arange(len(buffer)))


class Terminal:
    """Takes what is captured from stderr for a terminal, and keeps it."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys, self.text = capsys, ""

    def drawn(self) -> list[str]:
        """Return the text next to the bar, at each time that it was drawn."""
        self.text += self.capsys.readouterr().err
        texts = [line.split("| ")[-1].rstrip() for line in re.split("[\r\n]", self.text) if "%|" in line]
        return [text for text in texts if text]  # tqdm draws an empty bar first


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _: True)
    for name in ("COLUMNS", "LINES"):
        monkeypatch.setenv(name, "120")
    return Terminal(capsys)
