"""Token stores: documents on disk, memory-mapped, with checksums verified on first access.

A folder with meta.json and, for each split, tokens.bin (the documents one after another, in the
smallest integer type that fits), offsets.bin (where each begins and the last ends) and
checksums.bin (a CRC-32 of each block of tokens.bin).
"""

import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from perceiver_ar.sealed import Damaged, check_version, read_sealed, write_sealed
from perceiver_ar.windows import Tokens

FORMAT_VERSION = 1
BLOCK = 1 << 16
"""Bytes per checksum: few, since the first access to a block reads all of it."""


@dataclass(frozen=True)
class Store:
    """A token store, opened for reading."""

    folder: Path
    meta: dict[str, Any]

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        folder = Path(folder)
        if not (folder / "meta.json").exists():
            raise ValueError(
                f"{folder} is not a token store: make one with `perceiver-ar prepare`, or name one by --data."
            )
        meta = read_sealed(folder / "meta.json")
        check_version(meta["format_version"], FORMAT_VERSION, folder)
        return cls(folder, meta)

    @property
    def vocab_size(self) -> int:
        return self.meta["vocab_size"]

    def split(self, name: str) -> "Split":
        if name not in self.meta["splits"]:
            raise ValueError(
                f"{self.folder} has no split '{name}': add --split with one that it has, "
                f"{' or '.join(self.meta['splits'])}."
            )
        return Split(self.folder / name, self.meta["splits"][name], self.meta["dtype"])


