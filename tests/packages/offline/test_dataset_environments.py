"""Every D4RL dataset has an environment that looks, starts, rewards and ends as D4RL's did."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from conftest import ROOT, SHARED
from gymnasium.envs.registration import load_env_creator

from common.errors import InputError
from envs import d4rl
from envs.d4rl import ANT_GOAL, POINT_GOAL, WALLS, AntMaze, Maze
from envs.make import make
from offline.environments import BINARY, ENVIRONMENTS, environment_of
from offline.recording import named_environment
from offline.scores import reference

NEWER_MUJOCO = tuple(map(int, mujoco.__version__.split(".")[:2])) > (3, 11)
# One dataset for each environment: the observation's and the action's size, and D4RL's horizon.
SHAPES = {
    "hopper-medium-v2": (11, 3, 1000),
    "halfcheetah-medium-v2": (17, 6, 1000),
    "walker2d-medium-v2": (17, 6, 1000),
    "ant-medium-v2": (111, 8, 1000),
    "antmaze-umaze-diverse-v2": (29, 8, 700),
    "antmaze-medium-play-v0": (29, 8, 1000),
    "antmaze-large-diverse-v2": (29, 8, 1000),
    "pen-human-v1": (45, 24, 100),
    "door-cloned-v1": (39, 28, 200),
    "hammer-expert-v0": (46, 26, 200),
    "relocate-human-v1": (39, 30, 200),
    "kitchen-partial-v0": (60, 9, 280),
    "kitchen-mixed-v0": (60, 9, 280),
    "maze2d-open-v0": (4, 2, 150),
    "maze2d-umaze-v1": (4, 2, 300),
    "maze2d-eval-medium-v1": (4, 2, 600),
    "maze2d-large-dense-v1": (4, 2, 800),
}


def maker(dataset_id: str) -> Any:
    env_id = environment_of(dataset_id)
    if "d4rl/" in env_id and "d4rl/ant-v2" not in env_id:
        pytest.importorskip("gymnasium_robotics")
    if dataset_id.startswith("kitchen") and NEWER_MUJOCO:
        pytest.skip("gymnasium-robotics 1.4.2 cannot start it with this MuJoCo")
    return make(env_id)


def inside(env: Any, kind: type = Maze) -> Any:
    while not isinstance(env, kind):
        env = env.env
    return env


def test_every_dataset_of_d4rl_has_one() -> None:
    assert len(ENVIRONMENTS) == 122
    reference = SHARED / "reference" / "d4rl.json"
    if not reference.exists():
        pytest.skip(f"{reference} is absent")
    families = json.loads(reference.read_text())["families"].values()
    steps = {name: dataset["max_episode_steps"] for family in families for name, dataset in family.items()}
    assert set(steps) == set(ENVIRONMENTS)
    for name, horizon in steps.items():
        assert gym.registry[environment_of(name).rpartition(":")[2]].max_episode_steps == horizon, name


def test_an_unknown_dataset_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"no dataset 'hopper-medium-v3'.*hopper-medium-v2"):
        environment_of("hopper-medium-v3")
    with pytest.raises(InputError, match=r"docs/d4rl\.md"):
        environment_of("")


def test_ids_of_runs_and_datasets_made_earlier_still_work() -> None:
    """They name `offline.environments`, and that is what is stored; the module of the environments does as well."""
    configs = [json.loads(path.read_text())["arguments"] for path in (ROOT / "results").rglob("config.json")]
    kept = {arguments["env"] for arguments in configs if ":" in arguments.get("env", "")}
    assert "offline.environments:d4rl/door-v1" in kept
    assert environment_of("maze2d-medium-v1") == "offline.environments:d4rl/maze2d-medium-v1"
    pytest.importorskip("gymnasium_robotics")
    for old in [*kept, "offline.environments:d4rl/maze2d-medium-v1", *BINARY.values()]:
        new = old.replace("offline.environments:", "envs.d4rl:")
        one, other = make(old), make(new)
        for name in ("id", "entry_point", "kwargs", "max_episode_steps"):
            assert getattr(one.spec, name) == getattr(other.spec, name)
        np.testing.assert_array_equal(one.reset(seed=3)[0], other.reset(seed=3)[0])
        assert reference(old) == reference(new)
        assert named_environment(old) == {"env": old}
        assert named_environment(new) == {"env": new}
    assert reference("envs.d4rl:d4rl/door-v1") == (-56.512833, 2880.5693087298737)


@pytest.mark.parametrize("name", ["Adroit", "AdroitBinary", "AntMaze", "Kitchen", "PaddedAnt", "PointMaze"])
def test_entry_points_in_minari_datasets_made_earlier_still_work(name: str) -> None:
    assert load_env_creator(f"offline.environments:{name}") is getattr(d4rl, name)


def test_importing_makes_and_imports_nothing() -> None:
    code = (
        "import sys, envs.d4rl, offline.environments\n"
        "print([name for name in ('mujoco', 'gymnasium_robotics', 'torch') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


@pytest.mark.parametrize("dataset_id", SHAPES)
def test_shapes_and_exact_state(dataset_id: str) -> None:
    env = maker(dataset_id)
    obs_dim, action_dim, horizon = SHAPES[dataset_id]
    assert env.spec.max_episode_steps == horizon
    assert env.action_space == gym.spaces.Box(-1, 1, (action_dim,), np.float32)
    random = np.random.default_rng(0)

    def play(env: Any, actions: np.ndarray) -> list[Any]:
        return [(obs.tobytes(), *rest) for obs, *rest in map(env.step, actions)]

    actions = random.uniform(-0.3, 0.3, (12, action_dim)).astype(np.float32)
    env.reset(seed=1)
    obs, _ = env.reset()
    assert obs.shape == env.observation_space.shape == (obs_dim,)
    assert obs.dtype == np.float32
    play(env, actions[:6])
    state = env.get_state()
    other = maker(dataset_id)
    assert other.set_state(state)
    assert play(env, actions[6:]) == play(other, actions[6:])
    np.testing.assert_array_equal(env.reset()[0], other.reset()[0])  # the generators stand alike too


def test_ant_is_ant_v4_with_zeros() -> None:
    env, plain = maker("ant-expert-v2"), make("Ant-v4")
    for obs, other in [(env.reset(seed=0)[0], plain.reset(seed=0)[0])] + [
        (env.step(action)[0], plain.step(action)[0]) for action in np.full((5, 8), 0.2, np.float32)
    ]:
        np.testing.assert_array_equal(obs, np.concatenate([other, np.zeros(84)]))


@pytest.mark.parametrize(("maze", "theirs"), [("umaze", "U_MAZE"), ("medium", "MEDIUM_MAZE"), ("large", "LARGE_MAZE")])
def test_walls_are_those_gymnasium_robotics_took_from_d4rl(maze: str, theirs: str) -> None:
    maps = pytest.importorskip("gymnasium_robotics.envs.maze.maps")
    ours = [[int(cell == "#") for cell in row] for row in WALLS[maze].split()]
    assert ours == [[int(cell == 1) for cell in row] for row in getattr(maps, theirs)]


def d4rl_point_maze(maze: str) -> mujoco.MjModel:
    """D4RL's own model, written down from its figures."""
    walls = "".join(
        f'<geom type="box" pos="{i + 1} {j + 1} 0" size=".5 .5 .2"/>'
        for i, row in enumerate(WALLS[maze].split())
        for j, cell in enumerate(row)
        if cell == "#"
    )
    return mujoco.MjModel.from_xml_string(f"""<mujoco><compiler inertiafromgeom="true"/>
        <option timestep=".01" gravity="0 0 0" iterations="20"/>
        <default><joint damping="1"/>
            <geom friction=".5 .1 .1" density="1000" margin=".002" condim="1" contype="2" conaffinity="1"/></default>
        <worldbody>
            <geom type="plane" size="40 40 .25" pos="0 0 -.1" contype="1" conaffinity="0"/>
            <body pos="1.2 1.2 0"><geom type="sphere" size=".1" contype="1"/>
                <joint name="x" type="slide" axis="1 0 0"/><joint name="y" type="slide" axis="0 1 0"/></body>
            {walls}</worldbody>
        <actuator><motor joint="x" gear="100" ctrlrange="-1 1" ctrllimited="true"/>
            <motor joint="y" gear="100" ctrlrange="-1 1" ctrllimited="true"/></actuator></mujoco>""")


