"""Which documents are for training, which for validation, which for the test."""

import csv
import random
import re
import sys
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


def top(source: Path) -> Path:
    """The folder that holds the files or the splits: below those that hold nothing but the next."""
    inside = [path for path in source.iterdir() if not path.name.startswith(".")]
    if len(inside) == 1 and inside[0].is_dir() and named_split(inside[0].name) is None:
        return top(inside[0])
    return source


def below(source: Path, suffixes: Collection[str]) -> list[Path]:
    """All files of these kinds, in order; what is hidden is left alone."""
    files = (path for path in sorted(source.rglob("*")) if path.suffix.lower() in suffixes)
    return [path for path in files if not any(part[0] == "." for part in path.relative_to(source).parts)]


def splits_of(files: Sequence[Path], source: Path, shares: Shares) -> list[str]:
    """The split of each file below a folder: that its own folder there is named after, or drawn."""
    parts = [path.relative_to(source).parts for path in files]
    return divide([named_split(part[0]) if len(part) > 1 else None for part in parts], shares)


def divide(named: Sequence[str | None], shares: Shares) -> list[str]:
    """The split of each document: that it is named for, or drawn, if none is named for that."""
    left = Shares(0 if "validation" in named else shares.validation, 0 if "test" in named else shares.test)
    drawn = iter(draw_splits(sum(name in (None, "train") for name in named), left))
    return [next(drawn) if name in (None, "train") else name for name in named]


def draw_splits(count: int, shares: Shares) -> list[str]:
    """A split for each of so many documents, at least one for each that has a share; train for one alone."""
    if count < 2:
        return ["train"] * count
    tests = max(1, round(count * shares.test)) if shares.test else 0
    others = max(1, round(count * shares.validation)) if shares.validation else 0
    splits = ["test"] * tests + ["validation"] * others + ["train"] * max(0, count - tests - others)
    random.Random(0).shuffle(splits)
    if "train" not in splits:
        raise ValueError(f"{count} documents are too few to divide: lower --validation and --test.")
    return splits


def recordings(source: Path, suffixes: Sequence[str], column: str, shares: Shares) -> dict[Path, str]:
    """Each file of music with its split: as MAESTRO's table says, if it is there, or as splits_of does."""
    if not source.exists():
        raise ValueError(f"{source} does not exist.")
    if source.is_file():
        return {source: "train"}
    source = top(source)
    tables = sorted(source.glob("maestro*.csv"))
    if tables:
        found = _listed(tables[0], column)
    else:
        files = below(source, suffixes)
        found = dict(zip(files, splits_of(files, source, shares), strict=True))
    if not found:
        raise ValueError(f"{source} holds no {', '.join(suffixes[:-1])} or {suffixes[-1]} files.")
    return found


def _listed(table: Path, column: str) -> dict[Path, str]:
    """The files that a table names and that are there; how many are not is said."""
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or not {column, "split"} <= rows[0].keys():
        raise ValueError(f"{table} is not MAESTRO's table: it has no {column} and split.")
    found = {}
    for row in rows:
        path, split = table.parent / row[column], named_split(row["split"])
        if split is None:
            raise ValueError(f"{table} has a split '{row['split']}', which is none of {', '.join(SPLITS)}.")
        if path.exists():
            found[path] = split
    if len(found) < len(rows):
        print(f"{len(rows) - len(found)} of the {len(rows)} files in {table} are not there.", file=sys.stderr)
    return found


def by_split(splits: Mapping[Path, str], usable: Collection[Path]) -> dict[str, list[Path]]:
    """The files of each split that has any."""
    named = {name: [p for p in splits if splits[p] == name and p in usable] for name in SPLITS}
    return {name: files for name, files in named.items() if files}
