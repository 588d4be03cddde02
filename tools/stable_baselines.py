"""Read a policy from a Stable-Baselines3 file of SAC, TQC, TD3, DDPG, PPO or A2C. Nothing is ever unpickled."""

import base64
import io
import json
import pickle
import pickletools
import re
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium.spaces import flatdim
from gymnasium.wrappers.utils import rescale_box
from numpy.typing import NDArray
from torch import Tensor

from common import files
from common.errors import InputError
from common.messages import log
from common.provenance import sha256_of

LARGEST = 2**30  # bytes of a file once unpacked; a policy of 1024 units takes 2**26
BAD_FILE = (RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, pickle.UnpicklingError)
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


def read_stable_baselines(
    path: Path, env: gym.Env[Any, Any], generator: torch.Generator, deterministic: bool
) -> tuple[Callable[[Array], Array], dict[str, Any]]:
    """Return the policy's function for `env` and its recipe entries, as `tools.policies.Policy` has them.

    `generator` draws the noise. Raise InputError if the file is damaged, of another kind, or does not fit `env`.
    """
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
    clip_mean = said.get("clip_mean", 2.0) if use_sde and names[-1] == "actor.mu.0" else None
    if not isinstance(clip_mean, int | float | None):
        raise InputError(f"{path} has a clip_mean of {clip_mean!r:.80}: give another policy")
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
    facts = {"kind": "stable-baselines3", "name": path.name, "sha256": sha256_of(path)} | statistics
    facts["algorithm"] = "ppo or a2c" if on_policy else module[1] if module else "unknown"
    return act, facts | {"step": data.get("num_timesteps")}


def _read_zip(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of policy.pth as float32, and the JSON in which the file describes itself.

    Raise InputError if the file is damaged, holds more than tensors, or holds weights that are not finite.
    """
    try:
        with files.open_regular(path, "rb") as file:
            policy, said = _unpacked(file, "policy.pth", "data")
        if zipfile.is_zipfile(io.BytesIO(policy)):  # PyTorch's files are archives too
            _unpacked(io.BytesIO(policy))
    except (zipfile.BadZipFile, zlib.error, OSError, KeyError, EOFError, NotImplementedError, RuntimeError) as error:
        raise InputError(f"{path} is not a complete Stable-Baselines3 .zip: {error}") from None
    try:
        weights = torch.load(io.BytesIO(policy), map_location="cpu", weights_only=True)
        data = json.loads(said)
    except BAD_FILE:
        raise InputError(f"{path} holds more than tensors, or is damaged: give another policy") from None
    if not (isinstance(weights, dict) and isinstance(data, dict)):
        raise InputError(f"{path} is not a Stable-Baselines3 policy")
    numbers = sum(v.numel() for v in weights.values() if isinstance(v, Tensor))
    if 4 * numbers > LARGEST:  # a tensor of stride 0 repeats a number that the file holds once
        raise InputError(f"{path} holds {numbers:,} weights, and a policy takes {LARGEST // 4:,} at most")
    tensors = {str(k): v.float() for k, v in weights.items() if isinstance(v, Tensor)}
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise InputError(f"{path} holds weights that are not finite: give another policy")
    return tensors, data


def _unpacked(file: IO[bytes], *names: str) -> list[bytes]:
    """Return these parts of an archive. Raise BadZipFile if all parts together would take more than LARGEST."""
    with zipfile.ZipFile(file) as archive:
        if (size := sum(part.file_size for part in archive.infolist())) > LARGEST:
            raise zipfile.BadZipFile(
                f"it unpacks to {size / 1e9:,.1f} GB, and a policy takes {LARGEST / 1e9:.1f} at most"
            )
        return [archive.read(name) for name in names]


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
            facts = {"vec_normalize": sha256_of(export)}
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
    weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    if weight.ndim != 2 or bias.shape != weight.shape[:1]:  # PyTorch would broadcast some
        raise KeyError(f"{name} of fitting shapes ({list(weight.shape)} and {list(bias.shape)} are there)")
    return weight, bias


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
        if (shape := act(np.zeros((3, obs_dim), np.float32)).shape) != (3, action_dim):
            raise RuntimeError(f"3 observations give actions of shape {list(shape)}")
    except (RuntimeError, ValueError) as error:
        raise InputError(f"{path} holds layers that do not fit each other: {str(error).splitlines()[0]}") from None


def _spec(env: gym.Env[Any, Any]) -> gym.envs.registration.EnvSpec:
    """Return the spec of the environment itself, without the wrappers of envs.make."""
    spec = env.unwrapped.spec
    assert spec is not None, "an environment made by gym.make has one"
    return spec
