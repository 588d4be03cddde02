"""Read the datasets of `bench/checks/compare_libraries.py` with other libraries, by the Python of .venv-libraries.

    MINARI_DATASETS_PATH=FOLDER/minari python bench/checks/library_answers.py FOLDER

For each FOLDER/ID.hdf5 there is a Minari dataset mine/ID with the same transitions. The program prints a line for each
check that holds, and fails at the first that does not. It also trains a policy of Stable-Baselines3 under a
VecNormalize. It writes the policy as FOLDER/policy.zip and its statistics as a pickle. The policy's actions on
FOLDER/obs.npy go to FOLDER/actions.npy.
"""

import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import gymnasium_robotics  # registers its environments
import h5py
import minari
import numpy as np
from gymnasium.utils.env_checker import data_equivalence
from numpy.typing import NDArray

Array = NDArray[Any]
Data = dict[str, Array]


def joined(observations: Any) -> Array:
    """Return observations as float32 [n, obs_dim], with the entries of a dict in the order of their names."""
    if not hasattr(observations, "keys"):
        return np.asarray(observations, np.float32)
    return np.concatenate([joined(observations[key]) for key in sorted(observations.keys())], axis=1)


def same(name: str, theirs: Any, ours: Array) -> None:
    theirs = np.asarray(theirs).reshape(ours.shape)
    assert np.array_equal(theirs.astype(ours.dtype), ours), f"{name} differ"


def steps_to_end(env: gym.Env[Any, Any]) -> int:
    env.reset(seed=0)
    ends = (any(env.step(env.action_space.sample())[2:4]) for _ in range(100_000))
    return next(step for step, end in enumerate(ends, 1) if end)


def check_minari(name: str, data: Data) -> str:
    """Check the recovered environment, as `check_env_recovery` of Minari's tests/common.py does, and the episodes."""
    dataset, env = minari.load_dataset(f"mine/{name}"), gym.make(name)
    recovered = dataset.recover_environment()
    assert recovered.spec == env.spec, f"{recovered.spec} is not {env.spec}"
    for kind in ("observation_space", "action_space"):
        assert data_equivalence(getattr(recovered, kind), getattr(env, kind)), f"{kind} recovered differs"
        assert data_equivalence(getattr(dataset.spec, kind), getattr(env, kind)), f"{kind} of the dataset differs"
    first = 0
    for episode in dataset:
        part = slice(first, first := first + len(episode.rewards))
        obs = joined(episode.observations)
        same("observations", obs[:-1], data["observations"][part])
        same("next observations", obs[1:], data["next_observations"][part])
        for key, mine in (("actions", "actions"), ("rewards", "rewards"), ("truncations", "timeouts")):
            same(key, getattr(episode, key), data[mine][part])
        assert episode.infos, "there are no infos"
        assert all(len(values) == len(episode.rewards) + 1 for values in episode.infos.values()), "infos are too short"
    limit = env.spec.max_episode_steps if env.spec else None
    assert steps_to_end(recovered) == limit, "the recovered environment does not end"
    return f"{first:,} transitions, infos {', '.join(sorted(episode.infos))}; the recovered environment ends at {limit}"


def check_d3rlpy(name: str, data: Data) -> str:
    """Check what d3rlpy reads, but only the first episode's observations.

    d3rlpy 2.8.1 concatenates n + 1 observations and n actions of each episode, so later observations are shifted.
    """
    from d3rlpy.datasets import get_minari

    dataset, env = get_minari(f"mine/{name}")
    ends = np.flatnonzero(data["terminals"] | data["timeouts"]) + 1
    assert np.cumsum([episode.size() for episode in dataset.episodes]).tolist() == ends.tolist(), "episodes differ"
    for key in ("actions", "rewards"):
        same(key, np.concatenate([getattr(episode, key) for episode in dataset.episodes]), data[key])
    obs = dataset.episodes[0].observations
    flat = data["observations"][: len(obs)]
    same("observations", obs, flat if obs.shape == flat.shape else flat[:, [*range(4, 8), 2, 3]])  # no achieved goal
    return f"{len(ends)} episodes; its environment ends at {steps_to_end(env)}"


def check_torchrl(name: str, data: Data, root: Path) -> str:
    from torchrl.data.datasets import MinariExperienceReplay

    local = {"load_from_local_minari": True, "download": False}
    replay = MinariExperienceReplay(f"mine/{name}", batch_size=32, root=root, **local)[:]
    assert set(replay["info"].keys()), "there are no infos"
    same("actions", replay["action"], data["actions"])
    same("observations", joined(replay["observation"]), data["observations"])
    for theirs, ours in (("reward", "rewards"), ("terminated", "terminals"), ("truncated", "timeouts")):
        same(ours, replay["next", theirs], data[ours])
    same("next observations", joined(replay["next", "observation"]), data["next_observations"])
    return f"{len(replay):,} transitions"


def train_policy(folder: Path) -> None:
    """Train PPO under a VecNormalize that clips, for some hundred steps, and write policy, statistics and actions."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    envs = VecNormalize(DummyVecEnv([lambda: gym.make("Pendulum-v1")]), clip_obs=1.0)
    model = PPO("MlpPolicy", envs, n_steps=256, seed=0, device="cpu").learn(512)
    model.save(folder / "policy.zip")
    envs.save(folder / "vecnormalize.pkl")
    obs = np.load(folder / "obs.npy")
    np.save(folder / "actions.npy", model.predict(envs.normalize_obs(obs), deterministic=True)[0])


def main(folder: Path) -> None:
    gym.register_envs(gymnasium_robotics)
    for path in sorted(folder.glob("*.hdf5")):
        with h5py.File(path) as file:
            data: Data = {key: value[:] for key, value in file.items()}
        sys.stdout.write(f"ok {path.stem} by Minari: {check_minari(path.stem, data)}\n")
        sys.stdout.write(f"ok {path.stem} by d3rlpy: {check_d3rlpy(path.stem, data)}\n")
        sys.stdout.write(f"ok {path.stem} by TorchRL: {check_torchrl(path.stem, data, folder / 'torchrl')}\n")
    train_policy(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
