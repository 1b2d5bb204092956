"""The training loop, readable top to bottom.

A step's batch, number of latents and dropout depend only on the seed and the step number, so a resumed
run repeats an uninterrupted one and checkpoints hold no random state.
"""

import math
import os
import signal
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perceiver_ar.checkpoint import Keeper, newest, recover
from perceiver_ar.config import Experiment, TrainConfig
from perceiver_ar.data import Batch, collate
from perceiver_ar.device import autocast, keep_freed_memory, memory_is_full
from perceiver_ar.distributed import alone, join, launch, whole
from perceiver_ar.embedding import Scores
from perceiver_ar.feed import Feed
from perceiver_ar.initial import start_from
from perceiver_ar.job import Interrupted, Job, NotFinite, State, make_state
from perceiver_ar.keeping import evaluate_step, keep, keep_last
from perceiver_ar.metrics import Metrics, import_logger
from perceiver_ar.optim import learning_rate, update_average
from perceiver_ar.run import Origin, begin, begun_by, kept_from_others
from perceiver_ar.source import Data, Source, as_stored, open_source, settle
from perceiver_ar.watch import Watch
from perceiver_ar.windows import generator

MOST_ROWS = 2**15
"""Rows of one call of the model, at most: CUDA's attention takes fewer than twice as many."""


def train(
    experiment: Experiment,
    data: Data = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    init: str | Path | None = None,
    device: str = "auto",
    show: bool = True,
) -> dict[str, Any]:
    """Trains an experiment; returns the run folder, the step reached, and the signal that stopped it, if any.

    data: a token store, or several as {folder: weight}; synthetic tasks such as copy need none. out: the
    run folder, by default runs/NAME. init: a run or model folder to start from. show: whether to report
    on standard error. Under torchrun, all processes train the same run.
    """
    folder, launcher = Path(out or Path("runs") / experiment.name), os.getppid()
    # Communication times out later than the watch, which names the rank that hangs.
    ranks, where = join(device, 2 * experiment.train.timeout_minutes + 5)
    notes, asked = list[str](), resume
    if where.type == "cpu":
        keep_freed_memory()
    with (
        repeatable(experiment.train.deterministic),
        Watch(ranks, experiment.train.timeout_minutes) as watch,
        ExitStack() as held,
    ):
        origin, resume = ranks.first(lambda: beginning(folder, data, init, resume))
        experiment, source, weights = chosen(experiment, origin, notes.append)
        with room_for("the model"):
            run = make_state(experiment, source, where, weights, ranks)
        place = ranks.first(lambda: prepare(folder, experiment, source, origin, resume, notes.append, held))
        received = held.enter_context(stop_signals())  # until here there is nothing to save
        if place is not None:
            run.restore(place)
        if resume and not asked:
            notes.append(f"A process had died: torchrun restarted the run from step {run.step:,}.")
        metrics = held.enter_context(Metrics(folder, experiment.train, run.step, show, ranks.leads))
        keeper = held.enter_context(Keeper(folder / "checkpoints", experiment.train.keep, ranks))
        for note in notes:
            metrics.say(note)
        job = Job(
            experiment=experiment,
            source=source,
            data=origin.data,
            folder=folder,
            device=where,
            metrics=metrics,
            received=received,
            ranks=ranks,
            keeper=keeper,
            watch=watch,
            launcher=launcher,
        )
        loop(job, run)
        signals = [number for numbers in ranks.gather(received) for number in numbers]
    return {"run": str(folder), "step": run.step, "signal": next(iter(signals), None)}


def beginning(folder: Path, data: Data, init: str | Path | None, resume: bool) -> tuple[Origin, bool]:
    """The run's origin, and whether to resume it: if asked to, or if torchrun has restarted it."""
    resume = resume or begun_by(launch(), folder)
    return Origin.of(folder, data, init, resume), resume


def chosen(
    experiment: Experiment, origin: Origin, say: Callable[[str], None]
) -> tuple[Experiment, Source, dict[str, Tensor] | None]:
    """The experiment adapted to its data and initial model, the data, and the initial weights, if any."""
    experiment = as_stored(experiment, origin.data, say)
    source = open_source(experiment.task, experiment.options, origin.data)
    import_logger(experiment.train.logger)
    experiment, weights = start_from(origin, settle(experiment, source, say), source)
    return experiment, source, weights


