"""Measured figures, with spread, memory, machine and versions; matmul rate; profiles."""

import functools
import json
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from perceiver_ar.device import describe
from perceiver_ar.timing import synchronize, time_repeatedly


@dataclass(frozen=True)
class Figure:
    """A quantity that was measured several times."""

    benchmark: str
    case: str
    unit: str
    values: list[float]
    device: torch.device
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def line(self) -> str:
        """A line of JSON, with all that is needed to compare it with another figure."""
        return json.dumps(
            {
                "benchmark": self.benchmark,
                "case": self.case,
                "median": rounded(self.median),
                "spread": [rounded(min(self.values)), rounded(max(self.values))],
                "unit": self.unit,
                **self.details,
                "repeats": len(self.values),
                "device": describe(self.device),
                "torch": torch.__version__,
                "python": platform.python_version(),
            }
        )


def show_table(figures: list[Figure]) -> None:
    """Prints all figures as a table on standard error."""
    table = Table("benchmark", "case", box=None, padding=(0, 2, 0, 0))
    for heading in ("median", "spread"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    table.add_column("at")
    for figure in figures:
        median, *spread = (
            f"{rounded(x):,g}" for x in (figure.median, min(figure.values), max(figure.values))
        )
        about = figure.details
        known = {
            "batch {}": about.get("batch"),
            "{} TFLOP/s": about.get("tflops"),
            "{} of matmul's": about.get("of_matmul_rate"),
            "{} GiB": about.get("peak_gib"),
        }
        at = ", ".join(words.format(value) for words, value in known.items() if value is not None)
        table.add_row(figure.benchmark, figure.case, median, "-".join(spread), figure.unit, at)
    Console(stderr=True).print(table)


def rounded(x: float) -> float:
    """The number to four significant digits."""
    return float(f"{x:.4g}")


@functools.cache
def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product."""
    side = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    return 2 * side**3 / statistics.median(time_repeatedly(lambda: a @ b, device, 5))


def profile(run: Callable[[], Any], device: torch.device) -> str:
    """Where the time of one call goes, the slowest kernels first."""
    kinds = torch.profiler.supported_activities()
    with torch.profiler.profile(activities=kinds) as found:
        run()
        synchronize(device)
    order = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
    return found.key_averages().table(sort_by=order, row_limit=60, max_name_column_width=90)
