"""The environments in which agents trained on D4RL's datasets are evaluated. Importing this module registers them.

Layouts, starts, goals, rewards, terminations and horizons are D4RL's. The simulators are today's: Gymnasium's MuJoCo v4
and Gymnasium-Robotics. docs/d4rl.md lists and measures the remaining differences. All figures here are from
Farama-Foundation/D4RL, version 1.1.
"""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from envs.state import Env
from envs.vector import Array

# The rows of each maze; # is a wall. D4RL's ant mazes have the walls of its point mazes.
WALLS = {
    "open": "####### #.....# #.....# #.....# #######",
    "umaze": "##### #...# ###.# #...# #####",
    "medium": "######## #..##..# #..#...# ##...### #..#...# #.#..#.# #...#..# ########",
    "large": "############ #....#.....# #.##.#.#.#.# #......#...# #.####.###.# #..#.#.....# ##.#.#.#.### "
    "#..#...#...# ############",
    "eval-umaze": "##### #...# #.### #...# #####",
    "eval-medium": "######## #......# #.#.##.# #....#.# ###..### #......# #..##..# ########",
    "eval-large": "############ #..#...#...# ##.###.#.#.# #..#.#.....# #.##.#..##.# #......#...# #.##.#.#.### "
    "#....#.....# ############",
}
# The row and column of the goal.
POINT_GOAL = {"open": (2, 3), "umaze": (1, 1), "medium": (6, 6), "large": (7, 9)}
POINT_GOAL |= {"eval-umaze": (1, 3), "eval-medium": (1, 6), "eval-large": (1, 9)}
ANT_GOAL = {"umaze": (3, 1), "medium": (6, 6), "large": (7, 9)}
GOAL_RADIUS = 0.5  # Gymnasium-Robotics has 0.45


class Maze(gym.Wrapper[Array, Array, Any, Any]):
    """A maze of Gymnasium-Robotics in D4RL's coordinates. Observations: float64 [positions, velocities], no goal.

    The maze is built with its rows upside down, because Gymnasium-Robotics counts rows downwards and D4RL upwards. The
    coordinates then differ only by `shift`, the position of Gymnasium-Robotics' origin in D4RL's.
    """

    simulator: Any  # the gymnasium.envs.mujoco.MujocoEnv inside
    goal: Array

    def __init__(self, env: Env, simulator: Any, shift: Array) -> None:
        super().__init__(env)
        self.simulator, self.shift = simulator, shift
        model = simulator.model
        self.observation_space = Box(-np.inf, np.inf, (model.nq + model.nv,), np.float64)

    def draw(self, random: np.random.Generator) -> tuple[Array, Array, Array]:
        """Draw an episode's goal [x, y], initial positions and initial velocities, in D4RL's coordinates."""
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        self.env.reset(seed=seed)  # no options: the task sets start and goal
        maze: Any = self.unwrapped
        self.goal, positions, velocities = self.draw(maze.np_random)
        positions[:2] -= self.shift
        maze.goal = self.goal - self.shift  # for pictures only
        maze.update_target_site_pos()
        self.simulator.set_state(positions, velocities)
        return self._observe(), {}

    def _observe(self) -> Array:
        data = self.simulator.data
        obs: Array = np.concatenate([data.qpos, data.qvel])
        obs[:2] += self.shift
        return obs

    def _moved(self, action: Array) -> tuple[Array, bool, float]:
        """Take a step; return the observation, whether the goal is reached, and the distance to it."""
        self.env.step(action)
        obs = self._observe()
        distance = float(np.linalg.norm(obs[:2] - self.goal))
        return obs, distance <= GOAL_RADIUS, distance


