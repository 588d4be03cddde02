"""Train one algorithm of Stable-Baselines3 or SBX until killed; run by the peers' own Python (see `bench/speed.py`).

`python bench/peer.py stable_baselines3:SAC <environment id> <number of environments> '<keyword arguments as JSON>'`
"""

import importlib
import json
import sys


def main() -> None:
    """Nothing but the arguments given is set: what is not named there is the peer's default, its logging included."""
    algorithm, env_id, num_envs, kwargs = sys.argv[1:]
    module, name = algorithm.split(":")
    # The peers are not installed where the types are checked, so they are found by name.
    make_vec_env = importlib.import_module("stable_baselines3.common.env_util").make_vec_env
    model = getattr(importlib.import_module(module), name)
    env = make_vec_env(env_id, n_envs=int(num_envs), seed=0)
    model("MlpPolicy", env, seed=0, **json.loads(kwargs)).learn(10**9)


if __name__ == "__main__":
    main()
