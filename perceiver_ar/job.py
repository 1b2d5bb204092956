"""A training run in progress: Job is fixed, State changes from step to step."""

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
    """Everything that stays fixed during training."""

    experiment: Experiment
    source: Source
    data: Data
    folder: Path
    device: torch.device
    metrics: Metrics
    received: list[int]
    """Stop signals received so far."""
    ranks: Ranks
    keeper: Keeper
    watch: Watch
    launcher: int
    """Process id of the parent at the start."""

    @property
    def config(self) -> TrainConfig:
        return self.experiment.train

    def due(self, step: int, every: int) -> bool:
        return every > 0 and step > 0 and (step % every == 0 or step == self.config.steps)

    def asked(self) -> bool:
        """Whether this rank should stop, because of a signal or because torchrun has died."""
        if launch() is not None and os.getppid() != self.launcher:
            self.received.append(signal.SIGTERM)
        return bool(self.received)

    def go_on(self, step: int) -> None:
        """Reports progress to the watch. A single process may stop here; several stop only after a step."""
        self.watch.beat(step)
        if self.ranks.size == 1 and self.asked():
            raise Interrupted

    def go_on_together(self, step: int) -> None:
        """The same as a collective call: all ranks stop if any of them was asked to."""
        self.watch.beat(step)
        if self.ranks.any(self.asked()):
            raise Interrupted


class Interrupted(Exception):
    """Training was asked to stop; a step or evaluation in progress is abandoned."""


class NotFinite(ValueError):
    """The loss or the gradient norm is not finite, which all ranks detect alike."""


@dataclass
class State:
    """Everything that changes from step to step."""

    model: Decoder
    spread: nn.Module
    """The model as called in training: wrapped or sharded if there are several ranks."""
    optimizer: torch.optim.Optimizer
    average: list[Tensor]
    examples: Examples
    micro: int
    others: Ranks
    """The group of ranks that have different rows of the batch, including this one."""
    step: int = 0
    kept: int = 0
    """Step of the newest checkpoint, whose writing may still be in progress."""
    evaluated: int = 0
    """Step of the last evaluation."""
    best: float = math.inf
    worse: int = 0
    """Number of evaluations since the best."""

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
        if self.others.size == saved.get("ranks", 1):  # otherwise ranks have other numbers of rows
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
    """Dtype in which FSDP sends weights and gradients: what a GPU computes in, or None for no rounding."""
    rounded = device.type == "cuda" and config.precision != "float32"
    return dtype_for(config.precision, device) if rounded else None
