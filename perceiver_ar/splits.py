"""Which documents are for training, which for validation, which for the test."""

import csv
import random
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SPLITS = ("train", "validation", "test")
_NAMED = re.compile(r"(train|validation|valid|val|dev|test)([-._].*)?", re.IGNORECASE)
"""Names of folders and files that say which split they hold."""


@dataclass(frozen=True)
class Shares:
    """Of the documents that go to other splits than train."""

    validation: float
    test: float

    def __post_init__(self) -> None:
        if min(self.validation, self.test) < 0 or self.validation + self.test >= 1:
            raise ValueError("the shares of validation and test must be at least 0 and together below 1.")

    def split(self, place: float) -> str:
        """Of a place between 0 and 1."""
        if place < 1 - self.validation - self.test:
            return "train"
        return "validation" if place < 1 - self.test else "test"


def named_split(name: str) -> str | None:
    """The split that a folder or file is named after."""
    found = _NAMED.fullmatch(name)
    if found is None:
        return None
    return {"valid": "validation", "val": "validation", "dev": "validation"}.get(
        found[1].lower(), found[1].lower()
    )


def splits_of(files: Sequence[Path], source: Path, shares: Shares) -> list[str]:
    """The split of each file below a folder: that its folder or own name says, or drawn."""
    given = [named_split(path.relative_to(source).parts[0]) for path in files]
    drawn = draw_splits(len(files), shares) if None in given else [""] * len(files)
    return [named or split for named, split in zip(given, drawn, strict=True)]


def draw_splits(count: int, shares: Shares) -> list[str]:
    """A split for each of so many documents, at least one for each that has a share."""
    tests = max(1, round(count * shares.test)) if shares.test else 0
    others = max(1, round(count * shares.validation)) if shares.validation else 0
    splits = ["test"] * tests + ["validation"] * others + ["train"] * max(0, count - tests - others)
    random.Random(0).shuffle(splits)
    if count > 1 and "train" not in splits:
        raise ValueError(f"{count} documents are too few to divide: lower --validation and --test.")
    return splits[:count]


def recordings(source: Path, suffixes: Sequence[str], column: str, shares: Shares) -> dict[Path, str]:
    """Each file of music with its split: as MAESTRO's table says, if it is there, or as splits_of does."""
    if source.is_file():
        return {source: "train"}
    tables = sorted(source.glob("maestro*.csv"))
    if tables:
        with tables[0].open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        if not rows or not {column, "split"} <= rows[0].keys():
            raise ValueError(f"{tables[0]} is not MAESTRO's table: it has no {column} and split.")
        listed = {source / row[column]: row["split"] for row in rows}
        found = {path: split for path, split in listed.items() if path.exists()}
    else:
        files = sorted(p for p in source.rglob("*") if p.suffix.lower() in suffixes)
        found = dict(zip(files, splits_of(files, source, shares), strict=True))
    if not found:
        raise ValueError(f"{source} holds no {', '.join(suffixes[:-1])} or {suffixes[-1]} files.")
    return found


def by_split(splits: Mapping[Path, str], usable: Collection[Path]) -> dict[str, list[Path]]:
    """The files of each split that has any."""
    named = {name: [p for p in splits if splits[p] == name and p in usable] for name in SPLITS}
    return {name: files for name, files in named.items() if files}
