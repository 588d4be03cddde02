"""A trained policy as a video: an mp4, which needs no display, or a window.

    make video RUN=runs/sac__Hopper-v4__1 ARGS="--episodes 3"
    make play RUN=runs/sac__Hopper-v4__1

The episodes are those of the run's own evaluations, at the speed of the simulated time. docs/video.md lists what to
install.
"""

import common.start

import contextlib
import itertools
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.error import DependencyNotInstalled
from numpy.typing import NDArray

from common.arguments import at_least
from common.command_line import command_line
from common.errors import InputError, RunError, Stopped
from common.evaluate import MAX_EPISODE_STEPS, evaluate
from common.files import prepare_output
from common.messages import log, print_result
from common.progress import Progress
from common.seeding import seeds
from envs.make import make
from envs.returned import reason
from tools.policies import load_policy, read_trained

PROBE = """
import mujoco
from mujoco.{0} import GLContext
context = GLContext(8, 8)
context.make_current()
mujoco.MjrContext(mujoco.MjModel.from_xml_string("<mujoco/>"), mujoco.mjtFontScale.mjFONTSCALE_100)
context.free()
"""
MAX_FRAMES_PER_SECOND = 60
SHADOW_SIZE = 1024  # pixels on each side of MuJoCo's shadow map; its default is 4096
Show = Callable[[], None]


@dataclass(frozen=True)
class Args:
    """Policy and output."""

    policy: Annotated[str, tyro.conf.Positional]
    """Run folder that has a checkpoint, a file of its policy/, or a name such as sac/Hopper-v4 (docs/policies.md)."""
    play: bool = False
    """Show a window instead: MuJoCo's viewer, or the environment's own."""
    output: Path | None = None
    """The mp4 to write. By default it is <run>/video.mp4, or <algorithm>-<env>.mp4 here for a policy file."""
    episodes: int = 1
    """Number of episodes to show."""
    sampled: bool = False
    """Act with the policy's noise. By default the policy acts as in evaluations."""
    seed: int | None = None
    """Seed of the episodes, as a run's --seed gives those of its evaluations. By default it is the run's own."""
    env: str | None = None
    """Environment to use instead of the run's, with the same observations and actions."""
    env_kwargs: str = "{}"
    """Arguments of the environment's constructor, as a dict in JSON. In the run's own environment, those that you leave
    out are the run's, and a changed one gives a warning."""

    def __post_init__(self) -> None:
        at_least(1, episodes=self.episodes)
        at_least(0, seed=self.seed)
        if self.output and (self.play or self.output.suffix != ".mp4"):
            raise InputError(f"--output is {self.output}: give a path that ends in .mp4, and no --play")


def watch(args: Args) -> None:
    """Show or record episodes of the policy, and print the return and length of each.

    Raise InputError if the run does not fit or a package that draws it is missing. Raise RunError if the file cannot be
    written.
    """
    torch.set_num_threads(1)
    run = read_trained(args.policy)
    env_id, settings = run.environment(args.env, args.env_kwargs, may_differ=True)
    no_renderer = None
    if not args.play:
        try:
            choose_renderer()  # before `make`, because importing MuJoCo fixes the renderer of mujoco.Renderer
        except InputError as error:
            no_renderer = error
    try:
        env = make(env_id, **settings | {"render_mode": None if args.play else "rgb_array"})
    except InputError as error:
        raise (no_renderer if no_renderer and "MUJOCO_GL" in os.environ else error) from None
    if no_renderer and _is_mujoco(env):
        env.close()
        raise no_renderer
    if args.play and not _is_mujoco(env):
        env = make(env_id, **settings | {"render_mode": "human"})
    output = args.output or run.output("video.mp4", env_id)
    if not args.play:
        prepare_output(output, "--output")
    each = seeds(int(run.arguments["seed"]) if args.seed is None else args.seed, "evaluation", args.episodes)
    policy = load_policy(str(args.policy), env, each[0], deterministic=not args.sampled)
    with contextlib.closing(env), window(env) if args.play else mp4(env, output, args.episodes) as show:
        for i, seed in enumerate(each):
            try:
                (episode,) = evaluate(policy, [Shown(env, show)], [seed])
            except DependencyNotInstalled as error:
                raise InputError(f"a package that draws {env_id} is missing: {error}") from None
            solved = "" if episode.success is None else ", solved" if episode.success else ", not solved"
            print_result(f"episode {i}: return {episode.return_:.1f}, length {episode.length}{solved}")
    if not args.play:
        print_result(f"written to {output}")


