"""A copy of an algorithm's file does not pass for the original, and a changed file is noticed."""

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from conftest import EXAMPLE, ROOT, agent_class, arguments_of

from common.errors import InputError
from common.provenance import sha256_of
from common.run_folder import CONFIG

SOURCE = (ROOT / "algos" / f"{EXAMPLE}.py").read_text()
CLASS = agent_class(EXAMPLE).__name__
NAMED = SOURCE.replace(f'Run("{EXAMPLE}", ', 'Run("my_copy", ')
WHOLE = re.sub(rf"\b{CLASS}\b", "MYCOPY", NAMED)


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Write algos/my_copy.py in a folder of this test's, and import it."""
    monkeypatch.setattr("common.provenance.ALGOS", tmp_path)

    def imported(text: str) -> ModuleType:
        (tmp_path / "my_copy.py").write_text(text)
        spec = importlib.util.spec_from_file_location("my_copy", tmp_path / "my_copy.py")
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "my_copy", module)
        spec.loader.exec_module(module)
        return module

    return imported


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SOURCE, rf'my_copy\.py calls Run\("{EXAMPLE}", …\): call Run\("my_copy", …\) there'),
        (NAMED, rf"my_copy\.py has the class {CLASS}: call it MYCOPY, as tools expect"),
    ],
)
def test_a_copy_with_names_of_the_original_is_refused(copied: Callable[[str], ModuleType], text: str, message: str):
    """It would resume the original's runs, or tools could not read its policies."""
    module = copied(text)
    with pytest.raises(InputError, match=message):
        module.train(module.Args(**arguments_of(EXAMPLE, {"run_dir": Path("run")})))
    assert not Path("run").exists()


def test_a_file_that_has_changed_is_named_at_the_resume(
    copied: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """And only then. config.json has the checksum of the file that began the run."""
    for text, steps, noticed in ((WHOLE, 300, False), (WHOLE, 320, False), (f"{WHOLE}\n# another loss\n", 340, True)):
        module = copied(text)
        module.train(module.Args(**arguments_of(EXAMPLE, {"run_dir": Path("run"), "total_steps": steps})))
        said = capsys.readouterr().err
        assert ("algos/my_copy.py changed since the run began: its results may differ" in said) == noticed
        began = json.loads((Path("run") / CONFIG).read_text())["code"]["algos/my_copy.py"]
        assert (began == sha256_of(tmp_path / "my_copy.py")) != noticed


def test_a_run_of_another_algorithm_is_named(copied: Callable[[str], ModuleType]):
    """Not each of the arguments that differ."""
    module = copied(WHOLE)
    arguments = {"run_dir": Path("run"), "total_steps": 20}
    module.train(module.Args(**arguments_of(EXAMPLE, arguments)))
    original = importlib.import_module(f"algos.{EXAMPLE}")
    with pytest.raises(InputError, match=rf"^run is a run of my_copy, not of {EXAMPLE}: give another --run-dir$"):
        original.train(original.Args(**arguments_of(EXAMPLE, arguments)))
