"""What several test files use."""

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box

os.environ.setdefault("OMP_NUM_THREADS", "1")  # networks this small gain nothing from more; shared machines lose much

import torch

from common import checkpoint
from common.arguments import RunArgs
from common.replay_buffer import Batch, ReplayBuffer
from offline.switch import with_presets

# A shell's background job ignores Ctrl-C, and so would every program that the tests start, those of Ctrl-C too.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parents[1]
# Data that is not part of the project: beside the repository, or where ONRAMP_SHARED says. May be absent.
SHARED = Path(os.environ.get("ONRAMP_SHARED", ROOT.parent / "shared"))
COMMON = {
    "env": "Pendulum-v1",
    "hidden": (16, 16),
    "total_steps": 400,
    "eval_every": 200,
    "eval_episodes": 2,
    "checkpoint_every": 100,
    "device": "cpu",
}
OFF_POLICY = {"batch_size": 16, "learning_starts": 50, "buffer_size": 10_000}
SMALL: dict[str, dict[str, Any]] = {
    "sac": COMMON | OFF_POLICY,
    "td3": COMMON | OFF_POLICY,
    "ppo": COMMON | {"num_envs": 1, "rollout_steps": 20, "minibatch_size": 10, "epochs": 10},
    "bc": COMMON | {"batch_size": 16, "buffer_size": 10_000},
    "iql": COMMON | {"batch_size": 16, "buffer_size": 10_000},
    "cql": COMMON
    | {"batch_size": 16, "buffer_size": 10_000, "critic_hidden": (16, 16), "cql_actions": 2, "calibrated": True},
    "td3_bc": COMMON | {"batch_size": 16, "buffer_size": 10_000},
    "wsrl": COMMON
    | {
        "batch_size": 16,
        "buffer_size": 10_000,
        "critic_hidden": (16, 16),
        "critics": 3,
        "cql_actions": 2,
        "calibrated": True,
        "warmup_steps": 70,
    },
    "expo": COMMON
    | {
        "size": "small",
        "batch_size": 16,
        "buffer_size": 10_000,
        "width": 16,
        "blocks": 1,
        "denoising_steps": 3,
        "critics": 3,
        "target_critics": 2,
        "dropout": 0.1,
        "utd": 2,
        "base_samples": 2,
        "edits": 2,
        "random_steps": 70,
        "edit_scale": 0.3,
    },
}
OFFLINE = ("bc", "cql", "expo", "iql", "td3_bc", "wsrl")  # these begin with a dataset
PENDULUM = ROOT / "tests" / "pendulum-random.hdf5"  # its recipe is inside


def arguments_of(algo: str, changed: dict[str, Any]) -> dict[str, Any]:
    """SMALL's, changed; where an algorithm begins with a dataset, half of the total steps are offline."""
    arguments = SMALL[algo] | changed
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
every_algorithm = pytest.mark.parametrize("algo", sorted(SMALL))


def module(algo: str) -> ModuleType:
    return importlib.import_module(f"algos.{algo}")


def agent_of(algo: str, action_dim: int = 2, device: str = "cpu") -> Any:
    """One for 3 observations, as in SMALL."""
    args, found = module(algo).Args(**arguments_of(algo, {})), vars(module(algo))
    if algo in OFFLINE:
        sizes = found["SIZES"]["small"] if algo == "expo" else {}
        args = with_presets(args, {domain: preset | sizes for domain, preset in found.get("PRESETS", {}).items()})
    return found[algo.replace("_", "").upper()](args, 3, action_dim, torch.device(device))


def updates_of(algo: str, agent: Any) -> Callable[[Batch, bool], Any]:
    """An update on a batch, the second argument what changes from one to the next."""
    if algo == "ppo":
        step = agent.step
        return lambda b, _: step(module("ppo").Minibatch(b.obs, b.actions, *3 * [b.rewards], b.returns_to_go))
    if algo in ("td3", "td3_bc", "cql"):
        return agent.update
    return (lambda b, _: agent.update(b, True)) if algo in ("wsrl", "expo") else lambda b, _: agent.update(b)


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., RunArgs]:
    """Arguments of a run of seconds, in a folder of this test's."""
    return lambda algo="sac", **changed: module(algo).Args(
        **arguments_of(algo, {"run_dir": tmp_path / "run"} | changed)
    )


@pytest.fixture(autouse=True)
def current_folder_of_its_own(tmp_path: Path) -> Iterator[None]:
    """Run each test in an empty folder: a path without a folder, `runs/` for one, never means the user's own files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        yield


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """A run in this process leaves its signal handlers, its way with denormal numbers and, on CUDA, its kernels."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    for number, handler in before:
        signal.signal(number, handler)
    torch.set_flush_denormal(False)
    torch.use_deterministic_algorithms(False)


def flags(algo: str = "sac", **arguments: Any) -> list[str]:
    """The command-line flags for these arguments."""
    said: list[str] = []
    for name, value in arguments_of(algo, arguments).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool) and isinstance(getattr(module(algo).Args, name), bool):  # else it may be None too
            said += [f"--{flag}" if value else f"--no-{flag}"]
        else:
            said += [f"--{flag}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return said


def command(*arguments: str, algo: str = "sac", **options: Any) -> subprocess.CompletedProcess[str]:
    """`python algos/<algo>.py` with these flags, to its end."""
    line = [sys.executable, str(ROOT / "algos" / f"{algo}.py"), *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=600, check=False, **options)


def killed_at(
    algo: str, places: list[tuple[str, int]], *arguments: str, **options: Any
) -> subprocess.CompletedProcess[str]:
    """A training killed at each of these places in turn (kill_at.py); status 0 if it was killed every time."""
    listed = ", ".join(f"{place} {n}" for place, n in places)
    line = [sys.executable, str(ROOT / "tests" / "kill_at.py"), algo, listed, *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=600, check=False, **options)


def final_state(folder: Path) -> dict[str, Any]:
    """All that the last checkpoint holds, but for the log sizes, which include wall-clock figures."""
    state = checkpoint.load(folder / "checkpoint" / "state.pt")
    state["logger"].pop("sizes")
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


def replay_bytes(folder: Path) -> bytes:
    """The rows of the replay buffer, in order."""
    return b"".join(path.read_bytes() for path in sorted((folder / "checkpoint" / "replay").glob("*.rows")))


def stored(folder: Path) -> Batch:
    """The online transitions of a run's last checkpoint, in order; of 3 observations and 1 action."""
    state = final_state(folder)["buffer"]
    buffer = ReplayBuffer(state["added"], 3, 1, returns_to_go=len(state["widths"]) == 6)
    buffer.load(folder / "checkpoint" / "replay", state)
    return buffer.at(torch.arange(len(buffer)))
