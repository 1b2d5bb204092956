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
