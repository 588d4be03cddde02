"""Updates as CUDA graphs, with a graph of the tests' own where there is no GPU; the GPU's part is in test_cuda.py."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import agent_of, final_state, module, replay_bytes, same, some, updates_of, with_flag
from cpu_graph import CPUGraph
from formulas import make_batch, parameters
from torch import Tensor

from common import networks
from common.arguments import Unset
from common.cuda import GPU_SHARE_ENV, WARM_UP, CUDAGraph, GraphedFunction, compiled, device, share_of_memory
from common.errors import InputError
from common.replay_buffer import Batch, free_memory
from common.run import Run


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[GraphedFunction[Any]]:
    """Runs capture as with CUDA, by a graph on the CPU, and compute as there; all that was captured."""
    made: list[GraphedFunction[Any]] = []

    def captured(function: Callable[..., Any], generator: torch.Generator) -> GraphedFunction[Any]:
        made.append(GraphedFunction(function, generator, CPUGraph))
        return made[-1]

    monkeypatch.setattr(networks, "MIN_ONEDNN_MULTIPLICATIONS", 2**60)  # oneDNN's networks are the CPU's alone
    monkeypatch.setattr("common.launch.GraphedFunction", captured)
    monkeypatch.setattr(
        "common.launch.Launch._chosen_form", lambda self: "CUDA graphs" if self.args.cuda_graph else "eager"
    )
    return made


@pytest.mark.parametrize(
    ("algo", "overlap"),
    [*((algo, False) for algo in some("sac", "td3", "ppo", "wsrl", "expo", "simba_v2")), ("sac", True)],
)
def test_a_captured_run_equals_an_eager_one(
    algo: str, overlap: bool, small: Callable[..., Any], tmp_path: Path, as_on_a_gpu: list[GraphedFunction[Any]]
):
    """To its end and bit for bit: more than a hundred replays, in every phase, and all that a checkpoint holds."""
    more = {"time_limit": 50} | ({"overlap": overlap} if algo in with_flag("overlap") else {})
    for cuda_graph in (False, True):
        args = small(algo, total_steps=200, cuda_graph=cuda_graph, run_dir=tmp_path / str(cuda_graph), **more)
        module(algo).train(args)
    replays = [kind.calls - WARM_UP for each in as_on_a_gpu for kind in each._entries.values()]
    assert len(as_on_a_gpu) == 2  # act, update
    assert sum(replays) > 100
    eager, captured = tmp_path / "False", tmp_path / "True"
    assert (eager / "evaluations.csv").read_text() == (captured / "evaluations.csv").read_text()
    assert same(final_state(eager), final_state(captured))
    assert replay_bytes(eager) == replay_bytes(captured)


@pytest.mark.parametrize(
    "algo", [algo for algo in with_flag("utd") if module(algo).Args.utd != 1 and algo in some("rlpd")]
)
def test_as_many_updates_a_step_as_the_papers_are_one_graph(
    algo: str, small: Callable[..., Any], tmp_path: Path, as_on_a_gpu: list[GraphedFunction[Any]]
):
    """Of 20 updates, or as many as the default says: the critics' steps on the slices of one batch."""
    utd = 20 if isinstance(module(algo).Args.utd, Unset) else module(algo).Args.utd
    shape = {"utd": utd, "batch_size": 4, "total_steps": 240}
    for cuda_graph in (False, True):
        args = small(algo, cuda_graph=cuda_graph, run_dir=tmp_path / str(cuda_graph), **shape)
        module(algo).train(args)
    kinds = [item for each in as_on_a_gpu for item in each._entries.items()]
    [online] = [kind.calls for key, kind in kinds if key == (("online", True),)]
    state = final_state(tmp_path / "True")
    updates = int(state["agent"]["critic_optimizer"]["state"][0]["step"])
    agent, batch = agent_of(algo), Batch(*(part.float() for part in make_batch(4)[:5]))
    updates_of(agent)(batch._replace(returns_to_go=batch.rewards), False)
    offline = int(agent.critic_optimizer.step_count)  # 0 if the critics learn online alone
    assert utd * online == updates - offline * args.offline_steps
    assert online > WARM_UP
    assert same(final_state(tmp_path / "False"), state)


