"""tools/export.py: the file acts as the agent, alone, and is refused if it does not."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, module, some
from onnx_file import needs_onnx, run

from common.acting import acting
from common.errors import InputError, RunError
from envs.make import make
from tools import export
from tools.export import Args, main
from tools.policies import load_policy


@needs_onnx
@pytest.mark.parametrize(
    "algo",
    some("bc", "crossq", "dsrl", "expo", "fql", "ifql", "pa_rl", "ppo", "sac", "simba_v2", "stream_ac"),
)
def test_the_file_acts_as_the_agent_in_the_environments_units(algo: str, small: Callable[..., Any]) -> None:
    """Against the policy of tools.policies and Gymnasium's own RescaleAction, if evaluations draw nothing."""
    folder = module(algo).train(small(algo, total_steps=60)).folder
    path = main(Args(str(folder), env="Pendulum-v1"))
    obs = np.random.default_rng(1).normal(size=(30, 3)).astype(np.float32)
    actions = run(path, obs)
    assert (np.abs(actions) <= 2 + 1e-6).all()
    policy, rescaled = load_policy(str(folder), make("Pendulum-v1"), 0, deterministic=True), gym.make("Pendulum-v1")
    to_box = gym.wrappers.RescaleAction(rescaled, np.float32(-1), np.float32(1)).action
    if np.array_equal(policy(obs), policy(obs)):  # no draws
        np.testing.assert_allclose(actions, np.stack([to_box(a) for a in policy(obs)]), atol=2e-5)
        assert np.array_equal(actions, run(path, obs, seed=5))
    else:
        assert not np.array_equal(actions, run(path, obs, seed=5))


