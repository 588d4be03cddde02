"""Policies to collect with: those of our runs, of Stable-Baselines3's files, and what is refused."""

import base64
import io
import json
import os
import pickle
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import OFFLINE, SHARED, agent_class, every_algorithm, final_state, module

from common import checkpoint
from common.acting import eval_policy
from common.errors import InputError
from common.evaluate import evaluate
from envs.make import make
from offline.offline_to_online import with_presets
from tools.policies import load_policy

PENDULUM = gym.make("Pendulum-v1")  # 3 observations, 1 action in [-2, 2]
OBS = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)


@every_algorithm
def test_of_a_run(algo: str, small):
    module(algo).train(args := small(algo, total_steps=100, eval_episodes=0))
    args = with_presets(args, getattr(module(algo), "PRESETS", {})) if algo in OFFLINE else args
    args = replace(args, seed=0)  # of the noise, which `load_policy` is given too
    agent = agent_class(algo)(args, 3, 1, torch.device("cpu"))
    checkpoint.restore(agent, final_state(args.run_dir)["agent"])
    policy = load_policy(str(args.run_dir), PENDULUM, 0, deterministic=True)
    evaluated = policy(OBS)
    assert evaluated.tobytes() == eval_policy(agent)(OBS).tobytes()
    draws = hasattr(agent, "eval_policy") and getattr(agent, "process", "") is not None  # BC's Gaussian draws nothing
    assert (policy(OBS) != evaluated).any() == draws
    facts = policy.facts
    step = final_state(args.run_dir)["logger"]["step"]
    assert (facts["kind"], facts["name"], facts["algorithm"], facts["step"]) == ("run", "run", algo, step)
    assert all(len(digest) == 64 for digest in facts["sha256"].values())

    first, again, other = (
        load_policy(str(args.run_dir), PENDULUM, seed, deterministic=False)(OBS) for seed in (1, 1, 2)
    )
    assert first.tobytes() == again.tobytes()
    assert (first != other).any() == (agent.act(OBS) != agent.act(OBS)).any()  # the noise is that of the seed
    assert np.abs(first).max() <= 1


def test_random():
    first, again, other = (load_policy("random", PENDULUM, seed, deterministic=False)(OBS) for seed in (1, 1, 2))
    assert first.tobytes() == again.tobytes()
    assert (first != other).any()
    assert first.dtype == np.float32
    assert first.shape == (50, 1)
    assert -1 <= first.min() < -0.8
    assert 0.8 < first.max() <= 1


def layer(name: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(name) + rows)
    weight, bias = torch.randn(rows, columns, generator=generator), torch.randn(rows, generator=generator)
    return {f"{name}.weight": weight, f"{name}.bias": bias}


SAC = layer("actor.latent_pi.0", 8, 3) | layer("actor.latent_pi.2", 8, 8) | layer("actor.mu", 1, 8)
SAC |= layer("actor.log_std", 1, 8) | layer("critic.qf0.0", 8, 4)
GSDE = {k.replace("actor.mu", "actor.mu.0"): v for k, v in SAC.items() if not k.startswith("actor.log_std")}
GSDE |= {"actor.log_std": torch.full((8, 1), -3.0)}
TD3 = layer("actor.mu.0", 8, 3) | layer("actor.mu.2", 8, 8) | layer("actor.mu.4", 1, 8)
PPO = layer("mlp_extractor.policy_net.0", 8, 3) | layer("mlp_extractor.policy_net.2", 8, 8) | layer("action_net", 1, 8)
PPO |= {"log_std": torch.tensor([-1.0])} | layer("mlp_extractor.value_net.0", 8, 3)


def write_zip(path: Path, weights: Any, **data: Any) -> str:
    """A file in Stable-Baselines3's layout."""
    policy = io.BytesIO()
    torch.save(weights, policy)
    data = {"policy_class": {"__module__": "stable_baselines3.sac.policies"}, "num_timesteps": 7} | data
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("policy.pth", policy.getvalue())
        archive.writestr("data", json.dumps(data))
    return str(path)


def forward(weights: dict[str, torch.Tensor], activation: Any, *names: str) -> np.ndarray:
    """In float64, by NumPy: OBS through these layers, the activation between them."""
    values = OBS.astype(np.float64)
    for name in names:
        values = values @ weights[f"{name}.weight"].double().numpy().T + weights[f"{name}.bias"].double().numpy()
        values = activation(values) if name != names[-1] else values
    return values


def relu(values: np.ndarray) -> np.ndarray:
    return np.maximum(values, 0)


