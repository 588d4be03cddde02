"""Faults of environments: errors, results of a wrong form, and lost processes."""

import functools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Text

from bench.faults.runs import Fault, Verdict, chance, judged, small_flags, train

ID = "bench.faults.environments:Faulty-v0"
# What is returned instead of (obs, reward, terminated, truncated, info), by the name of the fault.
OBS = np.zeros(3, np.float32)
STEPS: dict[str, Any] = {
    "4-tuple": (OBS, 0.0, False, {}),
    "obs alone": OBS,
    "nothing": None,
    "info None": (OBS, 0.0, False, False, None),
    "reward nan": (OBS, np.nan, False, False, {}),
    "reward inf": (OBS, np.inf, False, False, {}),
    "reward huge": (OBS, 1e300, False, False, {}),
    "reward text": (OBS, "1.0", False, False, {}),
    "reward None": (OBS, None, False, False, {}),
    "reward list": (OBS, [1.0, 2.0], False, False, {}),
    "reward matrix": (OBS, np.zeros((2, 2)), False, False, {}),
    "reward too large": (OBS, 10**400, False, False, {}),
    "reward complex": (OBS, 1j, False, False, {}),
    "obs short": (OBS[:2], 0.0, False, False, {}),
    "obs long": (np.zeros(4, np.float32), 0.0, False, False, {}),
    "obs scalar": (np.float32(1), 0.0, False, False, {}),
    "obs nan": (OBS * np.nan, 0.0, False, False, {}),
    "obs huge": (np.full(3, 1e300), 0.0, False, False, {}),
    "obs text": ("text", 0.0, False, False, {}),
    "obs None": (None, 0.0, False, False, {}),
    "obs objects": (np.array([None, {}, "a"], dtype=object), 0.0, False, False, {}),
    "terminated None": (OBS, 0.0, None, False, {}),
    "terminated text": (OBS, 0.0, "no", False, {}),
    "terminated array": (OBS, 0.0, np.array([True, False]), False, {}),
    "return text": (OBS, 0.0, False, True, {"return": "much"}),
    "success nan": (OBS, 0.0, False, True, {"success": np.nan, "is_success": "maybe"}),
}
RESETS: dict[str, Any] = {
    "bare obs": OBS, "nothing": None, "info None": (OBS, None),
    "obs short": (OBS[:2], {}), "obs nan": (OBS * np.nan, {}),
    "obs text": ("text", {}), "three": (OBS, {}, {}), "obs None": (None, {}),
}  # fmt: skip
ERRORS: dict[str, Any] = {
    "ValueError": ValueError("bad\nvalue\nof three lines"), "KeyError": KeyError("k"), "SystemExit": SystemExit(3),
    "MemoryError": MemoryError(), "StopIteration": StopIteration(),
    "RecursionError": RecursionError(), "OSError": OSError(28, "No space left on device"), "EOFError": EOFError(),
    "BrokenPipeError": BrokenPipeError(), "empty message": RuntimeError(), "unicode": RuntimeError("ü" * 3_000),
}  # fmt: skip
SPACES: dict[str, Any] = {
    "Box of no number": Box(-1, 1, (0,), np.float32), "Box of shape ()": Box(-1, 1, (), np.float32),
    "Discrete": Discrete(3), "Text": Text(5), "Dict": Dict({"a": Box(-1, 1, (3,))}),
    "infinite Box": Box(-np.inf, np.inf, (3,), np.float32), "integer Box": Box(0, 255, (3,), np.uint8),
    "image": Box(0, 255, (3, 3, 3), np.uint8), "None": None, "text": "Box(3)",
    "equal bounds": Box(np.zeros(3, np.float32), np.zeros(3, np.float32)),
}  # fmt: skip
OTHERS = ("process exits", "process is killed", "slow close", "close fails", "slow step", "no fault")
HARMLESS = {"x: slow close", "x: close fails", "x: slow step", "x: no fault"} | {
    f"spaces change: {name}" for name in SPACES
}
HARMLESS |= {f"observation space: {name}" for name in ("infinite Box", "integer Box", "equal bounds")}
HARMLESS |= {"reset gives: info None"}  # a run does not read it


class Faulty(gym.Env[Any, Any]):
    """A point of three numbers that has the fault `fault`, from its step or reset number `at` on."""

    observation_space = Box(-np.inf, np.inf, (3,), np.float32)
    action_space = Box(-1, 1, (1,), np.float32)

    def __init__(self, fault: str, at: int = 0) -> None:
        self.kind, _, self.fault = fault.partition(": ")
        self.at, self.steps, self.resets = at, 0, 0
        if self.kind == "constructor":
            raise ERRORS[self.fault]
        if self.kind == "observation space":
            self.observation_space = SPACES[self.fault]
        if self.kind == "action space":
            self.action_space = SPACES[self.fault]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.resets += 1
        if self.resets > self.at // 20 and self.kind == "reset raises":
            raise ERRORS[self.fault]
        if self.resets > self.at // 20 and self.kind == "reset gives":
            return RESETS[self.fault]
        if self.resets > self.at // 20 and self.kind == "spaces change":
            self.observation_space = SPACES[self.fault]
        return self._sample(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        result: Any = self._sample(), float(action[0]), False, self.steps % 20 == 0, {}
        if self.steps <= self.at:
            return result
        if self.kind == "step raises":
            raise ERRORS[self.fault]
        if self.kind == "step gives":
            return STEPS[self.fault]
        if self.fault == "process exits":
            os._exit(0)
        if self.fault == "process is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "slow step":
            time.sleep(0.005)
        return result

    def _sample(self) -> Any:
        return self.np_random.normal(size=3).astype(np.float32)

    def close(self) -> None:
        if self.fault == "slow close":
            time.sleep(1.0)
        if self.fault == "close fails":
            raise ValueError("it does not close")


gym.register("Faulty-v0", entry_point=f"{__name__}:Faulty")


def environments(algo: str, seed: int) -> list[Fault]:
    """Return every fault of an environment, stepped in the run's process and in others, in random order."""
    named = {
        "step raises": ERRORS,
        "step gives": STEPS,
        "reset raises": ERRORS,
        "reset gives": RESETS,
        "constructor": ERRORS,
    }
    named |= {"observation space": SPACES, "action space": SPACES, "spaces change": SPACES}
    faults = [f"{kind}: {fault}" for kind, options in named.items() for fault in options] + [f"x: {o}" for o in OTHERS]
    each = [
        Fault(f"{fault}, after {at} steps, {vectorizer}", functools.partial(_trained, algo, fault, at, vectorizer))
        for fault in faults
        for vectorizer in ("sync", "async")
        for at in ((0, 130) if fault.startswith(("step", "reset")) else (130,))
        if vectorizer == "async" or not fault.startswith("x: process")  # that process would be the run's
    ]
    chance(seed, "environments", algo).shuffle(each)
    return each


def _trained(algo: str, fault: str, at: int, vectorizer: str, folder: Path) -> Verdict:
    kwargs = json.dumps({"fault": fault, "at": at})
    words = small_flags(algo, env=ID, env_kwargs=kwargs, vectorizer=vectorizer, num_envs="2", total_steps="400")
    found = judged(train(algo, words, folder), f"{algo}.py")
    if found.outcome == "accepted" and fault not in HARMLESS:
        return Verdict("WRONG", "it was accepted")
    return found
