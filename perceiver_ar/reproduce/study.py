"""A claim of the paper as cells: each is run once, kept, and set beside the paper's figure."""

import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from perceiver_ar.device import describe, pick_device
from perceiver_ar.distributed import Ranks, join
from perceiver_ar.reproduce.beside import learn_all
from perceiver_ar.sealed import digest, read_sealed, write_sealed, write_whole
from perceiver_ar.store import Store

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
    at: str = ""
    """The paper's settings, where they are not those of this line."""


@dataclass(frozen=True)
class Cell:
    """A piece of work that is done once."""

    name: str
    settings: dict[str, Any]
    """All that decides what comes out."""
    work: Callable[[Path], list[Row]]
    """Does it, in a folder of its own."""
    data: str = ""
    """What changes when its data do; empty where other cells need other data, or none does."""
    hours: float = 0.0
    """How long it takes on one GPU, roughly."""
    check: Callable[[], None] = lambda: None
    """Refuses what could not be run to its end."""
    where: Callable[[], Path] | None = None
    """Times what decides about its training, and says where that is kept."""
    learn: Callable[[], None] = lambda: None
    """Does that training and what else others may go on beside."""


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

    @property
    def seal(self) -> str:
        """A text that changes when the data do."""
        if self.data is None or not (self.data / "meta.json").exists():
            return self.scale
        return digest(Store.open(self.data).meta)[:16]

    @property
    def machine(self) -> dict[str, str]:
        """What it runs on."""
        device = describe(pick_device(self.device))
        return {"device": device, "torch": torch.__version__, "python": platform.python_version()}


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
    shows: Callable[[list[Row], Scale], bool | None]
    """Whether rows, means over seeds, show the claim; None: they cannot, at that scale."""
    drawn: tuple[str, str] | None
    """What is drawn: a figure over another, or over something that rows are about."""
    needs: str | Mapping[str, str] = ""
    """What --data must be, where data are needed."""
    by: str = ""
    """What the lines of the drawing differ in. Default: all that rows are about."""

    def needs_at(self, scale: Scale) -> str:
        return self.needs if isinstance(self.needs, str) else self.needs[scale]


def run(
    study: Study, bench: Bench, only: str | None, say: Callable[[str], None], jobs: int = 1
) -> dict[str, Any]:
    """Runs the cells that are not done yet, and writes what there is after each.

    jobs: so many models are trained and evaluated at a time, all before anything else is timed. Under
    torchrun all its processes train each model and score its evaluation; the first does the rest.
    """
    if bench.scale != "smoke" and study.needs and bench.data is None:
        raise ValueError(f"{study.name} needs data: --data with {study.needs_at(bench.scale)}")
    cells = study.cells(bench)
    if only is not None:
        named = [cell for cell in cells if cell.name == only]
        if not named:
            raise ValueError(f"{study.name} has no cell '{only}', but {', '.join(c.name for c in cells)}.")
        cells = named
    done = {cell.name for cell in cells if is_done(cell, bench)}
    for cell in cells:
        if cell.name not in done:
            cell.check()
    ranks, _ = join(bench.device, minutes=24 * 60)  # while the first times or draws, the others wait
    if not ranks.leads:
        say = _nothing
    say(f"{study.name} ({study.where}), {bench.scale}.\nThe claim: {study.claim}\nProtocol: {study.protocol}")
    began = time.time() - _seconds(bench)
    if jobs > 1:
        try:
            learn_all(study.name, bench, [cell for cell in cells if cell.name not in done], jobs, say)
        finally:
            write_results(study, bench, time.time() - began, jobs)
    for index, cell in enumerate(cells, 1):
        say(f"{index} of {len(cells)}: {cell.name}" + (": already done." if cell.name in done else ""))
        if cell.name not in done:
            do(cell, bench, ranks)
            ranks.first(lambda: write_results(study, bench, time.time() - began, jobs))
    return ranks.first(lambda: write_results(study, bench, time.time() - began, jobs))


