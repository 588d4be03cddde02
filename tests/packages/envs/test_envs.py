"""Every environment looks the same to an agent, and what cannot work is refused in two lines."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from conftest import ROOT
from gymnasium.spaces import Box, Dict, Discrete, Graph

from common.errors import InputError, RunError
from common.evaluate import evaluate
from common.seeding import seeds
from envs.make import make, make_vector

NEWER_MUJOCO = tuple(map(int, mujoco.__version__.split(".")[:2])) > (3, 11)


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PATH": "", "PYTHONPATH": str(ROOT), **env},
        text=True,
        capture_output=True,
        timeout=60,
        check=True,
    )


class Odd(gym.Env[Any, Any]):
    """What it gives is not what its spaces say."""

    observation_space, action_space = Box(-1, 1, (3,), np.float32), Box(-1, 1, (1,), np.float32)

    def __init__(self, obs: tuple[int, ...] = (3,), reward: Any = 0.0) -> None:
        self.obs, self.reward = np.zeros(obs), reward

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.obs, {}

    def step(self, action: Any) -> Any:
        return self.obs, self.reward, False, False, {}


gym.register("Odd-v0", entry_point=Odd)


def test_an_environment_that_breaks_its_own_word_is_refused() -> None:
    for shape in ((4,), (1, 3), (1,), ()):
        with pytest.raises(InputError, match=r"Odd-v0 gave an observation of shape .*but its observation_space is"):
            make("Odd-v0", obs=shape).reset()
    for reward in (None, np.zeros(1), "high"):
        env = make("Odd-v0", reward=reward)
        env.reset()
        with pytest.raises(InputError, match="Odd-v0 gave a reward that is not a number"):
            env.step(np.zeros(1))


class Misbehaving(gym.Env[Any, Any]):
    """Its 30th step raises an error, or returns what is given."""

    observation_space, action_space = Box(-1, 1, (3,), np.float32), Box(-1, 1, (1,), np.float32)

    def __init__(self, returned: Any) -> None:
        self.returned, self.steps = returned, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps < 30:
            return np.zeros(3, np.float32), 0.0, False, False, {}
        if isinstance(self.returned, BaseException):
            raise self.returned
        return self.returned


def of(info: Any) -> tuple[Any, ...]:
    return np.zeros(3, np.float32), 0.0, False, False, info


gym.register("Misbehaving-v0", entry_point=Misbehaving, max_episode_steps=1000)


@pytest.mark.parametrize("repeat", [1, 2])
@pytest.mark.parametrize("vectorizer", ["sync", "async"])
@pytest.mark.parametrize(
    ("returned", "kind", "said"),
    [
        (ZeroDivisionError("no wind"), RunError, "failed in a step: ZeroDivisionError no wind\n.*resume"),
        (OSError("robot\nis gone"), RunError, "failed in a step: OSError robot is gone\n"),
        (of({})[:4], RunError, "failed in a step: ValueError not enough values to unpack"),
        (of({})[0], RunError, "failed in a step: "),
        (None, RunError, "failed in a step: TypeError"),
        (of({"success": math.nan}), InputError, "gave a success of nan, which is neither true nor false"),
        (of({"success": np.ones(2)}), InputError, r"gave a success of array\(\[1\., 1\.\]\), which is neither"),
        (of({"is_success": "yes"}), InputError, "gave a is_success of 'yes', which is neither"),
        (of({"return": "much"}), InputError, "gave a return that is not a number, 'much'"),
        (of({"return": 10**400}), InputError, "gave a return that is not a number, 1000"),
        (of({"return": np.zeros((2, 2))}), InputError, "gave a return that is not a number, "),
        (of({"success": None}), InputError, "gave a success of None, which is neither"),
        (SystemExit(3), RunError, "failed in a step: SystemExit 3\n"),
        (
            (*of({})[:2], np.zeros(2, bool), False, {}),
            InputError,
            r"gave a termination of array\(\[False, False\]\), which",
        ),
        ((of({})[0], "1.0", *of({})[2:]), InputError, r"gave a reward that is not a number, '1\.0'"),
        ((*of({})[:3], None, {}), InputError, "gave a truncation of None, which is neither true nor false"),
        (("text", *of({})[1:]), InputError, "gave an observation that is no vector of numbers, 'text'"),
    ],
)
def test_a_step_that_misbehaves_is_told_in_two_lines(
    returned: Any, kind: type[Exception], said: str, vectorizer: Any, repeat: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the environment's name and its own message, without a traceback of a process."""
    envs = make_vector("Misbehaving-v0", 2, 0, vectorizer=vectorizer, returned=returned, action_repeat=repeat)
    envs.reset()
    actions = np.zeros((2, 1), np.float32)
    for _ in range(30 // repeat - 1):
        envs.step(actions)
    with pytest.raises(kind, match=f"^Misbehaving-v0 {said}") as caught:
        envs.step(actions)
    assert len(str(caught.value).splitlines()) <= 2
    envs.close()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("vectorizer", ["sync", "async"])
def test_a_lack_of_memory_in_a_step(vectorizer: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """It is no fault of the environment, and without a traceback too."""
    envs = make_vector("Misbehaving-v0", 2, 0, vectorizer=vectorizer, returned=MemoryError())
    envs.reset()
    for _ in range(29):
        envs.step(np.zeros((2, 1), np.float32))
    with pytest.raises(MemoryError):
        envs.step(np.zeros((2, 1), np.float32))
    envs.close()
    assert capfd.readouterr().err == ""


def test_a_reset_without_info_is_refused() -> None:
    """As environments of Gym before 0.26 have it."""
    env = make("Odd-v0")
    env.unwrapped.reset = lambda **_: np.zeros(3, np.float32)  # type: ignore[attr-defined, method-assign]
    with pytest.raises(InputError, match=r"Odd-v0 is created but cannot start.*unpack.*\n.*its reset returns obs and"):
        env.reset()


def test_an_info_that_is_no_dict_is_refused() -> None:
    env = make("Odd-v0")
    env.reset()
    env.unwrapped.step = lambda action: of(None)  # type: ignore[attr-defined, method-assign]
    with pytest.raises(InputError, match="Odd-v0 gave the info None, which is not a dict"):
        env.step(np.zeros(1, np.float32))
    env = make("Odd-v0", all_infos=True)
    env.unwrapped.reset = lambda **_: (np.zeros(3, np.float32), None)  # type: ignore[attr-defined, method-assign]
    with pytest.raises(InputError, match="Odd-v0 gave the info None, which is not a dict"):
        env.reset()


def test_a_start_that_is_not_finite_is_refused() -> None:
    """Otherwise the policy's action would be, and the learning rate would be named as the cause."""
    env = make("Odd-v0")
    env.unwrapped.reset = lambda **_: (np.full(3, np.inf), {})  # type: ignore[attr-defined, method-assign]
    with pytest.raises(RunError, match="Odd-v0 starts an episode with a non-finite observation: correct its reset"):
        env.reset()


@pytest.mark.parametrize("value", [True, 1, 1.0, np.bool_(True), np.ones(1), np.float32(1)])
def test_success_may_be_any_kind_of_number(value: Any) -> None:
    env = make("Misbehaving-v0", returned=of({"success": value}))
    env.reset()
    assert [env.step(np.zeros(1, np.float32))[4].get("success") for _ in range(30)] == [None] * 29 + [True]


def without(part: str) -> Odd:
    env = Odd()
    setattr(env, part, Box(-1, 1, (0,), np.float32))
    return env


gym.register("Empty-v0", entry_point=without)


@pytest.mark.parametrize("part", ["action_space", "observation_space"])
def test_a_box_without_dimensions_is_refused(part: str) -> None:
    with pytest.raises(InputError, match=f"The {part.removesuffix('_space')}s of Empty-v0 are Box"):
        make("Empty-v0", part=part)


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "Humanoid-v5", "Pusher-v5", "HalfCheetah-v4"])
def test_actions_are_rescaled_to_the_box(env_id: str) -> None:
    env, raw = make(env_id), gym.make(env_id)
    assert env.action_space == Box(-1, 1, raw.action_space.shape, np.float32)
    for unit in (-1.0, -0.5, 0.0, 0.75, 1.0):
        obs, _ = env.reset(seed=3)
        raw_obs, _ = raw.reset(seed=3)
        np.testing.assert_array_equal(obs, raw_obs.astype(np.float32))
        action = np.full(raw.action_space.shape, unit, np.float32)
        own = raw.action_space.low + (action + 1) / 2 * (raw.action_space.high - raw.action_space.low)
        next_obs, reward, *_ = env.step(action)
        raw_next_obs, raw_reward, *_ = raw.step(own.astype(np.float32))
        assert next_obs.dtype == np.float32
        assert next_obs.shape == env.observation_space.shape
        np.testing.assert_allclose(next_obs, raw_next_obs, rtol=1e-4, atol=1e-4)
        assert reward == pytest.approx(raw_reward, rel=1e-4)


