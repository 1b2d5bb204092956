"""The command that runs the paper's tables and figures."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from perceiver_ar.cli.arguments import Device


def reproduce(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = None,
    scale: Literal["smoke", "small", "paper"] = "small",
    data: Path | None = None,
    out: Path | None = None,
    seeds: int = 1,
    cell: str | None = None,
    jobs: int = 1,
    all: bool = False,
    report: bool = False,
    page: Path = Path("docs/reproduction.md"),
    device: Device = "auto",
) -> None:
    """Reproduce one of the paper's tables or figures, or list them. An interrupted study is resumed.

    Args:
        name: Study to run. Without it, they are listed.
        scale: smoke: less than a minute on a laptop, only shows that the command works; small: about ten
            minutes on a GPU; paper: full size, printed as a plan of cells to run one by one with --cell.
        data: Token store, for studies that need data.
        out: Folder for runs and results. Default: reproduction/NAME-SCALE. With --all or --report, the folder
            of all results; default: reproduction.
        seeds: Number of seeds: each training is done once with each.
        cell: Run only the cell of this name.
        jobs: Number of models to train and evaluate at the same time, before anything is timed: small ones
            leave most of a GPU idle.
        all: Run all studies, one after another; only with --scale smoke.
        report: Run nothing: collect all results on one page.
        page: File to write that page to.
    """
    from perceiver_ar import reproduce as studies
    from perceiver_ar.distributed import leave
    from perceiver_ar.reproduce.page import costs, table, write_page

    if report:
        if name is not None:
            raise ValueError("the report is of all studies: give no name.")
        write_page(list(studies.STUDIES.values()), out or Path("reproduction"), page)
        print(f"Wrote {page}.")
        return
    if name is None and not all:
        for known in studies.STUDIES.values():
            print(f"{known.name:15} {known.where:25} {known.claim}")
        return
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several and (cell is None or jobs > 1):
        raise ValueError("torchrun is for one training after another: give --cell, and no --jobs.")
    if name is not None and all:
        raise ValueError("give a name or --all, not both.")
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, but is {seeds}.")
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, but is {jobs}.")
    if all and (data is not None or cell is not None or scale != "smoke"):
        raise ValueError("--all is for --scale smoke, and --report: others need data of their own each.")
    for study in studies.STUDIES.values() if name is None else [studies.get(name)]:
        named = Path(out or "reproduction") / f"{study.name}-{scale}"
        folder, shared = (named, named.parent) if all or out is None else (out, None)
        bench = studies.Bench(scale, folder, data, seeds, device, shared)
        if scale == "paper" and cell is None:
            print(costs(study, bench))
            continue
        results = studies.run(study, bench, cell, lambda line: print(line, file=sys.stderr, flush=True), jobs)
        leave()
        if os.environ.get("RANK", "0") != "0":
            return
        print(table([studies.Row(**row) for row in results["rows"]]))
        means = (
            " At this scale the figures mean nothing, only that the command works."
            if scale == "smoke"
            else ""
        )
        print(f"Results are in {folder}.{means}", file=sys.stderr)
