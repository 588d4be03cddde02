"""Ctrl-C while a program imports its libraries ends it in one line."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ALGORITHMS, ROOT

STUCK = """
import time
print("importing", flush=True)
try:
    for _ in range(6000):
        time.sleep(0.01)  # a signal just before a long sleep would not end that
except BaseException:
    pass  # as libraries do that catch every exception
raise SystemExit("the import continued")
"""
PROGRAMS = sorted(
    path.relative_to(ROOT)
    for folder in ("algos", "tools", "bench")
    for path in (ROOT / folder).rglob("*.py")
    if re.search(r"^    command_line\(", path.read_text(), re.MULTILINE)
)


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_ctrl_c_during_imports(program: Path, tmp_path: Path):
    """A PyTorch whose import never ends stands for any moment of the imports."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(STUCK)
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, program], cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        said = process.communicate()
    assert (process.returncode, *said) == (130, "", "stopped while starting: nothing was written\n")


def test_programs_are_all_algorithms_and_more():
    """The search above finds what it is meant to find."""
    assert {Path("algos") / f"{algo}.py" for algo in ALGORITHMS} < set(PROGRAMS)


def test_a_module_leaves_ctrl_c_to_its_program(tmp_path: Path):
    """An algorithm that another program imports is not what Ctrl-C should end."""
    (tmp_path / "algorithm.py").write_text("import common.start\n")
    code = "import signal, {}; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    for name, is_untouched in (("algorithm", "True"), ("common.start", "False")):
        line = [sys.executable, "-c", code.format(name)]
        assert subprocess.run(line, env=env, capture_output=True, text=True, check=True).stdout.strip() == is_untouched
