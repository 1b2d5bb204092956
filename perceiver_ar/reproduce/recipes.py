"""How models are trained at the scales below the paper's."""

from typing import Any

from perceiver_ar.config import TrainConfig
from perceiver_ar.reproduce.study import Scale


def recipe(scale: Scale, steps: int, **changes: Any) -> TrainConfig:
    """A few minutes of one GPU; for smoke, two steps of anything."""
    if scale == "smoke":
        return TrainConfig(steps=2, batch_size=2, warmup_steps=1, log_every=1)
    settings: dict[str, Any] = {
        "steps": steps,
        "batch_size": 32,
        "learning_rate": 1.2e-3,
        "warmup_steps": 200,
        "schedule": "cosine",
        "weight_decay": 0.1,
        "betas": (0.9, 0.98),
        "compile": True,
        "log_every": 100,
    }
    return TrainConfig(**settings | changes)