def test_pendulum_is_driven_with_two_newton_metres() -> None:
    env = make("Pendulum-v1")
    for unit in (-1, 0.5, 1):
        env.reset(seed=0)
        env.step(np.array([unit], np.float32))
        assert env.unwrapped.last_u == 2 * unit  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("env_id", "obs_dim"),
    [
        ("AntMaze_UMaze-v5", 2 + 2 + 105),
        ("PointMaze_UMaze-v3", 2 + 2 + 4),
        ("AdroitHandPen-v1", 45),
        ("AdroitHandDoor-v1", 39),
        ("FrankaKitchen-v1", 17 + 17 + 59),
        ("FetchReach-v4", 3 + 3 + 10),
    ],
)
def test_robotics_are_flat_and_tell_success(env_id: str, obs_dim: int) -> None:
    pytest.importorskip("gymnasium_robotics")
    if NEWER_MUJOCO and env_id in ("FrankaKitchen-v1", "FetchReach-v4"):
        with pytest.raises(InputError, match=r"cannot be made with .*mujoco"):
            make(env_id)
        return
    env = make(env_id)
    obs, _ = env.reset(seed=0)
    assert obs.shape == env.observation_space.shape == (obs_dim,)
    assert obs.dtype == np.float32
    raw_obs, _ = gym.make(env_id).reset(seed=0)
    if env_id not in ("AdroitHandPen-v1", "AdroitHandDoor-v1", "FrankaKitchen-v1"):
        raw_obs = np.concatenate([raw_obs[key] for key in ("achieved_goal", "desired_goal", "observation")])
    elif isinstance(raw_obs, dict):
        obs, raw_obs = obs[-59:], raw_obs["observation"]
    np.testing.assert_array_equal(obs, raw_obs.astype(np.float32))
    for _ in range(3):
        *_, info = env.step(np.ones(env.action_space.shape, np.float32))
        assert info == {"success": False}
        assert type(info["success"]) is bool


