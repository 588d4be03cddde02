"""Policies: random, waypoints, a run's checkpoint, a policy file, or a Stable-Baselines3 file.

Nothing is ever unpickled: checkpoints and policy files are read as tensors only.
"""

import difflib
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import flatdim
from numpy.typing import NDArray

from common import checkpoint, files
from common.acting import eval_policy, uniform_actions
from common.arguments import env_settings, json_object
from common.errors import InputError
from common.messages import log
from common.policy_file import SUFFIX, load_into, read_policy
from common.provenance import sha256_of
from common.run_folder import CONFIG, has_checkpoint, read_config, read_state, state_path, task_name
from common.schema import require
from envs.d4rl import PointMaze
from envs.settings import settings_in
from offline.environments import environment_of
from tools.stable_baselines import read_stable_baselines
from tools.waypoints import NOISE, Waypoints

POLICIES = Path(__file__).resolve().parents[1] / "results" / "policies"  # <algorithm>/<task>.safetensors
Array = NDArray[Any]


@dataclass(frozen=True)
class Policy:
    """Map obs float32 [n, obs_dim] to actions float32 [n, action_dim] in [-1, 1]."""

    act: Callable[[Array], Array]
    facts: dict[str, Any]
    """Entries for the dataset's recipe: kind, name, sha256 of its files, algorithm, step."""

    def __call__(self, obs: Array) -> Array:
        actions: Array = np.clip(self.act(obs), -1.0, 1.0, dtype=np.float32)  # PPO's Gaussian is not bounded
        return actions


@dataclass(frozen=True)
class Trained:
    """A trained agent: its algorithm, its arguments as stored, and its state."""

    path: Path
    algo: str
    arguments: dict[str, Any]
    facts: dict[str, Any]
    state: dict[str, Any]
    """The last checkpoint of a run folder, or the tensors of a policy file."""

    def __post_init__(self) -> None:
        require(self.arguments, {"seed": int}, self.path, "does not name its seed: give another run or policy")

    def environment(
        self, env: str | None = None, env_kwargs: str = "{}", may_differ: bool = False
    ) -> tuple[str, dict[str, Any]]:
        """Return `env`, by default the id that it was trained on, and the arguments of `envs.make.make`.

        `env_kwargs` is JSON. Raise InputError if no environment is known, or if it is that of the training with other
        arguments. With `may_differ`, other arguments give a warning only.
        """
        own = self.arguments.get("env")
        env_id = str(env or own or "")
        if not env_id:
            raise InputError(f"{self.path} used its dataset's environment and does not name it: give --env")
        asked: dict[str, Any] = json.loads(json_object("--env-kwargs", env_kwargs))
        if (settings := env_settings(**self.arguments)) and env_id != own:
            log.warning(f"{self.path} was trained in {own} with {settings}, which do not apply to {env_id}")
        return env_id, settings_in(env_id, asked, own, settings, str(self.path), may_differ)

    def output(self, name: str, env_id: str) -> Path:
        """Return <run>/`name`, or for a policy file <algorithm>-<task> with `name`'s suffix, in the current folder."""
        if self.path.is_dir():
            return self.path / name
        task = self.arguments if env_id == self.arguments.get("env") else {"env": env_id}
        return Path(f"{self.algo}-{task_name(task)}{Path(name).suffix}")

    def restore(self, agent: object) -> None:
        """Give `agent`, of the same algorithm and arguments, this state. Raise InputError if it does not fit."""
        if self.path.suffix == SUFFIX:
            load_into(agent, self.state)
            return
        own = {name: value.get_state() for name, value in vars(agent).items() if isinstance(value, torch.Generator)}
        checkpoint.restore(agent, self.state["agent"] | own)


def load_policy(source: str, env: gym.Env[Any, Any], seed: int, deterministic: bool) -> Policy:
    """Return the policy of `source` for `env`, made by gym.make or envs.make.make. `seed` alone sets its noise.

    `source` is one of these:
    - "random": uniform in [-1, 1], deterministic or not.
    - "waypoints": `tools.waypoints`, for maze2d.
    - A run folder, whose last checkpoint acts, or a file of its folder policy/.
    - The name of a policy in results/policies, such as sac/Hopper-v4.
    - A Stable-Baselines3 .zip of SAC, TQC, TD3, DDPG, PPO or A2C.

    Such a .zip lacks the statistics of a VecNormalize. They are read from an export next to it (docs/data.md). It also
    lacks the exploration noise of TD3 and DDPG, and gSDE's noise is not reproduced here. These policies need
    `deterministic`.

    Raise InputError if the source is missing, damaged or of another kind, or does not fit the environment. Raise it
    also if the statistics of a VecNormalize are missing.
    """
    action_dim, generator, path = flatdim(env.action_space), torch.Generator().manual_seed(seed), Path(source)
    if source == "random":
        return Policy(lambda obs: uniform_actions(len(obs), action_dim, generator), {"kind": "random"})
    if source == "waypoints":
        while isinstance(env, gym.Wrapper) and not isinstance(env, PointMaze):
            env = env.env
        if not isinstance(env, PointMaze):
            raise InputError(f"waypoints is for maze2d: give --env {environment_of('maze2d-umaze-v1')} or another")
        return Policy(Waypoints(env.rows, 0.0 if deterministic else NOISE, seed), {"kind": "waypoints"})
    if is_trained(source):
        trained = read_trained(source)
        agent = load_agent(trained, flatdim(env.observation_space), action_dim, seed)
        return Policy(eval_policy(agent) if deterministic else agent.act, trained.facts)
    require_source(source)
    return Policy(*read_stable_baselines(path, env, generator, deterministic))


