"""A new algorithm is one file, its test file and its page: the tests of every algorithm find it, and hold."""

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import conftest
import pytest
from conftest import ALGORITHMS, EXAMPLE, ROOT, agent_class
from pages import HEADINGS

NAME = "newcomer"
NEEDED = ("algos", "bench", "common", "docs", "envs", "offline", "tests", "tools", "README.md", "pyproject.toml")
QUICK = ("algorithm_trains", "changes_nothing", "help_lists", "every_flag", "last_policy", "30_lines")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project with a new algorithm: SAC under another name. No other file differs."""
    for name in NEEDED:
        source, copy = ROOT / name, tmp_path / "project" / name
        copy.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        else:
            shutil.copy(source, copy)
    folder = tmp_path / "project"
    source = (folder / "algos" / f"{EXAMPLE}.py").read_text()
    source = re.sub(rf"\b{agent_class(EXAMPLE).__name__}\b", NAME.upper(), source)
    (folder / "algos" / f"{NAME}.py").write_text(source.replace(f'Run("{EXAMPLE}", ', f'Run("{NAME}", '))
    tests = (folder / "tests" / f"test_{EXAMPLE}.py").read_text()
    small = re.search(r"^SMALL = .*$", tests, re.MULTILINE)
    assert small
    (folder / "tests" / f"test_{NAME}.py").write_text(f"from conftest import COMMON\n\n{small[0]}\n")
    headings = "".join(f"\n## {heading}\n" for heading in HEADINGS)
    (folder / "docs" / f"{NAME}.md").write_text(f"# Newcomer\n\nThe code is `algos/{NAME}.py`.\n{headings}")
    return folder


def test_the_tests_of_every_algorithm_find_a_new_file(project: Path) -> None:
    """All are collected, with ONRAMP_TESTS=all, as docs/your-algorithm.md says. The quick ones of each kind run."""
    asking = re.compile(r"^@every_algorithm|\b(with_flag|some)\(", re.MULTILINE)
    files = sorted(path for path in (project / "tests").rglob("test_*.py") if asking.search(path.read_text()))
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = os.environ | {"PYTHONPATH": str(project)}
    run = functools.partial(subprocess.run, cwd=project, env=environment, capture_output=True, text=True, check=False)
    everything = {"env": environment | {"ONRAMP_TESTS": "all"}}
    collected = run([*line, "--collect-only", "-q", "-k", NAME, *map(str, files)], **everything).stdout
    tests = re.findall(rf"::(\w+)\[\S*{NAME}\S*\]$", collected, re.MULTILINE)
    assert len(tests) >= 90, collected
    assert len(set(tests)) >= 50, collected
    with_quick = [path for path in files if any(quick in path.read_text() for quick in QUICK)]
    done = run([*line, "-v", "-k", f"{NAME} and ({' or '.join(QUICK)})", *map(str, with_quick)])
    assert done.returncode == 0, done.stdout + done.stderr
    passed = set(re.findall(rf"::(\w+)\[\S*{NAME}\S*\] PASSED", done.stdout))
    assert all(any(quick in name for name in passed) for quick in QUICK), done.stdout


def test_a_missing_test_file_or_configuration_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "ROOT", tmp_path)
    with pytest.raises(LookupError, match=rf"algos/{NAME}\.py has no tests/test_{NAME}\.py: give it SMALL = "):
        conftest.small_of(NAME)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / f"test_{NAME}.py").touch()
    monkeypatch.setitem(sys.modules, f"test_{NAME}", types.ModuleType(f"test_{NAME}"))
    with pytest.raises(LookupError, match=rf"tests/test_{NAME}\.py has no SMALL: give it SMALL = "):
        conftest.small_of(NAME)


def test_conftest_names_no_algorithm_but_the_example() -> None:
    source = (ROOT / "tests" / "conftest.py").read_text()
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    assert [text for text in texts if text in ALGORITHMS] == [EXAMPLE]


def test_the_worked_example_of_the_guide_fits_the_file(tmp_path: Path) -> None:
    """Its difference applies to today's sac.py, changes at most 60 lines, and the result has the new class."""
    page = (ROOT / "docs" / "your-algorithm.md").read_text()
    difference = re.search(r"^```diff\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert difference
    (tmp_path / "algos").mkdir()
    shutil.copy(ROOT / "algos" / "sac.py", tmp_path / "algos" / "mine.py")
    line = ["git", "apply", "-"]
    done = subprocess.run(line, cwd=tmp_path, input=difference[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    changed = re.findall(r"^[+-](?![+-]{2} )", difference[1], re.MULTILINE)
    assert 0 < len(changed) <= 60
    classes = [
        n.name for n in ast.parse((tmp_path / "algos" / "mine.py").read_text()).body if isinstance(n, ast.ClassDef)
    ]
    assert "MINE" in classes