class Shown(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper that calls `show` after every reset and every step."""

    def __init__(self, env: gym.Env[Any, Any], show: Show) -> None:
        super().__init__(env)
        self._show = show

    def reset(self, **kwargs: Any) -> Any:
        result = self.env.reset(**kwargs)
        self._show()
        return result

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        self._show()
        return result


def seconds_per_step(env: gym.Env[Any, Any]) -> float:
    """Return the simulated seconds of a step: by MuJoCo's clock, the environment's `dt`, or its frames per second.

    With MuJoCo this resets the environment and steps it once.
    """
    unwrapped: Any = env.unwrapped
    if _is_mujoco(env):  # the frames per second of mazes and Franka kitchen are not those of their clocks
        env.reset(seed=0)
        before = unwrapped.data.time
        env.step(np.zeros(env.action_space.shape or (), np.float32))
        if unwrapped.data.time > before:
            return float(unwrapped.data.time - before)
    return action_repeat(env) * float(getattr(unwrapped, "dt", 0) or 1 / (env.metadata.get("render_fps") or 30))


def action_repeat(env: gym.Env[Any, Any]) -> int:
    """Return how many steps of the environment each action takes."""
    wrapped: Any = env
    return int(wrapped.get_wrapper_attr("action_repeat")) if wrapped.has_wrapper_attr("action_repeat") else 1


def picture(env: gym.Env[Any, Any]) -> NDArray[np.uint8]:
    """Return a frame [height, width, 3]. Raise InputError if `env` draws none, and RunError if it fails to draw."""
    try:
        frame: Any = env.render()
    except (DependencyNotInstalled, InputError, RunError, MemoryError, Stopped):
        raise
    except Exception as error:
        raise RunError(f"the environment failed to draw: {reason(error)}") from error
    if not isinstance(frame, np.ndarray):
        raise InputError("the environment draws no pictures: it gave none for render_mode rgb_array")
    if frame.dtype != np.uint8 or frame.shape[2:] != (3,):
        raise InputError(f"the environment draws {frame.dtype} of shape {frame.shape}, not uint8 [height, width, 3]")
    return np.ascontiguousarray(frame)


@contextlib.contextmanager
def mp4(env: gym.Env[Any, Any], path: Path, episodes: int) -> Iterator[Show]:
    """Yield a function to call after each reset and step, which adds a frame of `env` to an H.264 video if it is time.

    `env` has render_mode rgb_array. `path` appears when the video is complete. Raise InputError if imageio-ffmpeg or a
    renderer is missing, or `env` gives no pictures. Raise RunError if the file cannot be written.
    """
    try:
        from imageio_ffmpeg import count_frames_and_secs, write_frames
    except ImportError:
        raise InputError(
            "an mp4 needs imageio-ffmpeg, which `make video` installs: pip install -e '.[video]'"
        ) from None
    if _is_mujoco(env):
        lower_quality(env)
    rate = 1 / seconds_per_step(env)
    every = math.ceil(rate / MAX_FRAMES_PER_SECOND - 1e-6)  # steps
    part = path.with_name(f"{path.stem}.part.mp4")
    part.unlink(missing_ok=True)  # a link that was put there would be followed
    writers: list[Any] = []
    shapes: set[tuple[int, ...]] = set()
    calls = itertools.count()
    longest = (env.spec and env.spec.max_episode_steps) or MAX_EPISODE_STEPS
    actions = -(-longest // action_repeat(env)) + 1
    progress = Progress(0, 0, -(-episodes * actions // every), "frame")
    progress.note = " at most"  # an episode may end before

    def show() -> None:
        if next(calls) % every:
            return
        frame = picture(env)
        shapes.add(frame.shape)
        if len(shapes) > 1:
            raise InputError(f"the environment draws pictures of several sizes, {sorted(shapes)}: a video has one")
        if not writers:
            size = (frame.shape[1], frame.shape[0])
            writers.append(write_frames(part, size, fps=rate / every, quality=8, macro_block_size=2))
            writers[0].send(None)
            progress.begin()
        writers[0].send(frame)
        progress.advance(1)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        try:
            yield show
        finally:
            for writer in writers:
                writer.close()
            progress.close()
        try:  # `close` raises nothing if the encoder fails at its end
            is_whole = not writers or count_frames_and_secs(str(part))[0] == progress.step
        except RuntimeError:
            is_whole = False
        if not is_whole:
            raise OSError("the encoder failed: is the disk full?")
        part.replace(path)
        seconds = time.perf_counter() - started
        log.info(f"{progress.step:,} frames in {seconds:.1f} s, {progress.step / seconds:.1f} frames/s")
    except OSError as error:
        raise RunError(f"{path} cannot be written: {str(error).strip().splitlines()[-1]}") from None
    finally:
        part.unlink(missing_ok=True)


def lower_quality(env: gym.Env[Any, Any]) -> None:
    """Set how MuJoCo draws, so that a processor draws three to four times as fast. docs/video.md has the figures.

    Call it before the first frame. It changes nothing of the simulation.
    """
    unwrapped: Any = env.unwrapped
    quality = unwrapped.model.vis.quality
    quality.offsamples = 0  # samples of a pixel
    quality.shadowsize = min(quality.shadowsize, SHADOW_SIZE)


def choose_renderer() -> None:
    """Set MUJOCO_GL to the first renderer that works here, if it is not set. Only glfw needs a display.

    Each renderer is tried in its own process, because a failure may crash that process. Raise InputError if none works.
    """
    given = os.environ.get("MUJOCO_GL")
    for name in [given] if given else ["egl", "osmesa", "glfw"]:
        probe, environment = [sys.executable, "-c", PROBE.format(name)], os.environ | {"MUJOCO_GL": name}
        if subprocess.run(probe, env=environment, capture_output=True, check=False).returncode == 0:
            os.environ["MUJOCO_GL"] = name
            return
    raise InputError(
        f"MuJoCo cannot draw here: {f'MUJOCO_GL={given} does' if given else 'egl, osmesa and glfw do'} not work\n"
        "install a software renderer (Debian, Ubuntu: apt install libegl1 libgl1-mesa-dri, or libosmesa6)"
    )


@contextlib.contextmanager
def window(env: Any) -> Iterator[Show]:
    """Yield a function that updates MuJoCo's viewer, at the speed of the simulated time.

    An environment with render_mode human draws its own window instead. The program ends when MuJoCo's viewer is closed.
    Raise InputError if there is no display.
    """
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        raise InputError("there is no display here (DISPLAY is not set): make video makes an mp4 without one")
    if env.render_mode == "human":  # it draws itself, and waits
        yield lambda: None
        return
    import mujoco.viewer

    model, data, seconds = env.unwrapped.model, env.unwrapped.data, seconds_per_step(env)
    others = set(threading.enumerate())
    try:
        with mujoco.viewer.launch_passive(model, data, show_left_ui=False, show_right_ui=False) as viewer:
            camera = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
            if camera >= 0:  # follow a robot that leaves the picture
                viewer.cam.type, viewer.cam.trackbodyid = mujoco.mjtCamera.mjCAMERA_TRACKING, model.cam_bodyid[camera]
                viewer.cam.distance *= 2.0
            due = time.monotonic()

            def show() -> None:
                nonlocal due
                if not viewer.is_running():
                    raise SystemExit(0)
                viewer.sync()
                due = max(due + seconds, time.monotonic())
                time.sleep(max(0.0, due - time.monotonic()))

            yield show
    finally:
        for thread in set(threading.enumerate()) - others:  # the program crashes if it ends before the viewer
            thread.join(5.0)


def _is_mujoco(env: gym.Env[Any, Any]) -> bool:
    return "mujoco" in sys.modules and isinstance(getattr(env.unwrapped, "data", None), sys.modules["mujoco"].MjData)


if __name__ == "__main__":
    command_line(watch, Args)
