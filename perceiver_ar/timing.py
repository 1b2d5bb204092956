"""Measures how much time and memory work takes."""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perceiver_ar.baselines import TransformerXL
from perceiver_ar.decoder import Decoder
from perceiver_ar.device import Precision, autocast


def time_repeatedly(
    run: Callable[[], Any], device: torch.device, repeats: int, warm_up: int = 3, in_a_row: int = 1
) -> list[float]:
    """Seconds of each repeat after warm-up; each the mean of `in_a_row` calls without a sync in between."""
    for _ in range(warm_up):
        run()
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(in_a_row):
            run()
        synchronize(device)
        seconds.append((time.perf_counter() - start) / in_a_row)
    return seconds


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def forget_peak(device: torch.device) -> None:
    """Frees the cached memory of a GPU, and resets its peak."""
    if device.type == "cuda":
        gc.collect()  # compiled models contain reference cycles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    """Peak memory of a GPU since forget_peak, in GiB; None for other devices."""
    if device.type != "cuda":
        return None
    return float(f"{torch.cuda.max_memory_allocated(device) / 2**30:.4g}")


def training_step(
    model: Decoder, tokens: Tensor, targets: Tensor, precision: Precision = "auto"
) -> Callable[[], None]:
    """A step to be timed: forward, backward and fused AdamW.

    Transformer-XL is given a full memory, as if the step before had left it.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    past = model.blank(len(tokens)) if isinstance(model, TransformerXL) else None

    def nats() -> Tensor:
        if isinstance(model, TransformerXL):
            return model.score_on(tokens[:, -targets.shape[1] :], targets, past, None)[0].nats
        return model.nats(tokens, targets)

    def step() -> None:
        with autocast(tokens.device, precision):
            loss = nats().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
