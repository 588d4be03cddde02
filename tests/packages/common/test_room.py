"""Sizes that cannot work are refused before anything is allocated, and what fits is not."""

import pytest
import torch
from conftest import module

from common import room
from common.errors import InputError
from common.room import require_resources

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_envs", [1, 1_000])
def test_a_rollout_is_counted_once_however_many_environments_share_it(
    num_envs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 GB are free. A reward alone has 4 bytes."""
    monkeypatch.setattr(room, "free_memory", lambda _: 4_000_000_000)
    args = {"num_envs": num_envs, "total_steps": 2_000_000_000}
    require_resources(module("ppo").Args(rollout_steps=999_999_000, **args), CPU)
    with pytest.raises(InputError, match=r"--rollout-steps needs 4 GB of memory or more, and 4\.0 GB are free"):
        require_resources(module("ppo").Args(rollout_steps=1_000_001_000, **args), CPU)


def test_work_of_ten_years_is_that_of_the_epochs_of_each_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 rollouts: 3.2e11 epochs are ten years at a million steps a second, with 8 environments as with one."""
    monkeypatch.setattr(room, "free_memory", lambda _: 10**12)
    for num_envs in (1, 8):
        args = {"num_envs": num_envs, "total_steps": 800_000, "rollout_steps": 800}
        require_resources(module("ppo").Args(epochs=3 * 10**11, **args), CPU)
        with pytest.raises(InputError, match="--epochs would make the run last ten years or more"):
            require_resources(module("ppo").Args(epochs=4 * 10**11, **args), CPU)