def require_source(source: str) -> None:
    """Raise InputError if `load_policy` finds no such policy."""
    if source not in ("random", "waypoints") and not is_trained(source) and not Path(source).is_file():
        raise _missing(
            source, 'give "random", "waypoints" (maze2d), a run folder, a policy file, or a Stable-Baselines3 .zip'
        )


def _missing(source: str, otherwise: str) -> InputError:
    """Return the error for a policy that does not exist. It ends with similar names, or `otherwise`."""
    names = [str(path.relative_to(POLICIES))[: -len(SUFFIX)] for path in sorted(POLICIES.glob(f"*/*{SUFFIX}"))]
    close = difflib.get_close_matches(source.removesuffix(SUFFIX), names, n=3)
    cure = f"did you mean {', '.join(close)}?" if close else otherwise
    return InputError(f"{source} does not exist: there is no such file, folder or policy in results/policies\n{cure}")


def is_trained(source: str) -> bool:
    """Return whether `source` is a run folder, a policy file, or the name of one in results/policies."""
    is_word = source in ("random", "waypoints")
    return not is_word and (Path(source).is_dir() or source.endswith(SUFFIX) or _named(source).exists())


def _named(source: str) -> Path:
    return POLICIES / f"{source}{SUFFIX}"


def read_trained(source: str | Path) -> Trained:
    """Read a run folder, a policy file, or a policy of results/policies by its name.

    Raise InputError if it is missing or damaged, or if a run has no checkpoint yet.
    """
    path = Path(source)
    if not path.is_dir() and _named(str(source)).exists():
        path = _named(str(source))
    if not files.exists(path):
        raise _missing(str(source), "give a run folder, a policy file, or a name such as sac/Hopper-v4")
    if path.suffix != SUFFIX:
        return read_run(path)
    file = read_policy(path)
    facts = {"kind": "policy file", "name": "/".join(path.resolve().parts[-3:]), "sha256": {path.name: sha256_of(path)}}
    facts |= {"algorithm": file.facts["algo"], "step": file.facts["step"]}
    return Trained(path, file.facts["algo"], file.facts["arguments"], facts, file.tensors)


def read_run(folder: Path) -> Trained:
    """Read a run folder. Raise InputError if it is not one, is damaged, or has no checkpoint yet."""
    if not files.exists(folder / CONFIG):
        if folder.is_file():
            raise InputError(f"{folder} is neither a run folder nor a policy file ({SUFFIX}): give one of these")
        raise InputError(f"{folder} is not a run folder: it has no {CONFIG}")
    if not has_checkpoint(folder):
        raise InputError(f"{folder} has no checkpoint yet: let the run reach one (--checkpoint-every)")
    state = read_state(folder)
    config = read_config(folder, "is damaged, or was written by something else")
    sha256 = {str(path.relative_to(folder)): sha256_of(path) for path in (folder / CONFIG, state_path(folder))}
    facts = {"kind": "run", "name": folder.resolve().name, "sha256": sha256}
    facts |= {"algorithm": config["algo"], "step": state["logger"]["step"]}
    return Trained(folder, config["algo"], config["arguments"], facts, state)


def load_agent(run: Trained, obs_dim: int, action_dim: int, seed: int) -> Any:
    """Return the trained agent on the CPU. `seed` sets its noise. Raise InputError if the sizes do not fit."""
    class_name = run.algo.upper().replace("_", "")
    # config.json names the module to import, as an environment's entry point does: algorithms are above this module.
    try:
        if not run.algo.isidentifier():
            raise ImportError(f"{run.algo!r} is not the name of an algorithm")
        module = importlib.import_module(f"algos.{run.algo}")
        # JSON stores a tuple as a list. The seed is that of the agent's generator.
        arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in run.arguments.items()}
        own_flags = {"run_dir": None, "preset": None, "device": "cpu", "compile": False, "overlap": False, "seed": seed}
        arguments |= {name: value for name, value in own_flags.items() if name in arguments}
        args, agent_class = module.Args(**arguments), getattr(module, class_name)
        agent = agent_class(args, obs_dim, action_dim, torch.device("cpu"))
        run.restore(agent)
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        if isinstance(error, AttributeError) and error.name == class_name:
            raise InputError(
                f"{run.path} needs the class {class_name}, which algos/{run.algo}.py does not have: "
                "give its agent this name (docs/your-algorithm.md)"
            ) from None
        raise InputError(f"{run.path} cannot be read by this version: {type(error).__name__} {error}") from None
    except InputError as error:
        reason = str(error).split("; give another")[0]
        raise InputError(
            f"{run.path} does not fit an environment of {obs_dim} observations and {action_dim} actions: {reason}\n"
            f"it was trained on {run.arguments.get('env')}"
        ) from None
    return agent
