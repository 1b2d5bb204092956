"""Attention by bf16 matrix products, for a CPU that has instructions for them.

There it takes half to three quarters of the time of torch's flash attention (benchmarks/RESULTS.md). It
looks at a few heads and queries at a time, so that their scores stay in the CPU's cache, and computes
them anew in the backward pass.

Letters: R rows (batch x heads), M keys, N queries, H heads, K head width, W keys that can be hidden.
"""

import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

QUERIES = 256
"""Queries looked at together: fewer save more of what a causal mask hides, but make narrow products."""
SCORES = 2**22
"""Scores computed together, but never less than those of so many queries of a row."""
LONGEST = 2**18
"""Most keys: of more, the scores of those queries would fill the memory (256 MiB each time they are kept)."""


NATIVE = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()
"""Whether this CPU multiplies bf16 vectors, but has no tiles (AMX): torch has a kernel for those."""


def serves(q: Tensor, k: Tensor) -> bool:
    """Whether this is the fastest way on this CPU, and there is memory for it."""
    return NATIVE and q.dtype == torch.bfloat16 and q.shape[2] > 1 and k.shape[2] <= LONGEST


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, own: bool) -> Tensor:
    """Right-aligned causal attention (attention.attend)."""
    shown = None if visible is None else visible.repeat_interleave(q.shape[1], dim=0)  # (R, W)
    flat = (x.flatten(0, 1) for x in (q, k, v))  # (R, N or M, K)
    return _forward(*flat, shown, own).view(q.shape)


@torch.library.custom_op("perceiver_ar::products", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, shown: Tensor | None, own: bool) -> Tensor:
    out = torch.empty_like(q)
    for rows, queries, keys in _pieces(q, k):
        weights = _weights(q, k, shown, own, rows, queries, keys)
        out[rows, queries] = weights.to(v.dtype) @ v[rows, keys]
    return out


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, shown: Tensor | None, own: bool) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("perceiver_ar::products_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, shown: Tensor | None, own: bool, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, queries, keys in _pieces(q, k):
        weights = _weights(q, k, shown, own, rows, queries, keys).to(v.dtype)
        above = grad[rows, queries]
        dv[rows, keys].baddbmm_(weights.mT, above)
        scores = torch._softmax_backward_data(above @ v[rows, keys].mT, weights, -1, weights.dtype)
        dq[rows, queries] = scores @ k[rows, keys]
        dk[rows, keys].baddbmm_(scores.mT, q[rows, queries])
    scale = 1 / math.sqrt(q.shape[-1])
    return dq * scale, dk * scale, dv


@_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, shown: Tensor | None, own: bool, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.own = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(*ctx.saved_tensors, ctx.own, grad.contiguous()), None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _pieces(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Rows and queries to look at together, and the keys that those queries may see."""
    rows, count = q.shape[:2]
    queries, before = min(QUERIES, count), k.shape[1] - count
    together = max(1, SCORES // (queries * k.shape[1]))
    for row in range(0, rows, together):
        for start in range(0, count, queries):
            stop = min(start + queries, count)
            yield slice(row, row + together), slice(start, stop), slice(0, before + stop)


def _weights(
    q: Tensor, k: Tensor, shown: Tensor | None, own: bool, rows: slice, queries: slice, keys: slice
) -> Tensor:
    """The attention weights of a piece, in float32 for bf16; zeros for a query that sees no key."""
    exact = torch.promote_types(q.dtype, torch.float32)
    with _products_in(q.dtype):
        scores = q[rows, queries].to(exact) @ k[rows, keys].to(exact).mT
    scores /= math.sqrt(q.shape[-1])
    count = scores.shape[1]
    scores[:, :, -count:] += scores.new_full((count, count), -torch.inf).triu(1)
    if shown is None:
        return scores.softmax(dim=-1)
    hidden = ~F.pad(shown[rows], (k.shape[1] - shown.shape[1], 0), value=True)[:, None, keys]
    if own:
        hidden = hidden.expand(-1, count, -1).clone()
        hidden.diagonal(keys.stop - count, dim1=1, dim2=2).fill_(False)
    return scores.masked_fill_(hidden, -torch.inf).softmax(dim=-1).nan_to_num_(0.0)


@contextmanager
def _products_in(dtype: torch.dtype) -> Generator[None]:
    """Has products of float32 round their factors, if these were bf16 anyway, but not what they give.

    Scores of a trained model may exceed 100, where bf16 is off by a half.
    """
    matmul: Any = torch.backends.mkldnn.matmul  # ty: ignore
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16" if dtype == torch.bfloat16 else before
    try:
        yield
    finally:
        matmul.fp32_precision = before
