"""EXPO agents, batches and draws that its test files share."""

from typing import Any

import numpy as np
import torch
from formulas import Array, Drawn, forward, layers, log_density, make_batch, parameters

from algos.expo import EXPO, PRESETS, SIZES, Args
from common.diffusion import Diffusion
from common.optim import Adam
from common.replay_buffer import Batch

E, S = 5, 2  # critics, and how many are drawn
SMALL = PRESETS["locomotion"] | SIZES["small"] | {
    "hidden": (16, 8), "width": 16, "critics": E, "batch_size": 64, "edit_scale": 0.4, "base_samples": 3, "edits": 2,
    "dataset": "none.hdf5", "online_steps": 1,
}  # fmt: skip


def float32_agent(action_dim: int = 2, **changed: Any) -> EXPO:
    return EXPO(Args(**(SMALL | changed)), 3, action_dim, torch.device("cpu"))


def make_agent(**changed: Any) -> EXPO:
    agent = float32_agent(**changed)
    noise = torch.Generator().manual_seed(7)
    with torch.no_grad():  # no scale at 1, no shift at 0, targets unlike the critics
        for _, parameter in parameters(agent):
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=noise))
    for network in (agent.base, agent.base_average, agent.edit, agent.critic, agent.target_critic):
        network.double()
    if isinstance(agent.process, Diffusion):
        agent.process = Diffusion(agent.process.betas.double(), agent.process.alpha_bars.double())
    agent.log_alpha.data = torch.tensor(-0.7, dtype=torch.float64)
    for name, lr in (("base", 1e-3), ("edit", 1e-3), ("critic", 1e-3)):
        setattr(agent, f"{name}_optimizer", Adam(getattr(agent, name).parameters(), lr))
    agent.alpha_optimizer = Adam([agent.log_alpha], 1e-3)
    return agent


def float32_batch(size: int = 5) -> Batch:
    return Batch(*(part.float() for part in make_batch(size)[:5]))


def edited(
    agent: EXPO, obs: Array, actions: Array, noise: Array, kept: list[Array] | None = None
) -> tuple[Array, Array]:
    """Edits drawn, and their log-probabilities before they are scaled."""
    mean, log_std = np.split(forward(np.concatenate([obs, actions], -1), layers(agent.edit), kept), 2, axis=-1)
    std = np.exp(np.clip(log_std, -20, 2))
    u = mean + std * noise
    return np.tanh(u), log_density(mean, std, u)


def drawn_subset(drawn: Drawn) -> list[int]:
    return torch.rand(E, generator=drawn.generator).argsort()[:S].tolist()
