"""tools/video.py: what is filmed, at which speed, and what is said where something is missing."""

import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import ROOT, Terminal, module
from stand_ins import Drawn, Film

from common.errors import InputError, RunError
from envs.make import make
from tools import video
from tools.video import Args, choose_renderer, lower_quality, seconds_per_step, watch


class Undrawn(Drawn):
    def render(self) -> None:
        return None


class Fast(Drawn):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 125}  # noqa: RUF012


class Strange(Drawn):
    """It draws `frames`, one after another, or raises one."""

    frames: Any = iter(())

    def render(self) -> Any:
        frame = next(self.frames)
        if isinstance(frame, Exception):
            raise frame
        return frame


gym.register("Fast-v0", Fast, max_episode_steps=5)
gym.register("Strange-v0", Strange)
gym.register("Undrawn-v0", Undrawn)


@pytest.fixture
def film(monkeypatch: pytest.MonkeyPatch) -> Film:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", made := Film())  # type: ignore[arg-type]
    monkeypatch.setattr(video, "choose_renderer", lambda: None)
    return made


@pytest.fixture
def run(small: Callable[..., Any]) -> Path:
    module("sac").train(args := small(env="Drawn-v0", total_steps=100, eval_episodes=3))
    return args.run_dir


def last_returns(folder: Path) -> list[float]:
    rows = list(csv.DictReader((folder / "evaluations.csv").open()))
    return [float(row["return"]) for row in rows if row["step"] == rows[-1]["step"]]


def said_returns(said: str) -> list[float]:
    return [float(line.split("return ")[1].split(",")[0]) for line in said.splitlines() if line.startswith("episode")]


def test_the_episodes_of_the_evaluations_are_filmed(run: Path, film: Film, capsys: pytest.CaptureFixture[str]):
    watch(Args(run, episodes=3))
    assert [frame[0, 0, 0] for frame in film.frames] == [0, 1, 2, 3, 4, 5] * 3
    assert (film.size, film.fps) == ((8, 6), pytest.approx(25))
    said = capsys.readouterr().out
    assert said_returns(said) == pytest.approx(last_returns(run), abs=0.051)
    assert said.count("length 5") == 3
    assert (run / "video.mp4").read_bytes() == b"whole"
    assert not film.path.exists()

    for changed, same in (({"seed": 1}, True), ({"seed": 2}, False), ({"sampled": True}, False)):
        watch(Args(run, episodes=3, output=run / "new" / "other.mp4", **changed))
        assert (said_returns(capsys.readouterr().out) == said_returns(said)) == same
    assert (run / "new" / "other.mp4").exists()


def test_other_arguments_of_its_own_environment(run: Path, film: Film, capsys: pytest.CaptureFixture[str]):
    """They are used with a warning, as in evaluations."""
    watch(Args(run, env_kwargs='{"action_repeat": 5}'))
    said = capsys.readouterr()
    assert "length 1\n" in said.out
    assert 'was made in Drawn-v0 with the arguments {}, and is used with {"action_repeat": 5}' in said.err


def test_a_fast_environment_is_not_drawn_at_every_step(run: Path, film: Film, capsys: pytest.CaptureFixture[str]):
    """Of 125 steps a second, every third is drawn. So the video is as long as the episodes."""
    watch(Args(run, env="Fast-v0", episodes=2))
    assert [frame[0, 0, 0] for frame in film.frames] == [0, 3, 0, 3]
    assert film.fps == pytest.approx(125 / 3)
    assert re.search(r"^4 frames in \d+\.\d s, [\d.]+ frames/s$", capsys.readouterr().err, re.MULTILINE)


@pytest.mark.parametrize("env_id", ["Hopper-v4", "AntMaze_UMaze-v4", "AdroitHandPen-v1", "FrankaKitchen-v1"])
def test_pictures_are_drawn_at_a_quality_for_processors(env_id: str):
    env = make(env_id)
    lower_quality(env)
    quality = env.unwrapped.model.vis.quality
    assert (quality.offsamples, quality.shadowsize) == (0, 1024)