def _nothing(line: str) -> None:
    """What processes but the first say."""


def _seconds(bench: Bench) -> float:
    """How long earlier attempts took."""
    try:
        return float(json.loads((bench.folder / "results.json").read_text())["seconds"])
    except (OSError, ValueError, KeyError, TypeError):  # none, or damaged: it will be written anew
        return 0.0


def kept(cell: Cell, bench: Bench) -> Path:
    return bench.folder / "cells" / f"{cell.name}.json"


def is_done(cell: Cell, bench: Bench) -> bool:
    """Whether a cell was run, with these very settings, and with these data, if any are given."""
    if not kept(cell, bench).exists():
        return False
    known = read_sealed(kept(cell, bench))
    if known["settings"] != digest(cell.settings) or (bench.data and known["data"] != cell.data):
        raise ValueError(
            f"{kept(cell, bench)} was run with other settings, data or machine: remove it, or choose "
            "another --out."
        )
    return True


def do(cell: Cell, bench: Bench, ranks: Ranks) -> None:
    """Runs a cell and keeps what it found, or what the first of several processes did."""
    with TemporaryDirectory() as elsewhere:
        place = bench.folder / "cells" / cell.name if ranks.leads else Path(elsewhere)
        place.mkdir(parents=True, exist_ok=True)
        rows = cell.work(place)
    about = {"settings": digest(cell.settings), "data": cell.data, **bench.machine}
    if ranks.leads:
        write_sealed(kept(cell, bench), {**about, "rows": [vars(row) for row in rows]})


def write_results(study: Study, bench: Bench, seconds: float, jobs: int) -> dict[str, Any]:
    """results.json, table.md and plot.png of the cells that are done, and what all of it took."""
    from perceiver_ar.reproduce.page import draw, table

    cells = study.cells(bench)
    done = [read_sealed(kept(cell, bench)) for cell in cells if is_done(cell, bench)]
    rows = means([Row(**row) for cell in done for row in cell["rows"]])
    whole = len(done) == len(cells)
    results = {
        "study": study.name,
        "scale": bench.scale,
        "seeds": bench.seeds,
        "whole": whole,
        "shown": study.shows(rows, bench.scale) if whole and bench.scale != "smoke" else None,
        "cells": f"{len(done)} of {len(cells)}",
        "seconds": seconds,
        "jobs": jobs,
        "machines": sorted({f"{cell['device']}, torch {cell['torch']}" for cell in done}),
        "rows": [vars(row) for row in rows],
    }
    bench.folder.mkdir(parents=True, exist_ok=True)
    write_whole(bench.folder / "results.json", (json.dumps(results, indent=1) + "\n").encode())
    write_whole(bench.folder / "table.md", (table(rows) + "\n").encode())
    draw(study, rows, bench.folder / "plot.png")
    return results


def means(rows: Sequence[Row]) -> list[Row]:
    """Rows that differ in their seed alone as one: the mean of each figure, and its spread."""

    def rest(row: Row) -> dict[str, str | float]:
        return {key: value for key, value in row.about.items() if key != "seed"}

    merged = []
    for key, group in groupby(sorted(rows, key=lambda row: _order(rest(row))), key=rest):
        same = list(group)
        merged.append(Row(key, dict(_merged(same)), same[0].paper, same[0].at))
    return merged


def half_spread(row: Row, name: str) -> float:
    """How far seeds are from their mean; 0 of a single one."""
    return (row.found.get(f"{name} (spread)") or 0.0) / 2


def _order(about: About) -> list[tuple[str, bool, str | float]]:
    """Numbers by size, before words."""
    return [(key, isinstance(value, str), value) for key, value in about.items()]


def _merged(rows: Sequence[Row]) -> Iterator[tuple[str, float | None]]:
    for name in rows[0].found:
        numbers = [value for row in rows if (value := row.found.get(name)) is not None]
        yield name, sum(numbers) / len(numbers) if numbers else None
        if len(numbers) > 1:
            yield f"{name} (spread)", max(numbers) - min(numbers)