SAC_NAMES, TD3_NAMES = ("actor.latent_pi.0", "actor.latent_pi.2"), ("actor.mu.0", "actor.mu.2", "actor.mu.4")
PPO_NAMES = ("mlp_extractor.policy_net.0", "mlp_extractor.policy_net.2", "action_net")
ELU = {"activation_fn": "<class 'torch.nn.modules.activation.ELU'>", ":type:": "<class 'dict'>"}


@pytest.mark.parametrize(
    ("weights", "data", "expected"),
    [
        (SAC, {}, np.tanh(forward(SAC, relu, *SAC_NAMES, "actor.mu"))),
        (GSDE, {"use_sde": True}, np.tanh(forward(GSDE, relu, *SAC_NAMES, "actor.mu.0").clip(-2, 2))),
        (TD3, {}, np.tanh(forward(TD3, relu, *TD3_NAMES))),
        (PPO, {}, (forward(PPO, np.tanh, *PPO_NAMES) / 2).clip(-1, 1)),  # its own units are [-2, 2]
        (
            PPO,
            {"policy_kwargs": ELU},
            (forward(PPO, lambda x: np.where(x > 0, x, np.expm1(x)), *PPO_NAMES) / 2).clip(-1, 1),
        ),
    ],
    ids=["SAC", "SAC with gSDE", "TD3", "PPO", "PPO with ELU"],
)
def test_the_layouts_of_stable_baselines(tmp_path: Path, weights: Any, data: Any, expected: np.ndarray):
    source = write_zip(tmp_path / "policy.zip", weights, **data)
    for env in (PENDULUM, make("Pendulum-v1")):  # as it is, and in the form our algorithms see
        actions = load_policy(source, env, 0, deterministic=True)(OBS)
        assert actions.dtype == np.float32
        np.testing.assert_allclose(actions, expected, atol=1e-5)


@pytest.mark.parametrize(("weights", "algo"), [(SAC, "SAC"), (PPO, "PPO")])
def test_the_noise_of_stable_baselines(tmp_path: Path, weights: Any, algo: str):
    """Mean and deviation before the squashing, over 4 000 draws."""
    source = write_zip(
        tmp_path / "policy.zip", {k: 0.1 * v for k, v in weights.items()} | {"log_std": torch.tensor([-1.0])}
    )
    policy = load_policy(source, PENDULUM, 0, deterministic=False)
    draws = np.stack([policy(OBS) for _ in range(4_000)]).astype(np.float64)
    weights = {k: 0.1 * v for k, v in weights.items()}
    if algo == "SAC":
        draws, mean = np.arctanh(draws.clip(-1 + 1e-7, 1 - 1e-7)), forward(weights, relu, *SAC_NAMES, "actor.mu")
        std = np.exp(forward(weights, relu, *SAC_NAMES, "actor.log_std"))
    else:
        mean, std = forward(weights, np.tanh, *PPO_NAMES) / 2, np.full((50, 1), np.exp(-1.0) / 2)
    assert np.abs((draws.mean(0) - mean) / std).max() < 5 / 4_000**0.5
    np.testing.assert_allclose(draws.std(0) / std, 1.0, atol=0.06)


STATISTICS = {"mean": [0.1, -0.2, 0.3], "var": [0.5, 2.0, 0.01], "epsilon": 1e-8, "clip_obs": 1.5}
NORMALIZED = ((OBS - STATISTICS["mean"]) / np.sqrt(np.array(STATISTICS["var"]) + 1e-8)).clip(-1.5, 1.5)


def last_obs(given: str | None, seen: str) -> dict[str, Any]:
    """The entries of a file trained on observations `seen`, where the environment gave `given` (types of numbers)."""

    def entry(kind: str) -> dict[str, str]:
        array = pickle.dumps(np.zeros((1, 3), kind))
        return {":type:": "<class 'numpy.ndarray'>", ":serialized:": base64.b64encode(array).decode()}

    return {"_last_obs": entry(seen), "_last_original_obs": given and entry(given)}


LINEAR_PPO = layer("action_net", 1, 3) | {"log_std": torch.tensor([-1.0])}
LINEAR_SAC = layer("actor.mu", 1, 3) | layer("actor.log_std", 1, 3)
LINEAR_TD3 = layer("actor.mu.0", 1, 3)


