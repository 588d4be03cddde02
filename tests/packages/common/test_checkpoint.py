"""State in, state out; files whole or not there."""

import enum
import errno
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import agent_of, every_algorithm, module, same, small_of
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from algos.sac import SAC, Args
from common import checkpoint
from common.checkpoint import restore, state_of
from common.errors import InputError
from common.files import prepare_output, replacing
from common.optim import Adam
from common.replay_buffer import ReplayBuffer


def agent(seed: int = 1) -> SAC:
    return SAC(Args(**(small_of("sac") | {"seed": seed})), 3, 2, torch.device("cpu"))


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
    alpha, target = restored.log_alpha.item(), restored.target_critic.state_dict()
    assert not same(target, restored.critic.state_dict())  # targets rebuilt from the online networks
    learn(original, 5)
    learn(restored, 5)
    assert same(state_of(original), state_of(restored))
    assert restored.log_alpha.item() != alpha  # the optimiser bound to another tensor


def test_an_attribute_without_a_known_state_is_refused():
    learner = agent()
    learner.history = [1, 2, 3]
    with pytest.raises(InputError, match=r"SAC\.history is a list"):
        state_of(learner)


def test_a_later_attribute_is_saved_without_further_code():
    learner, other = agent(), agent()
    learner.updates, learner.mean, learner.buffer = 7, torch.ones(2), np.arange(3)
    other.updates, other.mean, other.buffer = 0, torch.zeros(2), np.zeros(3, np.int64)
    restore(other, state_of(learner))
    assert (other.updates, other.mean.tolist(), other.buffer.tolist()) == (7, [1, 1], [0, 1, 2])


class Nested:
    """Attributes whose shapes NumPy cannot tell."""

    def __init__(self) -> None:
        self.sizes = ((256, 256), 1)
        self.networks = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2)])
        self.count = 3


def test_constants_and_networks_of_any_nesting_are_restored():
    agent, other = Nested(), Nested()
    other.count = 4
    restore(agent, state_of(other))
    assert agent.count == 4
    assert same(state_of(agent), state_of(other))


def test_state_of_another_shape_or_code_is_refused():
    state = state_of(SAC(Args(**(small_of("sac") | {"hidden": (8,)})), 3, 2, torch.device("cpu")))
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
        ("common.files.open_regular", PermissionError(errno.EACCES, "Permission denied"), "permission to read it"),
        ("common.files.open_regular", OSError(errno.EIO, "Input/output error"), "Input/output error"),
        ("common.files.open_regular", MemoryError(), "does not fit into memory"),
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
    assert not any(word in str(caught.value) for word in ("damaged", "delete"))
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


def test_an_output_is_checked_before_the_work(tmp_path: Path):
    """Its folder is made. A file that is there stays, and so does the rest of the folder."""
    prepare_output(tmp_path / "new" / "a.csv", "--csv")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "old.csv").write_text("old")
    prepare_output(tmp_path / "old.csv", "--csv")
    assert (tmp_path / "old.csv").read_text() == "old"
    for path, reason in ((tmp_path / "new", "Is not a regular file"), (Path("/proc/x.csv"), "No such"),
                         (tmp_path / "old.csv" / "x.csv", "exists")):  # fmt: skip
        with pytest.raises(InputError, match=rf"{path} cannot be written \(.*{reason}.*\): give another --csv"):
            prepare_output(path, "--csv")


SCHEDULES: dict[str, Callable[[Adam], LRScheduler]] = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 30, 1e-5),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
    "milestones": lambda optimizer: MultiStepLR(optimizer, [3, 8, 13], 0.5),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.3, patience=2),
    "warm-up, then decay": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=5), ExponentialLR(optimizer, 0.9)], [5]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("error")
def test_a_scheduled_learning_rate_resumes_exactly(name: str, tmp_path: Path):
    """Half of the steps, a checkpoint, the other half: against PyTorch's own Adam, in one go."""
    start = torch.linspace(-1.0, 1.0, 8)
    plain = torch.nn.Parameter(start.clone())
    theirs = torch.optim.Adam([plain], 0.1, fused=True)
    schedule = SCHEDULES[name](theirs)

    class Agent:
        def __init__(self) -> None:
            self.weights = torch.nn.Parameter(start.clone())
            self.optimizer = Adam([self.weights], 0.1)
            self.schedule = SCHEDULES[name](self.optimizer)

    agent, rates = Agent(), set()
    for step in range(20):
        if step == 10:
            checkpoint.save(tmp_path / "state.pt", state_of(agent))
            restore(agent := Agent(), checkpoint.load(tmp_path / "state.pt"))
        plain.grad = 2.0 * plain.detach()
        theirs.step()
        agent.optimizer.minimize(agent.weights.square().sum())
        for each in (schedule, agent.schedule):
            each.step(*([1.0] if name == "plateau" else []))
        rates.add(agent.optimizer.lr)
        assert agent.optimizer.lr == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-12)
        torch.testing.assert_close(agent.weights, plain)
    assert len(rates) > 3


class Remembering(LRScheduler):
    """A scheduler of a user's own, whose state is what it was given."""

    def __init__(self, optimizer: Adam, held: object) -> None:
        self.held = held
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [0.1]


class Level(enum.IntEnum):
    LOW = 1


@pytest.mark.parametrize(
    ("attribute", "why"),
    [
        (lambda adam: Remembering(adam, deque()), "has a state"),
        (lambda adam: Remembering(adam, lambda: 0.1), "has a state"),
        (lambda _: np.array(["a"]), "has a state"),
        (lambda _: np.array([{}], object), "has a state"),
        (lambda _: Level.LOW, "has a state"),
        (lambda _: (torch.ones(2), torch.zeros(2)), "is a tuple"),
        (lambda adam: OneCycleLR(adam, 0.1, 10), "cycles the momentum, which a captured update would not see"),
    ],
    ids=["deque", "lambda", "strings", "objects", "enum", "tensors", "momentum"],
)
def test_a_state_that_would_not_come_back_is_refused(attribute: Callable[[Adam], object], why: str):
    """In version 0.1 at the first checkpoint with a traceback, at the resume, or never."""
    learner = agent()
    checkpoint.require_saveable(learner)
    learner.extra = attribute(learner.actor_optimizer)
    with pytest.raises(InputError, match=rf"SAC\.extra {why}"):
        checkpoint.require_saveable(learner)


def test_a_numpy_number_is_a_number():
    learner, other = agent(), agent()
    learner.level, other.level = np.float32(0.5), np.float32(0)
    restore(other, state_of(learner))
    assert other.level == 0.5
    assert type(other.level) is np.float32  # a product of two would differ from that of Python's floats


@every_algorithm
def test_what_no_checkpoint_holds_is_refused_at_step_0(algo: str, small, monkeypatch: pytest.MonkeyPatch):
    """Not after the first 10,000 steps; and before anything is written."""
    kind, args = type(agent_of(algo)), small(algo)
    begin = kind.__init__
    monkeypatch.setattr(kind, "__init__", lambda self, *given: begin(self, *given) or setattr(self, "recent", deque()))
    with pytest.raises(InputError, match=r"\w+\.recent is a deque, which a checkpoint cannot hold\n"):
        module(algo).train(args)
    assert not args.run_dir.exists()
