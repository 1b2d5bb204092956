"""Steps and refreshes as CUDA graphs: hundreds of small kernels in one launch."""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from perceiver_ar.caching import Cache, Decode, Stack, decode_at, decode_one, deepen, through
from perceiver_ar.model import Block, PerceiverAR

CAPTURE_FROM = 32
"""Steps from which capturing a graph pays off; it takes about as long as ten steps."""
CAPTURE_REFRESHES_FROM = 4
"""Refreshes from which capturing one pays off; it takes about as long as two refreshes."""


def fastest(model: PerceiverAR, cache: Cache, tokens: int) -> tuple[Decode, Stack]:
    """The fastest functions for this number of steps: on a GPU, CUDA graphs, with our kernels if possible."""
    if cache.keys.device.type != "cuda" or tokens < CAPTURE_FROM:
        return decode_one, deepen
    _, latents = cache.room
    refreshes = tokens // max(1, latents - latents // 2)
    often = refreshes >= CAPTURE_REFRESHES_FROM and cache.first is None
    return _captured_decode(model, cache), _captured_stack(model, cache) if often else deepen


def _captured_decode(model: PerceiverAR, cache: Cache) -> Decode:
    fused = _fused(model)
    if fused is None and cache.first is None:
        # Attention covers the whole of the cache's tensors, so a mask must say which columns are filled.
        cache = replace(cache, first=cache.tokens.new_zeros(len(cache.tokens)))
    step = Recorded(
        lambda token, position, column, slot: decode_at(
            model, cache, token, position, column, slot, fused or through
        )
    )

    def decode(model: PerceiverAR, now: Cache, token: Tensor, position: Tensor) -> Tensor:
        assert now.keys is cache.keys
        return step(token, position, *(token.new_full((1,), n) for n in (now.inputs, now.latents)))

    return decode


def _captured_stack(model: PerceiverAR, cache: Cache) -> Stack:
    deep = Recorded(lambda z, positions: deepen(model, cache, z, positions, None))

    def stack(model: PerceiverAR, now: Cache, z: Tensor, positions: Tensor, visible: Tensor | None) -> Tensor:
        assert now.keys is cache.keys
        assert visible is None
        return deep(z, positions)

    return stack


def _fused(model: PerceiverAR) -> Callable[..., Tensor] | None:
    """The fused Triton kernels, if they support this model."""
    try:
        from perceiver_ar import fused
    except ImportError:  # triton only comes with torch for CUDA
        return None
    blocks = cast("list[Block]", [model.cross_attend, *model.self_attends])
    return fused.through if all(fused.serves(block) for block in blocks) else None


class Recorded:
    """A function of tensors on a GPU, captured as a CUDA graph at the first call and replayed at each.

    Any other tensors that it reads or writes must keep their memory addresses.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        with torch.cuda.device(inputs[0].device):
            if self.graph is None:
                self.inputs = [x.clone() for x in inputs]
                self.graph, self.output = self._record()
            for held, new in zip(self.inputs, inputs, strict=True):
                assert held.shape == new.shape
                held.copy_(new)
            self.graph.replay()
            return self.output.clone()

    def _record(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Runs the function once before capture, as torch requires; it is idempotent, so this is harmless."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self.function(*self.inputs)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self.function(*self.inputs)
        return graph, output