class PointMaze(Maze):
    """maze2d. Observations are [x, y, their velocities]. The episode continues at the goal."""

    def __init__(self, maze: str, dense: bool, **kwargs: Any) -> None:
        from gymnasium_robotics.envs.maze.point_maze import PointMazeEnv

        # D4RL's x is the row, its y the column. The ball's joints are zero at 1.2 from the corner, and the walls'
        # centres are at whole numbers. So a cell's centre is 0.2 below its row and column, and the goal is off centre.
        rows = WALLS[maze].split()
        columns = ["".join(column) for column in zip(*rows, strict=True)]
        env = PointMazeEnv(maze_map=_upside_down(columns), **kwargs)
        super().__init__(env, env.point_env, np.array([len(rows), len(rows[0])]) / 2 - 0.7)
        self.rows, self._dense = rows, dense
        self._goal = np.array(POINT_GOAL[maze], np.float64)
        self._cells = np.argwhere(np.array([list(row) for row in rows]) == ".")

    def draw(self, random: np.random.Generator) -> tuple[Array, Array, Array]:
        cell = self._cells[random.integers(len(self._cells))]
        return self._goal, cell + random.uniform(-0.1, 0.1, 2), 0.1 * random.standard_normal(2)

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        obs, near, distance = self._moved(action)
        return obs, float(np.exp(-distance)) if self._dense else float(near), False, False, {"success": near}


class AntMaze(Maze):
    """antmaze. Observations are [x, y, the 27 numbers of Ant without contact forces]. The episode ends at the goal."""

    def __init__(self, maze: str, **kwargs: Any) -> None:
        from gymnasium_robotics.envs.maze.ant_maze_v5 import AntMazeEnv

        rows = WALLS[maze].split()
        env = AntMazeEnv(maze_map=_upside_down(rows), include_cfrc_ext_in_observation=False, **kwargs)
        # D4RL's origin is the centre of the cell in row 1, column 1. A cell is 4 wide.
        super().__init__(env, env.ant_env, 4 * (np.array([len(rows[0]), len(rows)]) / 2 - 1.5))
        self._goal = 4.0 * (np.array(ANT_GOAL[maze][::-1]) - 1)
        model = self.simulator.model  # of Gymnasium's ant.xml, changed to D4RL's:
        model.opt.timestep = 0.02  # twice as long
        model.actuator_gear[:, 0] = 30  # a fifth of the torque
        model.geom_solimp[:, :3] = 0.8, 0.8, 0.01  # softer contacts

    def draw(self, random: np.random.Generator) -> tuple[Array, Array, Array]:
        # In x and in y, the goal is up to 1.5 above its cell's centre, as the sum of two draws, as in D4RL.
        goal = self._goal + random.uniform(0, 1, 2) + random.uniform(0, 0.5, 2)
        model = self.simulator.model
        positions = model.qpos0 + random.uniform(-0.1, 0.1, model.nq)
        return goal, positions, 0.1 * random.standard_normal(model.nv)

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        obs, near, _ = self._moved(action)
        return obs, float(near), near, False, {"success": near}


def _upside_down(rows: list[str]) -> list[list[int]]:
    return [[int(cell == "#") for cell in row] for row in reversed(rows)]


class Adroit(gym.Wrapper[Array, Array, Any, Any]):
    """An Adroit hand with D4RL's reward and termination.

    Gymnasium-Robotics rewards distance to the object, a sign error (its pull request 220), and never terminates.
    """

    def __init__(self, task: str, **kwargs: Any) -> None:
        super().__init__(_hand(task, **kwargs))
        self._task = task

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        obs, reward, _, _, info = self.env.step(action)
        if self._task == "pen":
            dropped = bool(obs[26] < 0.075)  # the pen's height
            return obs, float(reward), dropped, False, info
        # The palm's position relative to the object. A hammer's observation holds both positions instead.
        reach = {"door": obs[35:38], "hammer": obs[33:36] - obs[36:39], "relocate": obs[30:33]}[self._task]
        # D4RL adds -0.1 of its length, Gymnasium-Robotics 0.1.
        return obs, float(reward) - 0.2 * float(np.linalg.norm(reach)), False, False, info