def test_success_comes_true() -> None:
    pytest.importorskip("gymnasium_robotics")
    env = make("PointMaze_UMaze-v3")
    env.reset(seed=0)
    env.unwrapped.goal = env.unwrapped.data.qpos[:2].copy()  # type: ignore[attr-defined]
    *_, info = env.step(np.zeros(2, np.float32))
    assert info == {"success": True}


def test_kitchen_succeeds_when_all_its_tasks_are_complete() -> None:
    pytest.importorskip("gymnasium_robotics")
    if NEWER_MUJOCO:
        pytest.skip("gymnasium-robotics 1.4.2 cannot start it with this MuJoCo")
    env = make("FrankaKitchen-v1", tasks_to_complete=["kettle", "microwave"])
    env.reset(seed=0)
    kitchen: Any = env.unwrapped
    action = np.zeros(9, np.float32)
    kitchen.goal["kettle"] = kitchen.data.qpos[-7:].copy()
    *_, info = env.step(action)
    assert info == {"success": False}
    kitchen.goal["microwave"] = kitchen.data.qpos[22:23].copy()
    *_, info = env.step(action)
    assert info == {"success": True}


def chain(env: Any) -> list[str]:
    """The classes of the wrappers, from outside, and of the environment."""
    names = [type(env).__name__]
    while isinstance(env, gym.Wrapper):
        env = env.env
        names.append(type(env).__name__)
    return names


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [
        ("Pendulum-v1", {"g": 9.0}),  # rescaled
        ("HalfCheetah-v4", {"max_episode_steps": 7}),
        ("PointMaze_UMaze-v3", {}),  # flattened
        ("offline.environments:d4rl/ant-v2", {}),  # itself a wrapper
        ("offline.environments:d4rl/pen-v1", {}),
        ("puzzle-3x3-sparse-singletask-v0", {}),
    ],
)
def test_its_spec_makes_the_same_environment(env_id: str, kwargs: dict[str, Any]) -> None:
    """`gym.make(env.spec)` has the same wrappers and arguments, and gives the same steps bit for bit."""
    if "Maze" in env_id or "pen" in env_id:
        pytest.importorskip("gymnasium_robotics")
    if "singletask" in env_id:
        pytest.importorskip("ogbench", reason="needs pip install -e '.[ogbench]'")
    env = make(env_id, **kwargs)
    again = gym.make(env.spec)
    assert chain(again) == chain(env)
    assert again.spec == env.spec
    assert (again.action_space, again.observation_space) == (env.action_space, env.observation_space)
    assert again.reset(seed=1)[0].tobytes() == env.reset(seed=1)[0].tobytes()
    for _ in range(7):
        action = env.action_space.sample()
        (obs, *one), (other, *two) = env.step(action), again.step(action)
        assert obs.tobytes() == other.tobytes()
        assert one == two
    assert again.set_state(env.get_state())