@pytest.mark.parametrize(
    ("weights", "name", "to_unit"),
    [
        (LINEAR_PPO, "action_net", lambda x: (x / 2).clip(-1, 1)),
        (LINEAR_SAC, "actor.mu", np.tanh),
        (LINEAR_TD3, "actor.mu.0", np.tanh),
    ],
)
def test_policies_without_hidden_layers(tmp_path: Path, weights: Any, name: str, to_unit: Any):
    """As `net_arch=[]` makes them: with and without a VecNormalize."""
    source = write_zip(tmp_path / "policy.zip", weights, **last_obs("f8", "f8"))
    expected = to_unit(forward(weights, None, name))
    np.testing.assert_allclose(load_policy(source, PENDULUM, 0, True)(OBS), expected, atol=1e-5)
    np.savez(tmp_path / "policy.npz", mean=np.zeros(3), var=np.full(3, 0.25), epsilon=1e-8, clip_obs=np.inf)
    np.testing.assert_allclose(load_policy(source, PENDULUM, 0, True)(OBS / 2), expected, atol=1e-4)


@pytest.mark.parametrize(("weights", "given"), [(PPO, "f4"), (SAC, "f8")])
def test_a_vec_normalize_is_applied(tmp_path: Path, capsys: Any, weights: Any, given: str):
    """By the statistics in the export next to the policy, whose hash is in the recipe."""
    source = write_zip(tmp_path / "policy.zip", weights, **last_obs(given, "f4"))
    np.savez(tmp_path / "policy.npz", norm_obs=True, **STATISTICS)
    policy = load_policy(source, PENDULUM, 0, deterministic=True)
    plain = load_policy(write_zip(tmp_path / "plain.zip", weights, **last_obs("f8", "f8")), PENDULUM, 0, True)
    assert (np.abs(NORMALIZED) == 1.5).any()
    np.testing.assert_allclose(policy(OBS), plain(NORMALIZED.astype(np.float32)), atol=1e-6)
    assert np.abs(policy(OBS) - plain(OBS)).max() > 0.05
    assert len(policy.facts["vec_normalize"]) == 64
    assert capsys.readouterr().err == ""

    np.savez(tmp_path / "policy.npz", norm_obs=False)
    assert np.array_equal(load_policy(source, PENDULUM, 0, True)(OBS), plain(OBS))


@pytest.mark.parametrize(
    ("weights", "data", "file", "named"),
    [
        (PPO, last_obs("f4", "f4"), None, "was trained under VecNormalize"),
        (PPO, last_obs("f8", "f4"), None, "was trained under VecNormalize"),
        (SAC, last_obs("f8", "f4"), None, "was trained under VecNormalize"),
        (SAC, last_obs("f4", "f4"), "vecnormalize.pkl", "lies next to vecnormalize.pkl"),
        (SAC, {}, "policy/vecnormalize.pkl", "lies next to vecnormalize.pkl"),
        (PPO, {}, "vec_normalize.pkl", "lies next to vec_normalize.pkl"),
        (SAC, {}, "policy.pkl", "lies next to policy.pkl"),
    ],
)
def test_missing_vec_normalize_statistics(tmp_path: Path, weights: Any, data: Any, file: str | None, named: str):
    """Such a policy is refused, in two lines, and no pickle is loaded."""
    source = write_zip(tmp_path / "policy.zip", weights, **data)
    if file:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    with pytest.raises(InputError, match=named) as refused:
        load_policy(source, PENDULUM, 0, deterministic=True)
    assert f"export them to {tmp_path / 'policy.npz'}" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 2
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("weights", "data", "lines"),
    [
        (PPO, last_obs(None, "f4"), 0),
        (PPO, last_obs("f8", "f8"), 0),  # rewards alone were normalised
        (SAC, last_obs("f8", "f8"), 0),
        (SAC, last_obs("f4", "f4"), 1),
        (SAC, {}, 1),
        (PPO, {"_last_obs": None, "_last_original_obs": None}, 1),  # it never saw an environment, as after a clean-up
        (SAC, {"_last_obs": 3, "_last_original_obs": {":serialized:": "!"}}, 1),
    ],
)
def test_policies_without_vec_normalize(tmp_path: Path, capsys: Any, weights: Any, data: Any, lines: int):
    """One line is printed if the file does not show whether there was one."""
    load_policy(write_zip(tmp_path / "policy.zip", weights, **data), PENDULUM, 0, deterministic=True)
    assert capsys.readouterr().err.count("does not show whether it was trained under VecNormalize") == lines


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"mean": None}, "mean is not a file"),
        ({"mean": [0.0, 0.0]}, "takes 3 observations"),
        ({"mean": [0.0, 0.0, np.nan]}, "not finite"),
        ({"var": [1.0, 1.0, -1.0]}, "not positive"),
        ({"clip_obs": 0.0}, "not positive"),
        ({"epsilon": "small"}, "convert"),
        ({"var": np.array([None] * 3)}, "allow_pickle"),
    ],
)
def test_bad_vec_normalize_statistics(tmp_path: Path, changed: dict[str, Any], named: str):
    """What is in the export is checked, and no pickle in it is loaded."""
    source = write_zip(tmp_path / "policy.zip", SAC)
    np.savez(tmp_path / "policy.npz", **{k: v for k, v in (STATISTICS | changed).items() if v is not None})
    with pytest.raises(InputError, match=named) as refused:
        load_policy(source, PENDULUM, 0, deterministic=True)
    assert "docs/data.md" in str(refused.value)


