"""NumPy's archives, read without pickle: a damaged one is named."""

import struct
import zipfile
from pathlib import Path

import pytest

from common.errors import InputError
from offline.npz import Archive


@pytest.mark.parametrize("header", ["{'descr': '<f4', 'fortran_order': False, 'shape': (3", "{'descr': )", "", "[]"])
def test_an_array_whose_header_is_damaged(header: str, tmp_path: Path) -> None:
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("observations.npy", data)
    archive = Archive(tmp_path / "a.npz")
    for read in (archive.shape, archive.__getitem__, lambda key: list(archive.blocks(key, 2))):
        with pytest.raises(InputError, match=r"a\.npz"):
            read("observations")