@pytest.mark.parametrize("maze", POINT_GOAL)
def test_point_maze_moves_and_rewards_as_d4rls_own_model(maze: str) -> None:
    version = "v0" if maze == "open" else "v1"
    sparse, dense = maker(f"maze2d-{maze}-{version}"), maker(f"maze2d-{maze}-dense-{version}")
    model = d4rl_point_maze(maze)
    data = mujoco.MjData(model)
    random = np.random.default_rng(0)
    touched, returns = 0, 0.0
    for episode in range(8):
        obs, _ = sparse.reset(seed=episode)
        np.testing.assert_array_equal(dense.reset(seed=episode)[0], obs)
        row, column = np.round(obs[:2]).astype(int)
        assert WALLS[maze].split()[row][column] == "."
        assert np.abs(obs[:2] - [row, column]).max() <= 0.1
        if episode == 0:  # at the goal
            for env in (inside(sparse), inside(dense)):
                env.simulator.set_state(np.array(POINT_GOAL[maze]) - env.shift, np.zeros(2))
        state = inside(sparse)._observe()
        mujoco.mj_resetData(model, data)
        data.qpos[:], data.qvel[:] = state[:2], state[2:]
        for step in range(100):
            if step % 20 == 0:
                action = random.uniform(-1, 1, 2).astype(np.float32)
            data.qvel[:] = np.clip(data.qvel, -5, 5)
            data.ctrl[:] = action
            mujoco.mj_step(model, data)
            obs, reward, termination, truncation, info = sparse.step(action)
            expected = np.concatenate([data.qpos, data.qvel])
            np.testing.assert_allclose(obs, expected, atol=1e-5)
            distance = np.linalg.norm(data.qpos - POINT_GOAL[maze])
            assert (reward, info) == (float(distance <= 0.5), {"success": distance <= 0.5})
            assert dense.step(action)[1] == pytest.approx(np.exp(-distance))
            assert not termination
            assert not truncation
            touched += data.ncon > 1  # the ball always touches the ground
            returns += reward
    assert touched > 50
    assert 0 < returns < 800


