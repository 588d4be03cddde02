"""Train d3rlpy's IQL or CQL on a D4RL file with d3rlpy's own Python, and evaluate it as a run of onramp.

    make d3rlpy ARGS="iql|cql FILE ENVIRONMENT SEED STEPS FOLDER [WIDTH ACTIONS]"

Hyperparameters are those of its authors' reproduction scripts, if those are the paper's. Otherwise they are those of
`algos/cql.py`: CQL has two hidden layers of width WIDTH (256), and three in the scripts. CQL samples ACTIONS (10) of
each kind. D4RL's package reads the file, and d3rlpy makes the updates. Only the evaluation is onramp's, by
`common/evaluate.py`, in the same environments, from the same seeds and at the same steps. FOLDER gets evaluations.csv
and config.json, as one of our run folders does.
"""

import csv
import json
import platform
import sys
from pathlib import Path
from typing import Any

EVALUATE_EVERY = 5_000
EPISODES = 10


def algorithm(d3rlpy: Any, name: str, steps: int, width: int, actions: int) -> Any:
    """Return an agent with d3rlpy's configuration for locomotion, that of reproductions/offline/{iql,cql}.py."""
    hidden = d3rlpy.models.VectorEncoderFactory([width, width])
    encoders = {"actor_encoder_factory": hidden, "critic_encoder_factory": hidden}
    if name == "cql":  # no Lagrange multiplier: its logarithm starts at 0 and never changes
        return d3rlpy.algos.CQLConfig(alpha_learning_rate=0.0, n_action_samples=actions, **encoders).create()
    decay = d3rlpy.optimizers.CosineAnnealingLRFactory(T_max=steps)
    return d3rlpy.algos.IQLConfig(
        actor_optim_factory=d3rlpy.optimizers.AdamFactory(lr_scheduler_factory=decay),
        reward_scaler=d3rlpy.preprocessing.ReturnBasedRewardScaler(multiplier=1000.0),
        value_encoder_factory=hidden,
        **encoders,
    ).create()


def d4rl_arrays(path: str) -> dict[str, Any]:
    """Return all arrays that D4RL's reader gives for the file, `infos` included."""
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


def main(name: str, path: str, env_id: str, seed: int, steps: int, folder: Path, width: int, actions: int) -> None:
    import d3rlpy
    import torch

    from common.evaluate import evaluate
    from common.provenance import commit
    from common.seeding import seeds
    from envs.make import make

    arrays = d4rl_arrays(path)
    keys = ("observations", "actions", "rewards", "terminals", "timeouts")
    arrays["timeouts"] = (arrays["timeouts"] != 0) & (arrays["terminals"] == 0)  # d3rlpy refuses a step that is both
    dataset = d3rlpy.dataset.MDPDataset(**{key: arrays[key] for key in keys})
    d3rlpy.seed(seed)
    agent = algorithm(d3rlpy, name, steps, width, actions)
    eval_envs, eval_seeds = [make(env_id) for _ in range(EPISODES)], seeds(seed, "evaluation", EPISODES)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "algo": f"d3rlpy {name}",
        "arguments": {"dataset": Path(path).stem, "env": env_id, "seed": seed, "offline_steps": steps},
        "configuration": json.loads(agent.config.to_json()),
        "versions": {"d3rlpy": d3rlpy.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "commit": commit(),
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    with (folder / "evaluations.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("step", "episode", "return", "length", "success", "normalized_score"))
        logs = d3rlpy.logging.NoopAdapterFactory()
        for epoch, _ in agent.fitter(dataset, steps, EVALUATE_EVERY, logger_adapter=logs, show_progress=False):
            for i, episode in enumerate(evaluate(agent.predict, eval_envs, eval_seeds)):
                writer.writerow((epoch * EVALUATE_EVERY - steps, i, episode.return_, episode.length, "", ""))
            file.flush()
    (folder / "DONE").touch()


if __name__ == "__main__":
    name, path, env_id, seed, steps, folder, *sizes = sys.argv[1:]
    width, actions = map(int, sizes or ("256", "10"))
    main(name, path, env_id, int(seed), int(steps), Path(folder), width, actions)
