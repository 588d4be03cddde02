"""Write a trained policy as one ONNX file, which runs without this repository and without PyTorch.

    make export RUN=runs/sac__Hopper-v4__1
    python -m tools.export runs/sac__Hopper-v4__1/policy/best.safetensors --output hopper.onnx

The file maps an observation [1, obs_dim] to an action [1, action_dim] in the environment's own units, or to a chunk of
h actions [1, h, action_dim]. Normalisation of observations, squashing and scaling are inside. A policy that samples
takes its noise as further inputs. The file is compared with the agent before it is kept. docs/policies.md has an
example of its use.
"""

import common.start

import importlib.util
import io
import json
import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from common.acting import Agent
from common.command_line import command_line
from common.errors import InputError, RunError
from common.files import prepare_output, replacing
from common.messages import log, print_result
from common.seeding import seeds
from envs.make import action_box, make
from tools.policies import Trained, load_agent, read_trained

OBSERVATIONS = 1_000  # on which the file is compared with the agent
TOLERANCE = 1e-5  # of an action, in units of half its range
Draw = tuple[str, Tensor]  # its kind, and what was drawn
NOISE = {"randn": "normal", "rand": "uniform"}  # PyTorch's functions, and the names of the inputs that replace them


@dataclass(frozen=True)
class Args:
    """Policy and output."""

    policy: Annotated[str, tyro.conf.Positional]
    """Run folder that has a checkpoint, a file of its policy/, or a name such as sac/Hopper-v4 (docs/policies.md)."""
    output: Path | None = None
    """File to write, which ends in .onnx. TorchScript is written if ONNX cannot express the policy, and ends in .pt.
    By default it is <run>/policy.onnx, or <algorithm>-<env>.onnx here for a policy file."""
    sampled: bool = False
    """Export the policy with its exploration noise. By default it acts as in evaluations."""
    env: str | None = None
    """Environment whose action bounds are used instead of those of the run's."""
    env_kwargs: str = "{}"
    """Arguments of that environment's constructor, as a dict in JSON. The run's environment keeps the run's."""

    def __post_init__(self) -> None:
        if self.output and self.output.suffix != ".onnx":
            raise InputError(f"--output is {self.output}: give a path that ends in .onnx")


CANNOT = (RuntimeError, TypeError, NotImplementedError, torch.onnx.errors.OnnxExporterError)  # express a policy


class Draws(TorchFunctionMode):
    """Notes each random draw of the code inside, or replaces the draws by given tensors, in order.

    The code receives draws of `dtype`; `made` holds float32.
    """

    def __init__(self, dtype: torch.dtype, given: tuple[Tensor, ...] | None = None) -> None:
        super().__init__()
        self.dtype, self.given = dtype, given
        self.made: list[Draw] = []

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (kwargs or {}).get("generator") is None:
            return function(*args, **(kwargs or {}))
        if function.__name__ not in NOISE:
            raise InputError(f"the policy draws by torch.{function.__name__}: only rand and randn can become inputs")
        made = function(*args, **(kwargs or {})) if self.given is None else self.given[len(self.made)]
        self.made.append((NOISE[function.__name__], made.float()))
        return made.to(self.dtype)


