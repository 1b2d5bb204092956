"""What a person sees: a bar while work is done, and tables."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table


@contextmanager
def progress_bar(shown: bool, what: str) -> Generator[Callable[[int, int], None]]:
    """A bar on standard error, moved by (done, of how many)."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not (shown and console.is_terminal), transient=True) as progress:
        task = progress.add_task(what)
        yield lambda done, whole: progress.update(task, completed=done, total=whole)


def show(report: dict[str, Any], sample: str | None) -> None:
    """Prints the report, and the sample if there is one."""
    console = Console(highlight=False, markup=False, emoji=False)
    told = {key: _number(key, value) for key, value in means(report).items()}
    for key, value in told.items():
        console.print(f"{key:{max(map(len, told))}} {value}")
    name, parts = by_part(report)
    if len(parts) > 1:
        headings = list(next(iter(parts.values())))
        table = Table(f"{name} below", *headings, box=None, padding=(0, 1, 0, 0))
        for bound, part in parts.items():
            table.add_row(f"{int(bound):,}", *(_number(key, part[key]) for key in headings))
        console.print(table)
    if sample is not None:
        console.print(
            f"\nThe end of a sequence that was not trained on, and what the model predicts:\n{sample}"
        )


def means(report: dict[str, Any]) -> dict[str, Any]:
    """The report of an evaluation without its parts."""
    return {key: value for key, value in report.items() if not key.startswith(_PARTS)}


def by_part(report: dict[str, Any]) -> tuple[str, dict[str, dict[str, Any]]]:
    """What the losses of an evaluation are reported by, and the means of each part."""
    key = next(key for key in report if key.startswith(_PARTS))
    return key.removeprefix(_PARTS), report[key]


_PARTS = "by_"


def _number(key: str, value: Any) -> str:
    return f"{value:.4%}" if key == "accuracy" else f"{value:,}" if isinstance(value, int) else f"{value:.6f}"
