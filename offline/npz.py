"""Read NumPy's .npz archives without pickle, whole arrays or block by block."""

import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from common.errors import InputError
from offline.arrays import Array

# What NumPy and zipfile raise on an archive that is damaged or encrypted, and on one whose arrays are pickles.
BAD_ARCHIVE = (
    OSError, ValueError, EOFError, KeyError, SyntaxError, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
    RuntimeError,
)  # fmt: skip


class Archive:
    """The arrays of an .npz file. One that needs unpickling is refused when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as file:
                self.keys = [name.removesuffix(".npy") for name in file.namelist()]
        except BAD_ARCHIVE as error:
            raise InputError(f"{path} is damaged ({error}): put a whole copy in its place") from None

    def __contains__(self, key: str) -> bool:
        return key in self.keys

    def __getitem__(self, key: str) -> Array:
        """Return a whole array. Raises InputError if it is damaged, a pickle, or no array."""
        try:
            with np.load(self.path, allow_pickle=False) as file:
                array = file[key]
        except BAD_ARCHIVE as error:
            raise self._unreadable(key, error) from None
        if not isinstance(array, np.ndarray):
            raise InputError(f"{self.path}: {key} is not an array")
        return array

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of an array, from its header alone. Raises InputError as `blocks` does."""
        try:
            with zipfile.ZipFile(self.path) as file, file.open(f"{key}.npy") as data:
                return _header(data)[0]
        except BAD_ARCHIVE as error:
            raise self._unreadable(key, error) from None

    def blocks(self, key: str, rows: int) -> Iterator[Array]:
        """Yield an array [n, ...] in blocks of up to `rows`, so that memory holds one of them.

        Raises InputError if the array is damaged, a pickle, or stored in Fortran's order.
        """
        try:
            with zipfile.ZipFile(self.path) as file, file.open(f"{key}.npy") as data:
                shape, kind = _header(data)
                size = kind.itemsize * int(np.prod(shape[1:], dtype=np.int64))
                for first in range(0, shape[0], rows):
                    count = min(rows, shape[0] - first)
                    yield np.frombuffer(data.read(size * count), kind).reshape(count, *shape[1:])
                if data.read(1):  # at the end, the archive's checksum is compared too
                    raise ValueError("it is longer than its shape")
        except BAD_ARCHIVE as error:
            raise self._unreadable(key, error) from None

    def _unreadable(self, key: str, error: Exception) -> InputError:
        if "pickle" in str(error):
            return InputError(
                f"{self.path} holds {key} as a pickle, which is not loaded: save it as plain numbers (docs/data.md)"
            )
        return InputError(f"{self.path} is damaged at {key} ({error}): put a whole copy in its place")


def _header(data: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and type of an array, with `data` at its first byte. Raises ValueError if it has no rows to read."""
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    version = npy.read_magic(data)
    if version not in read:
        raise ValueError(f"version {version} of its format is unknown")
    shape, is_fortran, kind = read[version](data)
    if kind.hasobject:
        raise ValueError("it is a pickle")
    if is_fortran or not shape:
        raise ValueError("it is a single number, or stored in Fortran's order")
    return shape, kind
