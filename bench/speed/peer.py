"""Train one algorithm of a peer until killed, with the peers' own Python (see `bench/speed/speed.py`).

python bench/speed/peer.py stable_baselines3:SAC ENVIRONMENT NUMBER_OF_ENVIRONMENTS KEYWORD_ARGUMENTS_AS_JSON
python bench/speed/peer.py d3rlpy:CQL D4RL_FILE FOLDER_FOR_ITS_LOGS KEYWORD_ARGUMENTS_AS_JSON
"""

import importlib
import json
import sys
from typing import Any


def train_online(module: str, name: str, env_id: str, num_envs: int, kwargs: dict[str, Any]) -> None:
    """Train online with the given arguments; all others are the peer's defaults, its logging included."""
    # The type checker's environment does not have the peers, so they are imported by name.
    make_vec_env = importlib.import_module("stable_baselines3.common.env_util").make_vec_env
    model = getattr(importlib.import_module(module), name)
    env = make_vec_env(env_id, n_envs=num_envs, seed=0)
    model("MlpPolicy", env, seed=0, **kwargs).learn(10**9)


def train_offline(name: str, path: str, folder: str, kwargs: dict[str, Any]) -> None:
    """Train on a D4RL file with the given arguments; all others are d3rlpy's defaults.

    Its progress bar is off, as our progress bar is if the output is not a terminal.
    """
    import d3rlpy
    import h5py

    from bench.speed.step_counter import claim_slot

    with h5py.File(path) as file:
        keys = ("observations", "actions", "rewards", "terminals", "timeouts")
        dataset = d3rlpy.dataset.MDPDataset(**{key: file[key][:] for key in keys})
    count = claim_slot()
    getattr(d3rlpy.algos, f"{name}Config")(**kwargs).create().fit(
        dataset,
        n_steps=10**9,
        show_progress=False,
        logger_adapter=d3rlpy.logging.FileAdapterFactory(root_dir=folder),
        callback=lambda *_: count(),  # called after each gradient step
    )


def main() -> None:
    algorithm, *places, kwargs = sys.argv[1:]
    module, name = algorithm.split(":")
    if module == "d3rlpy":
        train_offline(name, places[0], places[1], json.loads(kwargs))
    else:
        train_online(module, name, places[0], int(places[1]), json.loads(kwargs))


if __name__ == "__main__":
    main()
