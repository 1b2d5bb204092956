"""The training loop, readable top to bottom.

A step's batch, latents and dropout follow from the seed and the step alone, so that a resumed run
repeats an uninterrupted one and a checkpoint holds no random state.
"""

import math
import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perceiver_ar.architectures import build, compile_blocks
from perceiver_ar.checkpoint import (
    Checkpoint,
    disk_is_full,
    load_newest,
    pack,
    recover,
    save_checkpoint,
    unpack,
)
from perceiver_ar.config import Experiment, TrainConfig
from perceiver_ar.data import Batch, collate
from perceiver_ar.decoder import Decoder
from perceiver_ar.device import autocast, pick_device
from perceiver_ar.embedding import Scores
from perceiver_ar.evaluation import evaluate, predict
from perceiver_ar.feed import Feed
from perceiver_ar.initial import start_from
from perceiver_ar.metrics import Metrics, import_logger
from perceiver_ar.optim import learning_rate, make_optimizer, update_average
from perceiver_ar.run import Data, Origin, Source, begin, export, open_source, settle
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
    """
    folder, where = Path(out or Path("runs") / experiment.name), pick_device(device)
    origin = Origin.of(folder, data, init, resume)
    source = open_source(experiment.task, experiment.options, origin.data)
    import_logger(experiment.train.logger)
    notes: list[str] = []
    experiment = settle(experiment, source, notes.append)
    experiment, weights = start_from(origin.init, experiment)
    run = make_state(experiment, source, where, weights)
    begin(folder, experiment, source, origin, resume)
    for place in (folder, folder / "checkpoints"):
        recover(place)
    restored = load_newest(folder / "checkpoints", where, notes.append)
    if restored is not None:
        run.restore(restored)
    with (
        Metrics(folder, experiment.train, run.step, show) as metrics,
        stop_signals() as received,
        repeatable(experiment.train.deterministic),
    ):
        for note in notes:
            metrics.say(note)
        loop(Job(experiment, source, origin.data, folder, where, metrics, received), run)
    return {"run": str(folder), "step": run.step, "signal": next(iter(received), None)}


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

    @property
    def config(self) -> TrainConfig:
        return self.experiment.train

    def due(self, step: int, every: int) -> bool:
        return every > 0 and step > 0 and (step % every == 0 or step == self.config.steps)

    def stop_if_asked(self, *progress: int) -> None:
        if self.received:
            raise Interrupted


class Interrupted(Exception):
    """A signal came in the middle of a step or an evaluation, which is given up."""


@dataclass
class State:
    """All that changes from step to step."""

    model: Decoder
    optimizer: torch.optim.Optimizer
    average: list[Tensor]
    examples: Examples
    micro: int
    step: int = 0
    kept: int = 0
    """Step of the newest checkpoint."""
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

    def restore(self, saved: Checkpoint) -> None:
        unpack(saved.tensors, self.model, self.optimizer, self.average)
        for key in ("step", "micro", "evaluated", "worse"):
            setattr(self, key, saved.state[key])
        self.kept = self.step
        self.best = math.inf if saved.state["best"] is None else saved.state["best"]
        self.examples.restore(saved.state["examples"])


def make_state(
    experiment: Experiment, source: Source, device: torch.device, weights: dict[str, Tensor] | None
) -> State:
    config = experiment.train
    torch.manual_seed(config.seed)
    model = build(experiment.model)
    if weights is not None:
        model.load_state_dict(weights)
    model.to(device).train()
    if config.compile:
        compile_blocks(model)
    average = [p.detach().clone() for p in model.parameters()] if config.ema else []
    examples = source.examples(experiment.model.context)
    micro = min(config.micro_batch_size or config.batch_size, config.batch_size)
    return State(model, make_optimizer(model, config), average, examples, micro)


def loop(job: Job, run: State) -> None:
    """Steps until the last, a signal, or no more patience."""
    began = run.step
    with Feed(batch_maker(job, run), run.step, job.config.steps) as feed:
        job.metrics.start_clock()
        try:
            while due_work_done(job, run) and run.step < job.config.steps:
                job.stop_if_asked()
                numbers = update(job, run, feed.take(run.step))
                run.step += 1
                after_step(job, run, feed, numbers)
        except Interrupted:
            job.metrics.say(f"Stopped at step {run.step:,}: go on with --resume.")
        except ValueError:  # said before the update, so the weights are good
            if run.kept < run.step:
                keep(job, run)
            raise
    if run.kept < run.step:
        keep(job, run)
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
            if run.micro == 1:
                raise ValueError(
                    "one sequence does not fit into memory: set --model.checkpoint-activations, "
                    "or lower the latents, the context or the channels."
                ) from None
            run.micro = (run.micro + 1) // 2
            torch.cuda.empty_cache()
            job.metrics.say(f"Out of memory: going on with micro-batches of {run.micro}.")
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), config.clip_norm)
    scored = int((batch.targets >= 0).sum())
    # Fetched at once, before the update: while a GPU does that, the next step is already being launched.
    steepness, *totals = torch.stack((norm, *sums)).tolist()
    means = zip(("loss", "accuracy"), totals, strict=False)
    numbers = {"grad_norm": steepness, **{name: total / scored for name, total in means}}
    if not all(math.isfinite(value) for value in numbers.values()):
        raise ValueError(
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
    return {**numbers, "lr": rate, "scored": scored}


def accumulate(job: Job, run: State, batch: Batch) -> list[Tensor]:
    """Gradients of the whole batch, piece by piece; sums of nats and, where they are counted, hits."""
    config, device = job.config, job.device
    scored = int((batch.targets >= 0).sum())
    sums: list[list[Tensor]] = []
    for start in range(0, len(batch), run.micro):
        job.stop_if_asked()
        part = batch.rows(start, start + run.micro).to(device)
        torch.manual_seed(((config.seed * 1_000_003 + run.step) * 65_537 + start) % 2**63)  # of dropout
        with precision(config, device):
            scores = run.model(
                part.inputs, positions=part.positions, lengths=part.lengths, targets=part.targets
            )
        (training_loss(scores, config) / scored).backward()
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


def evaluate_step(job: Job, run: State) -> None:
    """Evaluates on the validation split, and keeps the best model."""
    task, documents = job.source.task, job.source.documents("validation")
    with averaged(run):
        report = evaluate(run.model, task, documents, batch_size=run.micro, progress=job.stop_if_asked)
        sample = task.show(*predict(run.model, task, documents[0], 16))
        means = {key: value for key, value in report.items() if key != "by_position"}
        words = "  ".join(f"{key} {means[key]:.4f}" for key in ("nats", "accuracy") if key in means)
        run.evaluated, run.worse = run.step, run.worse + 1
        if report["nats"] < run.best:
            with unless_full(job, run):
                export(job.folder, run.model, job.experiment, job.source.task, job.data)
                run.best, run.worse = report["nats"], 0
                words += "  (best so far: kept)"
    job.metrics.log({"step": run.step, "validation": means})
    job.metrics.say(f"step {run.step:,}: validation {words}")
    if sample is not None:
        job.metrics.say(sample)
    job.metrics.start_clock()


@contextmanager
def averaged(run: State) -> Generator[None]:
    """Puts the average of the weights into the model for a while, if there is one."""
    if not run.average:
        yield
        return
    parameters = [p.data for p in run.model.parameters()]
    current = [p.clone() for p in parameters]
    torch._foreach_copy_(parameters, run.average)
    try:
        yield
    finally:
        torch._foreach_copy_(parameters, current)


def keep(job: Job, run: State) -> None:
    """Writes the model, unless evaluations choose the best, and then a checkpoint."""
    with unless_full(job, run):
        if not job.config.evaluate_every:
            with averaged(run):
                export(job.folder, run.model, job.experiment, job.source.task, job.data)
        save_checkpoint(job.folder / "checkpoints", run.step, run.checkpoint(), job.config.keep)
        run.kept = run.step
    job.metrics.start_clock()


@contextmanager
def unless_full(job: Job, run: State) -> Generator[None]:
    """On a full disk training goes on, and what was written before stays; but it cannot end so."""
    try:
        yield
    except Exception as error:
        if not disk_is_full(error):
            raise
        if run.step == job.config.steps:
            raise ValueError("the disk is full: free some space, then --resume to write the end.") from None
        job.metrics.say(
            f"The disk is full: nothing kept of step {run.step:,}. Training goes on; free some space."
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
