"""What a file states about itself: the box of its actions, its environment, its scores; and what is wrong there."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import module
from d4rl_file import make
from gymnasium.spaces import Box

from common.errors import InputError
from envs.make import action_box
from offline import d4rl
from offline.dataset import load
from offline.environments import ENVIRONMENTS
from offline.recording import ROUNDING, distance_outside
from tools.inspect_dataset import Args, facts, main

ACTIONS = np.float32([[-2], [-1], [0], [0.5], [1], [2]])


def file_of(path: Path, actions: Any = ACTIONS, box: tuple[Any, Any] | None = None, **attributes: Any) -> Path:
    """Write one episode with these actions, of 3 observations each, and attributes."""
    make(path, "....." + "t", box=box, actions=actions, observations=np.zeros((6, 3), np.float32))
    with h5py.File(path, "a") as file:
        file.attrs.update(attributes)
    return path


class TestBox:
    """Pendulum's actions are in [-2, 2]."""

    def test_is_that_of_the_environment_that_the_file_names(self, tmp_path: Path) -> None:
        """Actions are rescaled from the environment's own box if the file does not state one."""
        path = file_of(tmp_path / "a.hdf5", env="Pendulum-v1")
        assert np.allclose(load(path, max_action=None).column("actions"), ACTIONS / 2)

    def test_is_that_of_env_if_it_is_given(self, tmp_path: Path) -> None:
        """The environment that the caller names goes before the one that the file names."""
        for attributes in ({}, {"env": "Hopper-v4"}, {"env": "NoSuch-v3"}, {"env": "no_such_module:Env-v0"}):
            path = file_of(tmp_path / "a.hdf5", **attributes)
            assert np.allclose(load(path, env="Pendulum-v1", max_action=None).column("actions"), ACTIONS / 2)

    def test_is_the_files_own_if_it_states_one(self, tmp_path: Path) -> None:
        """What the file states goes before any environment."""
        path = file_of(tmp_path / "a.hdf5", box=(-4.0, 4.0), env="Pendulum-v1")
        assert np.allclose(load(path, env="Pendulum-v1", max_action=None).column("actions"), ACTIONS / 4)

    @pytest.mark.parametrize("env", [None, "NoSuch-v3", "json:Env-v0", "MountainCarContinuous-v0", "CartPole-v1"])
    def test_is_refused_if_nothing_states_it(self, tmp_path: Path, env: str | None) -> None:
        """The message names the attributes and the flag; the last two environments have other actions."""
        actions = np.zeros((6, 2)) if env == "MountainCarContinuous-v0" else ACTIONS
        path = file_of(tmp_path / "a.hdf5", actions, **({"env": env} if env else {}))
        said = r"a\.hdf5.*action_low and action_high, or --env"
        if env == "json:Env-v0":  # the file names one, which is not imported
            said = r"a\.hdf5 names the environment json:Env-v0, but .* not imported\ngive --env json:Env-v0 to allow it"
        with pytest.raises(InputError, match=said) as caught:
            load(path)
        assert len(str(caught.value).splitlines()) <= 2

    def test_that_is_unknown_has_a_cure_that_can_be_done(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file can be given attributes, a Minari dataset cannot; after --env, only another one helps."""
        import test_minari

        monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
        space = Box(np.float32([-np.finfo(np.float32).max]), np.float32([np.finfo(np.float32).max]))
        name = test_minari.create([test_minari.episode(3, 0.0, "truncated")], action_space=space)
        path = file_of(tmp_path / "a.hdf5")
        attributes = "give its attributes action_low and action_high, or "
        for source, env, cure in ((path, None, f"{attributes}--env"), (path, "Hopper-v4", f"{attributes}another --env"),
                                  (name, None, "give --env"), (name, "Hopper-v4", "give another --env")):  # fmt: skip
            with pytest.raises(InputError, match=f"{Path(source).name}.*[:o] {cure}$"):
                load(source, env=env)

    @pytest.mark.parametrize(("kind", "limit"), [(np.int8, 100), (np.uint8, 200), (np.int32, 2**31 - 1)])
    def test_of_integers_does_not_overflow(self, tmp_path: Path, kind: Any, limit: int) -> None:
        """The difference of its bounds, and of an action and a bound, may be no number of their type."""
        low = 0 if kind == np.uint8 else -limit
        box = (np.array([low], kind), np.array([limit], kind))
        actions = np.array([[low], [limit], [low], [limit], [low], [limit // 2]], kind)
        path = file_of(tmp_path / "a.hdf5", actions, box)
        expected = 2.0 * (actions[:, 0].astype(float) - low) / (limit - low) - 1.0
        assert np.allclose(load(path, max_action=None).column("actions")[:, 0], expected)
        assert facts(d4rl.read(path))["transitions with actions outside their bounds"] == 0
        assert (distance_outside(actions, *box) <= 0).all()

    def test_of_the_file_and_of_the_environment_may_differ(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """One line names both, since the file's may be in units of its own; an unknown environment gives no line."""
        for attributes, env in (({"env": "Pendulum-v1"}, None), ({}, "Pendulum-v1")):
            load(file_of(tmp_path / "a.hdf5", box=(-4.0, 4.0), **attributes), env=env)
            said = capsys.readouterr().err
            assert "a.hdf5 states the box -4 to 4 for its actions, Pendulum-v1 has -2 to 2 (dimension 0)" in said
            assert said.count("\n") == 1
            assert "error" not in said
        for box, env in (((-2.0, 2.0), "Pendulum-v1"), ((-4.0, 4.0), "NoSuch-v3"), ((-4.0, 4.0), "json:Env-v0")):
            load(file_of(tmp_path / "a.hdf5", box=box, env=env))
            assert capsys.readouterr().err == ""

    def test_of_another_environment_makes_another_mapped_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The rows on the disk are rescaled already."""
        monkeypatch.setenv("ONRAMP_CACHE", str(tmp_path / "cache"))
        path = file_of(tmp_path / "a.hdf5")
        for env, scale in (("Pendulum-v1", 0.5), ("MountainCarContinuous-v0", 1.0)):
            actions = load(path, env=env, mapped=True, max_action=None).column("actions")
            assert np.allclose(actions, scale * ACTIONS)

    @pytest.mark.parametrize("dataset_id", ["hopper-medium-v2", "halfcheetah-expert-v0", "walker2d-medium-v2",
                                            "ant-medium-v2", "pen-human-v1", "maze2d-umaze-v1",
                                            "antmaze-umaze-v2"])  # fmt: skip
    def test_of_d4rls_ids_is_that_of_their_environments(self, dataset_id: str) -> None:
        """The recorded bound is the box of the environment that runs here."""
        if "d4rl/" in ENVIRONMENTS[dataset_id]:
            pytest.importorskip("gymnasium_robotics")
        box, bound = action_box(ENVIRONMENTS[dataset_id]), d4rl.IDS[dataset_id].action_bound
        assert (box.low == -bound).all()
        assert (box.high == bound).all()

    @pytest.mark.parametrize(("dataset_id", "bound"), [("flow-merge-random-v0", 1.5), ("flow-ring-random-v0", 1.0)])
    def test_of_d4rls_ids_that_do_not_run_here_is_recorded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset_id: str, bound: float
    ) -> None:
        """As D4RL's source has it: max_accel and max_decel are 1.5 in flow/merge.py."""
        monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path))
        file_of(tmp_path / Path(d4rl.IDS[dataset_id].file).name)
        assert np.allclose(load(dataset_id, max_action=None).column("actions"), ACTIONS / bound)


