"""The Adroit binary tasks: reward, end, and the datasets in both conventions."""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SHARED

from common.command_line import command_line
from common.errors import Finished, InputError, RunError
from envs.d4rl import solved
from envs.make import make
from offline.arrays import Transitions
from offline.dataset import load
from offline.environments import BINARY
from offline.scores import normalized, reference
from tools.adroit_binary import Args, main, run, until_solved

PEN = SHARED / "data" / "adroit" / "pen-human-sparse.hdf5"
needs_demonstrations = pytest.mark.skipif(not PEN.exists(), reason=f"{PEN} is not there")


def solve(task: str, env: Any) -> None:
    """So that the next step finds the door open, the ball at its target, or the pen in the direction asked for."""
    hand = env.unwrapped
    state = hand.get_env_state()
    if task == "door":
        state["qpos"][-2] = 1.4  # the hinge; behind it the latch
        hand.set_env_state({key: state[key] for key in ("qpos", "qvel", "door_body_pos")})
    elif task == "relocate":
        hand.set_env_state({key: state[key] for key in ("qpos", "qvel", "obj_pos")} | {"target_pos": state["obj_pos"]})
    else:
        hand.set_env_state({"qpos": state["qpos"], "qvel": state["qvel"], "desired_orien": np.sqrt([0.5, 0, 0.5, 0])})


@pytest.mark.parametrize("task", ["pen", "door", "relocate"])
@pytest.mark.parametrize("ends", [False, True])
def test_reward_end_and_what_the_observation_says(task: str, ends: bool) -> None:
    """Against the success that Gymnasium-Robotics itself reports."""
    env = make(BINARY[task, ends])
    random, seen = np.random.default_rng(0), {False: 0, True: 0}
    for seed in range(25):
        env.reset(seed=seed)
        if seed % 2:
            solve(task, env)
        for _ in range(6):
            action = random.uniform(-0.3, 0.3, env.action_space.shape).astype(np.float32)
            obs, reward, terminated, truncated, info = env.step(action)
            assert reward == (0.0 if info["success"] else -1.0)
            assert terminated == (info["success"] and ends)
            assert not truncated
            assert bool(solved(task, obs[None])[0]) == info["success"]
            seen[info["success"]] += 1
            if terminated:
                break
    assert min(seen.values()) > 3, seen


def test_horizons() -> None:
    assert {name: make(env_id).spec.max_episode_steps for name, env_id in BINARY.items()} == {
        ("pen", False): 100, ("pen", True): 100, ("door", False): 200, ("door", True): 200,
        ("relocate", False): 200, ("relocate", True): 200,
    }  # fmt: skip


@pytest.mark.parametrize(("task", "steps"), [("pen", 100), ("door", 200)])
def test_a_task_that_continues_scores_the_share_of_its_steps_that_is_solved(task: str, steps: int) -> None:
    """RLPD's (return + steps) / steps; of the others, which end when solved, success is what counts."""
    between = reference(BINARY[task, False])
    assert normalized([-steps, -steps / 4, 0.0], between).tolist() == [0.0, 75.0, 100.0]
    assert reference(f"adroit-binary/{task}-v0") == between  # its name once it is registered
    assert reference(BINARY[task, True]) is None


def test_episodes_end_at_their_last_success_and_the_others_are_left_out() -> None:
    rewards = np.array([-1, 0, -1, 0, -1, -1, -1, -1, 0], np.float32)  # three episodes, the second fails
    cuts = np.array([0, 0, 0, 0, 1, 0, 1, 0, 1], bool)
    rows, nothing = np.arange(9.0)[:, None], np.zeros(9, bool)
    kept = until_solved(Transitions(rows, rows, rewards, rows + 1, nothing, nothing, cuts))
    assert kept.obs[:, 0].tolist() == [0, 1, 2, 3, 7, 8]
    assert kept.rewards.tolist() == [-1, 0, -1, 0, -1, 0]
    assert kept.terminations.tolist() == [False, True, False, True, False, True]
    assert not kept.timeouts.any()
    with pytest.raises(InputError, match="no episode solves the task"):
        until_solved(Transitions(rows, rows, rewards * 0 - 1, rows + 1, nothing, nothing, cuts))


def test_demonstrations_that_d4rl_cuts_in_two_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"marks time-outs inside its demonstrations.*D4RL/door/human-v2"):
        main(Args("door-human-v1", str(tmp_path / "door.hdf5"), task="door"))


def test_a_command_that_fails_is_named() -> None:
    run("this")
    with pytest.raises(RunError, match="no_such_module failed: see above"):
        run("no_such_module")


@needs_demonstrations
def test_the_whole_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both conventions, of the same roll-outs: the second time they are there."""

    def run_here(name: str, *arguments: str) -> None:
        module = importlib.import_module(name)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        command_line(module.train if name == "algos.bc" else module.collect, module.Args)

    monkeypatch.setattr("tools.adroit_binary.run", run_here)
    for goes_on in (False, True):
        args = Args(str(PEN), str(tmp_path / "pen.hdf5"), goes_on=goes_on, rollouts=10, updates=400)
        main(args)
        dataset = load(args.output)
        assert dataset.env == BINARY["pen", not goes_on]
        rewards, terminations = dataset.column("rewards"), dataset.column("terminations")
        assert np.array_equal(rewards == 0, solved("pen", dataset.column("next_obs")))
        if goes_on:
            assert len(dataset) == 25 * 199 + 10 * 100
            assert not terminations.any()
            assert dataset.lengths.tolist() == [199] * 25 + [100] * 10
        else:
            assert np.array_equal(terminations == 1, rewards == 0)
            assert terminations[dataset.ends - 1].all()
            assert len(dataset) < 25 * 199 + 10 * 100
        before = Path(args.output).read_bytes()
        with pytest.raises(Finished, match="nothing to do"):
            main(args)
        assert Path(args.output).read_bytes() == before
        with pytest.raises(InputError, match="made with other arguments"):
            main(Args(str(PEN), args.output, goes_on=not goes_on, rollouts=10, updates=400))
        Path(args.output).unlink()
        monkeypatch.setattr("tools.adroit_binary.run", lambda *command: None)


@pytest.mark.parametrize(("rollouts", "side_by_side"), [(500, "10"), (15, "5"), (7, "7"), (11, "1")])
def test_all_rollouts_are_whole(
    rollouts: int, side_by_side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many transitions in each of the environments that run side by side as whole episodes have."""

    def stop_at_collect(module: str, *arguments: str) -> None:
        if module == "tools.collect":
            raise InputError(" ".join(arguments))

    monkeypatch.setattr("tools.adroit_binary.run", stop_at_collect)
    with pytest.raises(InputError, match=f"--num-envs {side_by_side} --transitions {rollouts * 100} "):
        main(Args("mine.hdf5", str(tmp_path / "pen.hdf5"), rollouts=rollouts))


def test_no_rollouts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--rollouts is 0: give a number of 1 or more"):
        main(Args("mine.hdf5", str(tmp_path / "pen.hdf5"), rollouts=0))


def test_an_output_that_is_no_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.adroit_binary.run", lambda *_: pytest.fail("the work began"))
    with pytest.raises(InputError, match=r"--output is minari:pen/binary-v0: give a file that ends in \.hdf5"):
        main(Args("mine.hdf5", "minari:pen/binary-v0"))
