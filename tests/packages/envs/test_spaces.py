"""Dict observations whose space is not in alphabetical order, and what Minari can hold of other spaces."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Tuple

from common.errors import InputError
from envs.make import make
from envs.spaces import alphabetical
from offline.dataset import load
from offline.write import write_dataset
from tools import collect as tool
from tools.collect import Args, collect

PLANE = Box(-np.inf, np.inf, (2,), np.float64)


class Moving(gym.Env[Any, Any]):
    """The velocity comes before the position, at two levels. An episode has five steps."""

    observation_space = Dict([("robot", Dict([("vel", PLANE), ("pos", PLANE)])), ("goal", PLANE)])
    action_space = Box(-2.0, 3.0, (1,))
    time = 0

    def obs(self) -> Any:
        position = np.array([self.time, -1.0])
        return {"robot": {"vel": position + 10.0, "pos": position}, "goal": np.zeros(2)}

    def reset(self, **kwargs: Any) -> Any:
        super().reset(**kwargs)
        self.time = 0
        return self.obs(), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        return self.obs(), 1.0, False, self.time >= 5, {}


class Pair(Moving):
    observation_space = Dict(a=Tuple([PLANE, PLANE]))

    def obs(self) -> Any:
        return {"a": (np.zeros(2), np.zeros(2))}


class Gears(Moving):
    observation_space = Dict(gear=Discrete(3), light=Box(0, 255, (2,), np.uint8))

    def obs(self) -> Any:
        return {"gear": 1, "light": np.array([self.time, 3], np.uint8)}


for each in (Moving, Pair, Gears):
    gym.register(f"{each.__name__}-v0", f"{__name__}:{each.__name__}")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


def test_entries_are_sorted_at_each_level() -> None:
    env, other = make("Moving-v0"), make("Moving-v0")
    first = env.reset(seed=0)[0]
    assert first.tolist() == [0, 0, 0, -1, 10, 9]  # goal, pos, vel
    env.step(np.zeros(1, np.float32))
    assert other.set_state(env.get_state())
    assert other.step(np.zeros(1, np.float32))[0].tolist() == [0, 0, 2, -1, 12, 9]
    assert gym.make(env.spec).reset(seed=0)[0].tolist() == first.tolist()


def test_a_sorted_space_is_not_wrapped() -> None:
    """Then the state of an environment in an older checkpoint fits."""
    assert "Alphabetical" in str(make("Moving-v0"))
    assert "Alphabetical" not in str(make("Gears-v0"))
    assert repr(alphabetical(Gears.observation_space)) == repr(Gears.observation_space)


def test_both_kinds_of_dataset_have_the_order_of_the_environment() -> None:
    columns = []
    for output in ("moving.hdf5", "minari:own/moving-v0"):
        collect(Args(output, "Moving-v0", ("random",), transitions=20, num_envs=2))
        columns.append(load(output.removeprefix("minari:")).column("obs"))
    assert columns[0][:6].tolist() == [[0, 0, t % 5, -1, t % 5 + 10, 9] for t in range(6)]
    np.testing.assert_array_equal(*columns)


def test_what_minari_cannot_hold_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    args = {"env": "Pair-v0", "policy": ("random",), "transitions": 20, "num_envs": 2}
    collect(Args("pair.hdf5", **args))
    monkeypatch.setattr(tool, "_collected", lambda *_: pytest.fail("it was collected"))
    with pytest.raises(InputError, match=r"cannot hold observations of Dict\('a': Tuple.*ends in .hdf5"):
        collect(Args("minari:own/pair-v0", **args))
    assert not list(tmp_path.glob("minari/own/*"))


@pytest.mark.parametrize(("row", "fits"), [
    ([0, 1, 0, 7, 255], True), ([0, 1, 0, 0.7, 3], False), ([0.2, 0.3, 0, 1, 2], False), ([0, 1, 0, -1, 300], False),
])  # fmt: skip
def test_observations_outside_the_environments_space(row: list[float], fits: bool, tmp_path: Path) -> None:
    """HDF5 keeps the numbers. In Minari, a uint8 would lose the fraction, and a class the sum of 1."""
    arrays: dict[str, Any] = {"observations": [row] * 2, "next_observations": [row] * 2, "actions": [[0.0]] * 2}
    arrays |= {"rewards": [0, 0], "terminations": [0, 1], "truncations": [0, 0], "env": "Gears-v0"}
    write_dataset("gears.hdf5", **arrays)
    np.testing.assert_allclose(load("gears.hdf5").column("obs")[0], row, rtol=1e-6)
    if fits:
        write_dataset("minari:own/gears-v0", **arrays)
        np.testing.assert_array_equal(load("own/gears-v0").column("obs")[0], row)
        return
    with pytest.raises(InputError, match="are not in the environment's observation_space"):
        write_dataset("minari:own/gears-v0", **arrays)
    assert not [path for path in tmp_path.glob("minari/own/*") if path.is_dir()]
