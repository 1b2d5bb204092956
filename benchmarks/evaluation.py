"""Strided evaluation, next to the forward pass of training, whose speed it should reach."""

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.measure import Figure
from benchmarks.sizes import Size
from perceiver_ar import PerceiverAR, evaluate
from perceiver_ar.architectures import compile_blocks
from perceiver_ar.device import autocast
from perceiver_ar.tasks.base import Document
from perceiver_ar.tasks.tokens import TokensTask
from perceiver_ar.timing import forget_peak, peak_gib, time_repeatedly


def time_evaluation(
    name: str, size: Size, device: torch.device, repeats: int, compiled: bool = False
) -> Iterator[Figure]:
    """Sequences per second of a forward pass, and windows per second of a document of two batches."""
    config, batch = size.model, size.batch
    forget_peak(device)
    model = PerceiverAR(config).to(device)
    if compiled:
        compile_blocks(model)
    tokens = torch.randint(3, config.vocab_size, (batch, config.context), device=device)
    targets = torch.randint(3, config.vocab_size, (batch, config.latents), device=device)

    def forward() -> None:
        with autocast(device):
            model.nats(tokens, targets)

    stride, windows = config.latents // 2, 2 * batch
    length = config.context + 1 + stride * (windows - 1)
    text = np.random.default_rng(0).integers(3, config.vocab_size, length)
    document = Document(text, config.context + 1 - stride, length)

    def strided() -> None:
        evaluate(model, TokensTask(), [document], batch_size=batch)

    model.train()
    details = {"batch": batch, "compiled": compiled}
    rates = [batch / seconds for seconds in time_repeatedly(forward, device, repeats)]
    more = {**details, "peak_gib": peak_gib(device)}
    yield Figure("evaluate", f"{name}, training's forward pass", "sequences/s", rates, device, more)
    forget_peak(device)
    rates = [windows / seconds for seconds in time_repeatedly(strided, device, repeats, warm_up=1)]
    more = {**details, "stride": stride, "peak_gib": peak_gib(device)}
    yield Figure("evaluate", name, "sequences/s", rates, device, more)