class AdroitBinary(gym.Wrapper[Array, Array, Any, Any]):
    """An Adroit hand with reward 0 at each step with its task solved, else -1. With `ends`, success ends the episode.

    Source: the authors' forks of mj_envs. RLPD's and EXPO's continues after success, and the score is the share of
    steps solved. In Cal-QL's and WSRL's, the wrapper ends the episode, and the score is whether it was solved at all.
    """

    def __init__(self, task: str, ends: bool, **kwargs: Any) -> None:
        super().__init__(_hand(task, **kwargs))
        self._ends = ends

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        obs, _, _, _, info = self.env.step(action)
        solved = bool(info["success"])
        return obs, float(solved) - 1.0, solved and self._ends, False, info


def solved(task: str, obs: Array) -> NDArray[np.bool_]:
    """Return whether the task (pen, door or relocate) is solved in obs [n, obs_dim], which end a step: bool [n]."""
    if task == "pen":  # close enough, and its direction within 18° of the target's
        is_solved = (np.linalg.norm(obs[:, 39:42], axis=1) < 0.075) & ((obs[:, 33:36] * obs[:, 36:39]).sum(1) > 0.95)
    elif task == "relocate":
        is_solved = np.linalg.norm(obs[:, 36:39], axis=1) < 0.1  # from the ball to its target, in metres
    else:
        is_solved = obs[:, 28] >= 1.35  # the hinge, in radians
    return np.asarray(is_solved)


def _hand(task: str, **kwargs: Any) -> Env:
    from gymnasium_robotics.envs.adroit_hand import adroit_door, adroit_hammer, adroit_pen, adroit_relocate

    hands = {
        "pen": adroit_pen.AdroitHandPenEnv,
        "door": adroit_door.AdroitHandDoorEnv,
        "hammer": adroit_hammer.AdroitHandHammerEnv,
        "relocate": adroit_relocate.AdroitHandRelocateEnv,
    }
    hand: Env = hands[task](**kwargs)
    return hand


class Kitchen(gym.Wrapper[Any, Array, Any, Any]):
    """Franka kitchen. Observations are float64 [robot's 9 joint positions, objects' 21, goal's 30].

    The goal is zero except for the tasks' entries. Observed positions have D4RL's noise: it is uniform, and for the
    robot ten times Gymnasium-Robotics'. The reward is the number of tasks completed so far. D4RL's files have the same
    reward, so it means the same after the switch. `info["return"]` is that number too. It is the return of D4RL's
    environment, which pays each task once.
    """

    OBJECT_NOISE = 0.1 * np.repeat([0.005, 0.0005, 0.005, 0.1, 0.005, 0.1, 0.005], [2, 6, 3, 3, 3, 3, 1])

    def __init__(self, tasks: tuple[str, ...], **kwargs: Any) -> None:
        from gymnasium_robotics.envs.franka_kitchen import kitchen_env

        noise = {"robot_noise_ratio": 0.1, "object_noise_ratio": 0.0}  # `_observe` adds the objects' noise
        super().__init__(kitchen_env.KitchenEnv(tasks_to_complete=list(tasks), **noise, **kwargs))
        self.observation_space = Box(-np.inf, np.inf, (60,), np.float64)
        self._goal_part = np.zeros(30)
        for task in tasks:
            self._goal_part[kitchen_env.OBS_ELEMENT_INDICES[task]] = kitchen_env.OBS_ELEMENT_GOALS[task]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed)
        return self._observe(obs), info

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        obs, _, termination, truncation, info = self.env.step(action)
        completed = float(len(self.get_wrapper_attr("episode_task_completions")))
        return self._observe(obs), completed, termination, truncation, info | {"return": completed}

    def _observe(self, obs: Any) -> Array:
        robot, objects = obs["observation"][:9], obs["observation"][18:39]
        random = self.get_wrapper_attr("robot_env").np_random  # the generator of the robot's noise
        objects = objects + self.OBJECT_NOISE * random.uniform(-1, 1, 21)
        return np.concatenate([robot, objects, self._goal_part])