def test_a_progress_is_shown_on_a_terminal(run: Path, film: Film, terminal: Terminal):
    """The most frames that the episodes can have, because they may end before."""
    watch(Args(run, env="Fast-v0", episodes=2))
    assert terminal.drawn()[-1] == "frame 4 of 4 at most"


def test_a_film_that_failed_leaves_nothing(run: Path, film: Film):
    film.fails_after = 4
    with pytest.raises(RunError, match=r"video\.mp4 cannot be written: .*No space left"):
        watch(Args(run))
    assert not list(run.glob("*.mp4"))


def test_an_encoder_that_fails_at_its_end_is_noticed(run: Path, film: Film, monkeypatch: pytest.MonkeyPatch):
    """It raises nothing then. The file has fewer frames than were drawn, or cannot be read."""

    def unreadable(path: str) -> tuple[int, float]:
        raise RuntimeError("no such number")

    for count in (lambda path: (len(film.frames) - 1, 0.1), unreadable):
        monkeypatch.setattr(film, "count_frames_and_secs", count)
        with pytest.raises(RunError, match=r"video\.mp4 cannot be written: the encoder failed: is the disk full\?"):
            watch(Args(run))
        assert not list(run.glob("*.mp4"))


def test_a_film_that_cannot_be_written_is_refused_before_the_work(run: Path, film: Film):
    for output in (run / "folder.mp4", Path("/proc/no/film.mp4")):
        if output.parent == run:
            output.mkdir()
        with pytest.raises(InputError, match=r"\.mp4 cannot be written .*: give another --output"):
            watch(Args(run, output=output))
    assert not film.frames


@pytest.mark.parametrize(
    ("env_id", "seconds"),
    [
        ("Hopper-v4", 0.008),
        ("HalfCheetah-v5", 0.05),
        ("AntMaze_UMaze-v4", 0.05),
        ("Pendulum-v1", 0.05),
        ("Drawn-v0", 0.04),
    ],
)
def test_the_speed_is_that_of_the_simulated_time(env_id: str, seconds: float):
    """Time step and frame skip of the models; Pendulum asks for 30 frames a second, AntMaze for 50."""
    assert seconds_per_step(make(env_id)) == pytest.approx(seconds)


def test_what_is_missing_is_named(run: Path, monkeypatch: pytest.MonkeyPatch, film: Film):
    def refused(named: str, **changed: Any) -> None:
        with pytest.raises(InputError, match=named):
            watch(Args(run, **changed))

    refused(r"ends in \.mp4", output=Path("film.avi"))
    refused("^--episodes is 0: give a number of 1 or more$", episodes=0)
    refused("^--seed is -1: give a number of 0 or more$", seed=-1)
    refused("draws no pictures", env="Undrawn-v0")
    assert not list(run.glob("*.mp4"))
    for variable in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(variable, raising=False)
    refused("no display.*make video", play=True)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    refused("needs imageio-ffmpeg.*make video")


BLACK = np.zeros((4, 6, 3), np.uint8)


@pytest.mark.parametrize(("frames", "error", "named"), [
    ([BLACK[:, :, 0]], InputError, r"draws uint8 of shape \(4, 6\), not uint8 \[height, width, 3\]"),
    ([BLACK / 1.0], InputError, r"draws float64 of shape \(4, 6, 3\)"),
    ([BLACK, BLACK[:2]], InputError, r"pictures of several sizes, \[\(2, 6, 3\), \(4, 6, 3\)\]"),
    ([BLACK, ValueError("no gl")], RunError, "failed to draw: ValueError no gl$"),
])  # fmt: skip
def test_strange_frames_are_named(
    frames: Any, error: Any, named: str, run: Path, film: Film, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Strange, "frames", iter(frames))
    with pytest.raises(error, match=named):
        watch(Args(run, env="Strange-v0"))
    assert not list(run.glob("*.mp4"))


def test_a_missing_pygame_is_named(small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, film: Film):
    module("sac").train(args := small(total_steps=100))
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(InputError, match=r"a package that draws Pendulum-v1 is missing: pygame.*pip install"):
        watch(Args(args.run_dir))