class Split:
    """The documents of one split; each block of tokens is verified on first access."""

    def __init__(self, folder: Path, meta: dict[str, Any], dtype: str) -> None:
        self.folder, self.meta = folder, meta
        self.offsets = self._read_whole("offsets", np.dtype("<u8"), meta["documents"] + 1).astype(np.int64)
        blocks = -(-meta["tokens"] * np.dtype(dtype).itemsize // BLOCK)
        self.checksums = self._read_whole("checksums", np.dtype("<u4"), blocks)
        self.verified = np.zeros(blocks, dtype=bool)
        path = folder / "tokens.bin"
        wanted = meta["tokens"] * np.dtype(dtype).itemsize
        if not path.exists() or path.stat().st_size != wanted:
            raise Damaged(f"{path} is missing or has the wrong size: prepare the store again.")
        self.tokens: Any = (
            np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r") if wanted else None
        )

    def __len__(self) -> int:
        return self.meta["documents"]

    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def length(self, index: int) -> int:
        return int(self.offsets[index + 1] - self.offsets[index])

    def read(self, index: int, start: int = 0, end: int | None = None) -> Tokens:
        """Tokens start to end of a document, verified."""
        base = int(self.offsets[index])
        first = base + start
        last = int(self.offsets[index + 1]) if end is None else base + end
        assert base <= first < last <= int(self.offsets[index + 1])
        assert self.tokens is not None
        self._verify(first, last)
        return np.asarray(self.tokens[first:last])

    def _verify(self, first: int, last: int) -> None:
        assert self.tokens is not None
        size = self.tokens.dtype.itemsize
        raw: Any = self.tokens.view(np.uint8)
        for block in range(first * size // BLOCK, (last * size - 1) // BLOCK + 1):
            if not self.verified[block]:
                if zlib.crc32(raw[block * BLOCK : (block + 1) * BLOCK]) != self.checksums[block]:
                    where = f"{self.folder / 'tokens.bin'} is damaged near byte {block * BLOCK:,}"
                    raise Damaged(f"{where}: prepare the store again.")
                self.verified[block] = True

    def _read_whole(self, name: str, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        path = self.folder / f"{name}.bin"
        data = path.read_bytes() if path.exists() else b""
        if zlib.crc32(data) != self.meta[f"{name}_crc32"] or len(data) != count * dtype.itemsize:
            raise Damaged(f"{path} is missing or damaged: prepare the store again.")
        return np.frombuffer(data, dtype=dtype)


def smallest_dtype(vocab_size: int) -> str:
    return next(name for name in ("uint8", "uint16", "uint32") if vocab_size <= np.iinfo(name).max + 1)


def check_new(folder: Path) -> None:
    """Refuses a folder that exists, before any work is done."""
    if folder.exists():
        raise ValueError(f"{folder} exists already: choose another folder, or remove it.")


def write_store(
    folder: str | Path,
    splits: Mapping[str, Iterable[Tokens | Iterator[Tokens]]],
    vocab_size: int,
    task: str,
    options: dict[str, Any] | None = None,
    *,
    files: Mapping[str, bytes] | None = None,
    counts: Mapping[str, dict[str, int]] | None = None,
) -> Store:
    """Writes a store under a temporary name and renames it, so that a store is always complete.

    splits: their documents, each an array or an iterator over arrays. files: other files of the store,
    such as a vocabulary. counts: other counts of each split, such as words.
    """
    folder = Path(folder)
    check_new(folder)
    beside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    meta = {
        "format_version": FORMAT_VERSION,
        "task": task,
        "options": options or {},
        "vocab_size": vocab_size,
        "dtype": smallest_dtype(vocab_size),
        "splits": {
            name: _write_split(beside / name, documents, vocab_size) for name, documents in splits.items()
        },
    }
    for name, known in (counts or {}).items():
        meta["splits"][name]["counts"] = known
    for name, content in (files or {}).items():
        (beside / name).write_bytes(content)
    write_sealed(beside / "meta.json", meta)
    beside.rename(folder)
    return Store.open(folder)


def _write_split(
    folder: Path, documents: Iterable[Tokens | Iterator[Tokens]], vocab_size: int
) -> dict[str, Any]:
    folder.mkdir(parents=True)
    offsets, kind = [0], np.dtype(smallest_dtype(vocab_size)).newbyteorder("<")
    with (folder / "tokens.bin").open("wb") as file:
        blocks = _Blocks(file)
        for document in documents:
            length = 0
            for stretch in [document] if isinstance(document, np.ndarray) else document:
                length += len(stretch)
                _check(stretch, vocab_size)
                blocks.write(np.ascontiguousarray(stretch, dtype=kind).data.cast("B"))
            if not length:
                raise ValueError("a document is empty: leave it out.")
            offsets.append(offsets[-1] + length)
        checksums = blocks.finish()
    meta: dict[str, Any] = {"documents": len(offsets) - 1, "tokens": offsets[-1]}
    for name, values, kind in (("offsets", offsets, "<u8"), ("checksums", checksums, "<u4")):
        data = np.array(values, dtype=kind).tobytes()
        (folder / f"{name}.bin").write_bytes(data)
        meta[f"{name}_crc32"] = zlib.crc32(data)
    return meta


def _check(tokens: Tokens, vocab_size: int) -> None:
    """Refuses tokens that are not whole numbers below the vocabulary size."""
    if not len(tokens):
        return
    low, high = 0 if tokens.dtype.kind == "u" else tokens.min(), tokens.max()
    if tokens.dtype.kind not in "iu" or low < 0 or high >= vocab_size:
        raise ValueError(
            f"a document holds tokens from {low} to {high}: give whole numbers from 0 to {vocab_size - 1}, "
            "or a larger vocabulary."
        )


class _Blocks:
    """Writes to a file, and computes the checksum of each block on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.checksums, self.crc, self.filled = file, [], 0, 0

    def write(self, data: memoryview) -> None:
        self.file.write(data)
        while data:
            part = data[: BLOCK - self.filled]
            self.crc, self.filled, data = (
                zlib.crc32(part, self.crc),
                self.filled + len(part),
                data[len(part) :],
            )
            if self.filled == BLOCK:
                self.checksums.append(self.crc)
                self.crc = self.filled = 0

    def finish(self) -> list[int]:
        return [*self.checksums, self.crc] if self.filled else self.checksums
