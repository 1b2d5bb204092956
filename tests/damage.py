"""Flips single bits in files, one at a time."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from perceiver_ar.sealed import Damaged


def every_flip_is_noticed(files: list[Path], count: int, read: Callable[[], object]) -> None:
    """Flips `count` random bits, one at a time, in the files by turns; with each, reading must fail."""
    random = np.random.default_rng(0)
    for number in range(count):
        path = files[number % len(files)]
        good = path.read_bytes()
        bad = bytearray(good)
        where = int(random.integers(len(bad) * 8))
        bad[where // 8] ^= 1 << (where % 8)
        path.write_bytes(bad)
        with pytest.raises(Damaged):
            read()
        path.write_bytes(good)
    read()