class PaddedAnt(gym.ObservationWrapper[Array, Array, Array]):
    """Ant-v4 with the 84 contact forces of Ant-v2, all zero, as the MuJoCo version of D4RL's time left them."""

    def __init__(self, **kwargs: Any) -> None:
        from gymnasium.envs.mujoco import ant_v4

        ant: Any = ant_v4.AntEnv  # has no types
        super().__init__(ant(**kwargs))
        self.observation_space = Box(-np.inf, np.inf, (27 + 84,), np.float64)

    def observation(self, observation: Array) -> Array:
        return np.concatenate([observation, np.zeros(84)])


def _registered(name: str, adapter: type[Env], max_episode_steps: int, **kwargs: Any) -> str:
    """Register `name` and return it. No environment is imported or made."""
    gym.register(name, f"{__name__}:{adapter.__name__}", max_episode_steps=max_episode_steps, kwargs=kwargs)
    return name


def _all() -> dict[str, str]:
    found: dict[str, str] = {}
    ant = _registered("d4rl/ant-v2", PaddedAnt, 1000)
    robots = {"hopper": "Hopper-v4", "halfcheetah": "HalfCheetah-v4", "walker2d": "Walker2d-v4", "ant": ant}
    kinds = ("random", "medium", "expert", "medium-expert", "medium-replay", "full-replay")
    for robot, env_id in robots.items():
        found |= {f"{robot}-{kind}-{version}": env_id for kind in kinds for version in ("v0", "v1", "v2")}
        del found[f"{robot}-full-replay-v0"]
    found["ant-random-expert-v0"] = ant

    for maze in ANT_GOAL:
        env_id = _registered(f"d4rl/antmaze-{maze}-v2", AntMaze, 700 if maze == "umaze" else 1000, maze=maze)
        for kind in ("umaze", "umaze-diverse") if maze == "umaze" else (f"{maze}-play", f"{maze}-diverse"):
            found |= {f"antmaze-{kind}-{version}": env_id for version in ("v0", "v2")}

    for task, steps in (("pen", 100), ("door", 200), ("hammer", 200), ("relocate", 200)):
        env_id = _registered(f"d4rl/{task}-v1", Adroit, steps, task=task)
        found |= {f"{task}-{kind}-{v}": env_id for kind in ("human", "cloned", "expert") for v in ("v0", "v1")}

    complete = ("microwave", "kettle", "light switch", "slide cabinet")
    mixed = ("microwave", "kettle", "bottom burner", "light switch")
    found["kitchen-complete-v0"] = _registered("d4rl/kitchen-complete-v0", Kitchen, 280, tasks=complete)
    found["kitchen-partial-v0"] = found["kitchen-complete-v0"]
    found["kitchen-mixed-v0"] = _registered("d4rl/kitchen-mixed-v0", Kitchen, 280, tasks=mixed)

    for maze in POINT_GOAL:
        steps = {"open": 150, "umaze": 300, "medium": 600, "large": 800}[maze.removeprefix("eval-")]
        for dense in (False, True):
            name = f"maze2d-{maze}{'-dense' * dense}-{'v0' if maze == 'open' else 'v1'}"
            found[name] = _registered(f"d4rl/{name}", PointMaze, steps, maze=maze, dense=dense)
    return found


ENVIRONMENTS = _all()  # dataset to registered name; `offline.environments` has the ids
BINARY_STEPS = {"pen": 100, "door": 200, "relocate": 200}  # the forks' horizons
# The registered name, by task and whether success ends the episode.
BINARY = {
    (task, ends): _registered(
        f"adroit-binary/{task}{'-until-solved' * ends}-v0", AdroitBinary, steps, task=task, ends=ends
    )
    for task, steps in BINARY_STEPS.items()
    for ends in (False, True)
}
