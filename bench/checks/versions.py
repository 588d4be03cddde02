"""Run the tests with the lowest, and then with the newest versions that pyproject.toml allows.

    make versions                       # all tests, twice
    make versions ARGS="-k smoke"       # what follows goes to pytest

The packages that only the tests need have the versions of requirements.txt. Each set has a virtual environment of its
own, .venv-lowest and .venv-newest, which is made again every time.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from common.messages import log, print_result

ROOT = Path(__file__).resolve().parents[2]


def requirements(which: str) -> list[str]:
    """Return the requirements of running and testing: `which` is "lowest" or "newest"."""
    direct: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    if which == "lowest":
        direct = [re.sub(r">=([^,]+).*", r"==\1", each) for each in direct]
    names = {re.split("[<>=]", each)[0] for each in direct}
    pinned = re.findall(r"^[a-z]\S+==\S+", (ROOT / "requirements.txt").read_text("utf-8"), re.MULTILINE)
    return direct + [each for each in pinned if each.partition("==")[0] not in names]


def main(words: list[str]) -> int:
    """Run the tests with both sets. Return the status of the first that failed, or 0."""
    for which in ("lowest", "newest"):
        environment = ROOT / f".venv-{which}"
        python = str(environment / "bin" / "python")
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *requirements(which), "-e", str(ROOT)], check=True)
        log.info(f"the {which} versions:")
        freeze = [python, "-m", "pip", "list", "--format", "freeze", "--disable-pip-version-check"]
        print_result(subprocess.run(freeze, check=True, capture_output=True, text=True).stdout)
        tests = [python, "-m", "pytest", "-n", "2", "--dist", "worksteal", *words]
        if status := subprocess.run(tests, cwd=ROOT, check=False).returncode:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
