"""How far EnvPool's MuJoCo environments are from Gymnasium's, for `test_envpool.py`.

From equal states (the first observation tells all but where the root stands on the ground) both take the same uniform
random actions. A simulation amplifies rounding, so it is compared with Gymnasium against itself with one
joint moved by 1e-14. Where EnvPool is as near as that, nothing but rounding differs.
"""

from typing import Any

import envpool
import gymnasium as gym
import mujoco
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# How many coordinates of the root the observation leaves out.
HIDDEN = {"Ant": 2, "HalfCheetah": 1, "Hopper": 1, "Humanoid": 2, "InvertedPendulum": 0, "Swimmer": 2, "Walker2d": 1}
CAN_FALL = ("Ant", "Hopper", "Humanoid", "Walker2d")
EPISODES = 16
STEPS = (1, 20, 100)
NUDGE = 1e-14


class Pool:
    """EnvPool's environments as one of `compare`'s two sides."""

    def __init__(self, env_id: str, num_envs: int, **kwargs: Any) -> None:
        self.envs = envpool.make_gymnasium(env_id, num_envs=num_envs, num_threads=1, seed=1, **kwargs)
        self.first = self.envs.reset()[0]

    def step(self, actions: Array) -> list[Array]:
        return list(self.envs.step(actions)[:4])


class Singles:
    """Gymnasium's, each begun in the state that a first observation tells, its last joint moved by `nudge`."""

    def __init__(self, env_id: str, first: Array, nudge: float = 0.0, **kwargs: Any) -> None:
        self.envs = [gym.make(gym.registry[env_id], **kwargs) for _ in first]
        hidden = HIDDEN[env_id.split("-")[0]]
        for env, obs in zip(self.envs, first, strict=True):
            env.reset()
            body: Any = env.unwrapped
            mujoco.mj_resetData(body.model, body.data)  # the solver's warm start too
            known = body.model.nq - hidden
            qpos = np.concatenate([np.zeros(hidden), obs[:known]])
            qpos[-1] += nudge
            body.set_state(qpos, obs[known : known + body.model.nv])

    def step(self, actions: Array) -> list[Array]:
        seen = [env.step(action)[:4] for env, action in zip(self.envs, actions, strict=True)]
        return [np.array(part) for part in zip(*seen, strict=True)]


def compare(env_id: str) -> dict[str, Any]:
    """The measured differences of one environment; each "after" is the largest so far, at STEPS.

    obs, rewards: EnvPool against Gymnasium, where falling ends no episode, so that 100 steps are reached; an
    observation's difference d of a value x counts as d / (1 + |x|). nudged: the same of obs, Gymnasium against itself.
    ends, unequal_ends: of episodes that may fall. starts: the largest Kolmogorov distance of a first observation's
    distribution, over 1 000 episodes each. limits: the time limits of EnvPool and Gymnasium.
    """
    name = env_id.split("-")[0]
    standing = {"terminate_when_unhealthy": False} if name in CAN_FALL else {}
    pool = Pool(env_id, EPISODES, **standing)
    obs, rewards, _ = _differences(env_id, Singles(env_id, pool.first, **standing), pool)
    twins = [Singles(env_id, pool.first, nudge, **standing) for nudge in (0.0, NUDGE)]
    nudged, *_ = _differences(env_id, *twins)
    falling = Pool(env_id, EPISODES)
    *_, ends = _differences(env_id, Singles(env_id, falling.first), falling)
    limits = (pool.envs.config["max_episode_steps"], gym.registry[env_id].max_episode_steps)
    return {
        "obs": obs, "rewards": rewards, "nudged": nudged, "ends": ends[0], "unequal_ends": ends[1],
        "starts": _starts(env_id), "limits": limits,
    }  # fmt: skip


def _differences(env_id: str, one: Singles, other: Pool | Singles) -> tuple[list[float], list[float], tuple[int, int]]:
    box: Any = one.envs[0].action_space
    generator, going = np.random.default_rng(0), np.ones(EPISODES, bool)
    scale = 0.01 if env_id.startswith("InvertedPendulum") else 1.0  # or it falls within 20 steps
    worst_obs, worst_reward, ends, unequal = [0.0], [0.0], 0, 0
    for _ in range(max(STEPS)):
        actions = scale * generator.uniform(box.low, box.high, (EPISODES, *box.shape))
        a, b = one.step(actions), other.step(actions)
        distance = np.max(np.abs(a[0] - b[0]) / (1 + np.abs(a[0])), axis=1)
        worst_obs.append(max(worst_obs[-1], float(np.max(distance, where=going, initial=0.0))))
        worst_reward.append(max(worst_reward[-1], float(np.max(np.abs(a[1] - b[1]), where=going, initial=0.0))))
        unequal += int(np.sum(going & ((a[2] != b[2]) | (a[3] != b[3]))))
        ended = going & (a[2] | a[3] | b[2] | b[3])
        ends += int(np.sum(ended))
        going &= ~ended
    return [worst_obs[t] for t in STEPS], [worst_reward[t] for t in STEPS], (ends, unequal)


def _starts(env_id: str, episodes: int = 1000) -> float:
    env = gym.make(gym.registry[env_id])
    env.reset(seed=0)
    ours = np.array([env.reset()[0] for _ in range(episodes)])
    theirs = Pool(env_id, episodes).first
    largest = 0.0
    for a, b in zip(np.sort(ours.T), np.sort(theirs.T), strict=True):
        if a[0] < a[-1] or b[0] < b[-1]:  # but for constants, such as the contact forces of a body in the air
            both = np.concatenate([a, b])
            distance = np.searchsorted(a, both, "right") - np.searchsorted(b, both, "right")
            largest = max(largest, float(np.abs(distance).max()) / episodes)
    return largest
