"""Policies: random, waypoints, a run's checkpoint, a policy file, or a Stable-Baselines3 file.

Nothing is ever unpickled: checkpoints and policy files are read as tensors only.
"""

import base64
import hashlib
import importlib
import io
import json
import pickle
import pickletools
import re
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium.spaces import flatdim
from gymnasium.wrappers.utils import rescale_box
from numpy.typing import NDArray
from torch import Tensor

from common import checkpoint
from common.acting import eval_policy, uniform_actions
from common.arguments import env_settings, json_object
from common.errors import InputError
from common.messages import log
from common.policy_file import SUFFIX, load_into, read_policy
from common.run_folder import CONFIG, has_checkpoint, read_config, state_path, task_name
from envs.d4rl import PointMaze
from envs.settings import settings_in
from offline.environments import environment_of
from tools.waypoints import NOISE, Waypoints

POLICIES = Path(__file__).resolve().parents[1] / "results" / "policies"  # <algorithm>/<task>.safetensors
Array = NDArray[Any]
Layer = tuple[Tensor, Tensor]  # weight [out, in], bias [out]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "ReLU": F.relu,
    "Tanh": torch.tanh,
    "ELU": F.elu,
    "LeakyReLU": F.leaky_relu,
    "SiLU": F.silu,
    "GELU": F.gelu,
}
# Names of the policy's layers in a Stable-Baselines3 file, which holds them in order: PPO and A2C, SAC and TQC, TD3.
LAYER = re.compile(r"(mlp_extractor\.policy_net\.\d+|action_net|actor\.latent_pi\.\d+|actor\.mu(?:\.\d+)?)\.weight")


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

    def environment(self, env: str | None = None, env_kwargs: str = "{}") -> tuple[str, dict[str, Any]]:
        """Return `env`, by default the id that it was trained on, and the arguments of `envs.make.make`.

        `env_kwargs` is JSON. Raise InputError if no environment is known, or if it is that of the training with other
        arguments.
        """
        own = self.arguments.get("env")
        env_id = str(env or own or "")
        if not env_id:
            raise InputError(f"{self.path} used its dataset's environment and does not name it: give --env")
        asked: dict[str, Any] = json.loads(json_object("--env-kwargs", env_kwargs))
        if (settings := env_settings(**self.arguments)) and env_id != own:
            log.warning(f"{self.path} was trained in {own} with {settings}, which do not apply to {env_id}")
        return env_id, settings_in(env_id, asked, own, settings, str(self.path))

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
    if path.is_file():
        return _of_stable_baselines(path, env, generator, deterministic)
    raise InputError(
        f'{source} does not exist: give "random", "waypoints" (maze2d), a run folder, a policy file, '
        "or a Stable-Baselines3 .zip"
    )


def is_trained(source: str) -> bool:
    """Return whether `source` is a run folder, a policy file, or the name of one in results/policies."""
    return Path(source).is_dir() or source.endswith(SUFFIX) or _named(source).exists()


def _named(source: str) -> Path:
    return POLICIES / f"{source}{SUFFIX}"


def read_trained(source: str | Path) -> Trained:
    """Read a run folder, a policy file, or a policy of results/policies by its name.

    Raise InputError if it is missing or damaged, or if a run has no checkpoint yet.
    """
    path = Path(source)
    if not path.is_dir() and _named(str(source)).exists():
        path = _named(str(source))
    if path.suffix != SUFFIX:
        return read_run(path)
    file = read_policy(path)
    facts = {"kind": "policy file", "name": "/".join(path.resolve().parts[-3:]), "sha256": {path.name: _sha256(path)}}
    facts |= {"algorithm": file.facts["algo"], "step": file.facts["step"]}
    return Trained(path, file.facts["algo"], file.facts["arguments"], facts, file.tensors)


