"""Trainings side by side, each in a process of its own: small models leave most of a GPU idle."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perceiver_ar.reproduce.study import Bench, Cell


def learn_all(study: str, bench: Bench, cells: Sequence[Cell], jobs: int, say: Callable[[str], None]) -> None:
    """Does the trainings of cells, each once; what has to be timed for them is timed first, alone."""
    trainings = {cell.where(): cell.name for cell in cells if cell.where is not None}
    pool = ThreadPoolExecutor(jobs)  # its threads only wait
    try:
        waiting = {pool.submit(_start, study, bench, name): name for name in trainings.values()}
        for count, done in enumerate(as_completed(waiting), 1):
            if done.exception() is not None:
                say(f"{done.exception()} Trainings that have begun will still be finished.")
            done.result()
            say(f"trained {count} of {len(waiting)}: {waiting[done]}")
    finally:
        pool.shutdown(cancel_futures=True)


def _start(study: str, bench: Bench, name: str) -> None:
    log = bench.folder / "cells" / name / "train.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    process = multiprocessing.get_context("spawn").Process(target=_learn, args=(study, bench, name, log))
    process.start()
    process.join()
    if process.exitcode:
        killed = f" by signal {-process.exitcode}" if process.exitcode < 0 else ""
        raise ValueError(f"the training of {name} was ended{killed}: see {log}.")


def _learn(study: str, bench: Bench, name: str, log: Path) -> None:
    from perceiver_ar.distributed import die_with_launcher
    from perceiver_ar.reproduce import get

    die_with_launcher()  # by SIGTERM, of which a training keeps what it has
    with log.open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    next(cell for cell in get(study).cells(bench) if cell.name == name).learn()
