"""Freed memory stays with the process."""

import subprocess
import sys

import pytest
from conftest import ROOT

PAGES = """
import resource, torch
from common.onednn import keep_freed_memory
keep_freed_memory()
def work():
    return [torch.ones(2**21) for _ in range(8)]  # 8 MB each
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's own settings")
def test_freed_blocks_are_not_fetched_anew():
    """640 MB of blocks are 160 000 pages of 4 kB, nearly all of which came from the kernel; now few may."""
    result = subprocess.run([sys.executable, "-c", PAGES], capture_output=True, text=True, cwd=ROOT, check=True)
    assert int(result.stdout) < 50_000, result.stderr
