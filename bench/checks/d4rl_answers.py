"""Write the answers of D4RL's own package for `bench/checks/compare_d4rl.py`, with the Python of .venv-d4rl.

    python bench/checks/d4rl_answers.py FOLDER HORIZON

Ids and scores go to FOLDER/ids.json. For each FOLDER/*.hdf5, the conversion of `qlearning_dataset` goes to
*.qlearning.npz. The concatenated episodes of `sequence_dataset` go to *.sequences.npz: their lengths, then KEYS.
"""

import json
import sys
from pathlib import Path

import d4rl
import gym
import h5py
import numpy as np

KEYS = ("observations", "actions", "rewards", "terminals")


def main(folder: Path, horizon: int) -> None:
    infos = d4rl.infos
    scores = {name: (infos.REF_MIN_SCORE.get(name), infos.REF_MAX_SCORE.get(name)) for name in infos.DATASET_URLS}
    (folder / "ids.json").write_text(json.dumps({"urls": infos.DATASET_URLS, "scores": scores}))
    for path in folder.glob("*.hdf5"):
        env = d4rl.offline_env.OfflineEnv()
        env._max_episode_steps = horizon
        with h5py.File(path) as file:
            for name, key in (("observation_space", "observations"), ("action_space", "actions")):
                setattr(env, name, gym.spaces.Box(-np.inf, np.inf, file[key].shape[1:]))
        dataset = env.get_dataset(path)
        np.savez(path.with_suffix(".qlearning.npz"), **d4rl.qlearning_dataset(env, dataset))
        episodes = list(d4rl.sequence_dataset(env, dataset))
        parts = [np.concatenate([each[key] for each in episodes]) for key in KEYS]
        lengths = np.array([len(each["rewards"]) for each in episodes])
        np.savez(path.with_suffix(".sequences.npz"), lengths, *parts)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