def d4rl_ant_maze(maze: str) -> mujoco.MjModel:
    """Gymnasium's ant, changed in its text to D4RL's figures, among D4RL's walls."""
    source = Path(gym.__file__).parent / "envs" / "mujoco" / "assets" / "ant.xml"
    tree = ET.parse(source).getroot()
    tree.find("option").set("timestep", "0.02")
    tree.find("default/geom").set("solimp", ".8 .8 .01")
    for motor in tree.findall("actuator/motor"):
        motor.set("gear", "1")
        motor.set("ctrlrange", "-30 30")
    world = tree.find("worldbody")
    assert world is not None
    for i, row in enumerate(WALLS[maze].split()):
        for j, cell in enumerate(row):
            if cell == "#":
                pos = f"{4 * (j - 1)} {4 * (i - 1)} 1"
                ET.SubElement(world, "geom", type="box", pos=pos, size="2 2 1", contype="1", conaffinity="1")
    return mujoco.MjModel.from_xml_string(ET.tostring(tree, "unicode"))


@pytest.mark.parametrize("maze", ANT_GOAL)
def test_ant_maze_moves_as_d4rls_own_model(maze: str) -> None:
    env = maker("antmaze-umaze-v2" if maze == "umaze" else f"antmaze-{maze}-play-v2")
    model = d4rl_ant_maze(maze)
    data = mujoco.MjData(model)
    random = np.random.default_rng(0)
    touched = 0
    for episode in range(4):
        env.reset(seed=episode)
        ours = inside(env)
        if episode % 2:  # at a wall
            state = ours.simulator.data
            ours.simulator.set_state(state.qpos - np.eye(15)[1] * 1.2, state.qvel.copy())
        state = ours._observe()
        mujoco.mj_resetData(model, data)
        data.qpos[:], data.qvel[:] = state[:15], state[15:]
        for _ in range(60):
            action = random.uniform(-1, 1, 8).astype(np.float32)
            obs, *_ = env.step(action)
            data.ctrl[:] = 30 * action.astype(np.float64)
            mujoco.mj_step(model, data, 5)
            np.testing.assert_allclose(obs, np.concatenate([data.qpos, data.qvel]), atol=1e-5)
            touched += any(
                model.geom_type[geom] == mujoco.mjtGeom.mjGEOM_BOX for pair in data.contact for geom in pair.geom
            )
    assert touched > 0


def test_ant_maze_starts_and_ends_as_d4rl() -> None:
    env = maker("antmaze-medium-play-v2")
    goals = []
    for episode in range(200):
        obs, _ = env.reset(seed=0) if episode == 0 else env.reset()
        assert np.abs(obs[:2]).max() <= 0.1
        assert np.abs(obs[2] - 0.75) <= 0.1
        goals.append(inside(env, AntMaze).goal)
    # The sum of two uniform draws, up to 1 and up to 1/2, above the cell's middle: mean 0.75, variance (1 + 1/4) / 12.
    above = np.array(goals) - 20
    assert above.min() >= 0
    assert above.max() <= 1.5
    np.testing.assert_allclose(above.mean(0), 0.75, atol=0.1)
    np.testing.assert_allclose(above.var(0), 1.25 / 12, rtol=0.35)
    ours = inside(env, AntMaze)
    for offset, reached in ((0.55, False), (0.45, True)):
        state = ours.simulator.data
        place = state.qpos.copy()
        place[:2] = ours.goal - ours.shift + [offset, 0]
        ours.simulator.set_state(place, np.zeros(14))
        _, reward, termination, _, info = env.step(np.zeros(8, np.float32))
        assert (reward, termination, info) == (float(reached), reached, {"success": reached})


