"""The optimizer, its learning rate, and the average of the weights."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from perceiver_ar.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW, decaying matrices alone: biases and layer norms keep their size."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = next(model.parameters()).device.type == "cuda"
    low, high = config.betas
    return torch.optim.AdamW(groups, config.learning_rate, (low, high), config.epsilon, fused=fused)


def learning_rate(step: int, config: TrainConfig) -> float:
    """At a step counted from 0: linear warm-up, then constant or cosine to 0."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    whole = config.steps - config.warmup_steps
    last = whole if config.cosine_steps is None else min(config.cosine_steps, whole)
    done = (step - (config.steps - last)) / max(1, last)
    return config.learning_rate * (1 + math.cos(math.pi * min(max(done, 0.0), 1.0))) / 2


@torch.no_grad()
def update_average(average: list[Tensor], parameters: Iterable[Tensor], decay: float, step: int) -> None:
    """Moves the average towards the weights, faster at first, when it still holds the random start."""
    torch._foreach_lerp_(average, list(parameters), 1 - min(decay, (1 + step) / (10 + step)))
