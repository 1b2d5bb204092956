"""A run that is going on: what stays the same from step to step, and what changes."""

import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from perceiver_ar.architectures import build, compile_blocks
from perceiver_ar.checkpoint import STATE, Checkpoint, Keeper, fill, named_tensors
from perceiver_ar.config import Experiment, TrainConfig
from perceiver_ar.decoder import Decoder
from perceiver_ar.device import dtype_for
from perceiver_ar.distributed import Ranks, launch, spread
from perceiver_ar.metrics import Metrics
from perceiver_ar.model import PerceiverAR
from perceiver_ar.optim import make_optimizer
from perceiver_ar.sealed import read_sealed
from perceiver_ar.source import Data, Source
from perceiver_ar.watch import Watch
from perceiver_ar.windows import Examples


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
        """Tells the watch that this rank goes on. One alone stops here if asked; several, after each step."""
        self.watch.beat(step)
        if self.ranks.size == 1 and self.asked():
            raise Interrupted

    def go_on_together(self, step: int) -> None:
        """The same where all ranks are at one place: all of them stop if one is asked to."""
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
    """How many evaluations there were since the best."""

    def checkpoint(self) -> Checkpoint:
        numbers = {key: getattr(self, key) for key in ("step", "micro", "evaluated", "worse")}
        best = None if math.isinf(self.best) else self.best
        state = {**numbers, "best": best, "ranks": self.others.size, "examples": self.examples.state}
        return Checkpoint(named_tensors(self.model, self.optimizer, self.average), state)

    def restore(self, place: Path) -> None:
        fill(place, self.model, self.optimizer, self.average)
        saved = read_sealed(place / STATE)
        for key in ("step", "evaluated", "worse"):
            setattr(self, key, saved[key])
        if self.others.size == saved.get("ranks", 1):  # else each has other rows, in pieces of another size
            self.micro = min(self.micro, saved["micro"])
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
        assert isinstance(model, PerceiverAR)
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
    return State(
        model=model,
        spread=called,
        optimizer=make_optimizer(model, config, ranks),
        average=average,
        examples=examples,
        micro=micro,
        others=others,
    )


def sent_as(config: TrainConfig, device: torch.device) -> torch.dtype | None:
    """What sharded weights and gradients are rounded to, if they are: what a GPU computes in."""
    rounded = device.type == "cuda" and config.precision != "float32"
    return dtype_for(config.precision, device) if rounded else None
