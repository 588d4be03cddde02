"""Train one algorithm of d3rlpy on a dataset until killed; run by d3rlpy's own Python (see `bench/speed.py`).

`python bench/offline_peer.py CQL <D4RL file> <folder for its logs> '<keyword arguments as JSON>'`
"""

import json
import sys

import d3rlpy
import h5py

from bench.step_counter import claim_slot


def main() -> None:
    """What the arguments do not name is d3rlpy's default; only its progress bar is off, as ours is off a terminal."""
    name, path, folder, kwargs = sys.argv[1:]
    with h5py.File(path) as file:
        keys = ("observations", "actions", "rewards", "terminals", "timeouts")
        dataset = d3rlpy.dataset.MDPDataset(**{key: file[key][:] for key in keys})
    count = claim_slot()
    getattr(d3rlpy.algos, f"{name}Config")(**json.loads(kwargs)).create().fit(
        dataset,
        n_steps=10**9,
        show_progress=False,
        logger_adapter=d3rlpy.logging.FileAdapterFactory(root_dir=folder),
        callback=lambda *_: count(),  # called after each gradient step
    )


if __name__ == "__main__":
    main()