def read_run(folder: Path) -> Trained:
    """Read a run folder. Raise InputError if it is not one, is damaged, or has no checkpoint yet."""
    if not checkpoint.exists(folder / CONFIG):
        raise InputError(f"{folder} is not a run folder: it has no {CONFIG}")
    if not has_checkpoint(folder):
        raise InputError(f"{folder} has no checkpoint yet: let the run reach one (--checkpoint-every)")
    state = checkpoint.load(state_path(folder))
    config = read_config(folder, "is damaged, or was written by something else")
    sha256 = {str(path.relative_to(folder)): _sha256(path) for path in (folder / CONFIG, state_path(folder))}
    facts = {"kind": "run", "name": folder.resolve().name, "sha256": sha256}
    facts |= {"algorithm": config["algo"], "step": state["logger"]["step"]}
    return Trained(folder, config["algo"], config["arguments"], facts, state)


def load_agent(run: Trained, obs_dim: int, action_dim: int, seed: int) -> Any:
    """Return the trained agent on the CPU. `seed` sets its noise. Raise InputError if the sizes do not fit."""
    # config.json names the module to import, as an environment's entry point does: algorithms are above this module.
    try:
        if not run.algo.isidentifier():
            raise ImportError(f"{run.algo!r} is not the name of an algorithm")
        module = importlib.import_module(f"algos.{run.algo}")
        # JSON stores a tuple as a list. The seed is that of the agent's generator.
        arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in run.arguments.items()}
        own_flags = {"run_dir": None, "preset": None, "device": "cpu", "compile": False, "overlap": False, "seed": seed}
        arguments |= {name: value for name, value in own_flags.items() if name in arguments}
        args, agent_class = module.Args(**arguments), getattr(module, run.algo.upper().replace("_", ""))
        agent = agent_class(args, obs_dim, action_dim, torch.device("cpu"))
        run.restore(agent)
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        raise InputError(f"{run.path} cannot be read by this version: {type(error).__name__} {error}") from None
    except InputError as error:
        reason = str(error).split("; give another")[0]
        raise InputError(
            f"{run.path} does not fit an environment of {obs_dim} observations and {action_dim} actions: {reason}\n"
            f"it was trained on {run.arguments.get('env')}"
        ) from None
    return agent


def _of_stable_baselines(path: Path, env: gym.Env[Any, Any], generator: torch.Generator, deterministic: bool) -> Policy:
    weights, data = _read_zip(path)
    said = data.get("policy_kwargs")
    said = said if isinstance(said, dict) else {}
    on_policy = "action_net.weight" in weights
    try:
        names = [match[1] for key in weights if (match := LAYER.fullmatch(key))]
        layers = [_layer(weights, name) for name in names]
        log_std_layer = _layer(weights, "actor.log_std") if "actor.log_std.weight" in weights else None
        log_std = weights["log_std"] if on_policy else weights.get("actor.log_std")
        module = re.search(r"(\w+)\.policies$", str(data["policy_class"]["__module__"]))
        if not layers:
            raise KeyError("actor.mu")
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{path} is not a policy of SAC, TQC, TD3, DDPG, PPO or A2C in continuous actions: it has no {error}"
        ) from None
    if any("features_extractor" in key or "shared_net" in key for key in weights) or said.get("squash_output"):
        raise InputError(f"{path} is not a plain MLP: feature extractors, shared layers, squash_output are not read")
    activation = _activation(path, said, "Tanh" if on_policy else "ReLU")
    use_sde = bool(data.get("use_sde")) or (log_std is not None and log_std.ndim == 2)
    # gSDE's mean is followed by a clamp, so its layer is the first in an nn.Sequential.
    clip_mean = float(said.get("clip_mean", 2.0)) if use_sde and names[-1] == "actor.mu.0" else None
    if not deterministic and use_sde:
        raise InputError(f"{path} explores by gSDE, which is not reproduced here: give --deterministic")
    if not deterministic and log_std is None and log_std_layer is None:
        raise InputError(f"{path} is a deterministic policy, stored without its noise: give --deterministic")

    normalize, statistics = _vec_normalize(path, data, on_policy, layers[0][0].shape[-1])
    box: Any = gym.make(_spec(env), disable_env_checker=True).action_space if on_policy else None
    to_unit = rescale_box(box, -np.ones_like(box.low), np.ones_like(box.low))[1] if on_policy else None

    @torch.no_grad()
    def act(obs: Array) -> Array:
        latent = torch.from_numpy(normalize(obs))
        for layer in layers[:-1]:
            latent = activation(F.linear(latent, *layer))
        actions = F.linear(latent, *layers[-1])
        if clip_mean:
            actions = actions.clamp(-clip_mean, clip_mean)
        if not deterministic:
            std = F.linear(latent, *log_std_layer).clamp(-20.0, 2.0) if log_std_layer else log_std
            assert std is not None
            actions = actions + std.exp() * torch.randn(actions.shape, generator=generator)
        # PPO's and A2C's actions are in the environment's own units, the others' in [-1, 1].
        unit: Array = to_unit(actions.numpy().astype(box.dtype)) if to_unit else actions.tanh().numpy()
        return unit

    _check_shapes(path, env, layers, act)
    facts = {"kind": "stable-baselines3", "name": path.name, "sha256": _sha256(path)} | statistics
    facts["algorithm"] = "ppo or a2c" if on_policy else module[1] if module else "unknown"
    return Policy(act, facts | {"step": data.get("num_timesteps")})


