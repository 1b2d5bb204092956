"""The kinds of cell: a model that is trained and then asked, and a training step that is timed."""

import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from perceiver_ar.architectures import build, compile_blocks
from perceiver_ar.config import AnyModelConfig, Experiment
from perceiver_ar.decoder import Decoder
from perceiver_ar.device import pick_device
from perceiver_ar.evaluation import evaluate
from perceiver_ar.reproduce.study import About, Bench, Cell, Found, Row
from perceiver_ar.run import load, open_source
from perceiver_ar.sealed import digest, read_sealed
from perceiver_ar.store import Store
from perceiver_ar.tasks.base import Document, Task
from perceiver_ar.timing import forget_peak, forward_flops, peak_gib, time_repeatedly, training_step
from perceiver_ar.training import train

FLOPS = 4e14
"""Operations a second at which the cost of a run is reckoned: half of what an H200 multiplies in bf16."""


@dataclass(frozen=True)
class Ask:
    """An evaluation of a trained model."""

    about: About = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """Of `evaluate`: latents, stride, context."""
    paper: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """A trained model, and what it is asked about."""

    model: Decoder
    task: Task
    documents: Sequence[Document]
    run: Path


Figures = dict[str, Callable[[dict[str, Any]], float]]
More = Callable[[Trained, Ask, Path], Found]
"""What else there is to find out, in a folder of the cell's own."""


def trained(
    about: About,
    experiment: Experiment,
    data: Callable[[], Path | None],
    bench: Bench,
    figures: Figures,
    asks: Sequence[Ask] = (Ask(),),
    more: More | None = None,
    adapt: Callable[[Experiment], Experiment] = lambda experiment: experiment,
    documents: int | None = None,
    batch_size: int = 32,
) -> Iterator[Cell]:
    """Cells that train a model and ask it, one for each seed.

    figures: names of what is found, and how it follows from the report of an evaluation. documents: only
    so many of the validation split. adapt: what is settled only when the cell's turn comes.
    """
    for seed in range(bench.seeds):
        chosen = replace(experiment, train=replace(experiment.train, seed=seed))
        asked = [[ask.about, ask.settings] for ask in asks]
        settings = {"experiment": chosen.to_dict(), "asks": asked, "documents": documents}

        def work(place: Path, chosen: Experiment = chosen, seed: int = seed) -> list[Row]:
            found = finish(adapt(chosen), data(), bench)
            if chosen.train.compile:
                compile_blocks(found.model)
            if documents is not None:
                few = [found.documents[i] for i in range(min(documents, len(found.documents)))]
                found = replace(found, documents=few)
            rows = []
            for ask in asks:
                report = evaluate(
                    found.model, found.task, found.documents, batch_size=batch_size, **ask.settings
                )
                values: Found = {label: of(report) for label, of in figures.items()}
                values |= more(found, ask, place) if more is not None else {}
                rows.append(Row({**about, **ask.about, "seed": seed}, values, ask.paper))
            return rows

        yield Cell(named({**about, "seed": seed}), settings, work, hours(chosen))


def named(about: About) -> str:
    """What a row is about as the name of a file."""
    return re.sub(r"[^\w.]+", "-", " ".join(f"{key} {value}" for key, value in about.items()))


def finish(experiment: Experiment, data: Path | None, bench: Bench) -> Trained:
    """Trains, or goes on where it was, or takes what another cell has trained alike on the same data."""
    seal = None if data is None else Store.open(data).meta
    run = bench.runs / digest({"experiment": experiment.to_dict(), "data": seal})[:16]
    result = train(experiment, data, run, resume=(run / "config.json").exists(), device=bench.device)
    if result["signal"] is not None:
        raise KeyboardInterrupt
    model, task, _ = load(run, str(pick_device(bench.device)))
    source = open_source(task.name, task.to_dict(), data)
    return Trained(model, source.task, source.documents("validation"), run)


def trained_steps_a_second(found: Trained) -> float:
    """As they were in the training itself, but for its evaluations."""
    lines = map(json.loads, (found.run / "metrics.jsonl").read_text().splitlines())
    rates = [line["targets_per_second"] for line in lines if "targets_per_second" in line]
    about = read_sealed(found.run / "config.json")["experiment"]
    return statistics.median(rates) / about["train"]["batch_size"] / found.model.config.latents


def hours(experiment: Experiment) -> float:
    """Of one GPU for a whole training."""
    work = 3 * forward_flops(experiment.model) * experiment.train.batch_size * experiment.train.steps
    return work / FLOPS / 3600


def timed(
    about: About, config: AnyModelConfig, batch: int, bench: Bench, paper: dict[str, float] | None = None
) -> Cell:
    """A cell that times steps of training."""

    def work(place: Path) -> list[Row]:
        return [Row(about, steps_a_second(config, batch, bench), paper or {})]

    return Cell(
        named(about), {"model": config.to_dict(), "kind": type(config).__name__, "batch": batch}, work
    )


def steps_a_second(config: AnyModelConfig, batch: int, bench: Bench, repeats: int = 5) -> Found:
    """Of training, with its memory; None where that does not suffice."""
    device = pick_device(bench.device)
    forget_peak(device)
    try:
        model = build(config).to(device).train()
        if device.type == "cuda":
            compile_blocks(model)
        tokens = torch.randint(config.vocab_size, (batch, config.context), device=device)
        targets = torch.randint(config.vocab_size, (batch, config.latents), device=device)
        seconds = time_repeatedly(training_step(model, tokens, targets), device, repeats)
    except torch.OutOfMemoryError:
        return {"steps/s": None}
    memory = peak_gib(device)
    return {"steps/s": 1 / statistics.median(seconds), **({} if memory is None else {"GiB": memory})}


def matching_depth(config: AnyModelConfig, rate: float, batch: int, bench: Bench) -> int:
    """The depth at which a model takes as many steps a second, by timing a few.

    Time grows by as much with every layer, so two depths tell roughly, and two more exactly.
    """
    times: dict[int, float] = {}

    def seconds(depth: int) -> float:
        if depth not in times:
            found = steps_a_second(replace(config, layers=depth), batch, bench)["steps/s"]
            times[depth] = 1 / found if found else float("inf")
        return times[depth]

    low, high = max(1, config.layers // 2), config.layers
    each = (seconds(high) - seconds(low)) / max(1, high - low)
    guess = low + (1 / rate - seconds(low)) / each if each > 0 else high
    below = min(max(1, int(guess)), 4 * high)
    return min((below, below + 1), key=lambda depth: abs(seconds(depth) - 1 / rate))
