"""Saving a run: checkpoints, and the model (the best one, if there are evaluations)."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from perceiver_ar.architectures import build
from perceiver_ar.checkpoint import disk_is_full
from perceiver_ar.distributed import whole
from perceiver_ar.evaluation import evaluate, predict
from perceiver_ar.job import Job, State
from perceiver_ar.report import means
from perceiver_ar.run import export


def evaluate_step(job: Job, run: State) -> None:
    """Evaluates on the validation split, and writes the model if it is the best so far."""
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
    words = "  ".join(f"{key} {report[key]:.4f}" for key in ("nats", "accuracy") if key in report)
    run.evaluated, run.worse = run.step, run.worse + 1
    if job.ranks.first(lambda: report["nats"] < run.best):  # ranks that share inputs may differ in a bit
        with unless_full(job, run.step):
            write_model(job, run)
            run.best, run.worse = report["nats"], 0
            words += "  (best so far: saved)"
    job.metrics.log({"step": run.step, "validation": means(report)})
    job.metrics.say(f"step {run.step:,}: validation {words}")
    if sample is not None:
        job.metrics.say(sample)
    job.metrics.start_clock()


def write_model(job: Job, run: State) -> None:
    """Gathers the weights, or their average if there is one, on rank 0 and writes model/."""
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
        export(job.folder / "model", model, job.experiment, job.source.task, job.data)

    job.ranks.first(write)


@contextmanager
def averaged(run: State) -> Generator[None]:
    """Temporarily replaces the weights by their moving average, if there is one."""
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
    """Writes the model, unless evaluations select the best, and starts writing a checkpoint."""
    finish_keeping(job, run)
    with unless_full(job, run.step):
        if not job.config.evaluate_every:
            write_model(job, run)
        job.keeper.save(run.step, run.checkpoint())
        run.kept = run.step
    job.metrics.start_clock()


def finish_keeping(job: Job, run: State) -> None:
    """Waits until the checkpoint being written, if any, is complete."""
    step = job.keeper.writing
    with unless_full(job, step):
        job.keeper.wait()
        return
    run.kept = 0


def keep_last(job: Job, run: State) -> None:
    """Makes sure that a checkpoint of the current step is complete."""
    finish_keeping(job, run)
    if run.kept < run.step:
        keep(job, run)
        finish_keeping(job, run)


@contextmanager
def unless_full(job: Job, step: int) -> Generator[None]:
    """If the disk is full, reports it and lets training continue; at the last step, raises instead."""
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
