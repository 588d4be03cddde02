"""Recorded updates: equal to eager ones from the same state, the same in every run, and never silently wrong."""

import copy
import itertools
import json
import math
import os
import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from conftest import (
    EVERYTHING,
    OFFLINE,
    agent_of,
    assert_same_folder,
    assert_same_run,
    command,
    every_algorithm,
    final_state,
    flags,
    killed_at,
    modes_of,
    module,
    same,
    some,
    updates_of,
)
from formulas import make_batch
from torch import Tensor

from common import onednn, recorded
from common.arguments import IF_IT_PAYS, RunArgs
from common.checkpoint import state_of
from common.errors import InputError, RunError
from common.launch import Launch
from common.networks import mlp
from common.optim import Adam
from common.provenance import hardware
from common.recorded import CannotCompile, RecordedFunction, Recording, compiler_version
from common.replay_buffer import Batch, ReplayBuffer
from common.tracing import CannotRecord

CPU = torch.device("cpu")


def random_batch(seed: int) -> Batch:
    """Return a batch of 32 transitions of 3 observations and 2 actions."""
    torch.manual_seed(seed)
    batch = Batch(*(part.float() for part in make_batch(32)[:5]))
    moved = batch._replace(obs=batch.obs + torch.randn(32, 3), rewards=batch.rewards + torch.randn(32))
    moved = moved._replace(returns_to_go=moved.rewards - 3.0, next_actions=moved.actions.flip(0))
    return moved._replace(valid=torch.ones(32, 1))


@pytest.mark.parametrize("algo", some("sac", "ppo", "wsrl"))
def test_a_recorded_update_equals_the_eager_one(algo: str, request: pytest.FixtureRequest):
    """To rounding, from each of 10 states along an eager run, and in each form of the update.

    A difference is measured against how far the update moves the tensor. Compiling takes long, so only SAC's recording
    is compiled. Every run compares its recordings itself (`Recording.check`).
    """
    if algo not in some("sac"):
        request.getfixturevalue("interpreted")
    agent = agent_of(algo)
    update = updates_of(agent)
    recordings = {
        online: Recording(lambda *parts, online=online: update(Batch(*parts), online), random_batch(0), agent)
        for online in modes_of(agent)
    }
    moving = 0
    for i in range(10):
        online, batch = i % len(recordings) == 1, random_batch(i)
        before = copy.deepcopy(state_of(agent))
        # A bias before a batch normalisation has a gradient of rounding alone, and Adam's step has its sign.
        noise = recordings[online]._noise(batch) if algo == "crossq" else itertools.repeat(0.0)
        for (start, eager, compiled), rounding in zip(recordings[online].compare(*batch), noise, strict=False):
            scale = (eager - start).abs().max() + 1e-3 * start.abs().max()
            assert (compiled - eager).abs().max() <= 1e-3 * scale + 1e-6 + rounding
            moving += int((eager - start).abs().max() > 0)
        assert same(before, state_of(agent))
        update(batch, online)
    assert moving > 10 * 10


@pytest.mark.parametrize("algo", some("sac"))
def test_recorded_runs_are_deterministic_and_resume_exactly(algo: str, small: Callable[..., RunArgs], tmp_path: Path):
    """The same bits twice, and after a kill; the form is in config.json, and the run is not the eager one."""
    made = {name: small(algo, compile=name != "eager", run_dir=tmp_path / name) for name in ("eager", "a")}
    for args in made.values():
        module(algo).train(args)
        form = json.loads((args.run_dir / "config.json").read_text())["form"]
        assert form == ("recorded" if args.compile else "eager")
    place = ("online step", 75) if algo in OFFLINE else ("step", 550)
    arguments = flags(algo, compile=True, run_dir=tmp_path / "killed")
    killed = killed_at(algo, [place], *arguments)
    assert killed.returncode == 0, killed.stderr
    assert not (tmp_path / "killed" / "DONE").exists()
    assert command(*arguments, algo=algo).returncode == 0
    assert_same_folder(tmp_path / "killed", tmp_path / "a")
    assert not same(final_state(tmp_path / "eager"), final_state(tmp_path / "a"))


