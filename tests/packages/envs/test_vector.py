"""Many environments at once: every transition is stored, none joins two episodes, and no process is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
from conftest import ROOT, replay_bytes

from algos import sac
from common.errors import InputError, RunError
from common.seeding import seeds
from envs.make import make, make_vector
from envs.state import get_states, set_states
from envs.vector import AsyncEnvs

START = "from envs.make import make_vector; envs = make_vector('Pendulum-v1', 3, 0, vectorizer='async'); envs.reset()\n"


@pytest.mark.parametrize("env_id", ["stand_ins:Short-v0", "Hopper-v4"])
@pytest.mark.parametrize("vectorizer", ["sync", "async"])
def test_what_is_stored_is_what_single_environments_give(
    small: Callable[..., sac.Args], env_id: str, vectorizer: str
) -> None:
    n, steps = 3, 300
    args = small(env=env_id, num_envs=n, vectorizer=vectorizer, total_steps=n * steps, learning_starts=n * steps)
    sac.train(args)
    stored = np.frombuffer(replay_bytes(args.run_dir), np.float32).reshape(steps, n, -1)
    ends = np.zeros(2, int)
    for i, seed in enumerate(seeds(args.seed, "training", n)):
        env = make(env_id)
        env.reset(seed=seed)
        obs, _ = env.reset()
        width = len(obs)
        for row in stored[:, i]:
            action = row[width : -width - 2]
            next_obs, reward, termination, truncation, _ = env.step(action)
            assert row.tobytes() == np.float32([*obs, *action, reward, *next_obs, termination]).tobytes()
            ends += termination, truncation
            obs = env.reset()[0] if termination or truncation else next_obs
    assert ends[0] > 20
    assert ends[1] > 20 or env_id != "stand_ins:Short-v0"


@pytest.mark.parametrize("vectorizer", ["sync", "async"])
def test_terminations_and_truncations_arrive_apart(vectorizer: Any) -> None:
    envs = make_vector("stand_ins:Short-v0", 2, seed=3, vectorizer=vectorizer)
    singles = [make("stand_ins:Short-v0") for _ in range(2)]
    for single, seed in zip(singles, seeds(3, "training", 2), strict=True):
        single.reset(seed=seed)
        single.reset()
    envs.reset()
    for _ in range(100):
        _, *given, _ = envs.step(np.zeros((2, 1), np.float32))
        expected = zip(*(single.step(np.zeros(1, np.float32))[1:4] for single in singles), strict=True)
        for got, each in zip(given, expected, strict=True):
            np.testing.assert_array_equal(got, each)
        dones = given[1] | given[2]
        if dones.any():
            envs.reset(options={"reset_mask": dones})
            for i in np.flatnonzero(dones):
                singles[i].reset()
    envs.close()


def test_non_finite_actions_never_reach_a_process() -> None:
    envs = make_vector("Pendulum-v1", 2, seed=0, vectorizer="async")
    envs.reset()
    with pytest.raises(RunError, match="non-finite actions"):
        envs.step(np.array([[0.0], [np.nan]], np.float32))
    envs.step(np.zeros((2, 1), np.float32))
    envs.close()


@pytest.mark.parametrize(
    "use",
    [
        lambda envs: envs.step(np.zeros((2, 1), np.float32)),
        lambda envs: envs.reset(),
        get_states,
        lambda envs: set_states(envs, [{}, {}]),
    ],
    ids=["step", "reset", "save", "restore"],
)
def test_a_killed_process_ends_the_run(use: Callable[[Any], Any], capfd: pytest.CaptureFixture[str]) -> None:
    envs = make_vector("Pendulum-v1", 2, seed=0, vectorizer="async")
    envs.reset()
    worker = envs.processes[0]  # type: ignore[attr-defined]
    worker.kill()
    worker.join()
    with pytest.raises(RunError, match="the process of an environment was killed"):
        use(envs)
    del envs
    assert capfd.readouterr().err == ""


def test_a_process_that_is_killed_while_its_environment_is_made_ends_the_run() -> None:
    """As the kernel does for lack of memory."""
    here = os.getpid()

    def made() -> gym.Env[Any, Any]:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return gym.make("Pendulum-v1")

    with pytest.raises(RunError, match="the process of an environment was killed"):
        AsyncEnvs([made, made])


def test_ctrl_c_to_the_processes_alone_changes_nothing() -> None:
    """Each is its own process group, so a user has to send it on purpose."""
    envs = make_vector("Pendulum-v1", 2, seed=0, vectorizer="async")
    envs.reset()
    for worker in envs.processes:  # type: ignore[attr-defined]
        os.kill(worker.pid, signal.SIGINT)
    for _ in range(3):
        envs.step(np.zeros((2, 1), np.float32))
    envs.close()


@pytest.mark.parametrize("end", ["envs.close()", "", "raise SystemExit", "import os, signal; os.kill(os.getpid(), 9)"])
def test_no_process_outlives_the_run(end: str) -> None:
    code = START + "print(*(process.pid for process in envs.processes), flush=True)\n" + end
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60, check=False)
    assert ended.returncode == (-signal.SIGKILL if "kill" in end else 0)
    assert ended.stderr == ""
    pids = [int(pid) for pid in ended.stdout.split()]
    assert len(pids) == 3
    for _ in range(100):
        if not any(map(psutil.pid_exists, pids)):
            return
        time.sleep(0.05)
    pytest.fail(f"still there: {pids}")


def test_arguments_reach_every_environment_or_are_refused():
    envs = make_vector("Hopper-v4", 2, 1, healthy_reward=5.0)
    assert [env.unwrapped._healthy_reward for env in envs.envs] == [5.0, 5.0]
    envs.close()
    with pytest.raises(InputError, match="healthy_reward: give --vectorizer sync"):
        make_vector("Hopper-v4", 2, 1, vectorizer="envpool", healthy_reward=5.0)