def adroit_reward(task: str, hand: Any) -> float:
    """D4RL's dense reward, from the simulator."""
    model, data = hand.model, hand.data
    site = {model.site(i).name: data.site_xpos[i] for i in range(model.nsite)}
    if task == "door":
        hinge = data.qpos[model.joint("door_hinge").qposadr[0]]
        reward = -0.1 * np.linalg.norm(site["S_grasp"] - site["S_handle"]) - 0.1 * (hinge - 1.57) ** 2
        return reward - 1e-5 * np.sum(data.qvel**2) + 2 * (hinge > 0.2) + 8 * (hinge > 1) + 10 * (hinge > 1.35)
    thing = data.body("Object").xpos
    if task == "hammer":
        nail = np.linalg.norm(site["S_target"] - site["nail_goal"])
        reward = -0.1 * np.linalg.norm(site["S_grasp"] - thing) - np.linalg.norm(site["tool"] - site["S_target"])
        reward += -10 * nail - 0.01 * np.linalg.norm(data.qvel) + 2 * (thing[2] > 0.04 and site["tool"][2] > 0.04)
        return reward + 25 * (nail < 0.02) + 75 * (nail < 0.01)
    if task == "relocate":
        far = np.linalg.norm(thing - site["target"])
        reward = -0.1 * np.linalg.norm(site["S_grasp"] - thing) + 10 * (far < 0.1) + 20 * (far < 0.05)
        lifted = 1 - 0.5 * np.linalg.norm(site["S_grasp"] - site["target"]) - 0.5 * far
        return reward + (lifted if thing[2] > 0.04 else 0)
    far = np.linalg.norm(thing - site["eps_ball"])
    pen, target = (site[f"{name}_top"] - site[f"{name}_bottom"] for name in ("object", "target"))
    alike = pen @ target / np.linalg.norm(pen) / np.linalg.norm(target)
    bonus = 10 * (far < 0.075 and alike > 0.9) + 50 * (far < 0.075 and alike > 0.95)
    return -far + alike + bonus - 5 * (thing[2] < 0.075)


@pytest.mark.parametrize("task", ["pen", "door", "hammer", "relocate"])
def test_adroit_rewards_and_ends_as_d4rl(task: str) -> None:
    env = maker(f"{task}-human-v1")
    random = np.random.default_rng(0)
    dropped = 0
    for episode in range(5):
        env.reset(seed=episode)
        for _ in range(60):
            _, reward, termination, _, _ = env.step(random.uniform(-1, 1, env.action_space.shape).astype(np.float32))
            assert reward == pytest.approx(adroit_reward(task, env.unwrapped), rel=1e-6)
            assert termination == (task == "pen" and env.unwrapped.data.body("Object").xpos[2] < 0.075)
            if termination:
                dropped += 1
                break
    assert dropped > 0 or task != "pen"


PLACES = {
    "bottom burner": slice(11, 13),
    "light switch": slice(17, 19),
    "slide cabinet": slice(19, 20),
    "microwave": slice(22, 23),
    "kettle": slice(23, 30),
}


def test_kitchen_shows_pays_and_ends_as_d4rl() -> None:
    """Its return is D4RL's, one for each task; its rewards are those of D4RL's files, how many are done."""
    goals = {
        "kitchen-complete-v0": {17: -0.69, 18: -0.05, 19: 0.37, 22: -0.75},
        "kitchen-mixed-v0": {11: -0.88, 12: -0.01, 17: -0.69, 18: -0.05, 22: -0.75},
    }
    kettle = [-0.23, 0.75, 1.62, 0.99, 0, 0, -0.06]
    for dataset_id, elements in goals.items():
        env = maker(dataset_id)
        kitchen = env.unwrapped
        noise = np.zeros(30)
        for episode in range(60):
            obs, _ = env.reset(seed=episode)
            noise = np.maximum(noise, np.abs(obs[:30] - kitchen.data.qpos))
        expected = np.zeros(30)
        expected[list(elements)], expected[23:] = list(elements.values()), kettle
        np.testing.assert_allclose(obs[30:], expected)
        # D4RL's largest: 0.1 of what its configuration gives for each joint.
        largest = np.repeat([1e-2, 5e-4, 5e-5, 5e-4, 1e-2, 5e-4, 1e-2, 5e-4], [9, 2, 6, 3, 3, 3, 3, 1])
        assert (noise <= largest + 1e-6).all()
        assert (noise > 0.8 * largest).all()

        rewards = []
        for task in list(kitchen.goal):
            state = kitchen.data.qpos.copy()
            state[PLACES[task]] = kitchen.goal[task]
            kitchen.robot_env.set_state(state, kitchen.data.qvel * 0)
            _, reward, termination, _, info = env.step(np.zeros(9, np.float32))
            rewards.append(reward)
            assert info["return"] == len(rewards)
            assert termination == info["success"] == (len(rewards) == 4)
        assert rewards == [1.0, 2.0, 3.0, 4.0]
        env.reset(seed=0)
        _, reward, *_ = env.step(np.zeros(9, np.float32))
        assert reward == 0.0