class Owner:
    """An agent of one tensor, as recordings see it."""

    def __init__(self) -> None:
        self.total, self.count, self.visits = torch.zeros(3), 0, np.zeros(2)
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 10)
        self.net = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
        self.generator = torch.Generator().manual_seed(0)


def in_place(owner: Owner, x: Tensor) -> Tensor:
    noise = torch.randn(3, generator=owner.generator)
    owner.total += x + noise
    return owner.total.sum()


def test_random_numbers_continue_from_the_generator():
    """Each call draws what the eager function would draw, also after the generator was set from outside."""
    one, other = Owner(), Owner()
    recording = Recording(lambda x: in_place(one, x), [torch.ones(3)], one)
    for i in range(10):
        x = torch.full((3,), float(i))
        torch.testing.assert_close(recording(x), in_place(other, x))
        torch.testing.assert_close(one.total, other.total)
        if i == 4:
            for owner in (one, other):
                owner.generator.manual_seed(7)


def test_a_result_may_be_a_number():
    """Metrics of an own algorithm may hold one, or None."""
    recording = Recording(lambda x: {"tensor": 2.0 * x, "number": 3.0, "nothing": None}, [torch.ones(3)], Owner())
    recording.check(torch.ones(3))
    results = recording(torch.ones(3))
    assert results.pop("tensor").tolist() == [2.0] * 3
    assert results == {"number": 3.0, "nothing": None}


