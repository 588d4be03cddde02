"""A planner for D4RL's maze2d environments, which walks along shortest paths to one random cell after another.

It works as the controller that made D4RL's maze2d data (Farama-Foundation/D4RL, version 1.1). Its actions are a spring
towards the next cell of the path, a brake, and noise.
"""

from collections import deque

import numpy as np

from envs.vector import Array

SPRING, BRAKE, NOISE = 10.0, 1.0, 0.5
ARRIVED = 0.4  # distance to the goal below which the next goal is drawn
Cell = tuple[int, int]


class Waypoints:
    """Map obs [n, 4] of n environments, the same in every call, to actions [n, 2] in [-1, 1].

    Each environment has its own goal, which the end of an episode does not change.
    """

    def __init__(self, rows: list[str], noise: float, seed: int) -> None:
        """Plan the paths to every cell of the maze `rows`, in which # is a wall, as in `envs.d4rl.WALLS`."""
        self.cells = [(i, j) for i, row in enumerate(rows) for j, cell in enumerate(row) if cell == "."]
        self.middles = _middle(self.cells)
        self.following = {goal: self._towards(goal) for goal in self.cells}
        self.noise, self.random, self.goals = noise, np.random.default_rng(seed), list[Cell]()

    def __call__(self, obs: Array) -> Array:
        if len(self.goals) != len(obs):
            self.goals = [self._draw() for _ in obs]
        positions, velocities = obs[:, :2], obs[:, 2:]
        targets = np.array([self._target(i, position) for i, position in enumerate(positions)])
        actions = SPRING * (targets - positions) - BRAKE * velocities
        actions += self.noise * self.random.standard_normal(actions.shape)
        clipped: Array = actions.clip(-1.0, 1.0).astype(np.float32)
        return clipped

    def _target(self, i: int, position: Array) -> Array:
        """Return the middle of the next cell on the path of environment i."""
        if np.linalg.norm(_middle(self.goals[i]) - position) < ARRIVED:
            self.goals[i] = self._draw()
        near = self.cells[np.square(self.middles - position).sum(1).argmin()]
        return _middle(self.following[self.goals[i]][near])

    def _draw(self) -> Cell:
        return self.cells[self.random.integers(len(self.cells))]

    def _towards(self, goal: Cell) -> dict[Cell, Cell]:
        """Return for every cell the next one on a shortest path to the goal, by breadth-first search from there."""
        found, border = {goal: goal}, deque([goal])
        while border:
            i, j = border.popleft()
            for neighbour in ((i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)):
                if neighbour in self.cells and neighbour not in found:
                    found[neighbour] = (i, j)
                    border.append(neighbour)
        return found


def _middle(cells: Cell | list[Cell]) -> Array:
    """Return the middle of one cell or n, [2] or [n, 2], in D4RL's coordinates.

    Their zero is not a corner of the maze (see `envs.d4rl.PointMaze`).
    """
    return np.array(cells) - 0.2
