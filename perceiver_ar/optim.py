"""The optimizer, the learning rate schedule, and the moving average of the weights."""

import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from perceiver_ar.config import TrainConfig
from perceiver_ar.distributed import Ranks
from perceiver_ar.layers import Linear


def make_optimizer(model: nn.Module, config: TrainConfig, ranks: Ranks) -> torch.optim.Optimizer:
    """AdamW, with weight decay on matrices only; or Muon for linear maps, and AdamW for the rest."""
    maps = [m.weight for m in model.modules() if isinstance(m, Linear)] if config.optimizer == "muon" else []
    chosen = set(map(id, maps))
    others = [p for p in model.parameters() if id(p) not in chosen]
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = next(model.parameters()).device.type == "cuda"
    settings: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "eps": config.epsilon}
    if config.parallel == "zero1" and ranks.size > 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # takes a while to import

        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, fused=fused, **settings)
    rest = torch.optim.AdamW(groups, fused=fused, **settings)
    if not maps:
        return rest
    # Scales updates to the RMS of AdamW's, so that the same learning rates and weight decays apply.
    muon = torch.optim.Muon(maps, config.learning_rate, config.weight_decay, adjust_lr_fn="match_rms_adamw")
    return Both(muon, rest)


class Both(torch.optim.Optimizer):
    """Two optimizers of disjoint parameters, presented as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.parts, self.param_groups = parts, groups
        self._share()

    def _share(self) -> None:
        """Makes the parts use this optimizer's groups and state."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = list(itertools.islice(groups, len(part.param_groups)))
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for part in self.parts:
            part.step()


def begin_state(optimizer: torch.optim.Optimizer) -> None:
    """Initialises the state as the first step would, so that a checkpoint can be loaded into it."""
    local = local_part(optimizer)
    for group in local.param_groups:
        for parameter in group["params"]:
            if "momentum" in group:  # Muon's
                local.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
                continue
            zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            step = torch.zeros((), device=parameter.device if group["fused"] else None)
            local.state[parameter] = {"step": step, **zeros}


def local_part(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer of this rank's parameters, without the wrapper of zero1."""
    return getattr(optimizer, "optim", optimizer)


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate at a step counted from 0: linear warm-up, then constant or cosine decay to 0."""
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
    """Moves the average towards the weights, faster at first, while it still holds the initial weights."""
    torch._foreach_lerp_(average, list(parameters), 1 - min(decay, (1 + step) / (10 + step)))
