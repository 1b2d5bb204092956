"""Commands for training: presets, train, and plan, which estimates what a training costs."""

import json
import sys
from dataclasses import asdict, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from perceiver_ar.cli.arguments import Device, Json, first_of
from perceiver_ar.config import Experiment

FIRST = ("tiny", "small")
"""Presets to begin with: for a laptop, and for a GPU."""


def show_presets(as_json: Json = False) -> None:
    """List the presets: two to start with, then the paper's models, with their sizes."""
    from rich.console import Console
    from rich.table import Table

    from perceiver_ar import presets
    from perceiver_ar.architectures import parameter_count

    rows: dict[str, dict[str, Any]] = {}
    for name in sorted(presets.names(), key=lambda name: name not in FIRST):
        experiment = presets.get(name)
        sizes = {key: getattr(experiment.model, key) for key in ("context", "latents", "layers", "channels")}
        rows[name] = {"task": experiment.task, **sizes, "parameters": parameter_count(experiment.model)}
    if as_json:
        print(json.dumps(rows))
        return
    table = Table("name", "task", box=None, padding=(0, 1, 0, 0))
    for heading in ("context", "latents", "layers", "channels", "parameters"):
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        row["parameters"] = f"{row['parameters'] / 1e6:,.1f}M"
        table.add_row(name, *(f"{cell:,}" if isinstance(cell, int) else cell for cell in row.values()))
    Console().print(table)


def preset_fields(name: str) -> tuple[Experiment, list[tuple[str, Any, Any]]]:
    """An experiment, and the options that its settings are the defaults of."""
    from perceiver_ar import presets, tasks

    experiment = presets.get(name)
    fields: list[tuple[str, Any, Any]] = [
        (part, type(value), value)
        for part, value in (("model", experiment.model), ("train", experiment.train))
    ]
    if tasks.is_known(experiment.task):
        task = tasks.get(experiment.task, experiment.options)
        fields.append(("task", type(task), task))
    return experiment, fields


def as_chosen(experiment: Experiment, chosen: Any) -> Experiment:
    options = chosen.task.to_dict() if hasattr(chosen, "task") else experiment.options
    return replace(experiment, model=chosen.model, train=chosen.train, options=options)


def train(arguments: list[str]) -> None:
    """Train a preset, with any of its settings changed: see `perceiver-ar train PRESET --help`."""
    preset = first_of(
        arguments,
        lambda: (
            "usage: perceiver-ar train PRESET [--data DIR] [--out RUN] [--model.latents 512 ...] [--resume]\n"
            "`perceiver-ar presets` lists the presets, `perceiver-ar train PRESET --help` all settings."
        ),
    )
    experiment, fields = preset_fields(preset)
    fields += [
        (
            "data",
            Annotated[
                tuple[Path, ...],
                tyro.conf.arg(help="Token stores made by `prepare`; the copy task needs none."),
            ],
            (),
        ),
        (
            "weights",
            Annotated[
                tuple[float, ...], tyro.conf.arg(help="Relative weight of each store. Default: all equal.")
            ],
            (),
        ),
        ("out", Annotated[Path | None, tyro.conf.arg(help="Folder of the run. Default: runs/PRESET.")], None),
        (
            "init",
            Annotated[Path | None, tyro.conf.arg(help="Run or model whose weights to start from.")],
            None,
        ),
        (
            "resume",
            Annotated[bool, tyro.conf.arg(help="Continue from the newest checkpoint, if any.")],
            False,
        ),
        ("device", Device, "auto"),
    ]
    kind = make_dataclass("Train", fields, frozen=True)
    chosen: Any = tyro.cli(
        kind,
        args=arguments[1:],
        prog=f"perceiver-ar train {preset}",
        description=f"Train the preset {preset}.",
    )
    from perceiver_ar.distributed import leave, restarts
    from perceiver_ar.training import train

    if chosen.weights and len(chosen.weights) != len(chosen.data):
        raise ValueError(f"{len(chosen.weights)} weights do not fit {len(chosen.data)} stores of --data.")
    if len({path.resolve() for path in chosen.data}) < len(chosen.data):
        raise ValueError("the same store stands twice in --data.")
    data = dict(zip(chosen.data, chosen.weights or [1.0] * len(chosen.data), strict=True))
    experiment = as_chosen(experiment, chosen)
    result = train(experiment, data, chosen.out, resume=chosen.resume, init=chosen.init, device=chosen.device)
    leave()
    done, most = restarts()
    if result["signal"] and done == most:  # else torchrun would start again what was asked to stop
        sys.exit(128 + result["signal"])


def plan(arguments: list[str]) -> None:
    """Estimate what training a preset costs: `perceiver-ar plan PRESET --gpus 8 --gpu h200`."""
    preset = first_of(
        arguments,
        lambda: "usage: perceiver-ar plan PRESET [--gpus 8] [--gpu h200] [--train.batch-size 64 ...]",
    )
    from perceiver_ar.plan import GPUS, plan

    experiment, fields = preset_fields(preset)
    fields += [
        ("gpus", Annotated[int, tyro.conf.arg(help="Number of GPUs.")], 1),
        ("gpu", Annotated[str, tyro.conf.arg(help=f"GPU model: {', '.join(GPUS)}.")], "h200"),
        ("as_json", Json, False),
    ]
    kind = make_dataclass("Plan", fields, frozen=True)
    chosen: Any = tyro.cli(
        kind,
        args=arguments[1:],
        prog=f"perceiver-ar plan {preset}",
        description="Estimate what the training costs. On one H200 this is within 15 % of what was measured; "
        "other GPUs were not tried.",
    )
    found = plan(as_chosen(experiment, chosen), chosen.gpu, chosen.gpus)
    print(json.dumps(asdict(found)) if chosen.as_json else found)
