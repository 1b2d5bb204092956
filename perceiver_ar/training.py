"""The training loop, readable top to bottom.

A step's batch, latents and dropout follow from the seed and the step alone, so that a resumed run
repeats an uninterrupted one and a checkpoint holds no random state.
"""

import math
import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from perceiver_ar.architectures import build, compile_blocks
from perceiver_ar.checkpoint import (
    STATE,
    Checkpoint,
    Keeper,
    disk_is_full,
    newest,
    pack,
    recover,
    unpack,
)
from perceiver_ar.config import Experiment, TrainConfig
from perceiver_ar.data import Batch, collate
from perceiver_ar.decoder import Decoder
from perceiver_ar.device import autocast, best_dtype
from perceiver_ar.distributed import Ranks, alone, join, launch, restarts, spread, whole
from perceiver_ar.embedding import Scores
from perceiver_ar.evaluation import evaluate, predict
from perceiver_ar.feed import Feed
from perceiver_ar.initial import start_from
from perceiver_ar.metrics import Metrics, import_logger
from perceiver_ar.model import PerceiverAR
from perceiver_ar.optim import learning_rate, make_optimizer, update_average
from perceiver_ar.run import Data, Origin, Source, begin, begun_by, export, open_source, settle
from perceiver_ar.sealed import read_sealed
from perceiver_ar.watch import Watch
from perceiver_ar.windows import Examples, generator


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
    """Trains an experiment into a run folder; returns that folder, the step reached, and any signal.

    data: a token store, or several as {folder: weight}; tasks such as copy need none. out: the folder,
    by default runs/NAME. init: a model folder to start from. show: whether to report on standard error.
    Under torchrun all its processes train the one run.
    """
    folder, launcher = Path(out or Path("runs") / experiment.name), os.getppid()
    # Longer than it takes the watch to say who does not answer.
    ranks, where = join(device, 2 * experiment.train.timeout_minutes + 5)
    origin, resume = ranks.first(lambda: beginning(folder, data, init, resume))
    source = open_source(experiment.task, experiment.options, origin.data)
    import_logger(experiment.train.logger)
    notes: list[str] = []
    experiment = settle(experiment, source, notes.append)
    experiment, weights = start_from(origin.init, experiment)
    run = make_state(experiment, source, where, weights, ranks)
    place = ranks.first(lambda: prepare(folder, experiment, source, origin, resume, notes.append))
    if place is not None:
        run.restore(place)
    with (
        Metrics(folder, experiment.train, run.step, show, ranks.leads) as metrics,
        stop_signals() as received,
        repeatable(experiment.train.deterministic),
        Watch(ranks, experiment.train.timeout_minutes) as watch,
        Keeper(folder / "checkpoints", experiment.train.keep, ranks) as keeper,
    ):
        for note in notes:
            metrics.say(note)
        about = experiment, source, origin.data, folder, where
        loop(Job(*about, metrics, received, ranks, keeper, watch, launcher), run)
        signals = [number for numbers in ranks.gather(received) for number in numbers]
    return {"run": str(folder), "step": run.step, "signal": next(iter(signals), None)}


def beginning(folder: Path, data: Data, init: str | Path | None, resume: bool) -> tuple[Origin, bool]:
    """Where data and weights come from, and whether to go on with a run: also if torchrun starts it again."""
    resume = resume or (restarts()[0] > 0 and begun_by(launch(), folder))
    return Origin.of(folder, data, init, resume), resume


def prepare(
    folder: Path,
    experiment: Experiment,
    source: Source,
    origin: Origin,
    resume: bool,
    warn: Callable[[str], None],
) -> Path | None:
    """Makes or mends a run's folder; its newest checkpoint, if there is one."""
    begin(folder, experiment, source, origin, resume, launch())
    for place in (folder, folder / "checkpoints"):
        recover(place)
    return newest(folder / "checkpoints", warn)


@dataclass(frozen=True)
class Job:
    """All that stays the same from step to step."""

    experiment: Experiment
    source: Source
    data: Data
    folder: Path
    device: torch.device
    metrics: Metrics
    received: list[int]
    """Signals that ask the run to stop."""
    ranks: Ranks
    keeper: Keeper
    watch: Watch
    launcher: int
    """The process that started this one."""

    @property
    def config(self) -> TrainConfig:
        return self.experiment.train

    def due(self, step: int, every: int) -> bool:
        return every > 0 and step > 0 and (step % every == 0 or step == self.config.steps)

    def asked(self) -> bool:
        """Whether this rank is asked to stop, by a signal or by torchrun's death."""
        if launch() is not None and os.getppid() != self.launcher:
            self.received.append(signal.SIGTERM)
        return bool(self.received)

    def go_on(self, step: int) -> None:
        """Says that this rank does. One alone stops here if it is asked to; several, after each step."""
        self.watch.beat(step)
        if self.ranks.size == 1 and self.asked():
            raise Interrupted

    def go_on_together(self, step: int) -> None:
        """The same where all ranks are at the same place: they stop if one of them is asked to."""
        self.watch.beat(step)
        if self.ranks.any(self.asked()):
            raise Interrupted


