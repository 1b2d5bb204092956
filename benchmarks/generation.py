"""Generation: time per token, time to the first token, and share of the refreshes."""

import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from benchmarks.measure import Figure, rounded
from perceiver_ar import PerceiverAR, stream
from perceiver_ar.caching import prefill, refresh
from perceiver_ar.captured import fastest
from perceiver_ar.timing import forget_peak, peak_gib, synchronize, time_repeatedly

Mode = Literal["cached", "no-caching"]


def time_generation(
    name: str,
    model: PerceiverAR,
    rows: int,
    prompt: int,
    tokens: int | None,
    mode: Mode = "cached",
    compiled: bool = False,
) -> Iterator[Figure]:
    """Milliseconds per token and tokens per second, over stretches of one refresh each if tokens suffice."""
    cached, period = mode == "cached", model.config.latents // 2 + 1
    tokens = (4 + 4 * period if cached else 24) if tokens is None else tokens
    each = period if cached and tokens >= 4 + period else tokens - 4
    device = model.norm.weight.device
    given = torch.randint(model.config.vocab_size, (rows, prompt), device=device)
    forget_peak(device)
    # The fourth token is the first for which nothing is compiled or captured.
    bounds = range(3, tokens, each)
    began, marks, first = time.perf_counter(), [], 0.0
    drawing = stream(model, given, tokens, cache=cached, grow_latents=cached)
    for t, _ in enumerate(drawing):
        if t == 0:
            synchronize(device)
            first = time.perf_counter() - began
        if t in bounds:
            synchronize(device)
            marks.append(time.perf_counter())
    steps = [(end - start) / each for start, end in pairwise(marks)]
    refreshed = cached and each == period
    details = {
        "batch": rows,
        "prompt": prompt,
        "tokens": tokens,
        "refreshes": len(steps) if refreshed else 0,
        "mode": mode,
        "compiled": compiled,
        "first_token_seconds": rounded(first),
        "start_seconds": rounded(marks[0] - began),
        "peak_gib": peak_gib(device),
    }
    yield Figure("generate", name, "ms/token", [1000 * s for s in steps], device, details)
    yield Figure("generate", name, "tokens/s", [rows / s for s in steps], device, details)
    if cached and prompt >= period:
        seconds = refresh_seconds(model, given)
        mean = sum(steps) / len(steps)
        whole = mean * period if refreshed else seconds + mean * (period - 1)
        share = [100 * seconds / whole]
        yield Figure("generate", f"{name}, refreshes", "% of the time", share, device, {"batch": rows})


@torch.inference_mode()
def refresh_seconds(model: PerceiverAR, given: Tensor) -> float:
    """Seconds of one refresh over the prompt (B, P)."""
    latents, held = model.config.latents, min(given.shape[1], model.config.context)
    places = torch.arange(held, device=given.device)[None, :, None]
    _, cache = prefill(model, given[:, -held:], places, (held, latents))
    _, stack = fastest(model, cache, tokens=100 * latents)
    times = time_repeatedly(lambda: refresh(model, cache, latents // 2, stack), given.device, 5)
    return statistics.median(times)
