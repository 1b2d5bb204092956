"""A step as a CUDA graph: hundreds of small kernels, launched as one."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from perceiver_ar.caching import Cache, Decode, decode_at, decode_one, through
from perceiver_ar.model import Block, PerceiverAR

CAPTURE_FROM = 32
"""Tokens from which recording a graph pays: it takes about as long as ten steps."""


def decode_for(model: PerceiverAR, cache: Cache, tokens: int) -> Decode:
    """How to decode so many tokens: one by one, or captured on a GPU, by the fastest kernels there are."""
    if cache.keys.device.type != "cuda" or tokens < CAPTURE_FROM:
        return decode_one
    fused = _fused(model)
    return Captured(cache, through) if fused is None else Captured(cache, fused, whole=False)


def _fused(model: PerceiverAR) -> Callable[..., Tensor] | None:
    """Kernels of our own, if they can take this model."""
    try:
        from perceiver_ar import fused
    except ImportError:  # triton comes with torch for CUDA alone
        return None
    blocks = cast("list[Block]", [model.cross_attend, *model.self_attends])
    return fused.through if all(fused.serves(block) for block in blocks) else None


class Captured:
    """decode_one of one cache, recorded at the first call and replayed at the others."""

    def __init__(self, cache: Cache, through: Callable[..., Tensor], whole: bool = True) -> None:
        """whole: the whole of the cache's tensors is attended to, so it must be said which columns count."""
        zeros = functools.partial(torch.zeros, dtype=torch.long, device=cache.keys.device)
        rows, _, axes = cache.positions.shape
        self.cache = (
            replace(cache, first=zeros(len(cache.tokens))) if whole and cache.first is None else cache
        )
        self.token, self.position = zeros(len(cache.tokens)), zeros((rows, 1, axes))
        self.column, self.slot = zeros(1), zeros(1)
        self.through = through
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, model: PerceiverAR, cache: Cache, token: Tensor, position: Tensor) -> Tensor:
        assert cache.keys is self.cache.keys
        with torch.cuda.device(cache.keys.device):
            return self._replay(model, cache, token, position)

    def _replay(self, model: PerceiverAR, cache: Cache, token: Tensor, position: Tensor) -> Tensor:
        self.token.copy_(token)
        self.position.copy_(position)
        self.column.fill_(cache.inputs)
        self.slot.fill_(cache.latents)
        if self.graph is None:
            self.graph, self.logits = self._record(model)
        self.graph.replay()
        return self.logits.clone()

    def _record(self, model: PerceiverAR) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Runs the step a few times first: it writes the same to the same places each time."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self._decode(model)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._decode(model)
        return graph, logits

    def _decode(self, model: PerceiverAR) -> Tensor:
        return decode_at(model, self.cache, self.token, self.position, self.column, self.slot, self.through)