class Interrupted(Exception):
    """A signal came in the middle of a step or an evaluation, which is given up."""


class NotFinite(ValueError):
    """A loss or a gradient that is no number, which all ranks find alike."""


@dataclass
class State:
    """All that changes from step to step."""

    model: Decoder
    spread: nn.Module
    """What is called: the model, on all ranks."""
    optimizer: torch.optim.Optimizer
    average: list[Tensor]
    examples: Examples
    micro: int
    others: Ranks
    """This rank, and those that have other rows of a batch."""
    step: int = 0
    kept: int = 0
    """Step of the newest checkpoint, which may still be being written."""
    evaluated: int = 0
    """Step of the last evaluation."""
    best: float = math.inf
    worse: int = 0
    """Evaluations since the best."""

    def checkpoint(self) -> Checkpoint:
        numbers = {key: getattr(self, key) for key in ("step", "micro", "evaluated", "worse")}
        best = None if math.isinf(self.best) else self.best
        state = {**numbers, "best": best, "examples": self.examples.state}
        return Checkpoint(pack(self.model, self.optimizer, self.average), state)

    def restore(self, place: Path) -> None:
        unpack(place, self.model, self.optimizer, self.average)
        saved, micro = read_sealed(place / STATE), self.micro
        for key in ("step", "micro", "evaluated", "worse"):
            setattr(self, key, saved[key])
        self.micro = min(self.micro, micro)  # there may be more ranks now
        self.kept = self.step
        self.best = math.inf if saved["best"] is None else saved["best"]
        self.examples.restore(saved["examples"])


