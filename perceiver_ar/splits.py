"""Which documents are for training, validation and test."""

import csv
import random
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SPLITS = ("train", "validation", "test")
_NAMED = re.compile(r"(train|validation|valid|val|dev|test)([-._].*)?", re.IGNORECASE)
"""Names of folders that stand for a split."""
_WHOLE = re.compile(
    r".*\.(jsonl|ndjson|parquet|npy|npz|bin)|[a-z]+([-._]\d.*)?\.(txt|tokens|raw|csv|tsv)", re.IGNORECASE
)
"""Names of files that may hold a whole split: test-a.jsonl, or test-1.txt, but not test-a.txt or test.py."""


@dataclass(frozen=True)
class Shares:
    """Shares of the documents that are held out from training."""

    validation: float
    test: float

    def __post_init__(self) -> None:
        if not (self.validation >= 0 and self.test >= 0 and self.validation + self.test < 1):
            raise ValueError("the shares of validation and test must be at least 0 and together below 1.")

    def split(self, place: float) -> str:
        """The split of a document that was given a number from 0 to 1."""
        if place < 1 - self.validation - self.test:
            return "train"
        return "validation" if place < 1 - self.test else "test"


def named_split(name: str) -> str | None:
    """The split that a folder or file is named after, if any."""
    found = _NAMED.fullmatch(name)
    if found is None:
        return None
    return {"valid": "validation", "val": "validation", "dev": "validation"}.get(
        found[1].lower(), found[1].lower()
    )


def top(source: Path) -> Path:
    """The folder of the files or splits: skips folders that contain only another, not named after a split."""
    inside = [path for path in source.iterdir() if not path.name.startswith(".")]
    if len(inside) == 1 and inside[0].is_dir() and named_split(inside[0].name) is None:
        return top(inside[0])
    return source


def below(source: Path, suffixes: Collection[str]) -> list[Path]:
    """All files with one of these suffixes, sorted; hidden files and folders are skipped."""
    return [path for path in fitting(source, "*") if path.suffix.lower() in suffixes]


def fitting(source: Path, pattern: str) -> list[Path]:
    """The same for all files that match a pattern."""
    found = (path for path in sorted(source.rglob(pattern)) if path.is_file())
    return [path for path in found if not any(part[0] == "." for part in path.relative_to(source).parts)]


def by_folder(files: Sequence[Path], source: Path) -> dict[Path, str | None]:
    """Each file with the split that its top folder below the source is named after, if any.

    A file directly in the source has its own name's split, if it looks like data: train.txt, not test.py.
    """
    parts = {path: path.relative_to(source).parts for path in files}
    return {
        path: named_split(part[0]) if len(part) > 1 or _WHOLE.fullmatch(part[0]) else None
        for path, part in parts.items()
    }


def divide(named: Sequence[str | None], shares: Shares) -> list[str]:
    """The split of each document: as named; splits that none is named for are drawn from the rest."""
    drawn = iter(draw_splits(sum(name in (None, "train") for name in named), left(named, shares)))
    return [next(drawn) if name in (None, "train") else name for name in named]


def left(named: Collection[str | None], shares: Shares) -> Shares:
    """The shares of the splits that no document is named for, to be drawn from the training documents."""
    return Shares(0 if "validation" in named else shares.validation, 0 if "test" in named else shares.test)


def draw_splits(count: int, shares: Shares) -> list[str]:
    """Draws the splits of `count` documents, at least one for each share; a single one is for training."""
    if count < 2:
        return ["train"] * count
    tests = max(1, round(count * shares.test)) if shares.test else 0
    others = max(1, round(count * shares.validation)) if shares.validation else 0
    splits = ["test"] * tests + ["validation"] * others + ["train"] * max(0, count - tests - others)
    random.Random(0).shuffle(splits)
    if "train" not in splits:
        raise ValueError(f"{count} documents are too few to divide: lower --validation and --test.")
    return splits


def recordings(source: Path, suffixes: Sequence[str], column: str) -> dict[Path, str | None]:
    """Music files with their splits: by MAESTRO's table if there is one, otherwise by folder names."""
    if not source.exists():
        raise ValueError(f"{source} does not exist.")
    if source.is_file():
        return {source: None}
    source = top(source)
    tables = sorted(source.glob("maestro*.csv"))
    found = _listed(tables[0], column) if tables else by_folder(below(source, suffixes), source)
    if not found:
        raise ValueError(f"{source} holds no {', '.join(suffixes[:-1])} or {suffixes[-1]} files.")
    return found


def _listed(table: Path, column: str) -> dict[Path, str | None]:
    """The files of a table that exist, with their splits; reports how many do not."""
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or not {column, "split"} <= rows[0].keys():
        raise ValueError(f"{table} is not MAESTRO's table: it has no {column} and split.")
    found: dict[Path, str | None] = {}
    for row in rows:
        split = named_split(row["split"] or "")
        if split is None or not row[column]:
            raise ValueError(f"{table} has a line without a file, or with a split '{row['split']}'.")
        if (path := table.parent / row[column]).is_file():
            found[path] = split
    if len(found) < len(rows):
        print(f"{len(rows) - len(found)} of the {len(rows)} files in {table} are missing.", file=sys.stderr)
    return found


def by_split(
    named: Mapping[Path, str | None], usable: Collection[Path], shares: Shares
) -> dict[str, list[Path]]:
    """The usable files by split, as named or drawn; without empty splits."""
    files = [path for path in named if path in usable]
    splits = divide([named[path] for path in files], shares)
    chosen = {split: [p for p, s in zip(files, splits, strict=True) if s == split] for split in SPLITS}
    return {split: found for split, found in chosen.items() if found}
