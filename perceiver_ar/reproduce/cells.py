"""The kinds of cell: a model that is trained and then asked, and a training step that is timed."""

import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from perceiver_ar.architectures import build, compile_blocks
from perceiver_ar.config import AnyModelConfig, Experiment
from perceiver_ar.decoder import Decoder
from perceiver_ar.device import pick_device
from perceiver_ar.distributed import join
from perceiver_ar.evaluation import evaluate
from perceiver_ar.plan import plan
from perceiver_ar.reproduce.materials import NONE, Data
from perceiver_ar.reproduce.study import About, Bench, Cell, Found, Row
from perceiver_ar.run import load
from perceiver_ar.sealed import digest, write_whole
from perceiver_ar.source import open_source
from perceiver_ar.store import Store
from perceiver_ar.tasks.base import Document, Task
from perceiver_ar.timing import forget_peak, peak_gib, time_repeatedly, training_step
from perceiver_ar.training import train

MEANING = ("size", "order", "levels", "codes")
"""Settings of a task in which a store must be as an experiment says, unless they are changed."""


@dataclass(frozen=True)
class Ask:
    """An evaluation of a trained model."""

    about: About = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of `evaluate`: latents, stride, context."""
    paper: dict[str, float] = field(default_factory=dict)
    at: str = ""
    """The paper's own settings, where they are others."""


@dataclass(frozen=True)
class Trained:
    """A trained model, and what it is asked about."""

    model: Decoder
    task: Task
    documents: Sequence[Document]
    experiment: Experiment
    run: Path


Figures = dict[str, Callable[[dict[str, Any]], float]]
"""Names of what is found, and how it follows from the report of an evaluation."""
More = Callable[[Trained, Ask, Path], Found]
"""What else there is to find out, in a folder of the cell's own."""


def trained(
    about: About,
    experiment: Experiment,
    data: Data,
    bench: Bench,
    figures: Figures,
    asks: Sequence[Ask] = (Ask(),),
    more: More | None = None,
    beside: Experiment | None = None,
    documents: int | None = None,
    counted: str = "",
    own_data: bool = False,
) -> Iterator[Cell]:
    """Cells that train a model and ask it, one for each seed.

    beside: the model gets the depth at which it takes as many steps a second as that one. documents: only
    so many of the validation split. counted: what must have been counted of that split. own_data: other
    cells of the study need another store.
    """

    if bench.scale == "paper":  # as its plan counts on
        experiment = replace(experiment, train=replace(experiment.train, compile=True))

    def cell(seed: int) -> Cell:
        chosen = replace(experiment, train=replace(experiment.train, seed=seed))
        settings = {
            "experiment": chosen.to_dict(),
            "asks": [[dict(ask.about), ask.settings] for ask in asks],
            "documents": documents,
            "beside": None if beside is None else beside.to_dict(),
        }

        def settled() -> tuple[Experiment, Path | None]:
            folder = data.find()
            return chosen if beside is None else as_fast(chosen, beside, folder, bench), folder

        def where() -> Path:
            return run_of(*settled(), bench)

        def ready() -> Trained:
            ranks, _ = join(bench.device)
            return finish(*ranks.first(settled), bench, documents)

        def learn() -> None:
            found = ready()
            for ask in asks:
                asked(found, ask)

        def work(place: Path) -> list[Row]:
            return [
                Row({**about, **ask.about, "seed": seed}, values, ask.paper, ask.at)
                for ask, values in answers(ready(), asks, figures, more, place)
            ]

        return Cell(
            named({**about, "seed": seed}),
            settings,
            work,
            data="" if own_data else data.seal,
            hours=hours(chosen),
            check=partial(check_store, experiment, data, bench, counted),
            where=where,
            learn=learn,
        )

    return map(cell, range(bench.seeds))


def answers(
    found: Trained, asks: Sequence[Ask], figures: Figures, more: More | None, place: Path
) -> Iterator[tuple[Ask, Found]]:
    """What a trained model is found to be, as it is asked."""
    for ask in asks:
        report = asked(found, ask)
        values: Found = {label: of(report) for label, of in figures.items()}
        yield ask, values | (more(found, ask, place) if more is not None else {})


def asked(found: Trained, ask: Ask) -> dict[str, Any]:
    """The report of an evaluation, which is done once and kept beside the model."""
    ranks, _ = join(found.model.norm.weight.device.type)
    settings = {**ask.settings, "documents": len(found.documents)}
    kept = found.run / "asked" / f"{digest(settings)[:16]}.json"
    if ranks.first(kept.exists):
        return json.loads(kept.read_text())
    report = evaluate(found.model, found.task, found.documents, **ask.settings, ranks=ranks)
    if ranks.leads:
        kept.parent.mkdir(exist_ok=True)
        write_whole(kept, json.dumps(report).encode())
    return report


def named(about: About) -> str:
    """What a row is about as the name of a file."""
    return re.sub(r"[^\w.]+", "-", " ".join(f"{key} {value}" for key, value in about.items()))


