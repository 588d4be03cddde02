"""Read OGBench's datasets."""

import os
from pathlib import Path


def folder() -> Path:
    """Return the package's own folder of datasets: $OGBENCH_DATASET_DIR, else ~/.ogbench/data."""
    return Path(os.environ.get("OGBENCH_DATASET_DIR", "~/.ogbench/data")).expanduser()