class Unready(Odd):
    """It starts, but its first episode does not: as one whose files are missing, or that MuJoCo refuses."""

    def __init__(self, error: str, resets: int = 0) -> None:
        """`resets`: how many succeed."""
        super().__init__()
        self.resets = resets
        self.error = {
            "file": FileNotFoundError(2, "No such file", "cube.xml"),
            "mujoco": mujoco.FatalError("bad\nqpos"),
        }[error]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.resets -= 1
        if self.resets < 0:
            raise self.error
        return super().reset(seed=seed)


gym.register("Unready-v0", entry_point=Unready)


@pytest.mark.parametrize("vectorizer", ["sync", "async"])
@pytest.mark.parametrize(
    ("error", "named"), [("file", "FileNotFoundError.*cube.xml"), ("mujoco", "FatalError bad qpos")]
)
def test_one_that_fails_at_reset_is_refused(
    error: str, named: str, vectorizer: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """In training and in evaluation, in two lines, without the traceback of a process."""
    said = f"Unready-v0 is created but cannot start an episode: {named}"
    with pytest.raises(InputError, match=said) as caught:
        make_vector("Unready-v0", 2, 0, vectorizer=vectorizer, error=error)
    assert len(str(caught.value).splitlines()) <= 2
    with pytest.raises(InputError, match=said):
        evaluate(lambda obs: obs, [make("Unready-v0", error=error)], [1])
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("vectorizer", ["sync", "async"])
def test_a_reset_that_fails_later_is_a_failed_run(vectorizer: Any) -> None:
    """The user gave nothing wrong: the run ends, with status 1, and not as refused input."""
    envs = make_vector("Unready-v0", 2, 0, vectorizer=vectorizer, error="file", resets=2)
    envs.reset()
    with pytest.raises(RunError, match=r"Unready-v0 cannot start another episode: FileNotFoundError.*\n.*resume"):
        envs.reset(options={"reset_mask": np.array([True, False])})


@pytest.mark.parametrize("obs", [{"a": 1}, ["x"], None])
def test_a_reset_that_gives_no_numbers_is_refused(obs: Any) -> None:
    """In words, which name the environment with its module."""
    env = make(f"{__name__}:Odd-v0")
    env.unwrapped.obs = obs  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=f"{__name__}:Odd-v0 gave an observation") as caught:
        env.reset()
    assert len(str(caught.value).splitlines()) == 1


