"""The planner for maze2d: shortest paths, places reached, and what is refused."""

import numpy as np
import pytest

from common.errors import InputError
from envs.d4rl import WALLS
from envs.make import make
from offline.environments import environment_of
from tools.policies import load_policy
from tools.waypoints import ARRIVED, Waypoints


@pytest.mark.parametrize("maze", WALLS)
def test_every_step_of_a_path_is_one_nearer(maze: str) -> None:
    """Distances by Floyd and Warshall's recursion, over the cells that touch."""
    planner = Waypoints(WALLS[maze].split(), 0.0, 0)
    places = np.array(planner.cells)
    touch = np.abs(places[:, None] - places[None]).sum(-1) == 1
    distance = np.where(touch, 1.0, np.inf)
    np.fill_diagonal(distance, 0)
    for k in range(len(places)):
        distance = np.minimum(distance, distance[:, k, None] + distance[k])
    assert np.isfinite(distance).all()
    number = {cell: k for k, cell in enumerate(planner.cells)}
    for goal, following in planner.following.items():
        for cell, after in following.items():
            there = distance[number[goal]]
            assert there[number[after]] == max(there[number[cell]] - 1, 0)
            assert cell == goal or touch[number[cell], number[after]]


@pytest.mark.parametrize("maze", ["umaze", "medium", "large"])
def test_it_reaches_one_place_after_another(maze: str) -> None:
    env = make(environment_of(f"maze2d-{maze}-v1"))
    planner = load_policy("waypoints", env, 0, deterministic=False)
    obs, _ = env.reset(seed=0)
    reached, goals = 0, None
    for _ in range(2_000):
        action = planner(obs[None])
        if goals is not None and planner.act.goals != goals:
            assert np.linalg.norm(np.array(goals[0]) - 0.2 - obs[:2]) < ARRIVED
            reached += 1
        goals = list(planner.act.goals)
        obs, _, _, truncated, _ = env.step(action[0])
        if truncated:
            obs, _ = env.reset()
    paths = [[cell] for following in planner.act.following.values() for cell in following]
    for path, following in zip(paths, [f for f in planner.act.following.values() for _ in f], strict=True):
        while following[path[-1]] != path[-1]:
            path.append(following[path[-1]])
    cells = np.mean([len(path) - 1 for path in paths])
    assert reached > 2_000 / (45 * cells)  # at 5 a second, its greatest speed, a cell takes 20 steps


def test_its_actions_are_a_function_of_the_seed() -> None:
    env = make(environment_of("maze2d-umaze-v1"))
    obs = np.random.default_rng(0).uniform(0.5, 3, (30, 4)).astype(np.float32)
    first, again, other = (load_policy("waypoints", env, seed, deterministic=False) for seed in (1, 1, 2))
    drawn = [np.stack([policy(obs) for _ in range(3)]) for policy in (first, again, other)]
    assert drawn[0].tobytes() == drawn[1].tobytes()
    assert (drawn[0] != drawn[2]).any()
    assert np.abs(drawn[0]).max() <= 1
    assert drawn[0].dtype == np.float32


def test_other_environments_are_refused() -> None:
    with pytest.raises(InputError, match=r"waypoints is for maze2d.*maze2d-umaze"):
        load_policy("waypoints", make("Pendulum-v1"), 0, deterministic=False)
