"""How long work takes, and how much memory."""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perceiver_ar.baselines import TransformerXL
from perceiver_ar.decoder import Decoder
from perceiver_ar.device import autocast


def time_repeatedly(
    run: Callable[[], Any], device: torch.device, repeats: int, warm_up: int = 3, in_a_row: int = 1
) -> list[float]:
    """Seconds of each repeat, once it is warm; or the mean of a few in a row, as work that goes on takes."""
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
    """Begins to watch the memory of a GPU anew."""
    if device.type == "cuda":
        gc.collect()  # compiled models hold on to themselves
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    """The most memory that was in use on a GPU since forget_peak, in GiB."""
    if device.type != "cuda":
        return None
    return float(f"{torch.cuda.max_memory_allocated(device) / 2**30:.4g}")


def training_step(model: Decoder, tokens: Tensor, targets: Tensor) -> Callable[[], None]:
    """A step to be timed: forward, backward, and AdamW, fused on a GPU, in the precision of training.

    Transformer-XL is given its memory, as if the step before had left it.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    past = model.blank(len(tokens)) if isinstance(model, TransformerXL) else None

    def nats() -> Tensor:
        if isinstance(model, TransformerXL):
            return model.score_on(tokens[:, -targets.shape[1] :], targets, past, None)[0].nats
        return model.nats(tokens, targets)

    def step() -> None:
        with autocast(tokens.device):
            loss = nats().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
