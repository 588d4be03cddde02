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
flags = "--total-steps {steps} --learning-starts 50 --eval-every 500 --eval-episodes 2 --hidden 8 8 --batch-size 16 --checkpoint-every 100"
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
        self.path, self.size, self.fps = path, size, fps
        path.write_bytes(b"begun")
        try:
            while len(self.frames) < self.fails_after:
                self.frames.append((yield))
            raise OSError(28, "No space left on device")
        finally:
            path.write_bytes(b"whole")


def write_suite(folder: Path, text: str, name: str = "mine") -> str:
    """A suite's file; its path."""
    path = folder / f"{name}.toml"
    path.write_text(text)
    return str(path)
