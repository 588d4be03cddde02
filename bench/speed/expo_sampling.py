"""The base samples of one environment step of EXPO, drawn again and again: by its own file, or as written first.

`python bench/speed/expo_sampling.py batch|loop <environment id>` runs until killed and counts those steps as a counted
environment does, at --size small. `batch` is what `algos/expo.py` does: all samples of all updates in one batch. `loop`
draws them where each is needed: update by update, sample by sample, with plain layers on rows that hold noisy action,
state and embedded time side by side. The weights are the same, and so is the distribution.
"""

import math
import runpy
import sys
from pathlib import Path
from typing import Any

import gymnasium
import torch
import torch.nn.functional as F
from gymnasium.spaces import flatdim
from torch import Tensor

from bench.speed.step_counter import claim_slot
from common.onednn import keep_freed_memory

EXPO_FILE = Path(__file__).resolve().parents[2] / "algos" / "expo.py"


def make_agent(obs_dim: int, action_dim: int) -> Any:
    """Of algos/expo.py, with the locomotion preset at --size small."""
    algorithm = runpy.run_path(str(EXPO_FILE), run_name="expo")
    given = (
        {"dataset": "none.hdf5", "online_steps": 1} | algorithm["PRESETS"]["locomotion"] | algorithm["SIZES"]["small"]
    )
    args = algorithm["Args"](**given)
    return algorithm["EXPO"](args, obs_dim, action_dim, torch.device("cpu"))


@torch.no_grad()
def noise_in(w: dict[str, Tensor], blocks: int, obs: Tensor, noisy: Tensor, k: int) -> Tensor:
    """`common.diffusion.Denoiser` of these weights, row by row: obs [batch, obs_dim] and noisy [batch, action_dim] at
    time k.
    """

    def dense(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    angles = 2.0 * math.pi * torch.full((len(obs), 1), float(k)) * w["frequencies"]
    embedding = dense(F.silu(dense(torch.cat([angles.cos(), angles.sin()], -1), "of_time.0")), "of_time.2")
    stream = dense(torch.cat([noisy, obs, embedding], -1), "first")
    for i in range(blocks):
        norm = F.layer_norm(stream, stream.shape[-1:], w[f"blocks.{i}.norm.weight"], w[f"blocks.{i}.norm.bias"], 1e-6)
        stream = stream + dense(F.silu(dense(norm, f"blocks.{i}.up")), f"blocks.{i}.down")
    return dense(F.silu(stream), "last")


def one_sample(agent: Any, w: dict[str, Tensor], obs: Tensor) -> Tensor:
    """An action of the base policy, whose weights are `w`, for each state: [batch, action_dim]."""
    x = torch.randn(len(obs), agent.action_dim)
    for k in reversed(range(len(agent.process.betas))):
        beta, alpha_bar = agent.process.betas[k], agent.process.alpha_bars[k]
        noise = noise_in(w, len(agent.base.blocks), obs, x, k)
        x = (x - beta / torch.sqrt(1 - alpha_bar) * noise) / torch.sqrt(1 - beta)
        if k > 0:
            x = x + torch.sqrt(beta) * torch.randn_like(x)
        x = torch.clamp(x, -1, 1)
    return x


def loop(agent: Any, obs: Tensor) -> Tensor:
    """The samples of all updates, [base_samples, batch, action_dim]."""
    w, updates = dict(agent.base.named_parameters()), obs.split(agent.args.batch_size)
    drawn = [torch.stack([one_sample(agent, w, part) for _ in range(agent.base_samples)]) for part in updates]
    return torch.cat(drawn, 1)


def batch(agent: Any, obs: Tensor) -> Tensor:
    """The same in one batch."""
    actions: Tensor = agent.sample(agent.base, obs, agent.base_samples, agent.generator)
    return actions


def main() -> None:
    torch.set_flush_denormal(True)  # as a run of ours
    keep_freed_memory()
    env = gymnasium.make(sys.argv[2])
    obs_dim, draw = flatdim(env.observation_space), {"batch": batch, "loop": loop}[sys.argv[1]]
    agent = make_agent(obs_dim, flatdim(env.action_space))
    obs = torch.randn(agent.args.utd * agent.args.batch_size, obs_dim)
    count = claim_slot()
    while True:
        draw(agent, obs)
        count()


if __name__ == "__main__":
    main()
