"""State in, state out; files whole or not there."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL, same

from algos.sac import SAC, Args
from common import checkpoint
from common.checkpoint import replacing, restore, state_of
from common.errors import InputError
from common.replay_buffer import ReplayBuffer


def agent(seed: int = 1) -> SAC:
    return SAC(Args(**(SMALL["sac"] | {"seed": seed})), 3, 2, torch.device("cpu"))


def learn(agent: SAC, updates: int) -> None:
    buffer, rng = ReplayBuffer(100, 3, 2), np.random.default_rng(0)
    for _ in range(100):
        buffer.add(
            rng.normal(size=(1, 3)), rng.uniform(-1, 1, (1, 2)), rng.normal(size=1), rng.normal(size=(1, 3)), [0]
        )
    for _ in range(updates):
        agent.update(buffer.sample(16, agent.generator))


def test_a_restored_agent_learns_on_exactly_as_the_original(tmp_path: Path):
    original, restored = agent(), agent(seed=2)
    learn(original, 5)
    checkpoint.save(tmp_path / "state.pt", state_of(original))
    restore(restored, checkpoint.load(tmp_path / "state.pt"))
    assert same(state_of(original), state_of(restored))
    alpha, target = restored.log_alpha.item(), restored.critic_target.state_dict()
    assert not same(target, restored.critic.state_dict())  # targets rebuilt from the online networks
    learn(original, 5)
    learn(restored, 5)
    assert same(state_of(original), state_of(restored))
    assert restored.log_alpha.item() != alpha  # the optimiser bound to another tensor


def test_an_attribute_without_a_known_state_is_refused():
    learner = agent()
    learner.history = [1, 2, 3]
    with pytest.raises(TypeError, match=r"SAC\.history"):
        state_of(learner)


def test_a_later_attribute_is_saved_without_further_code():
    learner, other = agent(), agent()
    learner.updates, learner.mean, learner.buffer = 7, torch.ones(2), np.arange(3)
    other.updates, other.mean, other.buffer = 0, torch.zeros(2), np.zeros(3, np.int64)
    restore(other, state_of(learner))
    assert (other.updates, other.mean.tolist(), other.buffer.tolist()) == (7, [1, 1], [0, 1, 2])


def test_state_of_another_shape_or_code_is_refused():
    state = state_of(SAC(Args(**(SMALL["sac"] | {"hidden": (8,)})), 3, 2, torch.device("cpu")))
    with pytest.raises(InputError, match="does not fit"):
        restore(agent(), state)
    with pytest.raises(InputError, match=r"made by other code: .*log_alpha"):
        restore(agent(), {k: v for k, v in state_of(agent()).items() if k != "log_alpha"})


def test_round_trip_of_everything_that_a_state_may_hold(tmp_path: Path):
    state = {
        "tensor": torch.arange(3.0), "array": np.arange(6, dtype=np.int16).reshape(2, 3), "empty": np.zeros((0, 2)),
        "big": 2**100, "none": None, "list": [{"text": "é", "flag": True}, 1.5], "nan": [float("inf")],
    }  # fmt: skip
    checkpoint.save(tmp_path / "state.pt", state)
    assert same(checkpoint.load(tmp_path / "state.pt"), state)


@pytest.mark.parametrize("seed", range(8))
def test_any_damage_is_noticed(tmp_path: Path, seed: int):
    path = tmp_path / "run" / "checkpoint" / "state.pt"
    path.parent.mkdir(parents=True)
    checkpoint.save(path, {"weights": torch.arange(1000.0)})
    whole, rng = path.read_bytes(), np.random.default_rng(seed)
    flipped = bytearray(whole)
    start = whole.index(torch.arange(1000.0).numpy().tobytes())
    flipped[start + int(rng.integers(4000))] ^= 1 << int(rng.integers(8))
    for damaged in (flipped, whole[: int(rng.integers(len(whole)))], b"", os.urandom(100)):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"is damaged \(.+\): restore .* or give another --run-dir"):
            checkpoint.load(path)


@pytest.mark.parametrize(
    ("where", "error", "reason"),
    [
        ("pathlib.Path.read_bytes", PermissionError(errno.EACCES, "Permission denied"), "permission to read it"),
        ("pathlib.Path.read_bytes", OSError(errno.EIO, "Input/output error"), "Input/output error"),
        ("pathlib.Path.read_bytes", MemoryError(), "does not fit into memory"),
        ("torch.load", MemoryError(), "does not fit into memory"),
        ("torch.load", RuntimeError("DefaultCPUAllocator: can't allocate memory"), "does not fit into memory"),
    ],
)
def test_a_file_that_cannot_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception, reason: str
):
    """The reason is printed, and nothing is to be deleted; with the cause gone, the same file loads."""
    checkpoint.save(tmp_path / "state.pt", {"weights": torch.ones(3)})
    with monkeypatch.context() as patch:
        patch.setattr(where, lambda *_, **__: (_ for _ in ()).throw(error))
        with pytest.raises(InputError, match=r"state\.pt .*run the same command") as caught:
            checkpoint.load(tmp_path / "state.pt")
    assert reason in str(caught.value)
    assert not {"damaged", "delete"} & set(str(caught.value).split())
    assert checkpoint.load(tmp_path / "state.pt")["weights"].tolist() == [1, 1, 1]


def test_a_folder_in_the_place_of_a_checkpoint(tmp_path: Path):
    """The system's own reason, from a real read."""
    with pytest.raises(InputError, match=r"cannot be read \(Is a directory\)"):
        checkpoint.load(tmp_path)


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"agent": Evil()}, tmp_path / "state.pt")
    with pytest.raises(InputError, match="damaged"):
        checkpoint.load(tmp_path / "state.pt")
    assert not (tmp_path / "ran").exists()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
