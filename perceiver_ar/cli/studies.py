"""The command that runs the paper's tables and figures."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from perceiver_ar.cli.arguments import Device


def reproduce(
    name: Annotated[str | None, tyro.conf.Positional] = None,
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
    """Run a table or a figure of the paper: `perceiver-ar reproduce` lists them.

    Stopped, it goes on where it was when it is started again: what is finished is kept.

    Args:
        name: Which one.
        scale: smoke: a minute on a laptop, which shows that the command works and nothing else; small: about
            ten minutes on a GPU; paper: its full size, shown as a plan of cells to run one by one by --cell.
        data: Token store, where data are needed.
        out: Folder for runs and results. Default: reproduction/NAME-SCALE.
        seeds: How often each training is done.
        cell: Run only this part.
        jobs: Train and evaluate so many models at a time, before anything is timed: small ones leave most
            of a GPU idle.
        all: All of them, one after another.
        report: Run nothing, but collect what was found in one page; --out is then the folder of all results.
        page: That page.
    """
    from perceiver_ar import reproduce as studies
    from perceiver_ar.distributed import leave
    from perceiver_ar.reproduce.page import costs, table, write_page

    if report:
        if name is not None:
            raise ValueError("the report is of all studies: give no name.")
        write_page(list(studies.STUDIES.values()), out or Path("reproduction"), page)
        print(f"{page} is written.")
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
        means = " The figures mean nothing: smoke shows that the command works." if scale == "smoke" else ""
        print(f"Written to {folder}.{means}", file=sys.stderr)
