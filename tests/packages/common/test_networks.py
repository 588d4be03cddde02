"""Building blocks against independent formulas in float64."""

import copy
import math
import subprocess
import sys
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from conftest import flags, killed_at, long

from common import onednn
from common.networks import MLP, Critic, EnsembleLinear, TanhGaussian, frozen, mlp
from common.optim import Adam, SoftUpdate
from common.recorded import Recording

PRODUCT = "mkldnn::_linear_pointwise"


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def log_density(action: float, mean: float, std: float) -> float:
    """Change of variables: p(a) = N(atanh a; mean, std) / (1 - a²)."""
    return math.log(NormalDist(mean, std).pdf(math.atanh(action))) - math.log1p(-(action**2))


def test_log_prob_is_of_the_action_given():
    """Not of a fresh sample."""
    actions = torch.tensor([[0.3, -0.9], [0.999, 0.0]], dtype=torch.float64)
    mean, std = torch.tensor([[0.2, -1.0], [2.0, 0.1]], dtype=torch.float64), torch.tensor([0.5, 1.3]).double()
    got = TanhGaussian(mean, std.log().expand(2, 2)).log_prob(actions)
    expected = [
        sum(log_density(a, m, s) for a, m, s in zip(*row, strict=True))
        for row in zip(actions.tolist(), mean.tolist(), [std.tolist()] * 2, strict=True)
    ]
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-10)


def test_the_density_integrates_to_one():
    policy = TanhGaussian(torch.tensor([[0.7]]).double(), torch.tensor([[-0.4]]).double())
    actions = torch.linspace(-1, 1, 2_000_001, dtype=torch.float64)[1:-1]
    density = policy.log_prob(actions[:, None]).exp()
    assert torch.trapezoid(density, actions).item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_sampled_log_prob_agrees_with_log_prob_of_the_sample(scale: float):
    mean = scale * torch.randn(1000, 3, generator=generator(1), dtype=torch.float64)
    policy = TanhGaussian(mean, torch.full((1000, 3), -1.0).double())
    actions, log_prob = policy.rsample(generator(2))
    inside = (actions.abs() < 1 - 1e-9).all(-1)  # beyond, atanh(tanh(u)) itself has lost u
    assert inside.sum() > 500
    torch.testing.assert_close(policy.log_prob(actions)[inside], log_prob[inside], rtol=1e-6, atol=1e-6)


def test_log_prob_is_finite_at_the_bounds_and_far_out():
    policy = TanhGaussian(torch.zeros(1, 2), torch.zeros(1, 2))
    assert policy.log_prob(torch.tensor([[1.0, -1.0]])).isfinite().all()
    far = TanhGaussian(torch.full((1, 2), 40.0), torch.zeros(1, 2)).rsample(generator())[1]
    assert far.isfinite().all()


def test_sample_and_rsample_draw_the_same_actions():
    policy = TanhGaussian(torch.randn(5, 2, generator=generator(3)), torch.zeros(5, 2))
    assert torch.equal(policy.sample(generator(4)), policy.rsample(generator(4))[0])
    assert torch.equal(policy.mode, torch.tanh(policy.mean))


