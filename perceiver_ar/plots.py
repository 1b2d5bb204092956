"""Plots of losses: by training step, and by position in the document."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from perceiver_ar.extras import need
from perceiver_ar.metrics import read_metrics
from perceiver_ar.report import by_part


def check_picture(path: Path) -> None:
    """Refuses a file that a plot cannot be written to, before any work is done."""
    known = need("matplotlib.figure").Figure().canvas.get_supported_filetypes()
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} for the plot.")
    if path.suffix.removeprefix(".") not in known:
        raise ValueError(f"a plot is written to .png, .svg or .pdf, not to {path}.")


def new_figure(**labels: str) -> tuple[Any, Any]:
    """A figure, and the axes to draw on."""
    figure = need("matplotlib.figure").Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set(**labels)
    return figure, axes


def draw_positions(report: dict[str, Any], path: Path) -> None:
    """Plots the nats of an evaluation by position in the document, or what else they are reported by."""
    name, parts = by_part(report)
    figure, axes = new_figure(xlabel=name, ylabel="nats per token")
    bounds = [f"< {int(bound):,}" for bound in parts]
    values = [part["nats"] for part in parts.values()]
    axes.plot(bounds, values, marker="o")
    axes.axhline(report["nats"], linestyle="--", color="grey", label=f"all: {report['nats']:.4f}")
    axes.tick_params(axis="x", rotation=30)
    axes.legend()
    figure.savefig(path, dpi=150)


def draw_curves(runs: Sequence[Path], path: Path) -> None:
    """Plots the losses of runs by step, raw and smoothed, with those of their evaluations."""
    curves = {run: read_metrics(run) for run in runs}  # all are read before anything is drawn
    figure, axes = new_figure(xlabel="step", ylabel="nats per token")
    for index, (run, lines) in enumerate(curves.items()):
        trained = np.array([(line["step"], line["loss"]) for line in lines if "loss" in line])
        found = [(line["step"], line["validation"]["nats"]) for line in lines if "validation" in line]
        colour = f"C{index}"
        axes.plot(*trained.T, color=colour, alpha=0.25, linewidth=0.8)
        few = "." if len(trained) < 10 else ""  # a single point makes no line
        axes.plot(trained[:, 0], _smoothed(trained[:, 1]), marker=few, color=colour, label=run.name)
        axes.plot(*np.array(found).reshape(-1, 2).T, "o", color=colour, markersize=4)
    low, high = axes.get_ylim()
    if low > 0 and high > 4 * low:
        axes.set_yscale("log")
    axes.legend()
    figure.savefig(path, dpi=150)


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Centred moving average over a fiftieth of the values."""
    width = max(1, len(values) // 50) | 1
    padded = np.pad(values, width // 2, mode="edge")
    return np.convolve(padded, np.ones(width) / width, mode="valid")
