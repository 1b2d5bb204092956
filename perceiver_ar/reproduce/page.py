"""What a person sees of studies: a table and a picture of each, a plan, and one page of all."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perceiver_ar.plots import new_figure
from perceiver_ar.reproduce.study import Bench, Row, Study, is_done

SPREAD = " (spread)"


def table(rows: Sequence[Row]) -> str:
    """Markdown: what each row is about, what was found, and what the paper found."""
    about, found, paper = (
        list(dict.fromkeys(key for row in rows for key in getattr(row, part)))
        for part in ("about", "found", "paper")
    )
    names = [name for name in found if not name.endswith(SPREAD)]
    heads = list(about)
    for name in names:
        heads += [name, "the paper's"] if name in paper else [name]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        cells = [_number(row.about.get(key, "")) for key in about]
        for name in names:
            cells.append(_found(row, name))
            if name in paper:
                at = f" ({row.at})" if row.at and name in row.paper else ""
                cells.append(_number(row.paper.get(name, "")) + at)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _found(row: Row, name: str) -> str:
    if name not in row.found:
        return ""
    value, spread = row.found[name], row.found.get(name + SPREAD)
    if value is None:
        return "out of memory"
    return _number(value) + (f" ± {spread / 2:.2g}" if spread else "")


def _number(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    )


def draw(study: Study, rows: Sequence[Row], path: Path) -> None:
    """The study's figure over what it is drawn over, where there is something to draw, and matplotlib."""
    lines = _lines(study, rows)
    if not lines:
        return
    labels = dict(zip(("xlabel", "ylabel"), study.drawn or (), strict=True))
    try:
        picture, axes = new_figure(**labels)
    except ValueError:
        return
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label or None)
    numbers = [x for points in lines.values() for x, _ in points]
    if not any(isinstance(x, str) for x in numbers) and max(numbers) > 8 * min(numbers) > 0:
        axes.set_xscale("log", base=2)
    if any(lines):
        axes.legend(fontsize="small")
    picture.savefig(path, dpi=150)


def _lines(study: Study, rows: Sequence[Row]) -> dict[str, list[tuple[Any, float]]]:
    """Points by what else their rows are about, or by what the study says."""
    lines: dict[str, list[tuple[Any, float]]] = {}
    if study.drawn is None:
        return lines
    over, figure = study.drawn
    for row in rows:
        x, y = {**row.about, **row.found}.get(over), row.found.get(figure)
        if x is not None and y is not None:
            names = [study.by] if study.by else [key for key in row.about if key != over]
            values = {key: row.about[key] for key in names}
            label = ", ".join(v if isinstance(v, str) else f"{key} {v}" for key, v in values.items())
            lines.setdefault(label, []).append((x, y))
    return lines


def costs(study: Study, bench: Bench) -> str:
    """What there is to run, and what it costs."""
    cells = study.cells(bench)
    lines = [f"{'cell':60} {'GPU-hours':>12}"]
    for cell in cells:
        state = "done" if is_done(cell, bench) else f"{cell.hours:,.0f}" if cell.hours >= 1 else "below 1"
        lines.append(f"{cell.name:60} {state:>12}")
    left = sum(cell.hours for cell in cells if not is_done(cell, bench))
    lines.append(f"{'still to run, at most':60} {left:>12,.0f}")
    out = "" if bench.shared else f" --out {bench.folder}"
    command = f"{_command(study, bench.scale, bench.seeds)}{out} --cell CELL"
    lines.append(f"Run cells one by one: {command}")
    lines.append(f"On 8 GPUs: torchrun --nproc-per-node 8 -m {command.replace('-', '_', 1)}")
    lines.append("Models that another study has already trained in the same folder are not trained again.")
    if study.needs:
        lines.append(f"STORE: {study.needs_at(bench.scale)}")
    return "\n".join(lines)


def _command(study: Study, scale: str, seeds: int, jobs: int = 1) -> str:
    data = " --data STORE" if study.needs else ""
    counts = "".join(f" --{name} {n}" for name, n in {"seeds": seeds, "jobs": jobs}.items() if n > 1)
    return f"perceiver-ar reproduce {study.name} --scale {scale}{data}{counts}"


def write_page(studies: Sequence[Study], folder: Path, page: Path) -> None:
    """One page of all studies: which claims were shown, at which scale, and which were not run."""
    if not any(folder.glob("*/results.json")):
        raise ValueError(f"{folder} holds no results: run a study first, or say by --out where they are.")
    head = [
        "# The paper's claims, run",
        "",
        "Written by `perceiver-ar reproduce --all --report`. Studies that were not run show no figures. "
        "Times are those of the command shown, without the training of models that it reused from another "
        "study. ± is half the range over the seeds. N is the number of latents in training.",
        "",
        "| study | in the paper | small | paper's size |",
        "|---|---|---|---|",
    ]
    body: list[str] = []
    for study in studies:
        found = {scale: _results(folder / f"{study.name}-{scale}") for scale in ("small", "paper")}
        verdicts = [_verdict(results) for results in found.values()]
        head.append(f"| [{study.name}](#{study.name}) | {study.where} | {' | '.join(verdicts)} |")
        body += ["", f"## {study.name}", "", f"**The paper ({study.where}):** {study.claim}", ""]
        body += [f"**Protocol:** {study.protocol}"]
        for scale, results in found.items():
            if results is not None:
                body += _section(study, folder / f"{study.name}-{scale}", page, results)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join([*head, *body]) + "\n")


def _results(folder: Path) -> dict[str, Any] | None:
    path = folder / "results.json"
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        missing = {"rows", "seeds", "whole", "shown", "cells", "seconds", "machines"} - found.keys()
    except (ValueError, AttributeError):
        missing = {"rows"}
    if missing:
        raise ValueError(f"{path} is damaged: remove it, and run its study again.")
    return found if found["rows"] else None


def _verdict(results: dict[str, Any] | None) -> str:
    if results is None:
        return "not run"
    if not results["whole"]:
        return f"not all run ({results['cells']} cells)"
    return {True: "shown", False: "not shown", None: "run; cannot be shown at this scale"}[results["shown"]]


def _section(study: Study, folder: Path, page: Path, results: dict[str, Any]) -> list[str]:
    """What was found at one scale."""
    minutes = round(results["seconds"] / 60)
    cost = f"{minutes:,} minute{'s' * (minutes != 1)} on {'; '.join(results['machines'])}"
    rows = [Row(**row) for row in results["rows"]]
    lines = ["", f"**At `{results['scale']}`: {_verdict(results)}.** {results['cells']} cells, {cost}.", ""]
    command = _command(study, results["scale"], results["seeds"], results.get("jobs", 1))
    lines += [f"    {command}", "", table(rows)]
    plot = folder / "plot.png"
    draw(study, rows, plot)
    if plot.exists():
        lines += ["", f"![{study.name}]({os.path.relpath(plot, page.parent)})"]
    return lines