@needs_onnx
def test_the_example_of_the_docs_runs_without_this_repository(small: Callable[..., Any], tmp_path: Path) -> None:
    folder = module("sac").train(small(env="InvertedPendulum-v5", total_steps=60)).folder
    main(Args(str(folder), output=tmp_path / "alone" / "policy.onnx"))
    page = (ROOT / "docs" / "policies.md").read_text()
    (example,) = re.findall(r"```python\n(import sys.*?)```", page, re.DOTALL)
    (tmp_path / "alone" / "example.py").write_text("import sys\nsys.modules['torch'] = None\n" + example)
    line = [sys.executable, "-I", "example.py", "policy.onnx"]
    done = subprocess.run(line, cwd=tmp_path / "alone", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0


@needs_onnx
def test_a_sampled_policy_takes_its_noise(small: Callable[..., Any]) -> None:
    """SAC's action is tanh(μ + σ ε) of the ε that is given."""
    folder = module("sac").train(small(total_steps=60)).folder
    path = main(Args(str(folder), sampled=True))
    agent = load_policy(str(folder), make("Pendulum-v1"), 0, deterministic=False).act.__self__  # type: ignore[attr-defined]
    obs = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    epsilon = np.random.default_rng(0).standard_normal((5, 1)).astype(np.float32)
    with torch.no_grad():
        mean, log_std = agent.actor.net(torch.from_numpy(obs)).chunk(2, dim=-1)
        expected = 2.0 * torch.tanh(mean + log_std.clamp(-20, 2).exp() * torch.from_numpy(epsilon))
    np.testing.assert_allclose(run(path, obs), expected.numpy(), atol=1e-5)


@needs_onnx
@pytest.mark.parametrize("error", [1e-3, np.nan])
def test_a_file_that_acts_otherwise_is_not_written(
    error: float, small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = module("sac").train(small(total_steps=60)).folder
    original = export.runner

    def wrong(data: bytes) -> Callable[..., Any]:
        run = original(data)
        return lambda given: run(given) + error

    monkeypatch.setattr(export, "runner", wrong)
    with pytest.raises(RunError, match="differs from the agent by"):
        main(Args(str(folder)))
    assert not (folder / "policy.onnx").exists()


class Climbing:
    """An agent that takes a gradient step on a value, as PA-RL's does."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.value = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))

    @acting
    def act(self, obs: torch.Tensor, deterministic: bool = False) -> torch.Tensor:
        with torch.enable_grad():
            values = self.value((points := obs.detach().requires_grad_()) / 3)
            return obs + torch.autograd.grad(values.sum(), points)[0]


@needs_onnx
def test_a_policy_that_takes_gradients_computes_in_float64() -> None:
    """With a layer norm and a number in its formula, whose precision an exporter can get wrong."""
    obs = np.random.default_rng(0).uniform(-0.5, 0.5, (20, 3)).astype(np.float32)
    exported = export.Exported(Climbing(), -np.ones(3), np.ones(3), sampled=False)
    assert export.float32_file(exported, obs, {}) == (b"", np.inf)
    data, difference = export.float64_file(exported.double(), obs, {})
    assert not export.is_torchscript(data)
    assert difference < 1e-7
    assert (np.abs(export.runner(data)([torch.from_numpy(obs[:1])]).numpy() - obs[:1]) > 1e-3).all()


@needs_onnx
def test_a_file_computes_in_float64_if_float32_is_not_enough(
    small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Simulate a policy for which float32 is too inexact. Inputs and actions stay float32."""
    import onnx

    folder = module("sac").train(small(total_steps=60)).folder
    original, forms = export.difference_of, list[torch.dtype]()

    def difference(data: bytes, form: Any, obs: Any) -> float:
        forms.append(form.dtype)
        return 1.0 if form.dtype == torch.float32 else original(data, form, obs)

    monkeypatch.setattr(export, "difference_of", difference)
    path = main(Args(str(folder)))
    assert forms == [torch.float32, torch.float64]
    assert "the float32 file differs from the agent by 1.0e+00: trying float64" in capsys.readouterr().err
    weights = [each.data_type for each in onnx.load(path).graph.initializer if len(each.dims) == 2]
    assert weights == [onnx.TensorProto.DOUBLE] * 3
    agent = load_policy(str(folder), make("Pendulum-v1"), 0, deterministic=False).act.__self__  # type: ignore[attr-defined]
    obs = np.random.default_rng(1).normal(size=(30, 3)).astype(np.float32)
    with torch.no_grad():
        expected = 2.0 * torch.tanh(agent.actor.net.double()(torch.from_numpy(obs).double()).chunk(2, dim=-1)[0])
    assert np.array_equal(run(path, obs), expected.float().numpy())


@needs_onnx
def test_torchscript_is_written_if_onnx_cannot_express_a_policy(
    small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = module("sac").train(small(total_steps=60)).folder

    def fail(*_: Any) -> bytes:
        raise RuntimeError("an operation is unknown")

    monkeypatch.setattr(export, "to_onnx", fail)
    path = main(Args(str(folder)))
    assert path == folder / "policy.pt"
    assert "warning: ONNX cannot express this policy" in capsys.readouterr().err
    obs = torch.randn(1, 3)
    policy = load_policy(str(folder), make("Pendulum-v1"), 0, deterministic=True)
    torch.testing.assert_close(torch.jit.load(path)(obs), 2.0 * torch.from_numpy(policy(obs.numpy())))


@pytest.mark.parametrize("name", ["p.pt", "p.safetensors", "p"])
def test_an_output_of_another_suffix_is_refused(name: str) -> None:
    """So that a trained policy is not replaced by mistake."""
    with pytest.raises(InputError, match=rf"--output is {name}: give a path that ends in \.onnx"):
        Args("nowhere", output=Path(name))


@needs_onnx
def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = module("sac").train(small(total_steps=60)).folder
    monkeypatch.setattr(export, "observations", lambda *_: pytest.fail("the work began"))
    with pytest.raises(InputError, match=r"/proc/no/x\.onnx cannot be written .*: give another --output"):
        main(Args(str(folder), output=Path("/proc/no/x.onnx")))


def test_a_missing_package_is_named(small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"export needs onnx, onnxscript, onnxruntime: .*\.\[export\]"):
        main(Args("nowhere"))


@needs_onnx
def test_a_policy_whose_environment_is_unknown_or_does_not_fit(small: Callable[..., Any]) -> None:
    folder = module("sac").train(small(total_steps=60)).folder
    with pytest.raises(InputError, match="does not fit an environment of 11 observations"):
        main(Args(str(folder), env="Hopper-v4"))
