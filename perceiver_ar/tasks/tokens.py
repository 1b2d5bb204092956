"""Token ids that the user already has: DNA, logs, or anything else, from .npy, .bin or .jsonl."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from perceiver_ar.special import BOS, FIRST
from perceiver_ar.splits import SPLITS, Shares, below, by_folder, divide, left, top
from perceiver_ar.store import Store, check_new, write_store
from perceiver_ar.tasks.base import Document, Task, beginning
from perceiver_ar.windows import Tokens

Dtype = Literal["uint8", "uint16", "uint32", "int32", "int64"]
SUFFIXES = (".npy", ".bin", ".jsonl")


@dataclass(frozen=True)
class TokensTask(Task):
    """Token ids of your own, each document after a BOS."""

    name: ClassVar[str] = "tokens"

    dtype: Dtype = field(default="uint16", compare=False)
    """Type of the ids in .bin files; taken from the store."""

    @property
    def ends(self) -> bool:
        return False

    def read(self, path: Path) -> Document:
        found = [encode(ids) for ids in read_ids(path, self.dtype)]
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
        return beginning(self.read(path).tokens, keep)

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
    if path.suffix.lower() == ".npy":
        try:
            array = np.lib.format.open_memmap(path, mode="r")
        except Exception as error:  # of every kind, on damaged files
            raise ValueError(f"{path} is not an array of ids that can be read: {error}") from None
        if array.ndim not in (1, 2):
            raise ValueError(f"{path} has {array.ndim} dimensions: give ids of one document, or a row each.")
        yield from (check_ids(row, str(path)) for row in np.atleast_2d(array))
    elif path.suffix.lower() == ".bin":
        size, kind = path.stat().st_size, np.dtype(dtype).newbyteorder("<")
        if not size or size % kind.itemsize:
            raise ValueError(f"{path} has {size} bytes, which are not ids of type {dtype}: set --dtype.")
        ids: Any = np.memmap(path, dtype=kind, mode="r")
        yield check_ids(ids, str(path))
    elif path.suffix.lower() == ".jsonl":
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _from_json(line, f"{path}, line {number}")
    else:
        raise ValueError(f"{path} is not a .npy, .bin or .jsonl file of token ids.")


def _from_json(line: bytes, where: str) -> Tokens:
    try:
        ids = json.loads(line)
        ids = ids["ids"] if isinstance(ids, dict) else ids
        array = np.array(ids)
    except (ValueError, KeyError, RecursionError):
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


def prepare(
    source: Path,
    /,
    out: Path,
    validation: float = 0.05,
    test: float = 0.0,
    vocab_size: int | None = None,
    dtype: Dtype = "uint16",
) -> Store:
    """Turn ids that you already have into a token store.

    Args:
        source: A .npy file (one document, or one per row), .bin file (one document) or .jsonl file (one per
            line), or a folder of them. Folders named train, validation and test, and files such as train.npy,
            are the splits; missing ones are drawn from the rest.
        out: New folder for the store.
        validation: Fraction of the documents to hold out for validation; of a single document, its end.
        test: Fraction of the documents to hold out for testing; of a single document, its end.
        vocab_size: Number of distinct ids. Default: the largest id plus one.
        dtype: Type of the ids in .bin files.
    """
    check_new(out)
    shares = Shares(validation, test)
    documents = [(ids, split) for path, split in _files(source).items() for ids in read_ids(path, dtype)]
    if not documents:
        raise ValueError(f"{source} holds no documents.")
    largest = max(int(ids.max()) for ids, _ in documents)
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(f"{source} holds the id {largest}, beyond the vocabulary of {vocab_size}.")
    splits: dict[str, list[Tokens]] = {}
    for ids, split in _divide(documents, shares):
        splits.setdefault(split, []).append(ids)
    encoded = {name: map(encode, splits[name]) for name in SPLITS if name in splits}
    return write_store(out, encoded, (vocab_size or largest + 1) + FIRST, "tokens", {"dtype": dtype})


def _files(source: Path) -> dict[Path, str | None]:
    """The file itself, or all such files below a folder, with the splits that they are named for."""
    if source.is_dir():
        source = top(source)
        files = by_folder(below(source, SUFFIXES), source)
        if not files:
            raise ValueError(f"{source} holds no .npy, .bin or .jsonl files.")
        return files
    if not source.exists():
        raise ValueError(f"{source} does not exist.")
    return {source: None}


def _divide(documents: list[tuple[Tokens, str | None]], shares: Shares) -> Iterator[tuple[Tokens, str]]:
    """Each document with its split; a single one for training is cut instead."""
    named = [split for _, split in documents]
    alone = sum(split in (None, "train") for split in named) == 1
    for (ids, _), split in zip(documents, divide(named, shares), strict=True):
        yield from _cut(ids, left(named, shares)) if alone and split == "train" else [(ids, split)]


def _cut(ids: Tokens, shares: Shares) -> Iterator[tuple[Tokens, str]]:
    """The end of a document is for validation, and what is after that for the test."""
    held = [max(1, round(len(ids) * share)) if share else 0 for share in (shares.validation, shares.test)]
    bounds = [0, len(ids) - sum(held), len(ids) - held[1], len(ids)]
    if bounds[1] < 1:
        raise ValueError("the only document is too short to divide: set --validation 0 and --test 0.")
    for split, (start, stop) in zip(SPLITS, pairwise(bounds), strict=True):
        if start < stop:
            yield ids[start:stop], split
