"""A training step: forward, backward, and fused AdamW."""

import statistics
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.fp8 import eight_bits
from benchmarks.measure import Figure, matmul_rate, profile, rounded
from benchmarks.sizes import Size
from perceiver_ar import PerceiverAR, attention
from perceiver_ar.architectures import compile_blocks
from perceiver_ar.device import Precision, dtype_for, keep_freed_memory
from perceiver_ar.embedding import InputEmbedding
from perceiver_ar.flops import forward_flops
from perceiver_ar.model import Block
from perceiver_ar.timing import forget_peak, peak_gib, time_repeatedly, training_step


def time_training(
    name: str,
    size: Size,
    device: torch.device,
    repeats: int,
    compiled: bool = False,
    cross_dropout: float = 0.0,
    plain: bool = False,
    profiled: bool = False,
    fp8: bool = False,
    precision: Precision = "auto",
) -> Figure:
    """Sequences per second. plain: without the fast paths of the model; fp8: with eight-bit floats."""
    config = replace(size.model, cross_dropout=cross_dropout)
    forget_peak(device)
    if device.type == "cpu":
        keep_freed_memory()  # as training does
    model = PerceiverAR(config).to(device).train()
    tokens = torch.randint(config.vocab_size, (size.batch, config.context), device=device)
    targets = torch.randint(config.vocab_size, (size.batch, config.latents), device=device)
    if compiled:
        compile_blocks(model, fullgraph=True)

    step = training_step(model, tokens, targets, precision)
    together = 3 if device.type == "cuda" else 1  # each step is launched while the last is computed
    with slow_twins(plain), eight_bits(fp8):
        times = time_repeatedly(step, device, repeats, in_a_row=together)
        rates = [size.batch / seconds for seconds in times]
        if profiled:
            print(profile(step, device), file=sys.stderr)
    rate, dtype = 3 * forward_flops(config) * statistics.median(rates), dtype_for(precision, device)
    details = {
        "batch": size.batch,
        "compiled": compiled,
        "cross_dropout": cross_dropout,
        "plain": plain,
        "fp8": fp8,
        "dtype": str(dtype).removeprefix("torch."),
        "peak_gib": peak_gib(device),
        "tflops": rounded(rate / 1e12),
        "of_matmul_rate": rounded(rate / matmul_rate(device, dtype)),
    }
    return Figure("train", name, "sequences/s", rates, device, details)


@contextmanager
def slow_twins(wanted: bool) -> Generator[None]:
    """Replaces fast paths: reference attention, every input projected, separate queries, keys and values."""
    if not wanted:
        yield
        return
    with (
        patch("perceiver_ar.attention._kernel", lambda *_: attention.reference),
        patch.object(InputEmbedding, "table", None),
        patch.object(Block, "_joint", one_by_one),
    ):
        yield


def one_by_one(block: Block, latents: Tensor) -> Tensor:
    """Queries, keys and values by three products instead of one."""
    parts = [part(latents) for part in (block.query, block.key, block.value)]
    return torch.stack(parts, dim=2).unflatten(-1, (block.heads, -1))