class Exported(nn.Module):
    """Maps obs [1, obs_dim], and the noise of each draw, to actions in the environment's units.

    Inputs and actions are float32. After `double()`, the computation uses float64.
    """

    def __init__(self, agent: Agent, low: NDArray[Any], high: NDArray[Any], sampled: bool) -> None:
        super().__init__()
        self._agent = [agent]  # in a list, so that it is no submodule
        for name, value in vars(agent).items():
            if isinstance(value, nn.Module):
                setattr(self, name, value)
        self.register_buffer("middle", torch.tensor((low + high) / 2.0, dtype=torch.float32))
        self.register_buffer("half_range", torch.tensor((high - low) / 2.0, dtype=torch.float32))
        self._act = type(agent).act.__wrapped__  # type: ignore[attr-defined]
        self._sampled, self._action_dim = sampled, len(low)

    @property
    def dtype(self) -> torch.dtype:
        """Return the precision in which the agent computes."""
        return self.half_range.dtype  # type: ignore[return-value]

    def act(self, obs: Tensor) -> Tensor:
        """Return the actions in units of the box, [-1, 1]: [1, action_dim], or [1, h, action_dim] of a chunk of h."""
        obs = obs.to(self.dtype)
        actions: Tensor = self._act(self._agent[0], obs, deterministic=not self._sampled).clamp(-1.0, 1.0)
        return actions if actions.shape[1] == self._action_dim else actions.unflatten(1, (-1, self._action_dim))

    def forward(self, obs: Tensor, *noise: Tensor) -> Tensor:
        with Draws(self.dtype, noise):
            return (self.middle + self.half_range * self.act(obs)).float()  # type: ignore[operator]


def main(args: Args) -> Path:
    """Write the file and return its path.

    Raise InputError if a package is missing, or the policy or its environment cannot be used. Raise RunError if the
    file does not act as the agent does.
    """
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"export needs {', '.join(missing)}: make export installs them, or pip install -e '.[export]'")
    torch.set_num_threads(1)
    trained = read_trained(args.policy)
    env_id, settings = trained.environment(args.env, args.env_kwargs)
    output, facts = args.output or trained.output("policy.onnx", env_id), facts_of(trained, env_id)
    prepare_output(output, "--output")
    box = action_box(env_id, **settings)
    obs = observations(make(env_id, **settings), int(trained.arguments["seed"]))
    agent = load_agent(trained, obs.shape[1], box.shape[0], 0)
    module = Exported(agent, box.low, box.high, args.sampled).eval()
    data, difference = float32_file(module, obs, facts)
    if not difference <= TOLERANCE:
        data, difference = float64_file(module.double(), obs, facts)
    if not difference <= TOLERANCE:
        raise RunError(f"the exported policy differs from the agent by {difference:.1e}: nothing was written")
    if is_torchscript(data):
        output = output.with_suffix(".pt")
    with replacing(output) as file:
        file.write(data)
    inputs = ", ".join(["obs", *names_of(draws(module, obs[:1]))])
    print_result(
        f"written to {output}: {inputs} → actions, at most {difference:.1e} from the agent's in {module.dtype}"
    )
    return output


def observations(env: gym.Env[Any, Any], seed: int) -> NDArray[np.float32]:
    """Return observations [OBSERVATIONS, obs_dim] of episodes with random actions, and close the environment."""
    found = list[NDArray[np.float32]]()
    random, episode_seeds = np.random.default_rng(seed), iter(seeds(seed, "export", OBSERVATIONS))
    done = True
    while len(found) < OBSERVATIONS:
        if done:
            obs, _ = env.reset(seed=next(episode_seeds))
        found.append(obs)
        action = random.uniform(-1, 1, env.action_space.shape or ()).astype(np.float32)
        obs, _, terminated, truncated, _ = env.step(action)
        done = terminated or truncated
    env.close()
    return np.stack(found)


def draws(module: Exported, obs: NDArray[np.float32]) -> list[Draw]:
    """Return the kind and an example of each draw that acting on `obs` makes, in order."""
    with torch.no_grad(), (mode := Draws(module.dtype)):
        module.act(torch.from_numpy(obs))
    return mode.made


def names_of(noise: list[Draw]) -> list[str]:
    """Return the names of the inputs for these draws: normal_0, uniform_1 and so on."""
    return [f"{kind}_{i}" for i, (kind, _) in enumerate(noise)]


def facts_of(trained: Trained, env_id: str) -> dict[str, str]:
    """Return the texts that the file stores about itself."""
    return {"algorithm": trained.algo, "env": env_id, "step": str(trained.facts["step"]),
            "arguments": json.dumps(trained.arguments)}  # fmt: skip