def test_arguments_that_do_not_fit_are_named() -> None:
    """Not the environment itself, as if its name were wrong."""
    with pytest.raises(
        InputError, match=r"unexpected keyword[^\n]*\nCheck the arguments of its constructor: mass=1$"
    ) as caught:
        make("Pendulum-v1", mass=1)
    assert "Did you mean" not in str(caught.value)


class WithSpaces(gym.Env):
    def __init__(self, actions: gym.Space = Box(-1, 1, (2,)), obs: gym.Space = Box(-1, 1, (2,))) -> None:  # noqa: B008
        self.action_space, self.observation_space = actions, obs


def refuse() -> None:
    raise AssertionError("no\nluck")


def leave() -> None:
    raise SystemExit(3)


LARGEST = np.finfo(np.float32).max
REFUSED = {
    "CartPole-v1": "continuous",
    "HalfCheeta-v4": r"Did you mean HalfCheetah-v4, HalfCheetah-v5(?!, HalfCheetah)",
    "HalfCheetah": r"Did you mean HalfCheetah-v5, HalfCheetah-v4(?!, HalfCheetah)",
    "HalfCheetah-v1": r"Did you mean HalfCheetah-v5, HalfCheetah-v4(?!, HalfCheetah)",
    "Cartpole-v1": "There is no environment Cartpole-v1. Give an environment of your own",
    "Zzzzzz-v0": "module:Name-v0",
    "": "module:Name-v0",
    "no_such_module:Thing-v0": "no_such_module:Thing-v0 cannot be imported",
    f"{__name__}:Nope-v0": r"has no environment Nope-v0\.\nIt registers \w+-v0, \w+-v0, \w+-v0\.$",
    "json:Thing-v0": r"json/__init__\.py has no environment Thing-v0",
    "Unbounded-v0": "unbounded",
    "HalfBounded-v0": "unbounded",
    "Largest-v0": "unbounded",
    "NoChoice-v0": "must be below high",
    "Whole-v0": "continuous",
    "Matrix-v0": "continuous",
    "Pixels-v0": "observations of Pixels-v0",
    "Graph-v0": "observations of Graph-v0",
    "Discrete-v0": "observations of Discrete-v0",
    "Fails-v0": "AssertionError no luck",
    "Leaves-v0": "Leaves-v0 cannot be made .*SystemExit 3",
    f"{__name__}:Fails-v0": r"AssertionError no luck\nIts own code failed: correct its constructor\.$",
    "HalfCheetah-v3": r"v3 cannot be made[^\n]*\nDid you mean HalfCheetah-v5, HalfCheetah-v4(?!, HalfCheetah)",
}


class Strict(WithSpaces):
    """Takes no action outside of its box, the bounds of which float32 does not meet again when it rescales."""

    def __init__(self) -> None:
        bounds = np.random.default_rng(0).uniform(-3, 3, (2, 200)).astype(np.float32)
        super().__init__(Box(bounds.min(0), bounds.max(0)))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        box: Any = self.action_space
        assert (action >= box.low).all()
        assert (action <= box.high).all()
        return np.zeros(2, np.float32), float(np.abs(action - box.low).max()), False, False, {}


def test_no_action_leaves_the_box_by_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    monkeypatch.setattr(gym, "registry", gym.envs.registration.registry)
    gym.register("Strict-v0", Strict)
    env = make("Strict-v0")
    env.reset(seed=1)
    assert env.step(np.full(200, -1.0, np.float32))[1] == pytest.approx(0.0, abs=1e-6)
    env.step(np.ones(200, np.float32))


