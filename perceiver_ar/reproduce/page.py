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
    heads = [*about, *(column for name in names for column in _columns(name, name in paper))]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        cells = [_number(row.about.get(key, "")) for key in about]
        for name in names:
            spread = row.found.get(name + SPREAD)
            cells.append(_found(row.found, name) + (f" ± {spread / 2:.2g}" if spread is not None else ""))
            if name in paper:
                cells.append(_number(row.paper.get(name, "")))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _columns(name: str, in_paper: bool) -> list[str]:
    return [name, "the paper's"] if in_paper else [name]


def _found(found: dict[str, float | None], name: str) -> str:
    if name not in found:
        return ""
    value = found[name]
    return "out of memory" if value is None else _number(value)


def _number(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    )


def draw(study: Study, rows: Sequence[Row], path: Path) -> None:
    """The study's figure over what it is drawn over, a line for each of what else rows are about."""
    over, figure = study.drawn
    lines: dict[str, list[tuple[Any, float]]] = {}
    for row in rows:
        x, y = {**row.about, **row.found}.get(over), row.found.get(figure)
        if x is not None and y is not None:
            names = [study.by] if study.by else [key for key in row.about if key != over]
            label = ", ".join(f"{key} {row.about[key]}" for key in names)
            lines.setdefault(label, []).append((x, y))
    picture, axes = new_figure(xlabel=over, ylabel=figure)
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label or None)
    numbers = [x for points in lines.values() for x, _ in points]
    if (
        not any(isinstance(x, str) for x in numbers)
        and max(numbers, default=0) > 8 * min(numbers, default=1) > 0
    ):
        axes.set_xscale("log", base=2)
    if any(lines):
        axes.legend(fontsize="small")
    picture.savefig(path, dpi=150)


def plan(study: Study, bench: Bench) -> str:
    """What there is to run, and what it costs."""
    cells = study.cells(bench)
    lines = [f"{'cell':40} {'GPU-hours':>12}"]
    for cell in cells:
        state = "done" if is_done(cell, bench) else f"{cell.hours:,.0f}" if cell.hours >= 1 else "below 1"
        lines.append(f"{cell.name:40} {state:>12}")
    left = sum(cell.hours for cell in cells if not is_done(cell, bench))
    lines.append(f"{'to be run':40} {left:>12,.0f}")
    lines.append(
        f"Run one by one, where there is a GPU: perceiver-ar reproduce {study.name} --scale {bench.scale}"
        f"{' --data STORE' if study.needs else ''} --out {bench.folder} --cell CELL"
    )
    return "\n".join(lines)


def write_page(studies: Sequence[Study], folder: Path, page: Path) -> None:
    """One page of all studies: which claims were shown, at which scale, and which were not run."""
    head = [
        "# The paper's claims, run",
        "",
        "Written by `perceiver-ar reproduce --all --report`; what was not run is not filled in.",
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
        body += [f"**How:** {study.protocol}", ""]
        for scale, results in found.items():
            if results is not None:
                body += _section(study, folder / f"{study.name}-{scale}", page, results)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join([*head, *body]) + "\n")


def _results(folder: Path) -> dict[str, Any] | None:
    path = folder / "results.json"
    return json.loads(path.read_text()) if path.exists() else None


def _verdict(results: dict[str, Any] | None) -> str:
    if results is None or not results["rows"]:
        return "not run"
    if results["shown"] is None:
        return f"not all run ({results['cells']} cells)"
    return "shown" if results["shown"] else "not shown"


def _section(study: Study, folder: Path, page: Path, results: dict[str, Any]) -> list[str]:
    """What was found at one scale."""
    cost = f"{results['seconds'] / 60:,.0f} minutes on {'; '.join(results['machines'])}"
    rows = [Row(**row) for row in results["rows"]]
    lines = [f"**At `{results['scale']}`: {_verdict(results)}.** {results['cells']} cells, {cost}.", ""]
    lines += [f"    perceiver-ar reproduce {study.name} --scale {results['scale']}", "", table(rows), ""]
    plot = folder / "plot.png"
    if plot.exists():
        lines += [f"![{study.drawn[1]}]({os.path.relpath(plot, page.parent)})", ""]
    return lines
