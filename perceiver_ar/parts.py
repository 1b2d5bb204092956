"""Attention over parts of the keys, merged by log-sum-exp: on a CPU, or with the keys split over processes.

Letters: B batch, M keys, N queries, H heads, K head width, W keys that can be hidden.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class Share(Protocol):
    """Processes that each hold some of the keys; the last one's end with the queries' own."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """Sums x over all processes, in place."""
        ...

    def max(self, x: Tensor) -> Tensor:
        """Takes the maximum of x over all processes, in place."""
        ...


def attend_in_two(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, own: bool) -> Tensor:
    """The CPU's kernel: dense attention to the first M - N keys, causal attention to the last N, merged."""
    return _InParts.apply(q, k, v, visible, own, None)


@functools.cache
def attend_together() -> Callable[..., Tensor]:
    """Attention to keys split over processes; not compiled, since that may reorder communication."""
    return torch.compiler.disable(_InParts.apply)


class _InParts(torch.autograd.Function):
    """One flash attention per part of the keys, merged by log-sum-exp.

    Passing the merged output and log-sum-exp to each part's backward gives the exact gradients of the
    whole. Processes that split the keys have the same queries and output gradients. The gradients of the
    queries are summed over the processes. Those of keys and values, which arise in one process only, are
    multiplied by the number of processes, since parameter gradients are averaged over them later.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, own: bool, share: Share | None
    ) -> Tensor:
        ctx.own, ctx.share = own, share
        parts = [
            _flash(q, k[:, :, keys], v[:, :, keys], causal, shown, own)
            for keys, causal, shown in _parts(q, k, visible, share)
        ]
        out, total = functools.reduce(_merged, parts or [_nothing(q)])
        if share is not None:
            out, total = _merged_by_all(out, total, share)
        if visible is not None or share is not None:
            hidden = _HIDDEN if q.device.type == "cpu" else SPARE * _LOWER / math.sqrt(q.shape[-1])
            nothing = total < hidden / 2
            out = out.masked_fill(nothing[..., None], 0.0)
            total = total.masked_fill(nothing, torch.inf)  # weights exp(score - inf) = 0 in backward
        ctx.save_for_backward(q, k, v, visible, out, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, visible, out, total = ctx.saved_tensors
        share: Share | None = ctx.share
        grads = [
            _flash_backward(grad, q, k[:, :, keys], v[:, :, keys], out, total, causal, shown, ctx.own)
            for keys, causal, shown in _parts(q, k, visible, share)
        ]
        dq, dk, dv = zip(*grads, strict=True) if grads else ([torch.zeros_like(q)], [k], [v])
        dq, dk, dv = functools.reduce(torch.add, dq), torch.cat(dk, dim=2), torch.cat(dv, dim=2)
        if share is not None:
            dq, dk, dv = share.sum(dq.contiguous()), dk * share.size, dv * share.size
        return dq, dk, dv, None, None, None


Part = tuple[Tensor, Tensor]
"""The output of attention, (B, H, N, K), and the log-sum-exp of its scores, (B, H, N)."""


def _nothing(q: Tensor) -> Part:
    """The part of a process without keys: zeros, with a weight of zero."""
    exact = torch.promote_types(q.dtype, torch.float32)
    return torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=exact)


def _merged(one: Part, other: Part) -> Part:
    total = torch.logaddexp(one[1], other[1])
    a, b = (out * (lse - total).exp().to(out.dtype)[..., None] for out, lse in (one, other))
    return a + b, total


def _merged_by_all(out: Tensor, lse: Tensor, share: Share) -> Part:
    lse = lse.contiguous()  # all-reduce ignores strides, so they must be the same everywhere
    top = share.max(lse.clone())
    weight = (lse - top).exp()
    whole = share.sum(weight.clone())
    merged = share.sum((out * weight[..., None]).contiguous()) / whole[..., None]
    return merged.to(out.dtype), top + whole.log()


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, shown: Tensor | None, own: bool) -> Part:
    """Flash attention to one part of the keys; shown (B, M) marks those that are visible."""
    if q.device.type == "cpu":
        mask = _bias(q, causal, shown, own)
        attend_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return attend_(q, k, v, 0.0, causal and mask is None, attn_mask=mask)
    width = q.shape[-1]
    if shown is not None:
        q, k, v = with_spare(q, k, v, shown[:, None, :, None])
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=1 / math.sqrt(width)
    )
    return out[..., :width], lse


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    shown: Tensor | None,
    own: bool,
) -> tuple[Tensor, ...]:
    if q.device.type == "cpu":
        mask = _bias(q, causal, shown, own)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, q, k, v, out, lse, 0.0, causal and mask is None, attn_mask=mask)
    width = q.shape[-1]
    if shown is not None:
        q, k, v = with_spare(q, k, v, shown[:, None, :, None])
    grad, out = (F.pad(x, (0, q.shape[-1] - width)) for x in (grad, out))
    random = (q.new_zeros(size, dtype=torch.uint64) for size in ((2,), ()))  # of dropout, which is off
    found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, *random,
        scale=1 / math.sqrt(width),
    )  # fmt: skip
    return tuple(x[..., :width] for x in found)


def _bias(q: Tensor, causal: bool, shown: Tensor | None, own: bool) -> Tensor | None:
    """Additive attention mask, (B, 1, N or 1, M), or None where no key is hidden."""
    if shown is None:
        return None
    open_ = shown[:, None, None]
    if causal:
        itself = torch.eye(q.shape[2], dtype=torch.bool)
        open_ = (open_ | itself if own else open_.expand(-1, -1, q.shape[2], -1)).tril()
    return torch.zeros(open_.shape, dtype=q.dtype).masked_fill(~open_, _HIDDEN)


SPARE = 32
"""Extra channels that lower a hidden key's score; with 32, FlashAttention 4's gradients stay right."""
_LOWER = -1e4
"""What each extra channel adds to a hidden key's score before scaling: its weight is 0 in float32."""


def with_spare(q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with extra channels that hide keys from GPU kernels that take no mask.

    shown marks the visible keys; it is broadcast to k, and its last dimension is 1.
    """
    lower = torch.where(shown, 0.0, _LOWER).to(k.dtype).expand(*k.shape[:3], SPARE)
    return F.pad(q, (0, SPARE), value=1.0), torch.cat((k, lower), dim=-1), F.pad(v, (0, SPARE))


_HIDDEN = -1e9
"""Added to the score of a hidden key; finite, so that a row without a visible key is not NaN."""


def _parts(
    q: Tensor, k: Tensor, visible: Tensor | None, share: Share | None
) -> list[tuple[slice, bool, Tensor | None]]:
    """The keys before the queries' own, then those: their slice, whether causal, and which are visible."""
    last = q.shape[2] if share is None or share.rank == share.size - 1 else 0
    before = k.shape[2] - last
    shown = None if visible is None else F.pad(visible, (k.shape[2] - visible.shape[1], 0), value=True)
    told_apart = visible is not None and visible.shape[1] > last
    parts = [
        (slice(0, before), False, shown[:, :before] if shown is not None and told_apart else None),
        (slice(before, None), True, None if shown is None else shown[:, before:]),
    ]
    return [part for part, keys in zip(parts, (before, last), strict=True) if keys]