def test_rsample_gradient_against_finite_differences():
    mean = torch.randn(4, 2, generator=generator(5), dtype=torch.float64, requires_grad=True)
    log_std = torch.randn(4, 2, generator=generator(6), dtype=torch.float64, requires_grad=True)

    def sampled(mean: torch.Tensor, log_std: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return TanhGaussian(mean, log_std).rsample(generator(7))

    assert torch.autograd.gradcheck(sampled, (mean, log_std))


@pytest.mark.parametrize("outputs", [1, 5])
def test_ensemble_equals_its_members_one_by_one(outputs: int):
    net = mlp([3, 8, outputs], generator(), ensemble=4).double()
    inputs = torch.randn(6, 3, dtype=torch.float64, generator=generator(1))
    first, last = (layer for layer in net if isinstance(layer, EnsembleLinear))
    for i, got in enumerate(net(inputs)):
        hidden = torch.relu(inputs @ first.weight[i].T + first.bias[i])
        torch.testing.assert_close(got, hidden @ last.weight[i].T + last.bias[i])


def test_critics_take_one_action_for_a_state_or_several_and_all_members_or_some():
    """Against each member's own layers, on each action alone."""
    critic = Critic(mlp([5, 8, 1], generator(), ensemble=3))
    first, _, last = critic.net
    obs, actions = torch.randn(4, 3, generator=generator(1)), torch.randn(6, 4, 2, generator=generator(2))

    def value(i: int, k: int, n: int) -> float:
        hidden = torch.relu(first.weight[i] @ torch.cat([obs[n], actions[k, n]]) + first.bias[i])
        return (last.weight[i] @ hidden + last.bias[i]).item()

    expected = torch.tensor([[[value(i, k, n) for n in range(4)] for k in range(6)] for i in range(3)])
    torch.testing.assert_close(critic(obs, actions), expected)
    torch.testing.assert_close(critic(obs, actions[0]), expected[:, 0])
    torch.testing.assert_close(critic(obs, actions, torch.tensor([2, 0])), expected[[2, 0]])
    torch.testing.assert_close(critic(obs, actions[1], 1), expected[1:2, 1])


@pytest.mark.parametrize("layer", [torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.BatchNorm1d(4)])
def test_a_layer_that_would_not_be_computed_is_refused(layer: torch.nn.Module):
    with pytest.raises(TypeError, match="would be left out"):
        MLP("relu", torch.nn.Linear(3, 4), layer, torch.nn.Linear(4, 1))


FORMS = {
    "plain": {}, "norm first": {"layer_norm": True}, "norm last": {"layer_norm": True, "norm_last": True},
    "gelu": {"activation": "gelu"}, "gelu, norm first": {"activation": "gelu", "layer_norm": True},
    "gelu, norm last": {"activation": "gelu", "layer_norm": True, "norm_last": True},
    "tanh, norm last": {"activation": "tanh", "layer_norm": True, "norm_last": True},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ensemble", [None, 1, 3])
@pytest.mark.parametrize("needed", ["all", "inputs", "parameters"])
def test_network_and_its_gradients_equal_layer_by_layer_in_float64(form: str, ensemble: int | None, needed: str):
    """The one node of `common.onednn`, at sizes where oneDNN computes, against plain layers and autograd's own."""
    net = mlp([23, 256, 200, 12], generator(), ensemble, **FORMS[form])
    for parameter in net.parameters():  # so that no scale is 1 and no shift 0
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator(3))
    exact = copy.deepcopy(net).double()
    inputs = torch.randn(300, 40, generator=generator(1))[:, 3:26].requires_grad_(needed != "parameters")  # strided
    double = inputs.detach().double().requires_grad_(needed != "parameters")
    for each in (net, exact):
        each.requires_grad_(needed != "inputs")
    got, expected = net(inputs), torch.nn.Sequential.forward(exact, double)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(net(inputs), got)
    upstream = torch.randn(got.shape, generator=generator(2))
    got.backward(upstream)
    expected.backward(upstream.double())
    assert (inputs.grad is None) == (needed == "parameters")
    assert (net[0].weight.grad is None) == (needed == "inputs")
    for a, b in zip([inputs, *net.parameters()], [double, *exact.parameters()], strict=True):
        if a.grad is not None:
            torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-5 * b.grad.abs().max().item())


