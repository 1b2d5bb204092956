"""Reads files in separate processes, since some readers crash on damaged files."""

import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from perceiver_ar.report import progress_bar
from perceiver_ar.workers import each, processes


def readable(
    read: Callable[[Path], Any], files: Collection[Path], workers: int | None, seconds: float = 60
) -> Iterator[tuple[Path, Any]]:
    """Yields each file with its content, in any order; reports files that cannot be read, and skips them."""
    skipped = 0
    with progress_bar(True, "reading") as moved:
        results = each(read, files, processes(workers), seconds)
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
    """Returns the content of one file; raises ValueError if it cannot be read."""
    if not path.is_file():
        raise ValueError(f"{path} is a folder: give a file." if path.is_dir() else f"{path} does not exist.")
    (done,) = each(read, [path], 1, seconds)
    if done.error is not None:
        raise ValueError(f"{path} cannot be used: {done.error}")
    return done.value
