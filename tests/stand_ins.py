"""What takes the place of an environment, of a run, of a suite and of a film in several test files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

HEADER = "step,episode,return,length,success,normalized_score\n"
RUN = """
[[runs]]
algo = "sac"
envs = "Pendulum-v1"
flags = "--total-steps {steps} --learning-starts 50 --eval-every 500 --eval-episodes 1 --hidden 8 8 --batch-size 16 --checkpoint-every 100"
seeds = {seeds}
"""  # noqa: E501


class Counter(gym.Env[Any, Any]):
    """Observes (episode, step, action); step 2 of every second episode terminates, step 3 of the others truncates."""

    observation_space = Box(-np.inf, np.inf, (3,), np.float32)
    action_space = Box(-1, 1, (1,), np.float32)
    episode, faulty = -1, ""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.count = self.episode + 1, 0
        return np.array([self.episode, 0, 0], np.float32), {}

    def step(self, action: np.ndarray) -> Any:
        self.count += 1
        obs = np.array([self.episode, self.count, np.nan if self.faulty == "next_obs" else action[0]], np.float32)
        reward = np.inf if self.faulty == "rewards" else 10.0 * self.count
        return obs, reward, self.episode % 2 == 1 and self.count == 2, self.count == 3, {}


class Short(gym.Env[Any, Any]):
    """Episodes of 1 to 6 steps, ended by a termination, a truncation or both; no two observations are equal."""

    observation_space = Box(-np.inf, np.inf, (3,), np.float32)
    action_space = Box(-2, 2, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left, self.start = self.np_random.integers(1, 7), self.np_random.normal()
        return self._obs(0.0), {}

    def _obs(self, action: float) -> np.ndarray:
        return np.array([self.start, self.left, action + self.np_random.normal()], np.float32)

    def step(self, action: np.ndarray) -> Any:
        self.left -= 1
        end = self.np_random.integers(1, 4) if self.left == 0 else 0
        return self._obs(action[0]), self.np_random.normal(), end in (1, 3), end in (2, 3), {}


class Drawn(gym.Env[Any, Any]):
    """Begins anywhere, lasts five steps of 0.04 s, and its pictures show the step."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 25}  # noqa: RUF012
    observation_space = Box(-1, 1, (2,), np.float32)
    action_space = Box(-1, 1, (1,), np.float32)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=kwargs.get("seed"))
        self.step_number, self.obs = 0, self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.step_number += 1
        return self.obs, float(self.obs[0] + action[0]), self.step_number == 5, False, {}

    def render(self) -> Any:
        return np.full((6, 8, 3), self.step_number, np.uint8)


gym.register("Short-v0", entry_point=Short)
gym.register("Drawn-v0", Drawn)


def write_run(folder: Path, curve: dict[int, list[float]]) -> None:
    """A finished run whose evaluations at these steps gave these returns."""
    folder.mkdir(parents=True)
    rows = [f"{step},{i},{value},200,,\n" for step, values in curve.items() for i, value in enumerate(values)]
    (folder / "evaluations.csv").write_text(HEADER + "".join(rows))


class Film:
    """Stands for imageio-ffmpeg, and keeps what it gets."""

    def __init__(self, fails_after: int = 1_000) -> None:
        self.frames: list[np.ndarray] = []
        self.fails_after = fails_after

    def write_frames(self, path: Path, size: tuple[int, int], fps: float, **options: Any) -> Iterator[None]:
        self.path, self.size, self.fps, self.first = path, size, fps, len(self.frames)
        path.write_bytes(b"begun")
        try:
            while len(self.frames) < self.fails_after:
                self.frames.append((yield))
            raise OSError(28, "No space left on device")
        finally:
            path.write_bytes(b"whole")

    def count_frames_and_secs(self, path: str) -> tuple[int, float]:
        count = len(self.frames) - self.first
        return count, count / self.fps


def write_suite(folder: Path, text: str, name: str = "mine") -> str:
    """A suite's file; its path."""
    path = folder / f"{name}.toml"
    path.write_text(text)
    return str(path)