@pytest.mark.parametrize(
    ("form", "recorded"),
    [*((form, False) for form in ("plain", "norm first", "gelu", "gelu, norm last")),
     ("plain", True), pytest.param("gelu, norm last", True, marks=long)],
)  # fmt: skip
@pytest.mark.parametrize("never_smallest", [[], [0, 2], [0, 2, 3, 4]])
def test_gradient_of_the_smallest_of_many_networks_in_float64(form: str, never_smallest: list[int], recorded: bool):
    """Members pass on the rows that have a gradient, which may be none and may be all."""
    net = mlp([23, 256, 200, 1], generator(), 5, **FORMS[form]).requires_grad_(False)
    net[-1].bias[never_smallest] += 100.0
    exact = copy.deepcopy(net).double()
    inputs = torch.randn(1024, 23, generator=generator(1), requires_grad=True)
    double = inputs.detach().double().requires_grad_()

    def gradient(inputs: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(net(inputs).amin(0).square().sum(), inputs)[0]

    compute = Recording(lambda x: gradient(x.requires_grad_()), [inputs.detach()], net) if recorded else gradient
    with torch.profiler.profile(record_shapes=True) as profile:
        got = compute(inputs)
    torch.nn.Sequential.forward(exact, double).amin(0).square().sum().backward()
    torch.testing.assert_close(got.double(), double.grad, rtol=1e-4, atol=1e-5 * double.grad.abs().max().item())
    products = [event.input_shapes for event in profile.events() if event.name in ("aten::mm", PRODUCT)]
    rows = [left[0] for left, right, *_ in products if left[1:] == [256] and 23 in right]
    rounded_up = [-(-count // 32) * 32 for count in net(inputs).argmin(0).flatten().bincount(minlength=5).tolist()]
    assert rows == [count if 2 * count <= 1024 else 1024 for count in rounded_up]


@pytest.mark.parametrize("size", [3, 400])
def test_gelu_then_layer_norm_against_numpy(size: int):
    """At a size where oneDNN computes and at one where it does not: 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))."""
    net = mlp([20, 128, 128, 2], generator(), 2, activation="gelu", layer_norm=True, norm_last=True)
    for parameter in net.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator(3))
    inputs = torch.randn(size, 20, generator=generator(1))
    for member in range(2):
        x = inputs.double().numpy()
        parts = [part[member].detach().double().numpy() for part in net.parameters()]
        for weight, bias, scale, shift in (parts[:4], parts[4:8]):
            x = x @ weight.T + bias
            x = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
            x = scale * (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-6) + shift
        np.testing.assert_allclose(net(inputs)[member].detach(), x @ parts[8].T + parts[9], rtol=1e-4, atol=1e-5)


def test_dropout_leaves_out_units_of_every_activation():
    """Also of GELU, whose kept units are scaled by 1 / (1 - share)."""
    net = mlp([3, 64, 64], generator(), activation="gelu")
    net[2] = torch.nn.Identity()
    inputs = torch.randn(5, 3, generator=generator(1))
    expected = torch.nn.functional.gelu(net[0](inputs), approximate="tanh")
    kept = torch.rand(5, 64, generator=generator(2)) >= 0.5
    torch.testing.assert_close(net.forward_with_dropout(inputs, 0.5, generator(2)), 2 * kept * expected)


def test_onednn_computes_the_large_products_where_it_is_there(monkeypatch: pytest.MonkeyPatch):
    """Else the speed would be lost in silence, with every number still right. On Intel's processors MKL does."""
    if not onednn.AVAILABLE:
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr(onednn, "_PRODUCT", torch.ops.mkldnn._linear_pointwise.default)
    with torch.profiler.profile() as profile:
        net = mlp([23, 256, 256, 1], generator(), ensemble=2)
        net(torch.randn(256, 23)).sum().backward()
    names = [event.name for event in profile.events()]
    # Forward: two layers of two members; backward: both weights' gradients and one layer's inputs'.
    assert names.count(PRODUCT) == 4 + 6


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("vendor_id : GenuineIntel\nflags : avx2 avx512f fma", False),
        ("vendor_id : GenuineIntel\nflags : avx2 fma", False),
        ("vendor_id : AuthenticAMD\nflags : avx2 avx512f fma", True),
        ("vendor_id : AuthenticAMD\nflags : avx2 fma", False),
        ("CPU implementer : 0x41\nFeatures : fp asimd", True),
        ("", True),
    ],
)
def test_the_processor_decides_which_library_multiplies(cpuinfo: str, expected: bool):
    """MKL does on Intel's, and on AMD's without AVX-512. Others have no MKL, so oneDNN does."""
    assert (onednn._fastest_product(cpuinfo) is not None) == (expected and onednn.AVAILABLE)


def test_frozen_network_passes_its_gradient_on_and_gets_none():
    net, inputs = mlp([3, 8, 1], generator()), torch.ones(2, 3, requires_grad=True)
    with frozen(net):
        inside = net(inputs).sum()
    inside.backward(retain_graph=True)
    assert inputs.grad is not None
    assert all(p.grad is None and p.requires_grad for p in net.parameters())
    with pytest.raises(KeyError), frozen(net):
        raise KeyError
    assert all(p.requires_grad for p in net.parameters())


def test_networks_start_uniform_and_touch_no_global_generator():
    before = torch.get_rng_state()
    net, ensemble = mlp([400, 300, 2], generator()), mlp([400, 300, 1], generator(), ensemble=3)
    assert torch.equal(torch.get_rng_state(), before)
    for layer in (net[0], ensemble[0]):
        assert layer.weight.std().item() == pytest.approx(1 / math.sqrt(3 * 400), rel=0.02)
        assert 0.04 < layer.weight.abs().max().item() <= 1 / math.sqrt(400)
        assert 0 < layer.bias.abs().max().item() <= 1 / math.sqrt(400)
    assert not torch.equal(ensemble[0].weight[0], ensemble[0].weight[1])  # members must not be copies