@pytest.mark.usefixtures("interpreted")
def test_an_extended_run_keeps_its_form(
    small: Callable[..., RunArgs], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A short run is eager, also when it is resumed with as many steps as those of recorded runs."""
    monkeypatch.setattr(module("sac").Args, "worth_compiling", 500)
    for steps in (400, 600):
        args = small(total_steps=steps)
        module("sac").train(args)
        assert json.loads((args.run_dir / "config.json").read_text())["form"] == "eager"
    assert "compiling" not in capsys.readouterr().err
    module("sac").train(small(total_steps=600, run_dir=Path("whole")))
    assert "compiling" in capsys.readouterr().err


def test_each_set_of_constants_and_shapes_is_recorded_once():
    made: list[tuple[int, ...]] = []

    def record(function: Callable[..., Tensor], tensors: Any) -> Callable[..., Tensor]:
        made.append(tuple(tensors[0].shape))
        return function

    called = RecordedFunction(lambda x, scale, negative=False: (-x if negative else x) * scale, record)
    for _ in range(3):
        for n, scale in ((2, 3.0), (4, 3.0), (4, 5.0)):
            x = torch.ones(n)
            assert called(x, scale).tolist() == [scale] * n
            assert called(x, scale, negative=True).tolist() == [-scale] * n
    assert made == [(2,), (2,), (4,), (4,), (4,), (4,)]


def rebinds(owner: Owner, x: Tensor) -> Tensor:
    owner.total = owner.total + x
    return owner.total


def counts(owner: Owner, x: Tensor) -> Tensor:
    owner.count += 1
    return x


def visits(owner: Owner, x: Tensor) -> Tensor:
    owner.visits += 1
    return x


def schedules(owner: Owner, x: Tensor) -> Tensor:
    owner.scheduler.step()
    return x


def counts_in_a_module(owner: Owner, x: Tensor) -> Tensor:
    owner.net[0].momentum *= 0.5
    return x


def scatters(owner: Owner, x: Tensor) -> Tensor:
    return torch.zeros(2000).index_add(0, torch.zeros(3, dtype=torch.int64), x)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda owner, x: x * x.sum().item(), "DataDependent"),
        (lambda owner, x: x[x > 0], "DynamicOutputShape"),
        (lambda owner, x: x if x.sum() > 0 else -x, "DataDependent"),
        (lambda owner, x: x + torch.randn(3), "draws without a torch.Generator"),
        (lambda owner, x: x + torch.from_numpy(np.random.default_rng().normal(size=3)), "two recordings of it differ"),
        (lambda owner, x: torch.empty(3).normal_(generator=owner.generator), "use torch.rand"),
        (rebinds, "changes total of Owner"),
        (counts, "changes count of Owner"),
        (visits, "changes visits of Owner"),
        (schedules, "changes scheduler of Owner"),
        (counts_in_a_module, "changes net of Owner"),
        (scatters, "may be compiled to wrong code"),
    ],
    ids=[
        "item",
        "mask",
        "branch",
        "global random numbers",
        "numpy",
        "normal_",
        "rebinding",
        "counter",
        "array",
        "scheduler",
        "module",
        "scatter",
    ],
)
def test_what_cannot_be_recorded_is_refused(function: Callable[[Owner, Tensor], Tensor], why: str):
    """With its reason, and nothing that the owner holds has changed."""
    owner = Owner()
    before = dict(vars(owner))
    with pytest.raises(CannotRecord, match=why):
        Recording(lambda x: function(owner, x), [torch.ones(3)], owner)
    assert vars(owner) == before
    assert owner.total.tolist() == [0.0] * 3
    assert owner.visits.tolist() == [0.0] * 2
    assert (owner.scheduler.last_epoch, owner.net[0].momentum) == (0, 0.1)


def test_the_check_restores_all_that_an_update_changes():
    """The argument, running statistics that no schema declares, and a counter of whole numbers."""
    owner = Owner()
    owner.net.train()

    def update(x: Tensor) -> Tensor:
        owner.net(x)
        return x.mul_(0.5)

    x = torch.randn(4, 3)
    before, given = copy.deepcopy(owner.net.state_dict()), x.clone()
    recording = Recording(update, [x], owner)
    recording.check(x)
    assert same(owner.net.state_dict(), before)
    assert torch.equal(x, given)
    recording(x)
    assert owner.net[0].num_batches_tracked == 1
    assert not torch.equal(owner.net[0].running_mean, before["0.running_mean"])
    torch.testing.assert_close(x, 0.5 * given)


def test_another_object_of_the_same_value_is_noticed():
    """Compiled code would use the old generator and the old tensor, and checkpoints would hold the new ones."""
    for name, value in (("generator", torch.Generator().manual_seed(1)), ("total", torch.zeros(3))):
        owner = Owner()
        recording = Recording(lambda x, owner=owner: in_place(owner, x), [torch.ones(3)], owner)
        assert recording.is_current()
        setattr(owner, name, value)
        assert not recording.is_current()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, changed: torch.sub(*(2.0 * x, (3.0 * x).exp())[:: -1 if changed else 1]),
        lambda x, changed: (2.0 * x)[1 if changed else 0 :][:2].exp(),
        lambda x, changed: (2.0 * x).view((1, 3) if changed else (3, 1)).exp(),
        lambda x, changed: x.clamp(max=2.0 if changed else 1.0),
        lambda x, changed: (x.sin(), x.cos())[:: -1 if changed else 1],
        lambda x, changed: {"b" if changed else "a": x + 1.0},
        lambda x, changed: (x + 1.0, 2.0 if changed else 1.0),
    ],
    ids=["operands", "view", "shape", "constant", "order of results", "name of a result", "number in the results"],
)
def test_another_graph_is_noticed(function: Callable[[Tensor, bool], Any]):
    """From operations that are the same ones, but for what each reads, or for what becomes of the results."""
    changed = False
    recording = Recording(lambda x: function(x, changed), [torch.ones(3)], Owner())
    assert recording.is_current()
    changed = True
    assert not recording.is_current()


@pytest.mark.parametrize(
    "function",
    [
        lambda owner, x, y, changed: y - x if changed else x - y,
        lambda owner, x, y, changed: (y if changed else x) + 1.0,
        lambda owner, x, y, changed: y if changed else x,
        lambda owner, x, y, changed: (x + y, owner.optimizer.param_groups[0]["params"][0] if changed else owner.total),
    ],
    ids=["swapped", "the other one", "returned", "returned from outside"],
)
def test_another_argument_or_result_is_noticed(function: Callable[..., Any]):
    changed, owner = False, Owner()
    recording = Recording(lambda x, y: function(owner, x, y, changed), [torch.ones(3), torch.ones(3)], owner)
    assert recording.is_current()
    changed = True
    assert not recording.is_current()


@pytest.mark.parametrize(
    "sizes", [(1, 1, 5), (1, 5, 1), (5, 1, 1), (1, 5, 5), (5, 5, 1), (5, 1, 5), (1, 1, 1)], ids=str
)
def test_products_of_single_rows_and_columns_are_recorded(sizes: tuple[int, int, int]):
    """The trace replaces them by plain operations, and the check does not. Arguments may be slices and expanded."""
    n, k, m = sizes
    x, weight = torch.randn(n, 2 * k)[:, :k], torch.nn.Parameter(torch.randn(m, 1).expand(m, k))

    def update(x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad((x @ weight.t()).exp().sum(), weight)
        return gradient.sin()

    recording = Recording(update, [x], Owner())
    assert recording.is_current()
    torch.testing.assert_close(recording(x), update(x))


def test_wrong_compiled_code_is_found(monkeypatch: pytest.MonkeyPatch):
    """A compiler that doubles what is added: the check raises, and the state is as it was."""
    monkeypatch.setattr(recorded, "_compiled", lambda graph, _: lambda *inputs: graph(*(2.0 * i for i in inputs)))
    owner = Owner()
    recording = Recording(lambda x: in_place(owner, x), [torch.ones(3)], owner)
    with pytest.raises(CannotCompile, match="another result"):
        recording.check(torch.ones(3))
    assert owner.total.tolist() == [0.0] * 3
    assert torch.equal(owner.generator.get_state(), Owner().generator.get_state())


class Cancelled(Owner):
    """A bias before a batch normalisation, whose gradient is zero but for rounding, and Adam, which steps all the same.

    A compiler that adds in another order gives some elements of the bias the other sign.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 1))
        self.optimizer = Adam(self.net.parameters(), 1e-3)

    def update(self, x: Tensor) -> None:
        loss = 1e3 * self.net(x).sin().square().mean()  # rounding above the ε of Adam
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