def test_an_export_that_is_something_else(tmp_path: Path):
    """A text, a pickle and a cut file are refused in words."""
    source = write_zip(tmp_path / "policy.zip", SAC)
    np.savez(tmp_path / "whole.npz", **STATISTICS)
    contents = [b"text", pickle.dumps(Bomb(tmp_path / "executed")), (tmp_path / "whole.npz").read_bytes()[:300]]
    for content in contents:
        (tmp_path / "policy.npz").write_bytes(content)
        with pytest.raises(InputError, match="does not hold the VecNormalize statistics"):
            load_policy(source, PENDULUM, 0, deterministic=True)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("name", "env", "least"),
    [
        ("sac-halfcheetah", "HalfCheetah-v4", 9_000),
        ("sac-hopper", "Hopper-v4", 1_000),
        ("sac-walker2d", "Walker2d-v4", 3_700),
        ("tqc-halfcheetah", "HalfCheetah-v4", 11_500),
        ("tqc-hopper", "Hopper-v4", 3_500),
        ("tqc-walker2d", "Walker2d-v4", 4_200),
    ],
)
def test_real_policies_reach_their_returns(name: str, env: str, least: float):
    path = SHARED / "data" / "policies" / f"{name}-v3.zip"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    environment = make(env)
    policy = load_policy(str(path), environment, 0, deterministic=True)
    assert (policy.facts["algorithm"], policy.facts["step"]) == (name[:3], 1_000_000)
    # In one of four episodes: a walker falls in one and walks to the end of the next.
    assert any(evaluate(policy, [environment], [seed])[0].return_ > least for seed in range(4))


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_hostile_file_is_not_executed(tmp_path: Path, how: str):
    path = tmp_path / "policy.zip"
    write_zip(path, {"actor.mu.0.weight": Bomb(tmp_path / "executed")})
    if how == "pickle":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("policy.pth", pickle.dumps(Bomb(tmp_path / "executed")))
            archive.writestr("data", "{}")
    with pytest.raises(InputError, match="more than tensors"):
        load_policy(str(path), PENDULUM, 0, deterministic=True)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("weights", "data", "deterministic", "named"),
    [
        ({"q_net.weight": torch.zeros(2, 2)}, {}, True, "not a policy of SAC"),
        ({k: v for k, v in PPO.items() if k != "log_std"}, {}, True, "continuous actions"),
        ([torch.zeros(3)], {}, True, "not a Stable-Baselines3 policy"),
        (SAC | {"actor.mu.bias": torch.tensor([torch.nan])}, {}, True, "not finite"),
        (SAC | layer("actor.mu", 2, 8), {}, True, "3 observations to 2 actions, Pendulum-v1"),
        (SAC | layer("actor.latent_pi.0", 8, 5), {}, True, "5 observations to 1 actions, Pendulum-v1"),
        (SAC | layer("actor.latent_pi.2", 9, 8), {}, True, "do not fit each other"),
        (SAC | {"actor.mu.weight": torch.tensor(1.0)}, {}, True, r"actor.mu of fitting shapes \(\[\] and \[1\]"),
        (SAC | {"actor.latent_pi.0.bias": torch.zeros(1)}, {}, True, r"latent_pi.0 of fitting shapes"),
        (PPO | {"log_std": torch.zeros(7, 1, 1)}, {}, False, "do not fit each other: 3 observations give actions of"),
        (GSDE, {"policy_kwargs": {"clip_mean": "wide"}}, True, "clip_mean of 'wide'"),
        (SAC | {"actor.mu.bias": torch.zeros(1).expand(2**28 + 1)}, {}, True, "takes 268,435,456 at most"),
        (SAC, {"policy_kwargs": {"activation_fn": "<class 'my.Own'>"}}, True, "my.Own"),
        (PPO | layer("features_extractor.cnn.0", 8, 3), {}, True, "not a plain MLP"),
        (GSDE, {"use_sde": True}, False, "gSDE.*--deterministic"),
        (TD3, {}, False, "noise.*--deterministic"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, weights: Any, data: Any, deterministic: bool, named: str):
    source = write_zip(tmp_path / "policy.zip", weights, **data)
    with pytest.raises(InputError, match=named):
        load_policy(source, PENDULUM, 0, deterministic)


@pytest.mark.parametrize("inner", [False, True])
def test_a_zip_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inner: bool):
    """Neither the file's own parts nor those of the archive policy.pth: a small limit stands for the memory."""
    source = write_zip(tmp_path / "policy.zip", SAC)
    load_policy(source, PENDULUM, 0, deterministic=True)
    monkeypatch.setattr("tools.stable_baselines.LARGEST", 2**20)
    load_policy(source, PENDULUM, 0, deterministic=True)
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("policy/data/0", bytes(2**21))
    assert len(bomb.getvalue()) < 2**12
    with zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("policy.pth", bomb.getvalue() if inner else bytes(2**21))
        archive.writestr("data", "{}")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was unpacked"))
    with pytest.raises(InputError, match=r"it unpacks to 0\.0 GB, and a policy takes 0\.0 at most"):
        load_policy(source, PENDULUM, 0, deterministic=True)


