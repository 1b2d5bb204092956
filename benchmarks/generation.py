"""Generation: the time of a token, of the first one, and of the refreshes among them."""

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

import torch

from benchmarks.measure import Figure, forget_peak, peak_gib, rounded, synchronize, time_repeatedly
from perceiver_ar import PerceiverAR, stream
from perceiver_ar.caching import half, prefill, refresh

Mode = Literal["cached", "no-caching"]


def time_generation(
    name: str,
    model: PerceiverAR,
    rows: int,
    prompt: int,
    tokens: int,
    repeats: int,
    mode: Mode = "cached",
    compiled: bool = False,
) -> Iterator[Figure]:
    """Milliseconds and tokens a second, over as many stretches as there are repeats."""
    if tokens < 4 + repeats:
        raise ValueError(f"timing {repeats} stretches needs at least {4 + repeats} tokens.")
    device = model.norm.weight.device
    given = torch.randint(model.config.vocab_size, (rows, prompt), device=device)
    forget_peak(device)
    # The fourth token is the first that neither compiles nor records anything.
    bounds = [3 + (tokens - 4) * part // repeats for part in range(repeats + 1)]
    began, marks, first = time.perf_counter(), [], 0.0
    cached = mode == "cached"
    drawing = stream(model, given, tokens, cache=cached, grow_latents=cached, compile=compiled)
    for t, _ in enumerate(drawing):
        if t == 0:
            synchronize(device)
            first = time.perf_counter() - began
        if t in bounds:
            synchronize(device)
            marks.append(time.perf_counter())
    steps = [(b - a) / (y - x) for (a, b), (x, y) in zip(pairwise(marks), pairwise(bounds), strict=True)]
    details = {
        "batch": rows,
        "prompt": prompt,
        "tokens": tokens,
        "mode": mode,
        "compiled": compiled,
        "first_token_seconds": rounded(first),
        "start_seconds": rounded(marks[0] - began),
        "peak_gib": peak_gib(device),
    }
    yield Figure("generate", name, "ms/token", [1000 * s for s in steps], device, details)
    yield Figure("generate", name, "tokens/s", [rows / s for s in steps], device, details)
    if cached:
        mean = (marks[-1] - marks[0]) / (bounds[-1] - bounds[0])
        yield from time_refresh(name, model, given, mean, repeats)


@torch.inference_mode()
def time_refresh(
    name: str, model: PerceiverAR, given: torch.Tensor, seconds: float, repeats: int
) -> Iterator[Figure]:
    """The share of a step's time that refreshes take, one for half as many tokens as there are latents."""
    latents, held = model.config.latents, min(given.shape[1], model.config.context)
    if half(held, latents) < latents // 2:
        return  # the prompt is too short for a whole refresh
    places = torch.arange(held, device=given.device)[None, :, None]
    _, cache = prefill(model, given[:, -held:], places, (held, latents))
    times = time_repeatedly(lambda: refresh(model, cache, latents // 2), given.device, repeats)
    every = latents // 2 + 1
    shares = [100 * s / (seconds * every) for s in times]
    yield Figure("generate", f"{name}, refresh", "% of the time", shares, given.device, {"batch": len(given)})