class TestCaptured:
    """Against the same function, called eagerly."""

    def test_each_set_of_constants_and_shapes_is_a_graph_of_its_own(self) -> None:
        ran: list[tuple[int, float]] = []

        def function(x: Tensor, scale: float, negative: bool = False) -> Tensor:
            ran.append((len(x), -scale if negative else scale))
            return -scale * x if negative else scale * x

        captured = GraphedFunction(function, torch.Generator(), CPUGraph)
        for i in range(10):
            for n, scale in ((2, 3.0), (4, 3.0), (4, 5.0)):
                x = torch.full((n,), float(i))
                assert captured(x, scale).tolist() == [scale * i] * n
                assert captured(x, scale, negative=True).tolist() == [-scale * i] * n
        kinds = [(n, sign * scale) for n, scale in ((2, 3.0), (4, 3.0), (4, 5.0)) for sign in (1, -1)]
        assert [ran.count(kind) for kind in kinds] == [WARM_UP + 1] * 6

    def test_random_numbers_go_on_where_the_generator_stands(self) -> None:
        generators = [torch.Generator().manual_seed(0) for _ in range(2)]
        draw = [lambda g=g: torch.rand(3, generator=g) for g in generators]
        captured = GraphedFunction(draw[0], generators[0], CPUGraph)
        for i in range(10):
            assert torch.equal(captured(), draw[1]())
            if i == 7:
                for generator in generators:
                    generator.manual_seed(i)
                    torch.randn(5, generator=generator)

    def test_what_a_caller_does_to_the_results_leaves_the_next_ones_whole(self) -> None:
        """A run clears the metrics that it has logged."""
        captured = GraphedFunction(lambda x: {"loss": 2 * x, "parts": (x, x + 1)}, torch.Generator(), CPUGraph)
        for i in range(WARM_UP + 5):
            found = captured(torch.tensor(i))
            assert found == {"loss": 2 * i, "parts": (i, i + 1)}
            found.clear()

    def test_changes_in_place_continue_and_rebinding_does_not(self) -> None:
        """The second is what a graph gets wrong: the tests above must not pass with it."""

        class State:
            total = torch.zeros(1)

        def in_place(state: State) -> Tensor:
            state.total += 1
            return state.total.clone()

        def rebound(state: State) -> Tensor:
            state.total = state.total + 1
            return state.total.clone()

        for function, last in ((in_place, 10), (rebound, WARM_UP + 1)):
            state = State()
            state.total = torch.zeros(1)
            captured = GraphedFunction(partial(function, state), torch.Generator(), CPUGraph)
            assert [captured().item() for _ in range(10)][-1] == last

    @pytest.mark.parametrize(
        ("function", "why"),
        [
            (lambda x: x * x.sum().item(), "a CUDA graph cannot capture"),
            (lambda x: x[x > 0], "a CUDA graph cannot capture"),
            (lambda x: x + torch.tensor([1.0]), "a CUDA graph cannot capture"),
            (lambda x: x if x.sum() > 0 else -x, "a CUDA graph cannot capture"),
            (lambda x: x.cumsum(0), "no deterministic algorithm"),
            (lambda x: x.histc(3), "no deterministic algorithm"),
        ],
        ids=["item", "mask", "from the host", "branch", "cumsum", "histc"],
    )
    def test_what_a_graph_cannot_repeat_is_refused(self, function: Callable[[Tensor], Tensor], why: str) -> None:
        captured = GraphedFunction(function, torch.Generator(), CPUGraph)
        for _ in range(WARM_UP):
            captured(torch.ones(3))
        with pytest.raises(RuntimeError, match=why):
            captured(torch.ones(3))


