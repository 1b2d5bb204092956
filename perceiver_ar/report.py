"""What a person sees: a bar while work is done, files that were skipped, and tables."""

import os
import sys
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from perceiver_ar.workers import each


@contextmanager
def progress_bar(shown: bool, what: str) -> Generator[Callable[[int, int], None]]:
    """A bar on standard error, moved by (done, of how many)."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not (shown and console.is_terminal), transient=True) as progress:
        task = progress.add_task(what)
        yield lambda done, whole: progress.update(task, completed=done, total=whole)


def readable(
    read: Callable[[Path], Any], files: Collection[Path], workers: int | None, seconds: float = 60
) -> Iterator[tuple[Path, Any]]:
    """Each file with what was read of it, in any order; those that cannot be read are named and counted."""
    skipped = 0
    with progress_bar(True, "reading") as moved:
        results = each(read, files, workers or os.cpu_count() or 1, seconds)
        for done, (path, value, error) in enumerate(results, 1):
            if error is None:
                yield path, value
            else:
                skipped += 1
                named = str(error).startswith(str(path))
                print(f"skipped {error}" if named else f"skipped {path}: {error}", file=sys.stderr)
            moved(done, len(files))
    if skipped:
        print(f"{skipped} of {len(files)} files were skipped.", file=sys.stderr)


def read_alone(read: Callable[[Path], Any], path: Path, seconds: float = 60) -> Any:
    """What is read of one file, in a process of its own: some readers crash on damaged files."""
    if not path.is_file():
        raise ValueError(f"{path} is a folder: give a file." if path.is_dir() else f"{path} does not exist.")
    (done,) = each(read, [path], 1, seconds)
    if done.error is not None:
        raise ValueError(f"{path} cannot be used: {done.error}")
    return done.value


def show(report: dict[str, Any], sample: str | None) -> None:
    """Prints the report, and the sample if there is one."""
    console = Console(highlight=False, markup=False, emoji=False)
    told = {key: _number(key, value) for key, value in report.items() if key != "by_position"}
    for key, value in told.items():
        console.print(f"{key:{max(map(len, told))}} {value}")
    if len(report["by_position"]) > 1:
        table = Table("position below", "tokens", "nats", box=None, padding=(0, 1, 0, 0))
        for bound, part in report["by_position"].items():
            table.add_row(f"{int(bound):,}", f"{part['tokens']:,}", f"{part['nats']:.4f}")
        console.print(table)
    if sample is not None:
        console.print(
            f"\nThe end of a sequence that was not trained on, and what the model predicts:\n{sample}"
        )


def _number(key: str, value: Any) -> str:
    return f"{value:.4%}" if key == "accuracy" else f"{value:,}" if isinstance(value, int) else f"{value:.6f}"
