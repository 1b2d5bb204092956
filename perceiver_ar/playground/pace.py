"""How fast a model generates with a given number of latents at a full context, refreshes included."""

import time
from collections.abc import Callable

import numpy as np
import torch

from perceiver_ar.caching import prefill, refresh, step
from perceiver_ar.captured import fastest
from perceiver_ar.model import PerceiverAR
from perceiver_ar.tasks.base import Task
from perceiver_ar.timing import synchronize
from perceiver_ar.windows import Tokens

WARM, TIMED = 2, 24
"""Steps of warm-up, and steps that are timed."""


@torch.inference_mode()
def tokens_per_second(
    model: PerceiverAR, task: Task, prompt: Tokens, total: int, latents: int, go_on: Callable[[], None]
) -> float:
    """The speed for one row at the end of `total` tokens; go_on is called between steps, and may raise."""
    device, given = model.norm.weight.device, max(1, total - WARM - TIMED)
    tokens = torch.from_numpy(np.resize(prompt, (1, given))).long().to(device)
    numbers = np.arange(total)[None]
    found = task.positions(numbers)
    places = torch.from_numpy(numbers[..., None] if found is None else found).to(device)
    latents = min(latents, given)
    _, cache = prefill(model, tokens, places[:, :given], (total, latents))
    decode, stack = fastest(model, cache, tokens=100 * latents)

    def timed(times: int, act: Callable[[int], object]) -> float:
        synchronize(device)
        began = time.perf_counter()
        for t in range(times):
            go_on()
            act(t)
        synchronize(device)
        return (time.perf_counter() - began) / times

    renewed = max(1, latents // 2)
    if device.type == "cuda":
        timed(1, lambda _: refresh(model, cache, renewed, stack))  # which captures it
    again = timed(1, lambda _: refresh(model, cache, renewed, stack))

    def one_more(t: int) -> None:
        nonlocal cache
        place = places[:, given + t : given + t + 1]
        _, cache = step(model, cache, tokens[:, 0], place, decode, stack)

    steps = max(1, min(total - given, latents - renewed))
    warm = min(WARM, steps - 1)
    for t in range(warm):
        one_more(t)
    each = timed(steps - warm, lambda t: one_more(warm + t))
    period = latents - renewed + 1  # tokens from one refresh to the next, which itself yields one
    return period / ((period - 1) * each + again)
