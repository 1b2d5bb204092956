"""A claim of the paper as cells: each is run once, kept, and set beside the paper's figure."""

import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch

from perceiver_ar.device import describe, pick_device
from perceiver_ar.sealed import digest, read_sealed, write_sealed, write_whole

Scale = Literal["smoke", "small", "paper"]
About = Mapping[str, str | float]
Found = dict[str, float | None]


@dataclass(frozen=True)
class Row:
    """A line of a table: what it is about, what was found, and what the paper found."""

    about: About
    found: Found
    """None: it did not fit into memory."""
    paper: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """A piece of work that is done once."""

    name: str
    settings: dict[str, Any]
    """All that decides what comes out."""
    work: Callable[[Path], list[Row]]
    """Does it, in a folder of its own."""
    hours: float = 0.0
    """Of one GPU, roughly."""


@dataclass(frozen=True)
class Bench:
    """Where a study is done, and with what."""

    scale: Scale
    folder: Path
    data: Path | None = None
    seeds: int = 1
    device: str = "auto"
    shared: Path | None = None
    """Where studies find the trainings of one another. Default: each has its own."""

    @property
    def runs(self) -> Path:
        return (self.shared or self.folder) / "runs"


@dataclass(frozen=True)
class Study:
    """What the paper claims, how that is tried, and what shows it."""

    name: str
    where: str
    """Its place in the paper."""
    claim: str
    protocol: str
    """Said before anything runs."""
    cells: Callable[[Bench], list[Cell]]
    shows: Callable[[list[Row]], bool]
    """Whether rows, means over seeds, show the claim."""
    drawn: tuple[str, str]
    """What is drawn: a figure over another, or over something that rows are about."""
    needs: str = ""
    """What --data must be, where data are needed."""
    by: str = ""
    """What the lines of the drawing differ in. Default: all that rows are about."""


def run(study: Study, bench: Bench, only: str | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs the cells that are not done yet, and writes what there is after each."""
    if bench.scale != "smoke" and study.needs and bench.data is None:
        raise ValueError(f"{study.name} needs data: --data with {study.needs}")
    cells = study.cells(bench)
    if only is not None:
        named = [cell for cell in cells if cell.name == only]
        if not named:
            raise ValueError(f"{study.name} has no cell '{only}', but {', '.join(c.name for c in cells)}.")
        cells = named
    say(f"{study.name} ({study.where}), {bench.scale}.\nThe claim: {study.claim}\nHow: {study.protocol}")
    for index, cell in enumerate(cells, 1):
        if is_done(cell, bench):
            say(f"{index} of {len(cells)}: {cell.name}: done before.")
            continue
        say(f"{index} of {len(cells)}: {cell.name}")
        do(cell, bench)
        write_results(study, bench)
    return write_results(study, bench)


def kept(cell: Cell, bench: Bench) -> Path:
    return bench.folder / "cells" / f"{cell.name}.json"


def is_done(cell: Cell, bench: Bench) -> bool:
    """Whether a cell was run, with these very settings."""
    if not kept(cell, bench).exists():
        return False
    if read_sealed(kept(cell, bench))["settings"] != digest(cell.settings):
        raise ValueError(
            f"{kept(cell, bench)} was run with other settings: remove it, or choose another --out."
        )
    return True


def do(cell: Cell, bench: Bench) -> None:
    """Runs a cell and keeps what it found."""
    place = bench.folder / "cells" / cell.name
    place.mkdir(parents=True, exist_ok=True)
    began = time.time()
    rows = cell.work(place)
    about = {"settings": digest(cell.settings), "seconds": time.time() - began, **machine(bench)}
    write_sealed(kept(cell, bench), {**about, "rows": [vars(row) for row in rows]})


def machine(bench: Bench) -> dict[str, str]:
    """What it ran on."""
    device = describe(pick_device(bench.device))
    return {"device": device, "torch": torch.__version__, "python": platform.python_version()}


def write_results(study: Study, bench: Bench) -> dict[str, Any]:
    """results.json, table.md and plot.png of the cells that are done."""
    from perceiver_ar.reproduce.page import draw, table

    cells = study.cells(bench)
    done = [read_sealed(kept(cell, bench)) for cell in cells if is_done(cell, bench)]
    rows = means([Row(**row) for cell in done for row in cell["rows"]])
    whole = len(done) == len(cells)
    results = {
        "study": study.name,
        "scale": bench.scale,
        "shown": study.shows(rows) if whole and bench.scale != "smoke" else None,
        "cells": f"{len(done)} of {len(cells)}",
        "seconds": sum(cell["seconds"] for cell in done),
        "machines": sorted({f"{cell['device']}, torch {cell['torch']}" for cell in done}),
        "rows": [vars(row) for row in rows],
    }
    bench.folder.mkdir(parents=True, exist_ok=True)
    write_whole(bench.folder / "results.json", (json.dumps(results, indent=1) + "\n").encode())
    write_whole(bench.folder / "table.md", (table(rows) + "\n").encode())
    if rows:
        draw(study, rows, bench.folder / "plot.png")
    return results


def means(rows: Sequence[Row]) -> list[Row]:
    """Rows that differ in their seed alone as one: the mean of each figure, and its spread."""

    def rest(row: Row) -> dict[str, str | float]:
        return {key: value for key, value in row.about.items() if key != "seed"}

    merged = []
    for key, group in groupby(sorted(rows, key=lambda row: _order(rest(row))), key=rest):
        same = list(group)
        merged.append(Row(key, dict(_merged(same)), same[0].paper))
    return merged


def _order(about: About) -> list[tuple[str, bool, str | float]]:
    """Numbers by size, before words."""
    return [(key, isinstance(value, str), value) for key, value in about.items()]


def _merged(rows: Sequence[Row]) -> Iterator[tuple[str, float | None]]:
    for name in rows[0].found:
        values = [row.found[name] for row in rows if row.found.get(name) is not None]
        numbers = [value for value in values if value is not None]
        yield name, sum(numbers) / len(numbers) if numbers else None
        if len(numbers) > 1:
            yield f"{name} (spread)", max(numbers) - min(numbers)
