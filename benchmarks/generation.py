"""Times generation at the sizes of benchmarks/RESULTS.md; prints one JSON line a batch size."""

import itertools
import json
import time
from typing import Any, Literal

import torch
import tyro

from benchmarks.__main__ import find_size, run_command, synchronize
from perceiver_ar import PerceiverAR, stream
from perceiver_ar.device import best_dtype, describe, pick_device


def main(
    size: tyro.conf.Positional[str] = "laptop",
    batch: tuple[int, ...] = (1,),
    prompt: tuple[int, ...] = (1,),
    tokens: int = 256,
    mode: Literal["cached", "no-caching"] = "cached",
    compile: bool = False,
    device: str = "auto",
) -> None:
    """Times the drawing of tokens, at temperature 1, in bf16 on a GPU.

    Args:
        size: One of laptop, 8k, 12k-60, 131k and 1m.
        batch: Rows drawn at once.
        prompt: Tokens of the prompt; several lengths are timed one after the other.
        tokens: Tokens to draw.
        mode: With a cache, or all N latents of every step computed anew (the paper's "no caching").
        compile: Compile each block.
        device: auto, cpu, cuda, mps ...
    """
    if tokens < 5:
        raise ValueError("timing needs at least 5 tokens.")
    where = pick_device(device)
    with where:
        model = PerceiverAR(find_size(size).model).to(best_dtype(where)).eval()
    if compile and mode == "no-caching":
        for block in (model.cross_attend, *model.self_attends):
            block.compile()
    for rows, given in itertools.product(batch, prompt):
        timed = time_generation(model, rows, given, tokens, mode == "cached", compile)
        print(json.dumps({"size": size, "mode": mode, **timed}), flush=True)


def time_generation(
    model: PerceiverAR, rows: int, prompt: int, tokens: int, cache: bool, compiled: bool
) -> dict[str, Any]:
    """Seconds to the fourth token, with any compiling, and of each token after it."""
    device = model.norm.weight.device
    given = torch.randint(model.config.vocab_size, (rows, prompt), device=device)
    marks = [time.perf_counter()]
    for t, _ in enumerate(stream(model, given, tokens, cache=cache, grow_latents=cache, compile=compiled)):
        if t in (3, tokens - 1):
            synchronize(device)
            marks.append(time.perf_counter())
    began, warm, done = marks
    seconds = (done - warm) / (tokens - 4)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return {
        "batch": rows,
        "prompt": prompt,
        "tokens": tokens,
        "compiled": compiled,
        "ms_per_step": round(1000 * seconds, 4),
        "tokens_per_second": round(rows / seconds, 1),
        "start_seconds": round(warm - began, 2),
        "peak_gib": peak and round(peak, 2),
        "device": describe(device),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    run_command(main, "python -m benchmarks.generation")