class TestActionsOutsideTheBox:
    def test_are_announced_by_training(self, tmp_path: Path, small: Any, capsys: pytest.CaptureFixture[str]) -> None:
        """One line says how many there are, how far outside, and what happens to them."""
        path = file_of(tmp_path / "a.hdf5", 1.5 * ACTIONS, env="Pendulum-v1")
        module("bc").train(small("bc", dataset=str(path), env="", offline_steps=2, online_steps=0))
        said = [line for line in capsys.readouterr().err.splitlines() if "outside" in line]
        assert len(said) == 1
        for word in ("warning", "a.hdf5", "33.33%", "box -2 to 2", "by up to 1:", "clipped", "or --env)"):
            assert word in said[0]

    def test_are_announced_again_of_mapped_rows(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The same line at every load, though the rows are read from the disk and not counted again."""
        monkeypatch.setenv("ONRAMP_CACHE", str(tmp_path / "cache"))
        path = file_of(tmp_path / "a.hdf5", box=(-1.0, 1.0))
        said = []
        for mapped in (False, True, True):
            load(path, mapped=mapped)
            said.append(capsys.readouterr().err)
        assert "33.33% of its transitions have actions outside the box" in said[0]
        assert said[0] == said[1] == said[2]

    @pytest.mark.parametrize("damage", ["", "[2, 1", "[]", "[2]", "5", "{}", '["a", 1.0]', "\x00"])
    def test_are_counted_again_if_their_file_is_damaged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage: str
    ) -> None:
        """The rows are written again with it. If no action is outside, the damaged file is removed."""
        monkeypatch.setenv("ONRAMP_CACHE", str(tmp_path / "cache"))
        for box, is_outside in (((-1.0, 1.0), True), ((-4.0, 4.0), False)):
            path = file_of(tmp_path / "a.hdf5", box=box)
            load(path, mapped=True)
            said = capsys.readouterr().err
            (rows,) = (tmp_path / "cache").glob("*.rows")
            counts = rows.with_suffix(".json")
            assert counts.exists() == is_outside == ("outside the box" in said)
            before = counts.read_text() if is_outside else ""
            counts.write_text(damage)
            load(path, mapped=True)
            assert capsys.readouterr().err == said
            assert (counts.read_text() if counts.exists() else "") == before
            rows.unlink()

    def test_name_the_worst_dimension(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """With its own bounds, not the least and the greatest of all."""
        actions = np.array([[0.0, 0.0], [0.5, 100.0], [0.02, 0.0]] * 2, np.float32)
        load(file_of(tmp_path / "a.hdf5", actions, ([-0.01, -100.0], [0.01, 100.0])))
        said = capsys.readouterr().err
        assert (
            "66.67% of its transitions have actions outside the box -0.01 to 0.01 of dimension 0, by up to 0.49:"
            in said
        )
        assert "check action_low and action_high)" in said

    def test_by_rounding_are_none(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """0.4 in float32 is above 0.4; only what exceeds rounding is counted."""
        assert float(np.float32(0.4)) > 0.4
        path = file_of(tmp_path / "a.hdf5", np.float32([[-0.4], [0.4]] * 3), box=(-0.4, 0.4))
        load(path)
        assert facts(d4rl.read(path))["transitions with actions outside their bounds"] == 0
        assert facts(d4rl.read(path))["transitions with actions at their bounds"] == 6
        assert capsys.readouterr().err == ""
        beyond = np.float32([[0.4 * (1 + 4 * ROUNDING)]] * 6)
        load(file_of(tmp_path / "a.hdf5", beyond, box=(-0.4, 0.4)))
        assert "100.00% of its transitions" in capsys.readouterr().err

    def test_are_kept_and_announced_with_d4rl_compat(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """D4RL's own conversion clips nothing."""
        load(file_of(tmp_path / "a.hdf5", box=(-1.0, 1.0)), compat=True)
        assert "they are kept" in capsys.readouterr().err


class TestInspect:
    def test_uses_the_box_of_env(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Without it the bounds are unknown, which is no error: one may look at any file."""
        path = file_of(tmp_path / "a.hdf5", 1.5 * ACTIONS)
        main(Args(str(path)))
        assert "6 transitions in 1 episodes of an unknown environment" in (said := capsys.readouterr().out)
        assert "actions    1 columns, -3 to 3; bounds unknown: give --env" in said
        main(Args(str(path), env="Pendulum-v1"))
        assert "6 transitions in 1 episodes of Pendulum-v1" in (said := capsys.readouterr().out)
        assert "33.33% of transitions outside their bounds (-2 to 2)" in said

    def test_refuses_an_env_that_does_not_fit(self, tmp_path: Path) -> None:
        """An environment that the user names must exist and have as many actions."""
        for env in ("Pendulm-v1", "Hopper-v4"):
            for box in (None, (-1.0, 1.0)):
                with pytest.raises(InputError, match=env):
                    main(Args(str(file_of(tmp_path / "a.hdf5", box=box)), env=env))

    def test_compares_the_box_of_env(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """One line if the file states another one, which is used."""
        main(Args(str(file_of(tmp_path / "a.hdf5", box=(-4.0, 4.0))), env="Pendulum-v1"))
        said = capsys.readouterr()
        assert "states the box -4 to 4 for its actions, Pendulum-v1 has -2 to 2" in said.err
        assert said.err.count("\n") == 1
        assert "outside their bounds (-4 to 4)" in said.out


WRONG = [
    ({"action_low": 1.0, "action_high": -1.0}, "action_low is 1 and action_high is -1 in dimension 0"),
    ({"action_low": [0.0, 1.0], "action_high": [1.0, 1.0]}, "in dimension 1"),
    ({"action_low": np.nan, "action_high": 1.0}, "attribute action_low is nan: it must be finite numbers"),
    ({"action_low": -1.0, "action_high": np.inf}, "attribute action_high is inf"),
    ({"action_low": np.float32(-3e38), "action_high": np.float32(3e38)}, "their difference finite"),
    ({"action_low": [-1.0] * 3, "action_high": [1.0] * 3}, r"action_low and action_high have shapes \(3,\)"),
    ({"action_low": [-1.0], "action_high": [1.0]}, "an action has 2 numbers"),
    ({"action_low": "-1", "action_high": "1"}, "attribute action_low is '-1': it must be finite numbers"),
    ({"action_low": -1.0}, "only one of the attributes action_low and action_high: add action_high too"),
    ({"action_high": 1.0}, "add action_low too"),
    ({"env_kwargs": "{"}, "attribute env_kwargs is '{': it must be a dict in JSON"),
    ({"env_kwargs": "[1, 2]"}, "attribute env_kwargs"),
    ({"env_kwargs": 3}, "attribute env_kwargs"),
    ({"env_kwargs": "[" * 100_000}, "attribute env_kwargs"),
    *(
        ({"env_kwargs": f'{{"{name}": 1}}'}, f"a dict in JSON without the keys .*{name}")
        for name in ("seed", "env_id", "num_envs", "all_infos", "vectorizer", "purpose")
    ),
    ({"env": 3}, "attribute env is .*3.*: it must be a text"),
    ({"env": np.bytes_(b"\xff\xfe")}, "attribute env is"),
    ({"env": h5py.Empty("f")}, "attribute env is"),
    ({"ref_min_score": np.nan, "ref_max_score": 1.0}, "attribute ref_min_score is nan: it must be a finite number"),
    ({"ref_min_score": 0.0, "ref_max_score": "many"}, "attribute ref_max_score is 'many'"),
    ({"ref_min_score": 0.0, "ref_max_score": [1.0, 2.0]}, "attribute ref_max_score"),
    (
        {"ref_min_score": 3.0, "ref_max_score": 3.0},
        "ref_min_score is 3 and ref_max_score 3: it must be larger",
    ),
    ({"ref_min_score": 0.0, "ref_max_score": -100.0}, "ref_min_score is 0 and ref_max_score -100: it must be"),
    ({"ref_min_score": 3.0}, "add ref_max_score too"),
]


class TestWrongAttributes:
    @pytest.mark.parametrize(("attributes", "said"), WRONG)
    def test_are_refused(self, tmp_path: Path, attributes: dict[str, Any], said: str) -> None:
        """The message has two lines at most and names the file and the attribute."""
        box = None if any(name.startswith("action") for name in attributes) else (-1.0, 1.0)
        path = file_of(tmp_path / "a.hdf5", np.zeros((6, 2)), box, **attributes)
        with pytest.raises(InputError, match=said) as caught:
            load(path)
        assert str(path) in str(caught.value)
        assert len(str(caught.value).splitlines()) <= 2
        assert len(str(caught.value)) < 500

    def test_right_ones_are_taken_in_every_form(self, tmp_path: Path) -> None:
        """Numbers or arrays, text or bytes."""
        for low, high in ((-2, 2), (np.float32(-2), [2.0, 2.0]), (np.full(2, -2), np.full(2, 2.0))):
            for env in ("Pendulum-v1", np.bytes_("Pendulum-v1"), np.array("Pendulum-v1", h5py.string_dtype())):
                path = file_of(
                    tmp_path / "a.hdf5", np.full((6, 2), 1.0), env=env, env_kwargs=np.bytes_('{"g": 9.0}'),
                    action_low=low, action_high=high, ref_min_score=[-1], ref_max_score=np.float32(1),
                )  # fmt: skip
                dataset = load(path)
                assert (dataset.env, dataset.env_kwargs) == ("Pendulum-v1", {"g": 9.0})
                assert dataset.reference == (-1.0, 1.0)
                assert (dataset.column("actions") == 0.5).all()

    def test_of_minari_are_refused_by_the_same_checks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its scores, and a box that is the wrong way round."""
        import test_minari

        monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
        steps = test_minari.episode(3, 0.0, "truncated")
        test_minari.create([steps], env="Pendulum-v1", ref_min_score=2.0, ref_max_score=2.0)
        with pytest.raises(InputError, match=r"mine/made-v0: ref_min_score is 2 and ref_max_score 2"):
            load("mine/made-v0")
        unbounded = Box(-np.inf, np.inf, (1,), np.float32)
        test_minari.create([steps], "mine/two-v0", env="Pendulum-v1", action_space=unbounded)
        assert np.allclose(load("mine/two-v0", max_action=None).column("actions")[:, 0], [-0.5, 0, 0.5])
        test_minari.create([steps], "mine/three-v0", action_space=unbounded)
        with pytest.raises(InputError, match=r"mine/three-v0 specifies neither the box of its actions"):
            load("mine/three-v0")


def test_arguments_of_an_environment_that_is_not_here_matter_only_where_it_is_needed(tmp_path: Path) -> None:
    path = file_of(tmp_path / "a.hdf5", env="Theirs-v0", env_kwargs='{"size": 3}', box=([-2.0], [2.0]))
    assert load(str(path), env="Pendulum-v1").reference is None
    assert facts(d4rl.read(str(path)))["transitions"] == 6