def below_autograd(module: Exported, obs: NDArray[np.float32]) -> nn.Module:
    """Return the operations of acting on one observation as a graph, without gradients.

    An exporter cannot express a gradient, such as that by which PA-RL improves its actions.
    """
    from torch._decomp import get_decompositions
    from torch.fx.experimental.proxy_tensor import make_fx  # it takes a second

    rules: Any = get_decompositions([torch.ops.aten.native_layer_norm])  # ONNX gives its mean in float32
    with torch.no_grad():
        graph: nn.Module = make_fx(module, rules)(
            torch.from_numpy(obs[:1]), *(tensor for _, tensor in draws(module, obs[:1]))
        )
    return graph


def float32_file(module: Exported, obs: NDArray[np.float32], facts: dict[str, str]) -> tuple[bytes, float]:
    """Return an ONNX file's bytes and its difference from the agent, infinite if ONNX cannot express the policy."""
    try:
        data = to_onnx(module, module, obs, facts)
    except CANNOT:
        return b"", math.inf
    if not (difference := difference_of(data, module, obs)) <= TOLERANCE:
        log.warning(f"the float32 file differs from the agent by {difference:.1e}: trying float64")
    return data, difference


def float64_file(module: Exported, obs: NDArray[np.float32], facts: dict[str, str]) -> tuple[bytes, float]:
    """Return a file's bytes and its difference from the agent: TorchScript if ONNX cannot express the policy.

    Rounding can swap two actions of almost equal value, such as PA-RL's. In float64 this is rare.
    """
    try:
        data = to_onnx(below_autograd(module, obs), module, obs, facts)
    except CANNOT as error:
        log.warning(f"ONNX cannot express this policy, so TorchScript is written: {str(error).splitlines()[0]}")
        data = to_torchscript(module, obs)
    return data, difference_of(data, module, obs)


def to_onnx(form: nn.Module, module: Exported, obs: NDArray[np.float32], facts: dict[str, str]) -> bytes:
    """Return the ONNX file's bytes of a form of the module, for one observation at a time."""
    noise = draws(module, obs[:1])
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of packages that are not needed
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            form, (torch.from_numpy(obs[:1]), *(tensor for _, tensor in noise)), dynamo=True, verbose=False,
            input_names=["obs", *names_of(noise)], output_names=["actions"],
        )  # fmt: skip
    assert program is not None
    proto = program.model_proto
    for key, value in facts.items():
        proto.metadata_props.add(key=key, value=value)
    data: bytes = proto.SerializeToString()
    return data


def is_torchscript(data: bytes) -> bool:
    return data.startswith(b"PK")  # it is a zip file


def runner(data: bytes) -> Callable[[list[Tensor]], Tensor]:
    """Return the function that an ONNX or a TorchScript file computes from its inputs."""
    if is_torchscript(data):
        script = torch.jit.load(io.BytesIO(data))
        return lambda given: script(*given)
    import onnxruntime

    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    return lambda given: torch.from_numpy(session.run(None, dict(zip(names, map(np.asarray, given), strict=True)))[0])


def difference_of(data: bytes, module: Exported, obs: NDArray[np.float32]) -> float:
    """Return the largest difference from the agent's actions on `obs`, in units of half an action's range."""
    run, differences = runner(data), list[float]()
    for one in np.split(obs, len(obs)):
        given = [torch.from_numpy(one), *(tensor for _, tensor in draws(module, one))]
        with torch.no_grad():
            differences.append(float(((run(given) - module(*given)).abs() / module.half_range).max()))
    return float(np.max(differences))  # NaN if one is: Python's max would lose it


def to_torchscript(module: Exported, obs: NDArray[np.float32]) -> bytes:
    """Return the bytes of a TorchScript file, for one observation at a time."""
    arguments, data = (torch.from_numpy(obs[:1]), *(tensor for _, tensor in draws(module, obs[:1]))), io.BytesIO()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(below_autograd(module, obs), arguments), data)
    return data.getvalue()


if __name__ == "__main__":
    command_line(main, Args)
