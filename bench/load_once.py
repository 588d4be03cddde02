"""Loads a D4RL file once, and prints seconds, bytes at the peak and transitions: for `bench/load.py`.

    python bench/load_once.py ours|d3rlpy|qlearning_dataset FILE

Timed is the call alone, in a new process, imports done. The peak is that of the resident memory, above what it was.
"""

import re
import sys
import time
from pathlib import Path
from typing import Any


def d4rl_arrays(path: str) -> dict[str, Any]:
    """What D4RL's reader gives for the file: all of it, `infos` too."""
    import d4rl
    import gym
    import h5py
    import numpy as np

    env = d4rl.offline_env.OfflineEnv()
    with h5py.File(path) as file:
        env.observation_space = gym.spaces.Box(-np.inf, np.inf, file["observations"].shape[1:])
        env.action_space = gym.spaces.Box(-np.inf, np.inf, file["actions"].shape[1:])
    arrays: dict[str, Any] = env.get_dataset(path)
    return arrays


def ours(path: str) -> Any:
    from offline.dataset import load

    return lambda: load(path), len


def d3rlpy(path: str) -> Any:
    """As its `get_d4rl` does, whose environments cannot be made any more."""
    from d3rlpy.dataset import MDPDataset

    def run() -> Any:
        arrays = d4rl_arrays(path)
        keys = ("observations", "actions", "rewards", "terminals", "timeouts")
        return MDPDataset(**{key: arrays[key] for key in keys})

    return run, lambda dataset: dataset.transition_count


def qlearning_dataset(path: str) -> Any:
    """As most public implementations do."""
    import d4rl

    return lambda: d4rl.qlearning_dataset(None, d4rl_arrays(path)), lambda dataset: len(dataset["rewards"])


def memory(line: str) -> int:
    found = re.search(rf"{line}:\s*(\d+)", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def main(contender: str, path: str) -> None:
    run, count = {"ours": ours, "d3rlpy": d3rlpy, "qlearning_dataset": qlearning_dataset}[contender](path)
    if contender != "ours":
        import d4rl  # noqa: F401  (its import is not timed either)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = memory("VmHWM")
    start = time.perf_counter()
    loaded = run()
    seconds = time.perf_counter() - start
    sys.stdout.write(f"{seconds} {memory('VmHWM') - before} {count(loaded)}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