def _read_zip(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of policy.pth as float32, and the JSON in which the file describes itself.

    Raise InputError if the file is damaged, holds more than tensors, or holds weights that are not finite.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            policy, said = archive.read("policy.pth"), archive.read("data")
    except (zipfile.BadZipFile, OSError, KeyError, EOFError, NotImplementedError, RuntimeError) as error:
        raise InputError(f"{path} is not a complete Stable-Baselines3 .zip: {error}") from None
    try:
        weights = torch.load(io.BytesIO(policy), map_location="cpu", weights_only=True)
        data = json.loads(said)
    except (RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, pickle.UnpicklingError):
        raise InputError(f"{path} holds more than tensors, or is damaged: give another policy") from None
    if not (isinstance(weights, dict) and isinstance(data, dict)):
        raise InputError(f"{path} is not a Stable-Baselines3 policy")
    tensors = {str(k): v.float() for k, v in weights.items() if isinstance(v, Tensor)}
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise InputError(f"{path} holds weights that are not finite: give another policy")
    return tensors, data


def _vec_normalize(
    path: Path, data: dict[str, Any], on_policy: bool, obs_dim: int
) -> tuple[Callable[[Array], Array], dict[str, Any]]:
    """Return the function that the policy's VecNormalize applies to obs [n, obs_dim], and its recipe entries.

    The statistics are read from an export next to the policy, because Stable-Baselines3 stores them as a pickle.
    Raise InputError if they are needed and missing, or do not fit.
    """
    export = path.with_suffix(".npz")
    if not export.is_file():
        _refuse_without_statistics(path, export, _was_normalized(data, on_policy))
        return lambda obs: obs, {}
    try:
        with np.load(export, allow_pickle=False) as file:
            facts = {"vec_normalize": _sha256(export)}
            if "norm_obs" in file and not file["norm_obs"]:  # it normalised rewards alone
                return lambda obs: obs, facts
            mean, var = (np.asarray(file[name], np.float64) for name in ("mean", "var"))
            epsilon, clip = float(file["epsilon"]), float(file["clip_obs"])
        if {mean.shape, var.shape} != {(obs_dim,)}:
            raise ValueError(f"the policy takes {obs_dim} observations, mean has shape {mean.shape}, var {var.shape}")
        if not (np.isfinite([mean, var]).all() and (var >= 0).all() and 0 < epsilon < np.inf and clip > 0):
            raise ValueError("a mean, var, epsilon or clip_obs is not finite, or not positive")
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(
            f"{export} does not hold the VecNormalize statistics of {path.name}: {error}\n"
            "write it as docs/data.md shows"
        ) from None
    deviation = np.sqrt(var + epsilon)
    return lambda obs: np.clip((obs - mean) / deviation, -clip, clip).astype(np.float32), facts


def _was_normalized(data: dict[str, Any], on_policy: bool) -> bool | None:
    """Return whether the policy was trained on observations of a VecNormalize; None if its file does not show it.

    Stable-Baselines3 keeps the last observations as the policy and as the environment gave them. The former are
    float32 under a VecNormalize; PPO and A2C keep the latter under a VecNormalize only.
    """
    seen, given = (_float_types(data.get(key)) for key in ("_last_obs", "_last_original_obs"))
    never_given = data.get("_last_obs") is not None and data.get("_last_original_obs", ...) is None
    if seen == {"f8"} or (on_policy and never_given):
        return False
    if given and seen and (on_policy or seen != given):
        return True
    return None


def _float_types(entry: Any) -> set[str]:
    """Return which of f4 and f8 an array's pickle names. The opcodes are listed and never executed."""
    try:
        opcodes = pickletools.genops(base64.b64decode(entry[":serialized:"]))
        return {argument for _, argument, _ in opcodes if argument in ("f4", "f8")}
    except (KeyError, TypeError, ValueError, OverflowError):
        return set()


def _refuse_without_statistics(path: Path, export: Path, was_normalized: bool | None) -> None:
    """Raise InputError if a policy needs statistics that are missing. Print a warning if its file does not show it."""
    pickles = [*path.parent.glob("*.pkl"), *path.parent.glob(f"{path.stem}/*.pkl")]  # the latter is the RL Zoo's place
    near = [file.name for file in pickles if file.stem == path.stem or re.search("vec_?norm", file.name.lower())]
    if was_normalized or (was_normalized is None and near):
        known = "was trained under VecNormalize" if was_normalized else f"lies next to {near[0]}"
        raise InputError(
            f"{path} {known}, but the statistics that its observations need are missing\n"
            f"export them to {export}: docs/data.md shows how (a pickle is never loaded here)"
        )
    if was_normalized is None:
        log.warning(
            f"{path} does not show whether it was trained under VecNormalize: "
            f"if so, export its statistics to {export} (docs/data.md)"
        )


def _layer(weights: dict[str, Tensor], name: str) -> Layer:
    return weights[f"{name}.weight"], weights[f"{name}.bias"]


def _activation(path: Path, said: dict[str, Any], default: str) -> Callable[[Tensor], Tensor]:
    text = str(said.get("activation_fn", default))  # "<class 'torch.nn.modules.activation.ReLU'>"
    name = re.findall(r"\w+", text)[-1:]
    if not name or name[0] not in ACTIVATIONS:
        raise InputError(f"{path} has activations {text}; known here: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name[0]]


def _check_shapes(path: Path, env: gym.Env[Any, Any], layers: list[Layer], act: Callable[[Array], Array]) -> None:
    takes, gives = layers[0][0].shape[-1], layers[-1][0].shape[0]
    obs_dim, action_dim = flatdim(env.observation_space), flatdim(env.action_space)
    if (takes, gives) != (obs_dim, action_dim):
        raise InputError(
            f"{path} maps {takes} observations to {gives} actions, "
            f"{_spec(env).id} has {obs_dim} observations and {action_dim} actions"
        )
    try:
        act(np.zeros((1, obs_dim), np.float32))
    except RuntimeError as error:
        raise InputError(f"{path} holds layers that do not fit each other: {str(error).splitlines()[0]}") from None


def _spec(env: gym.Env[Any, Any]) -> gym.envs.registration.EnvSpec:
    """Return the spec of the environment itself, without the wrappers of envs.make."""
    spec = env.unwrapped.spec
    assert spec is not None, "an environment made by gym.make has one"
    return spec


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