@pytest.mark.parametrize("fault", ["rounding", "its step", "moments", "another weight"])
def test_signs_of_rounding_pass_the_check_and_faults_do_not(fault: str, monkeypatch: pytest.MonkeyPatch):
    """Where gradients are rounding, the sign of a step may differ, but not its size, and nothing may elsewhere."""
    owner = Cancelled()
    bias, weight = owner.net[0].bias, owner.net[2].weight

    def compiled(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        def call(*inputs: Any) -> Any:
            owner.net[0].weight.mul_(1.0 + 3e-7 * torch.randn(64, 8, generator=torch.Generator().manual_seed(1)))
            before = bias.detach().clone()
            results = graph(*inputs)
            if fault == "its step":
                bias.add_(2.0 * (bias - before))
            if fault == "moments":
                owner.optimizer.state[weight]["exp_avg"].mul_(2.0)
            if fault == "another weight":
                weight.sub_(1e-3 * (torch.arange(64) < 4))
            return results

        return call

    monkeypatch.setattr(recorded, "_compiled", compiled)
    x = torch.randn(256, 8)
    recording = Recording(owner.update, [x], owner)
    differ = [(eager - compiled).abs() > 1e-3 for _, eager, compiled in recording.compare(x)]
    assert sum(int(d.sum()) for d in differ) > 0
    with nullcontext() if fault == "rounding" else pytest.raises(CannotCompile, match="another result"):
        recording.check(x)


def test_chosen_rows_get_the_sum_of_their_gradients():
    """The rows of a stack that an index chose twice, against eager indexing; Inductor's own form was wrong here."""
    weights, x = torch.randn(3, 4, 5), torch.randn(7, 5)
    for index in ([0, 0], [2, 0], [1, 1], [-1, 0]):

        def gradient(x: Tensor, index: Tensor) -> Tensor:
            leaf = weights.requires_grad_()
            values = x @ leaf.mT
            loss = (values - 1.0).square().mean() + values[index].logsumexp(0).mean() + (x @ leaf[index].mT).mean()
            return torch.autograd.grad(loss, leaf)[0]

        chosen = torch.tensor(index)
        torch.testing.assert_close(Recording(gradient, [x, chosen], Owner())(x, chosen), gradient(x, chosen))


@pytest.mark.parametrize("activation", ["gelu", "tanh"])
@pytest.mark.parametrize("is_large", [False, True], ids=["PyTorch's backward pass", "our own"])
def test_hidden_layers_are_compiled_without_a_tanh(activation: Literal["gelu", "tanh"], is_large: bool):
    """Values and gradients against the usual formula in float64, also where a sigmoid is 0 or 1 in float32."""
    net = mlp([1, 1024, 1024, 1] if is_large else [1, 3, 1], torch.Generator().manual_seed(0), activation=activation)
    for layer in (part for part in net if isinstance(part, torch.nn.Linear)):
        torch.nn.init.eye_(layer.weight)  # the first unit applies the activation to the input, then to the result
        torch.nn.init.zeros_(layer.bias)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        outputs = net(x := x.detach().requires_grad_())
        return outputs, torch.autograd.grad(outputs.sum(), x)[0]

    x = torch.tensor([-100.0, -12.0, -5.0, -1.0, -1e-3, 0.0, 1e-6, 0.3, 2.0, 9.0, 100.0]).unsqueeze(1)
    recording = Recording(both, [x], Owner())
    assert "sigmoid" in recording.trace.graph.code
    assert not re.search(r"tanh_?\.|gelu", recording.trace.graph.code)
    exact = of_layer = x.double().requires_grad_()
    for _ in range(2 if is_large else 1):
        if activation == "tanh":
            of_layer = torch.tanh(of_layer)
        else:
            of_layer = of_layer * (1 + torch.tanh(math.sqrt(2 / math.pi) * (of_layer + 0.044715 * of_layer**3))) / 2
    expected = of_layer, torch.autograd.grad(of_layer.sum(), exact)[0]
    for found, wanted in zip(recording(x), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("library", ["MKL", "oneDNN"])
def test_large_products_are_those_of_the_library(library: str, monkeypatch: pytest.MonkeyPatch):
    """Loss and gradients of two networks of 256 units, against float64 without either library's kernels."""
    if not onednn.AVAILABLE:
        pytest.skip("this PyTorch has no oneDNN")
    product = torch.ops.mkldnn._linear_pointwise.default
    monkeypatch.setattr(onednn, "_PRODUCT", product if library == "oneDNN" else None)
    net = mlp([23, 256, 256, 1], torch.Generator().manual_seed(0), ensemble=2, layer_norm=True)
    x = torch.randn(256, 23)

    def gradients(x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(net(x).square().mean(), list(net.parameters()))

    recording = Recording(gradients, [x], Owner())
    with torch.profiler.profile() as profile:
        found = recording(x)
    assert any("_linear_pointwise" in event.name for event in profile.events()) == (library == "oneDNN")
    for own, exact in zip(found, gradients_in_float64(net, x), strict=True):
        torch.testing.assert_close(own.double(), exact, rtol=1e-4, atol=1e-5 * exact.abs().max().item())


def gradients_in_float64(net: torch.nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    exact = copy.deepcopy(net).double()
    exact._layers = [tuple(part.double().detach().requires_grad_() for part in layer) for layer in net._layers]
    weights = [part for layer in exact._layers for part in layer]
    return torch.autograd.grad(exact(x.double()).square().mean(), weights)


@pytest.mark.parametrize(("weight_decay", "longest"), [(0.0, None), (0.1, 0.5)])
def test_adam_equals_pytorch_s(weight_decay: float, longest: float | None):
    """Twenty steps with a rate that falls, against torch.optim.AdamW in float64."""
    start = torch.randn(5, 3)
    own, other = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.double())
    optimizer = Adam([own], 0.1, weight_decay=weight_decay)
    plain = torch.optim.AdamW([other], 0.1, weight_decay=weight_decay)

    def step(x: Tensor) -> Tensor:
        loss = (own - x).square().sum()
        optimizer.minimize(loss, longest)
        return loss

    recording = Recording(step, [start], Owner())
    for i in range(20):
        x = torch.randn(5, 3)
        optimizer.lr = plain.param_groups[0]["lr"] = 0.1 / (i + 1)
        recording(x)
        plain.zero_grad()
        (other - x.double()).square().sum().backward()
        if longest is not None:
            torch.nn.utils.clip_grad_norm_([other], longest)
        plain.step()
        torch.testing.assert_close(own.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("steps", "form"), [(-1, "eager"), (0, "recorded")])
@pytest.mark.parametrize(("algo", "from_steps"), [("sac", 20_000), ("stream_ac", 20_000), ("ppo", 200_000)])
def test_long_runs_are_recorded(algo: str, from_steps: int, steps: int, form: str):
    args = module(algo).Args(total_steps=from_steps + steps)
    assert args.compile is IF_IT_PAYS
    assert Launch(args, CPU).form == form
    assert Launch(module(algo).Args(total_steps=from_steps + steps, compile=False), CPU).form == "eager"
    assert Launch(module(algo).Args(total_steps=from_steps + steps, compile=True), CPU).form == "recorded"
    assert Launch(args, torch.device("cuda")).form == "CUDA graphs"


@pytest.mark.parametrize(
    ("num_envs", "given", "is_eager"), [(15, {}, False), (16, {}, True), (16, {"compile": True}, False)]
)
def test_a_policy_that_many_environments_share_is_eager(num_envs: int, given: dict[str, bool], is_eager: bool):
    """Loading its compiled code would delay the first step, unless `--compile` asks for it."""
    launch = Launch(module("ppo").Args(num_envs=num_envs, **given), CPU)
    assert launch.form == "recorded"
    agent = agent_of("ppo")
    assert (launch.policy(agent) == agent.act) == is_eager


def test_the_version_is_of_the_compiler_that_inductor_chooses():
    """`compiler_version` does not ask Inductor, because importing it takes long."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    output = subprocess.run([get_cpp_compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    assert output.startswith(compiler_version() + "\n")


def test_without_a_compiler_a_run_stays_eager(small: Callable[..., RunArgs], tmp_path: Path, monkeypatch: Any):
    """It says so in one line, its config.json too, and it is the eager run; a compiled run is not resumed so."""
    monkeypatch.setattr("common.launch.compiler_version", _no_compiler)
    eager, asked = (small(compile=wanted, run_dir=tmp_path / str(wanted)) for wanted in (False, True))
    for args in (eager, asked):
        module("sac").train(args)
    assert json.loads((asked.run_dir / "config.json").read_text())["form"] == "eager"
    assert_same_run(eager.run_dir, asked.run_dir)
    (asked.run_dir / "DONE").unlink()
    config = json.loads((asked.run_dir / "config.json").read_text())
    del config["crc32"]  # the checksum, which would refuse the change
    (asked.run_dir / "config.json").write_text(json.dumps(config | {"form": "recorded"}))
    with pytest.raises(InputError, match=r"updates are compiled, and no C\+\+ compiler was found: install a working"):
        module("sac").train(asked)


def _no_compiler() -> None:
    raise CannotCompile("no C++ compiler was found")


def test_a_missing_compiler_is_named(tmp_path: Path):
    """As a user meets it, from the environment variable that names the compiler."""
    environment = os.environ | {"CXX": "/nonexistent/compiler"}
    done = command(*flags(compile=True, total_steps=20, run_dir=tmp_path / "run"), env=environment)
    assert done.returncode == 0
    assert done.stderr.count("note: updates stay eager, which is slower: no C++ compiler was found") == 1


@every_algorithm
@pytest.mark.usefixtures("interpreted", "checked_once")
def test_every_update_and_action_of_a_run_is_recorded(
    algo: str, small: Callable[..., RunArgs], capsys: pytest.CaptureFixture[str]
):
    """In each phase, with batches of online transitions alone (WSRL) or of both kinds (the others)."""
    retained = ("none", "mix") if EVERYTHING else ("none" if algo == "wsrl" else "mix",)
    for retain in retained if algo in OFFLINE and algo != "bc" else (None,):
        chosen = {} if retain is None else {"retain": retain}
        args = small(algo, compile=True, total_steps=150, time_limit=50, run_dir=Path(f"run-{retain}"), **chosen)
        module(algo).train(args)
        assert json.loads((args.run_dir / "config.json").read_text())["form"] == "recorded"
        said = capsys.readouterr().err
        assert said.count("compiling an update or action") == said.count("compiled in ") >= 2
        assert "eager" not in said


@pytest.mark.usefixtures("interpreted")
def test_an_update_that_cannot_be_recorded_stays_eager(
    small: Callable[..., RunArgs], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """One line gives the reason, and the run gets to its end."""
    sac = module("sac").SAC
    update = sac.update
    monkeypatch.setattr(sac, "update", lambda self, batch, _: update(self, batch) if batch.rewards.sum().item() else {})
    args = small(compile=True)
    module("sac").train(args)
    said = capsys.readouterr().err
    assert said.count("stays eager, which is slower: DataDependent") == 1
    assert (args.run_dir / "DONE").exists()


@pytest.mark.usefixtures("interpreted")
def test_a_failed_compilation_makes_a_new_run_eager(
    small: Callable[..., RunArgs], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Nothing was compiled yet, so the run is the eager one; after a compiled update it ends instead."""

    def fails(graph: Any, _: Any) -> Any:
        raise CannotCompile("the disk is full")

    monkeypatch.setattr(recorded, "_compiled", fails)
    eager, failed = (small(compile=wanted, run_dir=tmp_path / str(wanted)) for wanted in (False, True))
    for args in (eager, failed):
        module("sac").train(args)
    assert json.loads((failed.run_dir / "config.json").read_text())["form"] == "eager"
    assert_same_run(eager.run_dir, failed.run_dir)
    monkeypatch.setattr(recorded, "_compiled", lambda graph, _: graph if len(graph.graph.nodes) < 100 else fails(0, 0))
    with pytest.raises(RunError, match="cannot be compiled"):
        module("sac").train(small(compile=True, run_dir=tmp_path / "second"))


@pytest.mark.usefixtures("interpreted")
def test_a_signal_that_ends_the_compiler_too_leaves_the_run_recorded(
    small: Callable[..., RunArgs], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Ctrl-C in a terminal does, at the first compilation of a run or at its second."""
    compiling = iter(["signal", "compiler", "signal", *["compiler"] * 9])

    def compiled(graph: Any, _: Any) -> Any:
        if next(compiling) == "compiler":
            return graph
        os.kill(os.getpid(), signal.SIGINT)
        raise CannotCompile("the compiler was killed")

    monkeypatch.setattr(recorded, "_compiled", compiled)
    stopped, args = small(compile=True, run_dir=tmp_path / "stopped"), small(compile=True)
    for _ in range(2):
        with pytest.raises(SystemExit) as stop:
            module("sac").train(stopped)
        assert stop.value.code == 130
    for each in (stopped, args):
        module("sac").train(each)
        assert json.loads((each.run_dir / "config.json").read_text())["form"] == "recorded"
    assert_same_folder(stopped.run_dir, args.run_dir)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("changes", ["number of the agent", "size of the buffer"])
def test_what_changes_after_the_recording_ends_the_run(
    changes: str, small: Callable[..., RunArgs], monkeypatch: pytest.MonkeyPatch
):
    """Compiled code would use the old value for ever. The run ends soon after the change, with a message."""
    sac = module("sac").SAC
    act = sac.act

    def changing(self: Any, obs: Any, *args: Any, **kwargs: Any) -> Any:
        self.gamma *= 0.999
        return act(self, obs, *args, **kwargs)

    changing.__wrapped__ = act.__wrapped__  # type: ignore[attr-defined]
    if changes == "number of the agent":
        monkeypatch.setattr(sac, "act", changing)
    else:
        monkeypatch.setattr(
            ReplayBuffer,
            "sample",
            lambda self, size, source: self.at(torch.randint(len(self), (size,), generator=source)),
        )
    args = small(compile=True, eval_every=20)  # evaluations call `act` from Python
    with pytest.raises(RunError, match="depends on something that changes, and compiled code holds it"):
        module("sac").train(args)
    assert not (args.run_dir / "DONE").exists()
    assert final_state(args.run_dir)["logger"]["step"] == 50


@pytest.mark.parametrize("instruction", ["amx_bf16", "avx512_bf16", ""])
def test_bfloat16_products_need_the_instruction(instruction: str, monkeypatch: pytest.MonkeyPatch):
    """Products have float32's precision or bfloat16's, as asked for, and a processor that would emulate is refused."""
    monkeypatch.setattr(onednn, "_CPUINFO", f"flags : avx512f {instruction} fma")
    x, y = torch.randn(256, 256), torch.randn(256, 256)
    exact = x.double() @ y.double()
    try:
        if instruction != "amx_bf16":
            with pytest.raises(InputError, match="needs a processor with AMX"):
                onednn.set_products("bfloat16")
            return
        onednn.set_products("bfloat16")
        if torch.cpu._is_amx_tile_supported():
            assert 1e-3 < (x @ y - exact).abs().max() < 1.0
    finally:
        onednn.set_products("float32")
    assert (x @ y - exact).abs().max() < 1e-3


def test_checks_take_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch):
    """Once a minute, or more rarely where a check takes more than 0.6 s."""
    now, checks = 0.0, []

    class Slow:
        def is_current(self) -> bool:
            nonlocal now
            checks.append(now)
            now += took
            return True

    monkeypatch.setattr("time.monotonic", lambda: now)
    for took, every in ((0.5, 60.0), (7.0, 700.0)):
        now = 0.0
        launch = Launch(module("sac").Args(compile=True), CPU)
        launch._recordings.append(Slow())  # type: ignore[arg-type]
        checks.clear()
        while now < 200.0 + 4 * every:
            now += 1.0
            launch.check(now=False)
        later = [time for time in checks if time > 200.0]  # after the 10th and 100th report
        assert len(later) > 2
        assert all(0.0 <= b - a - took - every <= 1.0 for a, b in itertools.pairwise(later))


def test_another_processor_is_named_at_the_resume(
    small: Callable[..., RunArgs], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """And another number of threads, which also changes sums' last bits; the number of cores does not."""
    args = small(total_steps=300)
    module("sac").train(args)
    for other, warned in (({"cores": 96}, ""), ({"cpu": "another", "threads": 96}, "cpu, threads changed since the")):
        found = hardware(torch.device("cpu")) | other
        monkeypatch.setattr("common.run.hardware", lambda device, found=found: found)
        capsys.readouterr()
        module("sac").train(small(total_steps=args.total_steps + 10 * len(other), run_dir=args.run_dir))
        said = capsys.readouterr().err
        assert warned in said if warned else "changed since" not in said


@pytest.mark.usefixtures("interpreted")
def test_another_compiler_is_named_at_the_resume(
    small: Callable[..., RunArgs], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Its code may round differently. An eager run depends on no compiler."""
    for wanted in (True, False):
        args = small(compile=wanted, total_steps=300, run_dir=Path(str(wanted)))
        module("sac").train(args)
        monkeypatch.setattr("common.launch.compiler_version", lambda: "another 1.0")
        capsys.readouterr()
        module("sac").train(small(compile=wanted, total_steps=320, run_dir=args.run_dir))
        warned = "warning: compiler changed since the run began: its results may differ"
        assert (warned in capsys.readouterr().err) == wanted
