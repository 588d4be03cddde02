"""Draw the base samples of one environment step of EXPO again and again, in one batch or in a plain loop.

`python bench/speed/expo_sampling.py recorded|batch|loop <environment id>` runs until killed and counts those steps as a
counted environment does, at `--size small`. `batch` draws all samples of all updates in one batch, as `algos/expo.py`
does. `recorded` does the same as compiled code, as a long run does.
`loop` draws them update by update and sample by sample. It uses plain layers on rows that concatenate noisy action,
state and embedded time. Weights and distribution are the same.
"""

import math
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import torch
import torch.nn.functional as F
from gymnasium.spaces import flatdim
from torch import Tensor

from bench.speed.step_counter import claim_slot
from common.onednn import keep_freed_memory
from common.recorded import Recording

EXPO_FILE = Path(__file__).resolve().parents[2] / "algos" / "expo.py"


def make_agent(obs_dim: int, action_dim: int) -> Any:
    """Return an agent of algos/expo.py with the locomotion preset at --size small."""
    algorithm = runpy.run_path(str(EXPO_FILE), run_name="expo")
    given = (
        {"dataset": "none.hdf5", "online_steps": 1} | algorithm["PRESETS"]["locomotion"] | algorithm["SIZES"]["small"]
    )
    args = algorithm["Args"](**given)
    return algorithm["EXPO"](args, obs_dim, action_dim, torch.device("cpu"))


@torch.no_grad()
def noise_in(w: dict[str, Tensor], blocks: int, obs: Tensor, noisy: Tensor, k: int) -> Tensor:
    """Return the noise [batch, action_dim] that `common.diffusion.Denoiser` with the weights `w` finds at time k.

    Inputs are obs [batch, obs_dim] and noisy [batch, action_dim], which are concatenated by row.
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
    """Draw an action of the base policy with the weights `w` for each state: [batch, action_dim]."""
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
    """Draw the samples of all updates one by one: [base_samples, batch, action_dim]."""
    w, updates = dict(agent.base.named_parameters()), obs.split(agent.args.batch_size)
    drawn = [torch.stack([one_sample(agent, w, part) for _ in range(agent.base_samples)]) for part in updates]
    return torch.cat(drawn, 1)


def batch(agent: Any, obs: Tensor) -> Tensor:
    """Draw as many samples in one batch: [base_samples, batch, action_dim]."""
    actions: Tensor = agent.sample(agent.base, obs, agent.base_samples, agent.generator)
    return actions


def main() -> None:
    torch.set_flush_denormal(True)  # as in our runs
    keep_freed_memory()
    env = gymnasium.make(sys.argv[2])
    obs_dim = flatdim(env.observation_space)
    agent = make_agent(obs_dim, flatdim(env.action_space))
    obs = torch.randn(agent.args.utd * agent.args.batch_size, obs_dim)
    draw: Callable[[Tensor], Tensor] = partial(loop if sys.argv[1] == "loop" else batch, agent)
    if sys.argv[1] == "recorded":
        draw = Recording(torch.no_grad()(draw), [obs], agent)
    count = claim_slot()
    while True:
        draw(obs)
        count()


if __name__ == "__main__":
    main()