def check_store(experiment: Experiment, data: Data, bench: Bench, counted: str = "") -> None:
    """Refuses a store of something else than what the experiment is about."""
    if bench.scale == "smoke" or data is NONE:
        return
    assert bench.data is not None
    meta = Store.open(bench.data).meta
    if meta["task"] != experiment.task:
        raise ValueError(
            f"{bench.data} is a store of the task {meta['task']}, but {experiment.task} is needed."
        )
    for key in (set(MEANING) & experiment.options.keys()) - {data.changes}:
        if meta["options"].get(key) != experiment.options[key]:
            raise ValueError(
                f"{bench.data} has {key} {meta['options'].get(key)}, but {experiment.options[key]} is "
                "needed: prepare it so."
            )
    validation = meta["splits"].get("validation", {"tokens": 0})
    if not validation["tokens"]:
        raise ValueError(f"{bench.data} has no validation split: prepare it with one.")
    if counted and not validation.get("counts", {}).get(counted):
        raise ValueError(f"the {counted} of {bench.data} were not counted: prepare it from text.")


def run_of(experiment: Experiment, data: Path | None, bench: Bench) -> Path:
    """Where a training is kept: that of another cell, if it is trained alike on the same data."""
    seal = None if data is None else Store.open(data).meta
    return bench.runs / digest({"experiment": experiment.to_dict(), "data": seal})[:16]


def teach(experiment: Experiment, data: Path | None, bench: Bench) -> Path:
    """Trains, or goes on where it was; the folder of the run."""
    run = run_of(experiment, data, bench)
    result = train(experiment, data, run, resume=run.exists(), device=bench.device)
    if result["signal"] is not None:
        raise KeyboardInterrupt
    return run


def finish(experiment: Experiment, data: Path | None, bench: Bench, documents: int | None = None) -> Trained:
    """A trained model, and the validation split, or only so many documents of it."""
    run = teach(experiment, data, bench)
    _, device = join(bench.device)
    model, task, _ = load(run, str(device))
    source = open_source(task.name, task.to_dict(), data)
    scored = source.documents("validation")
    if documents is not None:
        scored = [scored[i] for i in range(min(documents, len(scored)))]
    return Trained(model, source.task, scored, experiment, run)


def hours(experiment: Experiment) -> float:
    """Hours of one H200 that a whole training takes."""
    return plan(experiment).hours


def timed(about: About, config: AnyModelConfig, batch: int, bench: Bench) -> Cell:
    """A cell that times steps of training."""

    def work(place: Path) -> list[Row]:
        return [Row(about, steps_a_second(config, batch, bench))]

    return Cell(named(about), _of_steps(config, batch, bench), work)


def _of_steps(config: AnyModelConfig, batch: int, bench: Bench) -> dict[str, Any]:
    """All that decides how long a step takes."""
    return {"kind": type(config).__name__, **config.to_dict(), "batch": batch, **bench.machine}


def steps_a_second(config: AnyModelConfig, batch: int, bench: Bench) -> Found:
    """Speed and memory of training; None where memory does not suffice. Timed once, and kept."""
    kept = bench.runs.parent / "speeds" / f"{digest(_of_steps(config, batch, bench))[:16]}.json"
    if not kept.exists():
        found = _time_steps(config, batch, pick_device(bench.device))
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, json.dumps(found).encode())
    return json.loads(kept.read_text())


def _time_steps(config: AnyModelConfig, batch: int, device: torch.device) -> Found:
    torch.compiler.reset()  # what was compiled for models that are gone is in the way of this one
    forget_peak(device)
    try:
        model = build(config).to(device).train()
        if device.type == "cuda":
            compile_blocks(model)
        tokens = torch.randint(config.vocab_size, (batch, config.context), device=device)
        targets = torch.randint(config.vocab_size, (batch, config.latents), device=device)
        step = training_step(model, tokens, targets)
        seconds = time_repeatedly(step, device, repeats=5, in_a_row=3)
    except torch.OutOfMemoryError:
        return {"steps/s": None}
    memory = peak_gib(device)
    return {"steps/s": 1 / statistics.median(seconds), **({} if memory is None else {"GiB": memory})}


def as_fast(chosen: Experiment, beside: Experiment, data: Path | None, bench: Bench) -> Experiment:
    """The experiment with the depth at which it takes as many steps a second as the other."""
    assert data is not None
    known, batch = Store.open(data).vocab_size, beside.train.batch_size

    def seconds(model: AnyModelConfig) -> float:
        rate = steps_a_second(replace(model, vocab_size=known), batch, bench)["steps/s"]
        if rate is None:
            raise ValueError(
                f"a step of {model.layers} layers does not fit into memory: take a GPU with more of it."
            )
        return 1 / rate

    depth = matching_depth(
        lambda layers: seconds(replace(chosen.model, layers=layers)),
        seconds(beside.model),
        chosen.model.layers,
    )
    return replace(chosen, model=replace(chosen.model, layers=depth))


def matching_depth(seconds: Callable[[int], float], wanted: float, usual: int) -> int:
    """The depth whose step takes nearest to so many seconds.

    Time grows by as much with every layer, so two depths tell roughly, and two more exactly.
    """
    low, high = max(1, usual // 2), max(2, usual)
    each = (seconds(high) - seconds(low)) / (high - low)
    guess = low + (wanted - seconds(low)) / each if each > 0 else high
    below = min(max(1, int(guess)), 4 * high)
    return min((below, below + 1), key=lambda depth: abs(seconds(depth) - wanted))
