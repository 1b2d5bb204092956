"""A training step: forward, backward, and fused AdamW."""

import statistics
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch

from benchmarks.measure import Figure, forget_peak, matmul_rate, peak_gib, profile, rounded, time_repeatedly
from benchmarks.sizes import Size, forward_flops
from perceiver_ar import PerceiverAR, attention
from perceiver_ar.architectures import compile_blocks
from perceiver_ar.device import autocast
from perceiver_ar.embedding import InputEmbedding


def time_training(
    name: str,
    size: Size,
    device: torch.device,
    repeats: int,
    compiled: bool = False,
    cross_dropout: float = 0.0,
    plain: bool = False,
    profiled: bool = False,
) -> Figure:
    """Sequences a second; plain: with every fast path of the model switched off."""
    config = replace(size.model, cross_dropout=cross_dropout)
    forget_peak(device)
    model = PerceiverAR(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(config.vocab_size, (size.batch, config.context), device=device)
    targets = torch.randint(config.vocab_size, (size.batch, config.latents), device=device)
    if compiled:
        compile_blocks(model, fullgraph=True)

    def step() -> None:
        with autocast(device):
            loss = model.nats(tokens, targets).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with slow_twins(plain):
        rates = [size.batch / seconds for seconds in time_repeatedly(step, device, repeats)]
        if profiled:
            print(profile(step, device), file=sys.stderr)
    rate = 3 * forward_flops(config) * statistics.median(rates)
    details = {
        "batch": size.batch,
        "compiled": compiled,
        "cross_dropout": cross_dropout,
        "plain": plain,
        "peak_gib": peak_gib(device),
        "tflops": rounded(rate / 1e12),
        "of_matmul_rate": rounded(rate / matmul_rate(device)),
    }
    return Figure("train", name, "sequences/s", rates, device, details)


@contextmanager
def slow_twins(wanted: bool) -> Generator[None]:
    """Attention written out, and every input projected."""
    if not wanted:
        yield
        return
    with (
        patch("perceiver_ar.model.attend", attention.reference),
        patch.object(InputEmbedding, "table", None),
    ):
        yield