def prepare(
    folder: Path,
    experiment: Experiment,
    source: Source,
    origin: Origin,
    resume: bool,
    warn: Callable[[str], None],
    held: ExitStack,
) -> Path | None:
    """Creates or repairs the run folder and locks it; returns its newest intact checkpoint, if any."""
    begin(folder, experiment, source, origin, resume, launch(), warn)
    held.enter_context(kept_from_others(folder))
    for place in (folder, folder / "checkpoints"):
        recover(place)
    return newest(folder / "checkpoints", warn)


def loop(job: Job, run: State) -> None:
    """Trains until the last step, a stop signal, or the end of patience."""
    began = run.step
    with Feed(batch_maker(job, run), run.step, job.config.steps) as feed:
        job.metrics.start_clock()
        try:
            while due_work_done(job, run) and run.step < job.config.steps:
                job.go_on(run.step)
                numbers = update(job, run, feed.take(run.step))
                run.step += 1
                asked = numbers.pop("asked")
                after_step(job, run, feed, numbers)
                if asked:
                    raise Interrupted
        except Interrupted:
            job.metrics.say(f"Stopped at step {run.step:,}: continue with --resume.")
        except ValueError as error:  # raised before the update, so the weights are good
            if job.ranks.size == 1 or isinstance(error, NotFinite):
                keep_last(job, run)
            raise
    keep_last(job, run)
    if run.step == began == job.config.steps:
        job.metrics.say(f"{job.folder} is finished: {run.step:,} steps.")


def due_work_done(job: Job, run: State) -> bool:
    """Evaluates and writes a checkpoint if due and not yet done; returns False when patience has run out."""
    config = job.config
    if job.due(run.step, config.evaluate_every) and run.evaluated < run.step:
        evaluate_step(job, run)
    if job.due(run.step, config.checkpoint_every) and run.kept < run.step:
        keep(job, run)
    if config.patience and run.worse >= config.patience:
        job.metrics.say(f"No improvement in {run.worse} evaluations: stopped at step {run.step:,}.")
        return False
    return True


def batch_maker(job: Job, run: State) -> Callable[[int], Batch]:
    """Returns the function that makes the batch of a given step."""
    config, most = job.config, job.experiment.model.latents

    def make(step: int) -> Batch:
        latents = int(generator(config.seed + 1, step).choice(config.latents_drawn or (most,)))
        windows = run.examples.windows(config.seed, step, config.batch_size, latents)
        # No latents beyond the targets: the model would learn to copy from them, and later they are absent.
        batch = collate(windows, max(window.scored for window in windows), job.source.task)
        seeds = generator(config.seed + 2, step).integers(2**31, size=len(batch), dtype=np.int32)
        batch = replace(batch, seeds=torch.from_numpy(seeds))  # for dropout
        return batch.each(Tensor.pin_memory) if job.device.type == "cuda" else batch

    return make


def after_step(job: Job, run: State, feed: Feed, numbers: dict[str, float]) -> None:
    """Reports the loss to the examples, which may change in response, and logs the step when due."""
    job.metrics.advance(run.step)
    job.metrics.count(numbers.pop("scored"))
    changed = run.examples.learned(numbers["loss"])
    if changed:
        job.metrics.say(f"step {run.step:,}: {changed}")
        feed.restart(run.step)
    if job.due(run.step, job.config.log_every):
        job.metrics.log_step(run.step, numbers, feed.take_waited())


