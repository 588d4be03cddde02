"""Recorded data of others, replayed in today's environments: how far they are from those that were recorded."""

from typing import Any

import h5py
import numpy as np
import pytest
from conftest import SHARED

from envs.make import make
from offline.dataset import load, read
from offline.environments import environment_of
from tools.inspect_dataset import facts


def recorded(name: str) -> dict[str, np.ndarray]:
    path = SHARED / "data" / name
    if not path.exists():
        pytest.skip(f"{path} is absent")
    with h5py.File(path) as file:
        return (
            {key: file[key][:] for key in ("observations", "next_observations", "actions", "rewards") if key in file}
            | {f"init_{key}": file[f"infos/init_{key}"][:] for key in ("door_body_pos", "qvel") if "infos" in file}
            | {"timeouts": file["timeouts"][:]}
        )


@pytest.mark.parametrize(
    ("name", "transitions", "episodes", "env"),
    [
        ("adroit/door-human", 6704, 25, "AdroitHandDoor-v1"),
        ("adroit/pen-human-sparse", 4975, 25, "AdroitHandPen-v1"),
        ("gym/halfcheetah-v4-expert", 2000, 2, "HalfCheetah-v4"),
        ("gym/hopper-v4-expert", 2000, 2, "Hopper-v4"),
        ("gym/walker2d-v4-expert", 2000, 2, "Walker2d-v4"),
        ("gym/ant-v4-expert", 2000, 2, "Ant-v4"),
    ],
)
def test_they_load_and_are_described(name: str, transitions: int, episodes: int, env: str) -> None:
    """25 demonstrations, or 2 episodes of 1000 steps; door's last steps have no successor, and still count."""
    data = recorded(f"{name}.hdf5")
    dataset = load(str(SHARED / "data" / f"{name}.hdf5"))
    assert (len(dataset), len(dataset.ends), dataset.env) == (transitions, episodes, env)
    assert dataset.returns().sum() == pytest.approx(data["rewards"].sum(dtype=np.float64), rel=1e-5)
    assert np.abs(dataset.column("actions")).max() < 1
    found = facts(read(str(SHARED / "data" / f"{name}.hdf5")))
    assert found["returns"]["mean"] == pytest.approx(data["rewards"].sum(dtype=np.float64) / episodes, rel=1e-5)
    assert not any(found["transitions not finite"].values())
    if "next_observations" in data:
        assert np.array_equal(dataset.column("next_obs"), data["next_observations"])


@pytest.mark.parametrize(
    ("robot", "usual", "largest", "reward_error"),
    [
        ("HalfCheetah", 1e-7, 1e-4, 2e-6),
        ("Hopper", 2e-7, 0.5, 0.1),  # exact but for the foot's velocity in contact
        ("Walker2d", 5e-7, 1e-5, 2e-6),
        ("Ant", 0.1, 3.0, 0.7),  # exact in the air, not in contact
    ],
)
def test_recorded_steps_are_repeated(robot: str, usual: float, largest: float, reward_error: float) -> None:
    data = recorded(f"gym/{robot.lower()}-v4-expert.hdf5")
    env: Any = make(f"{robot}-v4")
    env.reset(seed=0)
    env = env.unwrapped
    hidden = env.model.nq + env.model.nv - data["observations"].shape[1]  # x, and y
    # Hopper and Walker2d observe velocities up to 10: where one is cut off, the state is not known.
    known = np.abs(data["observations"][:, env.model.nq - hidden :]).max(1) < (
        10 if robot in ("Hopper", "Walker2d") else 99
    )
    errors, reward_errors = [], []
    for i in np.flatnonzero(known):
        state = np.concatenate([np.zeros(hidden), data["observations"][i]])
        env.set_state(state[: env.model.nq], state[env.model.nq :])
        obs, reward, *_ = env.step(data["actions"][i])
        after = data["next_observations"][i]
        errors.append(np.max(np.abs(obs - after) / (1 + np.abs(after))))
        reward_errors.append(abs(reward - data["rewards"][i]))
    assert len(errors) > 100
    assert np.median(errors) < usual
    assert max(errors) < largest
    assert max(reward_errors) < reward_error


def test_recorded_doors_open_again() -> None:
    pytest.importorskip("gymnasium_robotics")
    data = recorded("adroit/door-human.hdf5")
    env = make(environment_of("door-human-v1"), max_episode_steps=1000)
    env.reset(seed=0)
    hand: Any = env.unwrapped
    ends = np.flatnonzero(data["timeouts"])
    starts = [0, *(ends[:-1] + 1)]
    errors: dict[int, list[float]] = {0: [], 1: [], 10: [], 100: []}
    reward_errors, opened, opened_then = [], 0, 0
    for episode, (start, end) in enumerate(zip(starts, ends, strict=True)):
        env.reset()
        observed = data["observations"][start].astype(np.float64)
        state = {"qvel": data["init_qvel"][episode], "door_body_pos": data["init_door_body_pos"][episode]}
        # The first observation lacks the arm's slide alone: along it the palm moves in a straight line.
        slide = 0.0
        for _ in range(3):
            palms = []
            for place in (slide, slide + 1e-3):
                hand.set_env_state(
                    state | {"qpos": np.concatenate([[place], observed[:27], observed[28:29], observed[27:28]])}
                )
                palms.append(hand._get_obs()[29:32])
            way = (palms[1] - palms[0]) / 1e-3
            slide += way @ (observed[29:32] - palms[0]) / (way @ way)
        hand.set_env_state(state | {"qpos": np.concatenate([[slide], observed[:27], observed[28:29], observed[27:28]])})
        obs, success = hand._get_obs(), False
        for step in range(end - start):
            if step in errors:
                errors[step].append(np.abs(obs - data["observations"][start + step]).max())
            obs, reward, _, _, info = env.step(np.clip(data["actions"][start + step], -1, 1))
            if step == 0:
                reward_errors.append(abs(float(reward) - data["rewards"][start]))
            success |= info["success"]
        opened += success
        opened_then += (data["observations"][start : end + 1, 28] >= 1.35).any()
    for step, bound in ((0, 1e-6), (1, 0.005), (10, 0.01), (100, 0.2)):
        assert max(errors[step]) < bound
    assert max(reward_errors) < 1e-4  # 0.07 with Gymnasium-Robotics' sign
    assert opened >= opened_then - 3
