"""Where files are: which package may import which, how modules are named, how large they are, and which paths exist."""

import ast
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, every_algorithm

# bench, tools → algos → offline → envs, common
BELOW = {
    "common": set(),
    "envs": {"common"},
    "offline": {"common", "envs"},
    "algos": {"common", "envs", "offline"},
    "tools": {"common", "envs", "offline", "algos"},
    "bench": {"common", "envs", "offline", "algos", "tools"},
}
OURS = "|".join(BELOW)
NAMED = re.compile(rf"({OURS})\.(?:\w|$)")  # a string that begins with the name of a module of ours
PATHS = re.compile(
    rf"(?<![\w/.:-])(?:\.\./)*((?:{OURS}|docs)/[\w/-]+\.(?:py|toml|html|txt|csv|md))\b"
)  # not c8fd211:path, in an earlier commit
MODULES = re.compile(rf"-m ((?:{OURS})\b[.\w]*)|\b((?:{OURS})\b[.\w]*):[\w-]+/")  # of commands, and of ids
EXAMPLES = {"algos/mine.py", "docs/mine.md"}  # what a reader is told to make


def sources() -> list[Path]:
    return [path for folder in BELOW for path in sorted((ROOT / folder).rglob("*.py"))]


def packages_named(source: str) -> set[str]:
    """Return those of our packages that it imports, in functions too, or names as a module in a string.

    That counts `import_module("algos.sac")`, and also a string such as f"algos.{name}", wherever it goes from there.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and node.args and called(node) in ("import_module", "__import__"):
            parts = (part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant))
            found |= {part.split(".")[0] for part in parts if isinstance(part, str)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and (named := NAMED.match(node.value)):
            found.add(named[1])
    return found & BELOW.keys()


def called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def test_imports_run_one_way() -> None:
    for path in sources():
        folder = path.relative_to(ROOT).parts[0]
        assert packages_named(path.read_text()) <= BELOW[folder] | {folder}, path


@pytest.mark.parametrize(
    "line",
    [
        "import algos.sac",
        "from algos import sac",
        "from algos.sac import SAC",
        "def f():\n    import algos.sac",
        "def f():\n    from algos.sac import SAC",
        "importlib.import_module('algos')",
        "import_module('algos.sac')",
        "__import__('algos', fromlist=['sac'])",
        "import_module('algos' + '.' + name)",
        "import_module(f'algos.{name}')",
        "module = f'algos.{name}'",
        "module = 'algos.' + name",
        "gym.make('algos.sac:Mine-v0')",
    ],
)
def test_an_import_upward_is_found(line: str) -> None:
    assert packages_named(f"from common.errors import InputError\n{line}") == {"common", "algos"}


def test_no_module_has_a_name_of_the_standard_library() -> None:
    """`python tools/collect.py` puts tools/ first on the path: tools/inspect.py would be imported for `inspect`."""
    names = {path: path.parent.name if path.stem == "__init__" else path.stem for path in sources()}
    assert len(names) > 80
    assert not {str(path) for path, name in names.items() if name in sys.stdlib_module_names}


@every_algorithm
def test_a_training_loop_has_at_most_30_lines(algo: str):
    """Blank lines and comments count, the decorator does not."""
    body = ast.parse((ROOT / "algos" / f"{algo}.py").read_text()).body
    (train,) = (node for node in body if isinstance(node, ast.FunctionDef) and node.name == "train")
    assert train.end_lineno - train.lineno + 1 <= 30


def test_sizes_of_files_and_folders() -> None:
    """400 lines are the limit, and in each folder of `bench` twelve files."""
    for path in sources():
        assert len(path.read_text().splitlines()) <= 400, path
    for folder in [path.parent for path in (ROOT / "bench").rglob("__init__.py")]:
        assert len(list(folder.glob("*.py"))) <= 12, folder


def missing_names(text: str) -> set[str]:
    """Return the paths and modules of ours that `text` names and that do not exist."""
    paths = {path for path in PATHS.findall(text) if not (ROOT / path).is_file()}
    modules = {one or other for one, other in MODULES.findall(text)}
    return (paths - EXAMPLES) | {name for name in modules if not (ROOT / f"{name.replace('.', '/')}.py").is_file()}


def test_a_test_file_needs_no_other_folders() -> None:
    """It can run alone: it imports test files of its own folder only, and no environment that another one registers."""
    files = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    for path, text in files.items():
        for name in re.findall(r"^from (test_\w+) import", text, re.MULTILINE):
            assert path.with_name(f"{name}.py") in files, f"{path} imports {name}"
        for env in re.findall(r'^gym\.register\("([\w-]+)"', text, re.MULTILINE):
            users = [other for other, its in files.items() if f'"{env}"' in its]
            assert users == [path], f"{env}: {users}"


def test_every_path_and_module_that_is_named_exists() -> None:
    """In pages, commands, docstrings and messages."""
    pages = [ROOT / name for name in ("README.md", "Makefile", "pyproject.toml", ".ci/run", ".ci/untouched.py")]
    others = [*(ROOT / "bench").rglob("*.txt"), *(ROOT / "bench").rglob("*.toml"), *(ROOT / "bench").rglob("*.html")]
    texts = [*pages, *(ROOT / "docs").rglob("*.md"), *sources(), *others]
    missing = {str(path.relative_to(ROOT)): missing_names(path.read_text()) for path in texts}
    assert not {path: names for path, names in missing.items() if names}


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("python bench/sweep.py smoke", {"bench/sweep.py"}),
        ("[`a`](../offline/inspect.py), `bench/suites/gpu.toml`", {"offline/inspect.py", "bench/suites/gpu.toml"}),
        ("python -m offline.collect --help", {"offline.collect"}),
        ("--env offline.mazes:d4rl/door-v1", {"offline.mazes"}),
        ("python -m tools.collect --env offline.environments:d4rl/door-v1; algos/mine.py tools/collect.py", set()),
    ],
)
def test_a_path_or_module_that_does_not_exist_is_found(text: str, missing: set[str]) -> None:
    assert missing_names(text) == missing


def test_shared_code_does_not_know_an_algorithm():
    """No string constant of `common`, `envs` or `offline` equals its name, so that a new file needs no edit there."""
    algos = {path.stem for path in (ROOT / "algos").glob("*.py")}
    for path in (path for folder in ("common", "envs", "offline") for path in (ROOT / folder).rglob("*.py")):
        constants = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        assert not algos & {value for value in constants if isinstance(value, str)}, path