def test_adam_equals_pytorchs_bit_for_bit():
    ours, theirs = mlp([3, 8, 2], generator()), mlp([3, 8, 2], generator())
    lean, full = Adam(ours.parameters(), 1e-2), torch.optim.Adam(theirs.parameters(), 1e-2, fused=True)
    noise = generator(1)
    for _ in range(50):
        inputs = torch.randn(16, 3, generator=noise)
        lean.minimize(ours(inputs).square().mean())
        full.zero_grad()
        theirs(inputs).square().mean().backward()
        full.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    resumed = torch.optim.Adam(theirs.parameters(), 1e-2, fused=True)
    resumed.load_state_dict(lean.state_dict())  # the same state, too
    assert all(torch.equal(a["exp_avg_sq"], b["exp_avg_sq"]) for a, b in zip(
        resumed.state.values(), full.state.values(), strict=True))  # fmt: skip


def test_adam_clips_as_pytorch_does():
    """Gradients shorter and longer than the limit; the moments tell, where a step of Adam hides the scale."""
    ours, theirs = mlp([3, 8, 2], generator()), mlp([3, 8, 2], generator())
    lean, full = Adam(ours.parameters(), 1e-2), torch.optim.Adam(theirs.parameters(), 1e-2)
    norms, noise = [], generator(1)
    for size in (0.1, 1.0, 1.5, 100.0, 0.5):
        inputs = size * torch.randn(16, 3, generator=noise)
        lean.minimize(ours(inputs).square().mean(), max_gradient_norm=0.5)
        full.zero_grad()
        theirs(inputs).square().mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5).item())
        full.step()
        for a, b in zip(lean.state.values(), full.state.values(), strict=True):
            torch.testing.assert_close(a["exp_avg"], b["exp_avg"], rtol=1e-4, atol=1e-7)
            torch.testing.assert_close(a["exp_avg_sq"], b["exp_avg_sq"], rtol=1e-4, atol=1e-9)
    assert min(norms) < 0.5 < 1.0 < max(norms)
    assert any(0.5 < norm < 1.0 for norm in norms), norms


def test_adam_takes_a_transposed_gradient():
    """As the gradient of a weight that is used transposed often is: the fused kernel itself ignores strides."""
    start = torch.arange(6.0).view(2, 3)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    slopes = torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, -6.0]])
    Adam([ours], 0.1).minimize((ours.T * slopes.T.contiguous()).sum())
    full = torch.optim.Adam([theirs], 0.1)
    (theirs.T * slopes.T).sum().backward()
    full.step()
    torch.testing.assert_close(ours, theirs)


def test_adam_moves_its_own_parameters_only():
    actor, critic = mlp([2, 4, 1], generator(1)), mlp([1, 4, 1], generator(2))
    before = [p.clone() for p in [*actor.parameters(), *critic.parameters()]]
    loss = critic(actor(torch.ones(3, 2))).mean()
    expected = torch.autograd.grad(loss, list(actor.parameters()), retain_graph=True)
    Adam(actor.parameters(), 0.1).minimize(loss)
    for parameter, old, gradient in zip(actor.parameters(), before, expected, strict=False):
        # The first step of Adam is lr · g / (|g| + eps).
        torch.testing.assert_close(parameter, old - 0.1 * gradient / (gradient.abs() + 1e-8))
    assert all(torch.equal(p, old) for p, old in zip(critic.parameters(), before[4:], strict=True))
    assert all(p.grad is None for p in critic.parameters())


def test_a_run_does_without_the_compiler(tmp_path: Path):
    """PyTorch's optimisers, and its way to leave weights as they are, would import it: a second of every start."""
    arguments = flags("expo", run_dir=tmp_path / "run", checkpoint_every=20, total_steps=60)
    code = (
        "import sys\nfrom algos.expo import Args, train\nfrom common.command_line import command_line\n"
        "command_line(train, Args)\nassert not {'torch._dynamo', 'sympy'} & sys.modules.keys()\n"
    )
    assert killed_at("expo", [("online step", 10)], *arguments).returncode == 0
    found = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "resumes from step" in found.stderr


def test_polyak():
    target, online = mlp([2, 3, 1], generator(1), ensemble=2), mlp([2, 3, 1], generator(2), ensemble=2)
    expected = [0.9 * t.detach() + 0.1 * o for t, o in zip(target.parameters(), online.parameters(), strict=True)]
    SoftUpdate(target, online, 0.1)()
    for got, want in zip(target.parameters(), expected, strict=True):
        torch.testing.assert_close(got.data, want.data)


def test_a_run_flushes_denormal_numbers():
    """In every thread of PyTorch: else a long run slows down several times as its units die."""
    code = (
        "import torch; from common.arguments import OnlineArgs; from common.run import Run\n"
        "Run('x', OnlineArgs(env='Pendulum-v1'))\n"
        "torch.set_num_threads(2)\n"
        "assert not (torch.full((1_000_000,), 1e-38) * 0.1).any()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