def test_what_is_no_policy(tmp_path: Path):
    (tmp_path / "text.zip").write_text("text")
    whole = Path(write_zip(tmp_path / "policy.zip", SAC)).read_bytes()
    (tmp_path / "half.zip").write_bytes(whole[: len(whole) // 2])
    flipped = bytearray(whole)
    flipped[len(whole) // 4] ^= 255
    (tmp_path / "flipped.zip").write_bytes(flipped)
    with (
        zipfile.ZipFile(tmp_path / "policy.zip") as stored,
        zipfile.ZipFile(tmp_path / "packed.zip", "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name in stored.namelist():
            archive.writestr(name, stored.read(name))
    packed = bytearray((tmp_path / "packed.zip").read_bytes())
    packed[len(packed) // 4] ^= 255
    packed[43:60] = b"\xff" * 17  # within the first part, after its header
    (tmp_path / "packed.zip").write_bytes(packed)
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("readme", "text")
    for name, named in {"no.zip": "does not exist", "text.zip": "not a complete", "half.zip": "not a complete",
                        "flipped.zip": "not a complete", "packed.zip": "not a complete",
                        "other.zip": "policy.pth"}.items():  # fmt: skip
        with pytest.raises(InputError, match=named):
            load_policy(str(tmp_path / name), PENDULUM, 0, deterministic=True)


def test_an_algorithm_without_the_class_of_its_name(small, monkeypatch: pytest.MonkeyPatch):
    """Its file trains, but tools find the agent by the file's name."""
    folder = module("sac").train(small(total_steps=60, eval_episodes=0)).folder
    monkeypatch.setitem(sys.modules, "algos.sac_l2", SimpleNamespace(Args=module("sac").Args, SAC=module("sac").SAC))
    config = json.loads((folder / "config.json").read_text())
    del config["crc32"]
    (folder / "config.json").write_text(json.dumps(config | {"algo": "sac_l2"}))
    with pytest.raises(InputError, match=r"needs the class SACL2, which algos/sac_l2\.py does not have: give its"):
        load_policy(str(folder), PENDULUM, 0, deterministic=True)


def test_run_folders_that_do_not_fit(small):
    folder = small().run_dir
    folder.mkdir()

    def assert_refused(named: str, env: gym.Env[Any, Any] = PENDULUM) -> None:
        with pytest.raises(InputError, match=named):
            load_policy(str(folder), env, 0, deterministic=True)

    assert_refused("no config.json")
    (folder / "config.json").write_text("{}")
    assert_refused("no checkpoint")
    (folder / "config.json").unlink()
    module("sac").train(small(total_steps=60, eval_episodes=0))
    assert_refused("11 observations and 3 actions.*\n.*Pendulum-v1", gym.make("Hopper-v5"))
    whole = json.loads((folder / "config.json").read_text())
    del whole["crc32"]  # as in an older run, whose changes are not noticed by a checksum
    for changed, named in [
        ({"algo": "dreamer"}, "ModuleNotFoundError"),
        ({"algo": "../../evil"}, "not the name of an algorithm"),
        ({"algo": "td3"}, "TypeError"),
        ({"arguments": 3}, "config.json is damaged"),
        ({"arguments": whole["arguments"] | {"hidden": [8]}}, "does not fit"),
    ]:
        (folder / "config.json").write_text(json.dumps(whole | changed))
        assert_refused(named)
    (folder / "config.json").write_text(json.dumps(whole))
    state = folder / "checkpoint" / "state.pt"
    state.write_bytes(state.read_bytes()[:1_000])
    assert_refused("damaged")