@pytest.mark.parametrize("env_id", REFUSED)
def test_refusals_take_two_lines_and_name_the_cure(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    monkeypatch.setattr(gym, "registry", gym.envs.registration.registry)
    graph = Dict(a=Graph(Box(-1, 1), None))
    odd = {
        "Unbounded": {"actions": Box(-np.inf, np.inf, (2,))},
        "HalfBounded": {"actions": Box(np.array([-1, 0], np.float32), np.array([1, np.inf], np.float32))},
        "Largest": {"actions": Box(-LARGEST, LARGEST, (2,))},
        "NoChoice": {"actions": Box(np.array([-1, 0], np.float32), np.array([1, 0], np.float32))},
        "Whole": {"actions": Box(0, 3, (2,), np.int64)},
        "Matrix": {"actions": Box(-1, 1, (2, 2))},
        "Pixels": {"obs": Box(0, 255, (8, 8, 3), np.uint8)},
        "Graph": {"obs": graph},
        "Discrete": {"obs": Discrete(3)},
    }
    for name, kwargs in odd.items():
        gym.register(f"{name}-v0", WithSpaces, kwargs=kwargs)
    gym.register("Fails-v0", refuse)
    gym.register("Leaves-v0", leave)
    with pytest.raises(InputError, match=REFUSED[env_id]) as caught:
        make(env_id)
    assert len(str(caught.value).splitlines()) <= 2


def test_own_module(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import gymnasium as gym\nfrom gymnasium.envs.classic_control import PendulumEnv\n"
        "gym.register('Mine-v0', PendulumEnv, max_episode_steps=5)\n"
    )
    (tmp_path / "broken.py").write_text("import no_such_thing\n")
    code = (
        "from envs.make import make_vector; from common.errors import InputError\n"
        "make_vector('mine:Mine-v0', 2, 0)\n"
        "try: make_vector('broken:Mine-v0', 2, 0)\n"
        "except InputError as error: print(error)\n"
    )
    assert "No module named 'no_such_thing'" in run(code, PYTHONPATH=f"{ROOT}:{tmp_path}").stdout


def test_own_module_in_the_current_folder(tmp_path: Path) -> None:
    """A script's own folder is on the path, as algos/ is; the folder that the user is in counts too."""
    (tmp_path / "mine_here.py").write_text(
        "import gymnasium as gym\nfrom gymnasium.envs.classic_control import PendulumEnv\n"
        "gym.register('Mine-v0', PendulumEnv, max_episode_steps=5)\n"
    )
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "script.py"
    script.write_text("from envs.make import make_vector; make_vector('mine_here:Mine-v0', 2, 0, vectorizer='async')\n")
    environment = {"PATH": "", "PYTHONPATH": str(ROOT)}
    line = [sys.executable, str(script)]
    done = subprocess.run(line, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_own_module_with_the_name_of_another_one(tmp_path: Path) -> None:
    """The message names the file that was imported and the user's, which has to get another name."""
    (tmp_path / "json.py").write_text("")
    code = f"import os; from envs.make import make; from common.errors import InputError; os.chdir({str(tmp_path)!r})\n"
    said = run(code + "try: make('json:Mine-v0')\nexcept InputError as error: print(error)").stdout
    assert "json/__init__.py has no environment Mine-v0." in said
    assert f"instead of {tmp_path / 'json.py'}: rename that file" in said
    assert len(said.splitlines()) == 2


def test_own_module_that_exits(tmp_path: Path) -> None:
    """It ends in words, as one that fails does."""
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit('no licence')\n")
    code = (
        "from envs.make import make; from common.errors import InputError\n"
        "try: make('leaving:Mine-v0')\nexcept InputError as error: print(error)\n"
    )
    said = run(code, PYTHONPATH=f"{ROOT}:{tmp_path}").stdout
    assert "module of leaving:Mine-v0 cannot be imported. SystemExit: no licence" in said


@pytest.mark.parametrize(
    ("missing", "env_id", "cure"),
    [
        ("gymnasium_robotics", "AntMaze_UMaze-v5", "pip install gymnasium-robotics=="),
        ("mujoco", "HalfCheetah-v4", "pip install mujoco=="),
        ("mujoco", "AdroitHandPen-v1", "pip install mujoco=="),
        ("gymnasium_robotics", "Nothing-v0", "There is no environment Nothing-v0"),
        ("Box2D", "BipedalWalker-v3", "needs Box2D, which is not installed: pip install 'gymnasium[box2d]==1.4.0'"),
    ],
)
def test_missing_packages_are_named(missing: str, env_id: str, cure: str) -> None:
    if env_id.startswith("Adroit"):
        pytest.importorskip("gymnasium_robotics")
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from envs.make import make; from common.errors import InputError\n"
        "make('Pendulum-v1')\n"
        f"try: make({env_id!r})\n"
        "except InputError as error: print(error)\n"
    )
    assert cure in run(code).stdout


def test_old_versions_make_no_noise_and_other_warnings_stay() -> None:
    code = (
        "import warnings, sys; from envs.make import make, make_vector\n"
        "make_vector('HalfCheetah-v4', 1, 0); make('Humanoid-v4').reset()\n"
        "assert 'gymnasium_robotics' not in sys.modules, 'imported although not needed'\n"
        "assert 'torch' not in sys.modules\n"
        "make('Pendulum-v1', render_mode='upside-down')\n"
    )
    stderr = run(code).stderr
    assert "out of date" not in stderr
    assert "precision" not in stderr
    assert "upside-down" in stderr


def test_the_notice_of_robotics_is_for_those_it_concerns() -> None:
    """Gymnasium-Robotics prints it at each import: that Adroit's dense rewards changed within v1."""
    pytest.importorskip("gymnasium_robotics")
    others = ["AntMaze_UMaze-v5", "AdroitHandPen-v1", "AdroitHandDoorSparse-v1", "offline.environments:d4rl/door-v1"]
    code = "from envs.make import make, make_vector\n"
    made = run(code + "".join(f"make({each!r})\n" for each in others))
    assert "reward functions" not in made.stderr
    code += "for id in ('AdroitHandDoor-v1', 'AdroitHandDoor-v1', 'AdroitHandHammer-v1'): make(id)\n"
    made = run(code + "make_vector('AdroitHandDoor-v1', 2, 0, vectorizer='async').close()\n")
    assert made.stderr.count("reward functions were updated in v1.2.1") == 1


def test_seeds() -> None:
    assert seeds(1, "training", 3) == seeds(1, "training", 5)[:3]
    assert seeds(0, "training", 2) == [243515996, 1390174081]  # the same in every process, and from version to version
    drawn = [s for seed in range(20) for purpose in ("training", "evaluation") for s in seeds(seed, purpose, 20)]
    assert len(set(drawn)) == len(drawn)
    with pytest.raises(InputError, match="--seed is -1"):
        seeds(-1, "training", 1)
    with pytest.raises(InputError, match="num_envs is 0"):
        make_vector("Pendulum-v1", 0, seed=0)


def test_time_limit_truncates_and_failure_terminates() -> None:
    env = make("HalfCheetah-v4", max_episode_steps=4)
    env.reset(seed=0)
    ends = [env.step(np.zeros(6, np.float32))[2:4] for _ in range(4)]
    assert ends == [(False, False)] * 3 + [(False, True)]
    env = make("InvertedPendulum-v4")
    env.reset(seed=0)
    for _ in range(100):
        _, _, termination, truncation, _ = env.step(np.ones(1, np.float32))
        if termination:
            break
    assert termination
    assert not truncation


@pytest.mark.parametrize("error", [ValueError("stuck"), SystemExit(3)])
def test_an_environment_that_does_not_close(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    """A warning, because no result depends on it."""
    env = make("Pendulum-v1")
    env.unwrapped.close = Mock(side_effect=error)
    env.close()
    assert capsys.readouterr().err == f"warning: Pendulum-v1 failed to close: {type(error).__name__} {error}\n"
