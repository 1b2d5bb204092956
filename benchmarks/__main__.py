"""Times a training step at the sizes of benchmarks/RESULTS.md; prints one JSON line a size."""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import tyro

from perceiver_ar import ModelConfig, PerceiverAR
from perceiver_ar.config import unknown
from perceiver_ar.device import autocast, describe, pick_device


@dataclass(frozen=True)
class Size:
    """A model and a batch to time it with."""

    model: ModelConfig
    batch: int


SIZES = {
    "laptop": Size(ModelConfig(259, 4096, 512, channels=256, heads=8, layers=6), 4),
    "8k": Size(ModelConfig(259, 8192, 1024, layers=12), 32),
    "12k-60": Size(ModelConfig(259, 12_289, 1024, layers=60), 16),
    "131k": Size(ModelConfig(259, 131_072, 1024, layers=6), 4),
    "1m": Size(ModelConfig(259, 1_048_576, 1024, layers=6), 1),
}


def main(
    sizes: tyro.conf.Positional[tuple[str, ...]] = ("laptop",),
    device: str = "auto",
    repeats: int = 10,
    compile: bool = False,
    cross_dropout: float = 0.0,
) -> None:
    """Times training steps (forward, backward, fused AdamW).

    Args:
        sizes: Which of laptop, 8k, 12k-60, 131k and 1m.
        device: auto, cpu, cuda, mps ...
        repeats: Timed steps, after three to warm up.
        compile: Compile each block.
        cross_dropout: Share of inputs that the cross-attend drops.
    """
    where = pick_device(device)
    for name in sizes:
        timed = time_training(find_size(name), where, repeats, compile, cross_dropout)
        print(json.dumps({"size": name, **timed}))


def find_size(name: str) -> Size:
    if name not in SIZES:
        raise ValueError(unknown("size", name, SIZES))
    return SIZES[name]


def time_training(
    size: Size, device: torch.device, repeats: int, compiled: bool, cross_dropout: float
) -> dict[str, Any]:
    config = replace(size.model, cross_dropout=cross_dropout)
    model = PerceiverAR(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(config.vocab_size, (size.batch, config.context), device=device)
    targets = torch.randint(config.vocab_size, (size.batch, config.latents), device=device)
    if compiled:
        for block in (model.cross_attend, *model.self_attends):
            block.compile(fullgraph=True)

    def step() -> None:
        with autocast(device):
            loss = model.nats(tokens, targets).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = time_repeatedly(step, device, repeats)
    rates = [size.batch / s for s in seconds]
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return {
        "sequences_per_second": round(statistics.median(rates), 3),
        "spread": [round(min(rates), 3), round(max(rates), 3)],
        "batch": size.batch,
        "peak_gib": peak and round(peak, 2),
        "compiled": compiled,
        "cross_dropout": cross_dropout,
        "device": describe(device),
        "torch": torch.__version__,
    }


def time_repeatedly(run: Callable[[], None], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each repeat, after three to warm up."""
    for _ in range(3):
        run()
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def run_command(main: Callable[..., None], name: str) -> None:
    try:
        tyro.cli(main, prog=name, config=(tyro.conf.FlagCreatePairsOff,))
    except ValueError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    run_command(main, "python -m benchmarks")