def test_cuda_is_asked_for_a_graph_in_the_order_that_it_wants(monkeypatch: pytest.MonkeyPatch):
    """With a stand-in for torch.cuda: the generator is known before anything is recorded; warm-ups and recording are on
    one stream of their own, which waits for what was sent before, and is waited for; an error leaves Python as it was.
    """
    calls: list[tuple[Any, ...]] = []

    class Stream:
        def wait_stream(self, other: Any) -> None:
            calls.append(("wait", self, other))

    @contextlib.contextmanager
    def on(kind: str, *where: Any) -> Iterator[None]:
        calls.append((f"begin {kind}", *where))
        yield
        calls.append((f"end {kind}", *where))

    current, own = Stream(), Stream()
    graph = SimpleNamespace(
        register_generator_state=lambda state: calls.append(("register", state)),
        replay=lambda: calls.append(("replay",)),
    )
    monkeypatch.setattr(CUDAGraph, "stream", None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: own)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "stream", partial(on, "stream"))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: on("record", graph, stream))
    generator = torch.Generator()
    captured = GraphedFunction(lambda x: calls.append(("function", gc.isenabled())) or x, generator, CUDAGraph)
    for _ in range(WARM_UP + 2):
        captured(torch.ones(3))
    warm_up = [
        ("wait", own, current), ("begin stream", own), ("function", True), ("end stream", own), ("wait", current, own),
    ]  # fmt: skip
    recording = [("begin record", graph, own), ("function", False), ("end record", graph, own)]
    assert calls == [("register", generator), *WARM_UP * warm_up, *recording, *2 * [("replay",)]]
    with pytest.raises(ZeroDivisionError):
        CUDAGraph(generator).record(lambda: 1 / 0)
    assert gc.isenabled()


@pytest.mark.parametrize("said", ["0", "1.5", "half", "nan"])
def test_a_share_of_the_memory_that_is_none_is_refused(said: str, monkeypatch: pytest.MonkeyPatch):
    assert share_of_memory() == 1.0
    monkeypatch.setenv(GPU_SHARE_ENV, "0.25")
    assert share_of_memory() == 0.25
    monkeypatch.setenv(GPU_SHARE_ENV, said)
    with pytest.raises(InputError, match=f"is '{said}': give a number in"):
        share_of_memory()


def test_a_run_given_a_share_of_a_card_does_not_train_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device("auto").type == "cpu"
    monkeypatch.setenv(GPU_SHARE_ENV, "0.25")
    assert device("cpu").type == "cpu"
    with pytest.raises(InputError, match=f"{GPU_SHARE_ENV} is set, but PyTorch sees no CUDA device"):
        device("auto")


@pytest.mark.parametrize("tf32", [False, True])
def test_the_mantissa_of_products_on_cuda_is_what_was_asked_for(tf32: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share: None)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda wanted: None)
    products = torch.backends.cuda.matmul
    before = products.allow_tf32
    monkeypatch.setattr("common.run.device", lambda *asked: device("cuda", *asked[1:]))
    monkeypatch.setattr("common.run.require_resources", lambda *asked: None)  # it would ask the card
    try:
        products.allow_tf32 = not tf32  # from a run before it in this process
        Run("sac", module("sac").Args(tf32=tf32))
        assert products.allow_tf32 is tf32
    finally:
        products.allow_tf32 = before


@pytest.mark.parametrize(("free", "expected"), [(900, 400), (300, 300)])
def test_a_buffer_must_fit_into_what_is_left_of_the_share(free: int, expected: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 1_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 100)
    monkeypatch.setenv(GPU_SHARE_ENV, "0.5")
    assert free_memory(torch.device("cuda")) == expected


@pytest.mark.parametrize("algo", some("sac", "fql"))
def test_a_compiled_update_equals_an_eager_one(algo: str, monkeypatch: pytest.MonkeyPatch):
    """To rounding, a hundred of them, in float64: in float32 Adam's first steps make a whole step, of either sign, of a
    gradient that is mere rounding. As traced; with the compiler's own kernels on a GPU.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        batch = make_batch(32)
        batch = batch._replace(returns_to_go=batch.rewards - 3.0)
        agents = [agent_of(algo) for _ in range(2)]
        updates = [updates_of(agent) for agent in agents]
        updates[1] = compiled(updates[1])
        for i in range(100):
            for update in updates:
                update(batch, i % 2 == 1)
    finally:
        torch.set_default_dtype(before)
    for (name, eager), (_, other) in zip(*map(parameters, agents), strict=True):
        torch.testing.assert_close(eager, other, rtol=1e-6, atol=1e-9, msg=name)
    assert same(agents[0].generator.get_state(), agents[1].generator.get_state())
