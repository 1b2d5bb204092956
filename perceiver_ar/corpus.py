"""Where text comes from, and how it is cut into parts that can be processed independently.

A .txt file, or any other that is not binary, is one document; a .jsonl file holds one per line, a
.parquet file one per row. Long documents are cut at the ends of lines.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from perceiver_ar.extras import need
from perceiver_ar.splits import SPLITS, Shares, by_folder, divide, fitting, top

PART = 8 << 20
"""Bytes of text that are processed at a time."""
_NEAR = 1 << 16
"""Bytes that are searched for the end of a line."""
_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Span:
    """A byte range of a text or .jsonl file, or one row group of a .parquet file."""

    path: str
    start: int
    stop: int
    """Byte offsets, or numbers of row groups."""
    size: int
    """Approximate bytes."""
    split: str | None
    """None: each document has a split of its own, drawn by its checksum."""
    begins: bool = True
    ends: bool = True
    """Whether a document begins or ends here, rather than in another span."""
    final: bool = True
    """Whether this is also the end of the text, rather than a cut between splits."""


@dataclass(frozen=True)
class Stretch:
    """The text of a document, or a part of it."""

    data: bytes
    split: str
    begins: bool = True
    ends: bool = True
    final: bool = True


def find_files(source: Path, pattern: str) -> dict[Path, str | None]:
    """The files that match the pattern, each with the split that it is named for, if any."""
    if source.is_file():
        return {source: None}
    if not source.is_dir():
        raise ValueError(f"{source} does not exist.")
    source = top(source)
    found = by_folder(fitting(source, pattern), source)
    if not found:
        raise ValueError(f"{source} holds no files that fit '{pattern}'.")
    return found


def parts_of(files: dict[Path, str | None], shares: Shares, to_the_byte: bool) -> list[list[Span]]:
    """All text in order, in parts of about PART bytes. to_the_byte: splits need not be cut between words."""
    spans = list(_spans(files, shares, to_the_byte))
    if not spans:
        raise ValueError("all of these files are empty.")
    parts: list[list[Span]] = [[]]
    filled = 0
    for span in spans:
        if filled >= PART:
            parts.append([])
            filled = 0
        parts[-1].append(span)
        filled += span.size
    return parts


def _spans(files: dict[Path, str | None], shares: Shares, to_the_byte: bool) -> Iterator[Span]:
    held = {path: None if split == "train" else split for path, split in files.items()}
    texts = [
        path for path in files if path.suffix.lower() not in (*_LINES, ".parquet") and path.stat().st_size
    ]
    drawn = dict(zip(texts, divide([held[path] for path in texts], shares), strict=True))
    alone = [held[path] for path in texts].count(None) == 1
    for path, split in held.items():
        size = path.stat().st_size
        if path.suffix.lower() in _LINES:
            yield from (Span(str(path), a, b, b - a, split) for a, b in _cut(path, 0, size, whole_lines=True))
        elif path.suffix.lower() == ".parquet":
            yield from _row_groups(path, split)
        elif size and split is None and alone:
            yield from _divide(path, size, shares, to_the_byte)
        elif size:
            yield from _text(path, 0, size, drawn[path], final=True)


def _divide(path: Path, size: int, shares: Shares, to_the_byte: bool) -> Iterator[Span]:
    """A single document: its beginning for training, then validation, then test."""
    held = [round(size * share) for share in (shares.validation, shares.test)]
    bounds = [0, size - sum(held), size - held[1], size]
    if not to_the_byte:
        with path.open("rb") as file:
            bounds[1:3] = [_between_words(file, at, size) for at in bounds[1:3]]
    for split, (start, stop) in zip(SPLITS, pairwise(bounds), strict=True):
        if start < stop:
            yield from _text(path, start, stop, split, final=stop == size)


def _text(path: Path, start: int, stop: int, split: str, final: bool) -> Iterator[Span]:
    """The spans of a document, or of one split of it."""
    with path.open("rb") as file:
        if b"\0" in file.read(8192):
            raise ValueError(f"{path} is a binary file, not text: leave it out, or choose with --pattern.")
    for a, b in _cut(path, start, stop):
        yield Span(str(path), a, b, b - a, split, a == start, b == stop, final and b == stop)


def _cut(path: Path, start: int, stop: int, whole_lines: bool = False) -> list[tuple[int, int]]:
    """Byte ranges of about PART bytes that end with a line; within huge lines only if not whole_lines."""
    bounds = [start, stop]
    with path.open("rb") as file:
        for at in range(start + PART, stop, PART):
            file.seek(at)
            line_end = at + len(file.readline(stop - at)) if whole_lines else _between_words(file, at, stop)
            bounds.append(line_end)
    return list(pairwise(sorted(set(bounds))))


def _between_words(file: BinaryIO, at: int, stop: int) -> int:
    """The offset after the next end of a line, else before the next space, else before the next character."""
    file.seek(at)
    near = file.read(min(_NEAR, stop - at))
    if (line := near.find(b"\n")) >= 0:
        return at + line + 1
    if (space := near.find(b" ")) >= 0:
        return at + space
    return at + next((i for i, byte in enumerate(near[:4]) if byte & 0xC0 != 0x80), 0)


def _row_groups(path: Path, split: str | None) -> Iterator[Span]:
    about = _parquet(path).metadata
    for group in range(about.num_row_groups):
        yield Span(str(path), group, group + 1, about.row_group(group).total_byte_size, split)


def _parquet(path: Path) -> Any:
    return need("pyarrow.parquet", "text").ParquetFile(path)


def read(spans: Sequence[Span], key: str, shares: Shares) -> Iterator[Stretch]:
    """The text of a part, document by document."""
    for span in spans:
        path = Path(span.path)
        if path.suffix.lower() == ".parquet":
            documents = _rows(path, span.start, key)
        else:
            with path.open("rb") as file:
                file.seek(span.start)
                data = file.read(span.stop - span.start)
            if path.suffix.lower() not in _LINES:
                assert span.split is not None
                yield Stretch(data, span.split, span.begins, span.ends, span.final)
                continue
            documents = _lines(path, data, key)
        for document in filter(None, documents):
            place = zlib.crc32(document) / 2**32
            yield Stretch(document, span.split or shares.split(place))


def _lines(path: Path, data: bytes, key: str) -> Iterator[bytes]:
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            text = value if isinstance(value, str) else value[key]
            yield b"" if text is None else text.encode("utf-8", "surrogatepass")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(
                f"{path} holds a line that is not an object with a text at '{key}': {line[:60]!r}"
            ) from None


def _rows(path: Path, group: int, key: str) -> Iterator[bytes]:
    file = _parquet(path)
    if key not in file.schema_arrow.names:
        raise ValueError(
            f"{path} has no column '{key}': choose one of {', '.join(file.schema_arrow.names)} with --key."
        )
    if str(file.schema_arrow.field(key).type) not in ("string", "large_string", "binary", "large_binary"):
        raise ValueError(f"the column '{key}' of {path} holds no text: choose another with --key.")
    for value in file.read_row_group(group, columns=[key]).column(0).to_pylist():
        yield value.encode() if isinstance(value, str) else value or b""
