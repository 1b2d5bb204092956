"""Token ids that the user already has: DNA, logs, or anything else, from .npy, .bin or .jsonl."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from perceiver_ar.store import Store, write_store
from perceiver_ar.tasks.base import BOS, FIRST, Document, Task
from perceiver_ar.windows import Tokens


@dataclass(frozen=True)
class TokensTask(Task):
    """Ids as they are, counted from FIRST, each document after a BOS."""

    name: ClassVar[str] = "tokens"

    @property
    def ends(self) -> bool:
        return False

    def read(self, path: Path) -> Document:
        found = [encode(ids) for ids in read_ids(path, "uint16")]
        if len(found) != 1:
            raise ValueError(f"{path} holds {len(found)} documents: give a file of one.")
        return Document(found[0], 1, len(found[0]))

    def prompt(self, text: str) -> Tokens:
        """Ids with spaces or commas between them."""
        try:
            ids = [int(word) for word in text.replace(",", " ").split()]
        except ValueError:
            raise ValueError(f"'{text}' is not a row of ids such as 5 17 3.") from None
        return encode(check_ids(np.array(ids), "the prompt"))

    def prompt_file(self, path: Path, keep: int | None = None) -> Tokens:
        return self.read(path).tokens[: None if keep is None else keep + 1]

    def speller(self) -> Callable[[int], str]:
        return lambda token: f"{token - FIRST} " if token >= FIRST else ""

    def check_file(self, path: Path) -> None:
        if path.suffix not in (".npy", ".jsonl"):
            raise ValueError(f"{path} is neither a .npy nor a .jsonl file.")

    def save(self, tokens: Tokens, path: Path) -> None:
        """As .npy, or as a line of .jsonl: what `prepare` and `score` read."""
        ids = tokens[tokens >= FIRST] - FIRST
        if path.suffix == ".npy":
            np.save(path, ids)
        else:
            path.write_text(json.dumps(ids.tolist()) + "\n")


def read_ids(path: Path, dtype: str) -> Iterator[Tokens]:
    """The documents of a file: a .bin holds one, an .npy one or a row each, a .jsonl one a line."""
    if path.suffix == ".npy":
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if array.ndim not in (1, 2):
            raise ValueError(f"{path} has {array.ndim} dimensions: give ids of one document, or a row each.")
        yield from (check_ids(row, str(path)) for row in np.atleast_2d(array))
    elif path.suffix == ".bin":
        size, kind = path.stat().st_size, np.dtype(dtype).newbyteorder("<")
        if not size or size % kind.itemsize:
            raise ValueError(f"{path} has {size} bytes, which are not ids of type {dtype}: set --dtype.")
        ids: Any = np.memmap(path, dtype=kind, mode="r")
        yield check_ids(ids, str(path))
    elif path.suffix == ".jsonl":
        with path.open() as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _from_json(line, f"{path}, line {number}")
    else:
        raise ValueError(f"{path} is not a .npy, .bin or .jsonl file of token ids.")


def _from_json(line: str, where: str) -> Tokens:
    try:
        ids = json.loads(line)
        ids = ids["ids"] if isinstance(ids, dict) else ids
        array = np.array(ids)
    except (ValueError, KeyError):
        raise ValueError(f"{where} is not a JSON list of ids, nor an object with 'ids'.") from None
    return check_ids(array, where)


def check_ids(ids: Tokens, where: str) -> Tokens:
    if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{where} does not hold a list of whole numbers.")
    if ids.min() < 0:
        raise ValueError(f"{where} holds the negative id {ids.min()}.")
    if ids.max() >= 2**32 - FIRST:
        raise ValueError(f"{where} holds the id {ids.max()}, but ids must be below 2**32 - {FIRST}.")
    return ids


def encode(ids: Tokens) -> Tokens:
    """A document as it is stored."""
    return np.concatenate(([BOS], ids.astype(np.int64) + FIRST))


def find_files(source: Path) -> list[Path]:
    """The file itself, or all such files below a folder."""
    if source.is_dir():
        files = sorted(p for p in source.rglob("*") if p.suffix in (".npy", ".bin", ".jsonl"))
        if not files:
            raise ValueError(f"{source} holds no .npy, .bin or .jsonl files.")
        return files
    if not source.exists():
        raise ValueError(f"{source} does not exist.")
    return [source]


def prepare(
    source: Path,
    /,
    out: Path,
    validation: float = 0.05,
    vocab_size: int | None = None,
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16",
) -> Store:
    """Turn ids that you already have into a token store.

    Args:
        source: A .npy, .bin or .jsonl file, or a folder, perhaps with train/ and validation/ below it.
        out: Folder of the store.
        validation: Share of the documents that is kept for validation; of a single one, its end.
        vocab_size: Number of different ids. Default: the largest and one.
        dtype: Type of the ids in .bin files.
    """
    if not 0 <= validation < 1:
        raise ValueError(f"the validation share must be at least 0 and below 1, but is {validation}.")
    named = {name: source / name for name in ("train", "validation", "test") if (source / name).is_dir()}
    if named:
        splits = {name: list(_documents(folder, dtype)) for name, folder in named.items()}
    else:
        splits = divide(list(_documents(source, dtype)), validation)
    for name, documents in splits.items():
        if not documents:
            raise ValueError(f"{source} holds no documents for the split '{name}'.")
    largest = max(int(ids.max()) for documents in splits.values() for ids in documents)
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(f"{source} holds the id {largest}, beyond the vocabulary of {vocab_size}.")
    encoded = {name: map(encode, documents) for name, documents in splits.items()}
    return write_store(out, encoded, (vocab_size or largest + 1) + FIRST, "tokens")


def _documents(source: Path, dtype: str) -> Iterator[Tokens]:
    for path in find_files(source):
        yield from read_ids(path, dtype)


def divide(documents: list[Tokens], validation: float) -> dict[str, list[Tokens]]:
    """Every so many documents for validation; of a single one its end."""
    if not validation or not documents:
        return {"train": documents}
    if len(documents) == 1:
        (ids,) = documents
        cut = len(ids) - max(1, round(len(ids) * validation))
        if cut < 1:
            raise ValueError("the only document is too short to divide: set --validation 0.")
        return {"train": [ids[:cut]], "validation": [ids[cut:]]}
    every = max(2, round(1 / validation))
    held = {index for index in range(len(documents)) if index % every == every - 1} or {len(documents) - 1}
    return {
        "train": [ids for index, ids in enumerate(documents) if index not in held],
        "validation": [documents[index] for index in sorted(held)],
    }