def update(job: Job, run: State, batch: Batch) -> dict[str, float]:
    """Performs one optimizer step; returns its metrics, and as `asked` whether any rank should stop."""
    config, sums = job.config, gradients(job, run, batch)
    norm = whole(torch.nn.utils.clip_grad_norm_(run.model.parameters(), config.clip_norm))
    scored = int((batch.targets >= 0).sum())
    asked = torch.full((), float(job.asked()), device=job.device)
    # One sync, before the update is launched: while the GPU computes it, the CPU prepares the next step.
    here = torch.stack((asked, *sums)) * (run.others.size / job.ranks.size)  # those with the same rows agree
    steepness, stop, *totals = torch.stack((norm, *job.ranks.sum(here))).tolist()
    means = zip(("loss", "accuracy"), totals, strict=False)
    numbers = {"grad_norm": steepness, **{name: total / scored for name, total in means}}
    if not all(math.isfinite(value) for value in numbers.values()):
        raise NotFinite(
            f"the loss of step {run.step + 1} (the batch of seed {config.seed}, step {run.step}) is "
            f"{numbers['loss']}, its gradient's norm {numbers['grad_norm']}: training stops before that "
            "update. Start from its model with a lower learning rate: --init and another --out."
        )
    rate = learning_rate(run.step, config)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    with room_for("the optimizer's state"):
        run.optimizer.step()
    run.optimizer.zero_grad()
    if run.average:
        update_average(run.average, run.model.parameters(), config.ema, run.step)
    return {**numbers, "lr": rate, "scored": scored, "asked": stop}


def gradients(job: Job, run: State, batch: Batch) -> list[Tensor]:
    """Calls accumulate, halving the micro-batches until they fit into memory."""
    while True:
        try:
            return accumulate(job, run, batch)
        except RuntimeError as error:
            if not memory_is_full(error):
                raise
        # Outside the handler, since the exception keeps the tensors of the failed pass alive.
        run.optimizer.zero_grad()
        if job.ranks.size > 1:
            raise ValueError(
                f"{run.micro} sequences at once do not fit into memory: lower --train.micro-batch-size."
            )
        if run.micro == 1:
            raise ValueError(
                "one sequence does not fit into memory: set --model.checkpoint-activations, "
                "or lower the latents, the context or the channels."
            )
        run.micro = (run.micro + 1) // 2
        torch.cuda.empty_cache()
        job.metrics.say(f"Out of memory: going on with micro-batches of {run.micro}.")


def accumulate(job: Job, run: State, batch: Batch) -> list[Tensor]:
    """Accumulates gradients over micro-batches; returns this rank's summed nats and, if counted, hits."""
    config, device = job.config, job.device
    scored, rows = int((batch.targets >= 0).sum()), run.others.rows(len(batch))
    # Of short sequences, a batch may have more than its size.
    together = min(run.micro * (len(batch) // config.batch_size), MOST_ROWS)
    sums: list[list[Tensor]] = []
    for start in range(rows.start, rows.stop, together):
        job.go_on(run.step)
        stop = min(start + together, rows.stop)
        part = batch.rows(start, stop).to(device)
        with alone(run.spread, stop < rows.stop):
            with autocast(device, config.precision):
                scores = run.spread(
                    part.inputs,
                    positions=part.positions,
                    lengths=part.lengths,
                    targets=part.targets,
                    seeds=part.seeds,
                )
            # The mean over the targets of all ranks, whose gradients are averaged, not summed.
            (training_loss(scores, config) * (run.others.size / scored)).backward()
        counted = (scores.nats.detach(),) if scores.right is None else (scores.nats.detach(), scores.right)
        sums.append([x.sum().float() for x in counted])
    return [torch.stack(parts).sum() for parts in zip(*sums, strict=True)]


def training_loss(scores: Scores, config: TrainConfig) -> Tensor:
    """The training objective: summed nats with label smoothing and z-loss."""
    loss = scores.nats
    if config.label_smoothing:
        assert scores.uniform is not None
        loss = loss + config.label_smoothing * (scores.uniform - loss)
    return (loss + config.z_loss * scores.log_z.square()).sum()


@contextmanager
def room_for(what: str) -> Generator[None]:
    """Turns running out of memory into an error that says what did not fit."""
    try:
        yield
    except RuntimeError as error:
        if not memory_is_full(error):
            raise
        raise ValueError(f"{what} does not fit into memory: lower the channels or the layers.") from None


@contextmanager
def repeatable(wanted: bool) -> Generator[None]:
    """Restricts torch to deterministic kernels, if wanted."""
    before = torch.are_deterministic_algorithms_enabled()
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def stop_signals() -> Generator[list[int]]:
    """Collects SIGINT and SIGTERM instead of dying from them; a further SIGINT stops at once."""
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(number)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, as in some notebooks
        before = {}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
