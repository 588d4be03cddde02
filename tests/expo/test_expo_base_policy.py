"""EXPO's base policy learns two modes. test_diffusion.py has the tests of its processes and its network."""

import pytest
import torch
from expo_agents import float32_agent, float32_batch

from algos.expo import EXPO


class BestOfModes(torch.nn.Module):
    """E[ε|x, t] of diffusion, or E[a - ε|x, t] of a flow, where a is one of `modes` [n, action_dim], all alike."""

    def __init__(self, agent: EXPO, modes: torch.Tensor) -> None:
        super().__init__()
        self.agent, self.modes = agent, modes

    def forward(self, obs: torch.Tensor, noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        of_data, of_noise = time / self.agent.args.denoising_steps, 1 - time / self.agent.args.denoising_steps
        if self.agent.args.policy == "diffusion":
            bar = self.agent.process.alpha_bars[time.long()]
            of_data, of_noise = bar.sqrt(), (1 - bar).sqrt()
        distances = (noisy.unsqueeze(-2) - of_data * self.modes).square().sum(-1)
        mean = torch.softmax(-0.5 * distances / of_noise**2, -1) @ self.modes  # E[a|x]
        noise = (noisy - of_data * mean) / of_noise
        return noise if self.agent.args.policy == "diffusion" else mean - noise


class TestBasePolicy:
    @pytest.mark.parametrize("policy", ["diffusion", "flow"])
    def test_learns_two_modes_that_depend_on_the_state(self, policy: str) -> None:
        """Actions are (±0.7, ±0.7 s): a Gaussian could only learn their middle. Nearly as many samples come near as
        the best network's do.
        """
        updates = 1_000
        agent = float32_agent(policy=policy, width=64, actor_lr=3e-3, denoising_steps=10, decay_updates=updates,
                              offline_steps=updates)  # fmt: skip
        rng = torch.Generator().manual_seed(0)
        for step in range(-updates, 0):
            agent.decay(step)
            state = 2.0 * torch.randint(2, (256, 1), generator=rng) - 1.0
            sign = 2.0 * torch.randint(2, (256, 1), generator=rng) - 1.0
            actions = torch.cat([0.7 * sign, 0.7 * sign * state], 1)
            agent.imitate(float32_batch()._replace(obs=state.expand(-1, 3), actions=actions))
        for state in (-1.0, 1.0):
            modes = 0.7 * torch.tensor([[1.0, state], [-1.0, -state]])
            near = []
            for base in (agent.base, BestOfModes(agent, modes)):
                drawn = agent.sample(base, torch.full((1, 3), state), 4_000, agent.generator)[:, 0]
                at = torch.cdist(drawn, modes) < 0.25
                near.append(at.any(1).float().mean().item())
                assert at[:, 0].float().mean().item() == pytest.approx(near[-1] / 2, abs=0.15)
            assert near[0] > near[1] - 0.1
            assert near[1] > 0.95