def make_state(
    experiment: Experiment,
    source: Source,
    device: torch.device,
    weights: dict[str, Tensor] | None,
    ranks: Ranks,
) -> State:
    config = experiment.train
    others, sharing = ranks.split(config.context_parallel)
    if config.batch_size % others.size:
        raise ValueError(
            f"batch_size must be a multiple of the {others.size} processes that have rows of their own, "
            f"but is {config.batch_size}."
        )
    torch.manual_seed(config.seed)
    model = build(experiment.model)
    if weights is not None:
        model.load_state_dict(weights)
    model.train()
    if sharing.size > 1:
        if not isinstance(model, PerceiverAR):
            raise ValueError(
                "context_parallel shares out the inputs of Perceiver AR's cross-attend: set it to 1."
            )
        if device.type == "cuda" and sent_as(config, device) is None:
            raise ValueError("with context_parallel a GPU computes in bf16: set precision to auto.")
        width = model.config.input_width // model.config.cross_head_count
        if device.type == "cuda" and (width % 8 or width > 248):
            raise ValueError(
                "context_parallel on a GPU needs cross-attend heads of at most 248 channels, a multiple "
                f"of 8, but they have {width}: set cross_heads."
            )
        model.cross_attend.share = sharing
    if config.compile:
        compile_blocks(model)
    called = spread(model, device, ranks, config.parallel, sent_as(config, device))
    average = [p.detach().clone() for p in model.parameters()] if config.ema else []
    examples = source.examples(experiment.model.context)
    micro = min(config.micro_batch_size or config.batch_size, config.batch_size // others.size)
    return State(model, called, make_optimizer(model, config, ranks), average, examples, micro, others)


def loop(job: Job, run: State) -> None:
    """Steps until the last, a signal, or no more patience."""
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
            job.metrics.say(f"Stopped at step {run.step:,}: go on with --resume.")
        except ValueError as error:  # said before the update, so the weights are good
            if job.ranks.size == 1 or isinstance(error, NotFinite):
                keep_last(job, run)
            raise
    keep_last(job, run)
    if run.step == began == job.config.steps:
        job.metrics.say(f"{job.folder} is finished: {run.step:,} steps.")


def due_work_done(job: Job, run: State) -> bool:
    """Evaluates and keeps what is due at this step, unless that was done; says whether patience lasts."""
    config = job.config
    if job.due(run.step, config.evaluate_every) and run.evaluated < run.step:
        evaluate_step(job, run)
    if job.due(run.step, config.checkpoint_every) and run.kept < run.step:
        keep(job, run)
    if config.patience and run.worse >= config.patience:
        job.metrics.say(f"No better in {run.worse} evaluations: stopped at step {run.step:,}.")
        return False
    return True


def batch_maker(job: Job, run: State) -> Callable[[int], Batch]:
    """What makes the batch of a step."""
    config, most = job.config, job.experiment.model.latents

    def make(step: int) -> Batch:
        latents = int(generator(config.seed + 1, step).choice(config.latents_drawn or (most,)))
        windows = run.examples.windows(config.seed, step, config.batch_size, latents)
        # No more latents than are scored: others would teach copying from latents that are not there later.
        batch = collate(windows, max(window.scored for window in windows), job.source.task)
        seeds = generator(config.seed + 2, step).integers(2**31, size=len(batch), dtype=np.int32)
        batch = replace(batch, seeds=torch.from_numpy(seeds))  # of dropout
        return batch.each(Tensor.pin_memory) if job.device.type == "cuda" else batch

    return make


def after_step(job: Job, run: State, feed: Feed, numbers: dict[str, float]) -> None:
    """Tells the examples and the user how the step went."""
    job.metrics.advance(run.step)
    job.metrics.count(numbers.pop("scored"))
    changed = run.examples.learned(numbers["loss"])
    if changed:
        job.metrics.say(f"step {run.step:,}: {changed}")
        feed.restart(run.step)
    if job.due(run.step, job.config.log_every):
        job.metrics.log_step(run.step, numbers, feed.take_waited())


def update(job: Job, run: State, batch: Batch) -> dict[str, float]:
    """One optimizer step, in as large pieces as memory holds."""
    config = job.config
    while True:
        try:
            sums = accumulate(job, run, batch)
            break
        except torch.OutOfMemoryError:
            run.optimizer.zero_grad()
            if job.ranks.size > 1:
                raise ValueError(
                    f"{run.micro} sequences at once do not fit into memory: lower --train.micro-batch-size."
                ) from None
            if run.micro == 1:
                raise ValueError(
                    "one sequence does not fit into memory: set --model.checkpoint-activations, "
                    "or lower the latents, the context or the channels."
                ) from None
            run.micro = (run.micro + 1) // 2
            torch.cuda.empty_cache()
            job.metrics.say(f"Out of memory: going on with micro-batches of {run.micro}.")
    norm = whole(torch.nn.utils.clip_grad_norm_(run.model.parameters(), config.clip_norm))
    scored = int((batch.targets >= 0).sum())
    asked = torch.full((), float(job.asked()), device=job.device)
    # Fetched at once, before the update: while a GPU does that, the next step is already being launched.
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
    try:
        run.optimizer.step()
    except torch.OutOfMemoryError:
        raise ValueError(
            "the optimizer's state does not fit into memory: lower the channels or the layers."
        ) from None
    run.optimizer.zero_grad()
    if run.average:
        update_average(run.average, run.model.parameters(), config.ema, run.step)
    return {**numbers, "lr": rate, "scored": scored, "asked": stop}


def accumulate(job: Job, run: State, batch: Batch) -> list[Tensor]:
    """Gradients of the whole batch, piece by piece; this rank's sums of nats and, where counted, hits."""
    config, device = job.config, job.device
    scored, rows = int((batch.targets >= 0).sum()), run.others.rows(len(batch))
    sums: list[list[Tensor]] = []
    for start in range(rows.start, rows.stop, run.micro):
        job.go_on(run.step)
        stop = min(start + run.micro, rows.stop)
        part = batch.rows(start, stop).to(device)
        with alone(run.spread, stop < rows.stop):
            with precision(config, device):
                scores = run.spread(
                    part.inputs,
                    positions=part.positions,
                    lengths=part.lengths,
                    targets=part.targets,
                    seeds=part.seeds,
                )
            # Of what all ranks score; their gradients are averaged, not added.
            (training_loss(scores, config) * (run.others.size / scored)).backward()
        counted = (scores.nats.detach(),) if scores.right is None else (scores.nats.detach(), scores.right)
        sums.append([x.sum().float() for x in counted])
    return [torch.stack(parts).sum() for parts in zip(*sums, strict=True)]


def training_loss(scores: Scores, config: TrainConfig) -> Tensor:
    """Summed nats, smoothed, with the z-loss."""
    loss = scores.nats
    if config.label_smoothing:
        assert scores.uniform is not None
        loss = loss + config.label_smoothing * (scores.uniform - loss)
    return (loss + config.z_loss * scores.log_z.square()).sum()


def precision(config: TrainConfig, device: torch.device) -> Any:
    if config.precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext() if config.precision == "float32" else autocast(device)


def sent_as(config: TrainConfig, device: torch.device) -> torch.dtype | None:
    """What sharded weights and gradients are rounded to: bf16 on GPUs that compute in it."""
    if device.type != "cuda" or config.precision == "float32":
        return None
    return torch.bfloat16 if config.precision == "bf16" else best_dtype(device)


def evaluate_step(job: Job, run: State) -> None:
    """Evaluates on the validation split, and keeps the best model."""
    task, documents = job.source.task, job.source.documents("validation")
    with averaged(run):
        report = evaluate(
            run.model,
            task,
            documents,
            batch_size=run.micro,
            progress=lambda *_: job.go_on_together(run.step),
            ranks=run.others,
        )
        sample = task.show(*predict(run.model, task, documents[0], 16))
    means = {key: value for key, value in report.items() if key != "by_position"}
    words = "  ".join(f"{key} {means[key]:.4f}" for key in ("nats", "accuracy") if key in means)
    run.evaluated, run.worse = run.step, run.worse + 1
    if job.ranks.first(lambda: report["nats"] < run.best):  # those that share inputs may differ in a bit
        with unless_full(job, run.step):
            write_model(job, run)
            run.best, run.worse = report["nats"], 0
            words += "  (best so far: kept)"
    job.metrics.log({"step": run.step, "validation": means})
    job.metrics.say(f"step {run.step:,}: validation {words}")
    if sample is not None:
        job.metrics.say(sample)
    job.metrics.start_clock()


def write_model(job: Job, run: State) -> None:
    """Writes model/, with the average of the weights if there is one, put together on the first rank."""
    names = [name for name, _ in run.model.named_parameters()]
    weights: dict[str, Tensor] = {}
    for name, x in zip(names, run.average or run.model.parameters(), strict=True):
        gathered = whole(x.detach())
        if job.ranks.leads:
            weights[name] = gathered.cpu()

    def write() -> None:
        with torch.device("meta"):
            model = build(job.experiment.model)
        model.load_state_dict(weights, assign=True)
        export(job.folder, model, job.experiment, job.source.task, job.data)

    job.ranks.first(write)


@contextmanager
def averaged(run: State) -> Generator[None]:
    """Puts the average of the weights into the model for a while, if there is one."""
    if not run.average:
        yield
        return
    parameters = [p.detach() for p in run.model.parameters()]
    current = [p.clone() for p in parameters]
    for parameter, mean in zip(parameters, run.average, strict=True):
        parameter.copy_(mean)
    try:
        yield
    finally:
        for parameter, before in zip(parameters, current, strict=True):
            parameter.copy_(before)


def keep(job: Job, run: State) -> None:
    """Writes the model, unless evaluations choose the best, and then a checkpoint."""
    finish_keeping(job, run)
    with unless_full(job, run.step):
        if not job.config.evaluate_every:
            write_model(job, run)
        job.keeper.save(run.step, run.checkpoint())
        run.kept = run.step
    job.metrics.start_clock()


def finish_keeping(job: Job, run: State) -> None:
    """Waits for the checkpoint that is being written, if there is one."""
    step = job.keeper.writing
    with unless_full(job, step):
        job.keeper.wait()
        return
    run.kept = 0


def keep_last(job: Job, run: State) -> None:
    """Sees to it that this step is kept, and written."""
    finish_keeping(job, run)
    if run.kept < run.step:
        keep(job, run)
        finish_keeping(job, run)


@contextmanager
def unless_full(job: Job, step: int) -> Generator[None]:
    """On a full disk training goes on, and what was written before stays; but it cannot end so."""
    try:
        yield
    except Exception as error:
        if not disk_is_full(error):
            raise
        if step == job.config.steps:
            raise ValueError("the disk is full: free some space, then --resume to write the end.") from None
        job.metrics.say(
            f"The disk is full: nothing kept of step {step:,}. Training goes on; free some space."
        )


@contextmanager
def repeatable(wanted: bool) -> Generator[None]:
    """Only kernels that give the same bits every time, if that is wanted."""
    before = torch.are_deterministic_algorithms_enabled()
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def stop_signals() -> Generator[list[int]]:
    """Collects SIGINT and SIGTERM instead of dying of them; a second SIGINT stops at once."""
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