def test_the_module_that_a_run_names_is_imported(
    run: Path, film: Film, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The run is the user's own, and so is the module in the current folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drawn_here.py").write_text(
        "import gymnasium as gym\ngym.register('DrawnHere-v0', gym.spec('Drawn-v0').entry_point)\n"
    )
    config = run / "config.json"
    changed = json.loads(config.read_text().replace("Drawn-v0", "drawn_here:DrawnHere-v0"))
    del changed["crc32"]  # the checksum, which would refuse the change
    config.write_text(json.dumps(changed))
    watch(Args(run))
    assert len(film.frames) == 6


def test_the_first_renderer_that_works_is_chosen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MUJOCO_GL", "none")
    monkeypatch.setattr(video, "PROBE", "import sys; sys.exit('{0}' == 'egl')")
    choose_renderer()
    assert video.os.environ["MUJOCO_GL"] == "none"  # what is given is tried, and kept
    monkeypatch.delenv("MUJOCO_GL")
    choose_renderer()
    assert video.os.environ["MUJOCO_GL"] == "osmesa"
    monkeypatch.setenv("MUJOCO_GL", "egl")
    with pytest.raises(InputError, match=r"MUJOCO_GL=egl does not work\ninstall .*libosmesa6"):
        choose_renderer()
    monkeypatch.delenv("MUJOCO_GL")
    monkeypatch.setattr(video, "PROBE", "raise SystemExit(1)")
    with pytest.raises(InputError, match="egl, osmesa and glfw do not work"):
        choose_renderer()


def test_the_renderer_is_chosen_before_the_environment_is_made(run: Path, film: Film, monkeypatch: pytest.MonkeyPatch):
    """An environment that draws by mujoco.Renderer imports MuJoCo. Only MuJoCo's environments need a renderer."""
    made, original = list[str](), video.make

    def choose() -> None:
        assert not made
        raise InputError("none works")

    def make(env_id: str, **settings: Any) -> Any:
        made.append(env_id)
        return original(env_id, **settings)

    monkeypatch.setattr(video, "choose_renderer", choose)
    monkeypatch.setattr(video, "make", make)
    watch(Args(run))
    assert (made, len(film.frames)) == (["Drawn-v0"], 6)
    made.clear()
    with pytest.raises(InputError, match="none works"):
        watch(Args(run, env="InvertedPendulum-v5"))
    assert made == ["InvertedPendulum-v5"]


@pytest.fixture
def balanced(small: Callable[..., Any]) -> Path:
    """A run on a MuJoCo environment whose episodes are short at first."""
    module("sac").train(args := small(env="InvertedPendulum-v5", total_steps=100))
    return args.run_dir


def command(*line: str | Path) -> str:
    line = (*map(str, line),)
    result = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_an_mp4_is_as_long_as_its_episodes(balanced: Path, monkeypatch: pytest.MonkeyPatch):
    """Decoded again: a frame for each reset and each step of 0.04 s, of MuJoCo's 480 × 480, which change."""
    ffmpeg = pytest.importorskip("imageio_ffmpeg", reason="imageio-ffmpeg is not installed (make video)")
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    try:
        choose_renderer()
    except InputError as error:
        pytest.skip(str(error))
    said = command(sys.executable, ROOT / "tools" / "video.py", balanced, "--episodes", "2")
    assert said_returns(said) == pytest.approx(last_returns(balanced), abs=0.051)
    reader = ffmpeg.read_frames(str(balanced / "video.mp4"))
    facts, frames = next(reader), [np.frombuffer(frame, np.uint8) for frame in reader]
    assert (facts["size"], facts["fps"]) == ((480, 480), 25)
    assert len(frames) == sum(int(line.split("length ")[1]) + 1 for line in said.splitlines() if "length" in line)
    assert frames[0].std() > 5
    assert np.abs(frames[0].astype(int) - frames[4].astype(int)).max() > 50


@pytest.mark.skipif(shutil.which("xvfb-run") is None, reason="xvfb-run is not installed")
def test_the_viewer_opens_and_closes(balanced: Path):
    said = command("xvfb-run", "-a", sys.executable, ROOT / "tools" / "video.py", balanced, "--play", "--episodes", "2")
    assert said_returns(said) == pytest.approx(last_returns(balanced), abs=0.051)
