"""Right-aligned causal attention, rotary positions, and the choice of kernel.

The last query stands at the last key, so query n of N sees keys 0 ... M - N + n of M, its own
included. Which keys a query may see is never written out as an N x M table of floats.

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
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from perceiver_ar import flash4

Rotation = tuple[Tensor, Tensor]
"""What each channel, and the other channel of its pair, is multiplied by: (B or 1, 1, T, K) each."""

Blocks = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of each block of queries: how many blocks of keys are to be checked, which, how many are open, which."""


class Share(Protocol):
    """Processes that each hold some of the keys; the last of them holds those of the queries' own places."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """Over all of them, in place."""
        ...

    def max(self, x: Tensor) -> Tensor:
        """Over all of them, in place."""
        ...


def rotation(positions: Tensor, head_width: int, fraction: float, max_wavelength: float) -> Rotation:
    """The angles that turn a leading fraction of each head's channels, in interleaved pairs.

    Wavelengths (over 2 pi) are log-spaced from 1 to the longest, both ends included, as in the
    authors' code.
    """
    pairs = int(head_width * fraction) // 2
    turns = angles(positions, max_wavelength, pairs).unsqueeze(1)  # (B, 1, T, pairs)
    rest = (0, head_width - 2 * pairs)
    own = turns.cos().repeat_interleave(2, dim=-1)
    other = torch.stack((-turns.sin(), turns.sin()), dim=-1).flatten(-2)
    return F.pad(own, rest, value=1.0), F.pad(other, rest)


def angles(positions: Tensor, max_wavelength: float, count: int) -> Tensor:
    """Position times each of the log-spaced frequencies from 1 down to 1 / max_wavelength."""
    # Float32 is off by 0.06 radians at a million, so reduce in float64 (which MPS does not have).
    dtype = torch.float32 if positions.device.type == "mps" else torch.float64
    exponents = torch.linspace(0, 1, count, dtype=dtype, device=positions.device)
    turns = positions[..., None].to(dtype) * max_wavelength**-exponents
    return turns.remainder(2 * math.pi).float()


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Turns the leading of the last dimension's channels, (B, H, T, K); the rest pass through."""
    own, other = by
    if x.shape[-1] % 2:  # the last channel has no other
        return rotate(F.pad(x, (0, 1)), (F.pad(own, (0, 1)), F.pad(other, (0, 1))))[..., :-1]
    wide = x.to(torch.promote_types(x.dtype, own.dtype))
    swapped = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (wide * own + swapped * other).to(x.dtype)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None = None,
    own: bool = False,
    blocks: Blocks | None = None,
    share: Share | None = None,
) -> Tensor:
    """Causal attention with the queries aligned to the last keys.

    visible (B, W) says which of the last W keys, W >= N, may be seen at all; keys before those are
    open to every query. With own, a query sees its own key even where that is hidden from others.
    A query that sees nothing gives zero. blocks: what blocks_shown found, where it is known already.
    share: whose keys are attended to together; these are this one's, which all queries may see unless it
    is the last.
    """
    # (B, H, N, K) x (B, H, M, K): query n sees keys up to M - N + n.
    assert k.shape == v.shape
    if share is not None:
        return _attend_together()(q, k, v, visible, own, share)
    assert q.shape[2] <= k.shape[2]
    assert visible is None or q.shape[2] <= visible.shape[1] <= k.shape[2]
    return _kernel(q, k, visible, own, blocks)(q, k, v, visible, own)


def attend_packed(
    qkv: Tensor,
    turn: Rotation | None,
    visible: Tensor | None = None,
    own: bool = False,
    blocks: Blocks | None = None,
) -> Tensor:
    """For queries, keys and values that lie together, (B, N, 3, H, K), and are still to be turned."""
    q, k, _ = unpack(qkv, None)
    if _kernel(q, k, visible, own, blocks) is flash4.attend:
        return flash4.attend_packed(qkv if turn is None else _turn_packed(qkv, turn))
    return attend(*unpack(qkv, turn), visible, own, blocks)


def unpack(qkv: Tensor, turn: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, turned, and values, (B, H, N, K) each, of what lies together."""
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    return (q, k, v) if turn is None else (rotate(q, turn), rotate(k, turn), v)


def _turn_packed(qkv: Tensor, turn: Rotation) -> Tensor:
    """The same where it lies, in one go over all three: a compiler writes gradients of parts slowly."""
    own, other = (x.transpose(1, 2)[:, :, None] for x in turn)  # (B or 1, N, 1, 1, K)
    of_values = torch.arange(3, device=qkv.device)[:, None, None] == 2
    return torch.where(of_values, qkv, rotate(qkv, (own, other)))


def _kernel(
    q: Tensor, k: Tensor, visible: Tensor | None, own: bool, blocks: Blocks | None
) -> Callable[..., Tensor]:
    """The fastest kernel for this device and shape (the CPU's figures: docs/log.md)."""
    queries, keys, width = q.shape[2], k.shape[2], q.shape[-1]
    short = q.device.type == "cuda" and _has_flash(q.device) and q.dtype in (torch.bfloat16, torch.float16)
    if short and queries > 1 and flash4.serves(q):
        if visible is None:
            return flash4.attend
        if not own and visible.shape[1] == queries < keys and width <= 64:
            return flash4.attend_in_two
    if visible is None and (queries == 1 or queries == keys):
        return _attend_square
    if q.device.type == "cpu" and (visible is None or (4 * queries <= keys and q.dtype != torch.float16)):
        return _attend_in_two
    if short:
        if visible is None and width <= 256:
            return _attend_flash
        if visible is not None and queries >= _BLOCK and width in (16, 32, 64, 128, 256):
            return functools.partial(_attend_flex, blocks=blocks)
    return _attend_by_rows


def _has_flash(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def reference(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None, own: bool = False) -> Tensor:
    """What attend computes, written out plainly: the slow twin of every kernel below."""
    open_ = _open(q, k, visible, own, 0, q.shape[2])
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~open_, -torch.inf).softmax(dim=-1)
    return weights.nan_to_num(0.0) @ v  # rows of -inf alone: nothing seen


def _open(q: Tensor, k: Tensor, visible: Tensor | None, own: bool, start: int, stop: int) -> Tensor:
    """Which keys the queries start ... stop - 1 may see: (B or 1, 1, rows, keys)."""
    before = k.shape[2] - q.shape[2]
    keys = torch.arange(before + stop, device=q.device)
    standing = torch.arange(before + start, before + stop, device=q.device)[:, None]
    seen = (keys <= standing)[None, None]
    if visible is None:
        return seen
    always = k.shape[2] - visible.shape[1]
    shown = F.pad(visible, (always, 0), value=True)[:, None, None, : before + stop]
    return seen & (shown | (keys == standing)) if own else seen & shown


def _attend_square(q: Tensor, k: Tensor, v: Tensor, visible: None, own: bool) -> Tensor:
    """As many queries as keys, or one query that sees all: SDPA's own causal mask is right."""
    if q.shape[2] == 1:
        return F.scaled_dot_product_attention(q, k, v)
    if q.device.type != "cuda":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with sdpa_kernel(_CUDA_ORDER, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


# cuDNN first: on Hopper it is faster than flash on squares (figures of the brief: benchmarks/RESULTS.md).
_CUDA_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def _attend_flash(q: Tensor, k: Tensor, v: Tensor, visible: None, own: bool) -> Tensor:
    """CUDA's flash attention, whose causal mask is right-aligned (unlike SDPA's is_causal)."""
    width = q.shape[-1]
    if width % 8:
        q, k, v = (F.pad(x, (0, -width % 8)) for x in (q, k, v))
    out = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, is_causal=True, return_debug_mask=False, scale=1 / math.sqrt(width)
    )[0]
    return out[..., :width]


_BLOCK = 128


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def _attend_flex(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, own: bool, blocks: Blocks | None = None
) -> Tensor:
    """Compiled flex attention: hidden keys are skipped inside the kernel."""
    flex = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    out = flex(q, k, v, block_mask=_block_mask(q, k, visible, own, blocks))
    assert isinstance(out, Tensor)
    return out


def _block_mask(q: Tensor, k: Tensor, visible: Tensor, own: bool, blocks: Blocks | None = None) -> BlockMask:
    """What flex attention is told."""
    queries, keys = q.shape[2], k.shape[2]
    # Numbers that change between compiled calls cannot be in the kernel, but tensors can.
    skipped, shown_to_all = (torch.full((), keys - x, device=q.device) for x in (queries, visible.shape[1]))

    def may_see(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        standing = i + skipped
        shown = (j < shown_to_all) | visible[b, (j - shown_to_all).clamp(min=0)]
        return (j <= standing) & (shown | (j == standing) if own else shown)

    counts, order, full_counts, full_order = blocks or blocks_shown(visible, queries, keys, own)
    return BlockMask.from_kv_blocks(
        kv_num_blocks=counts,
        kv_indices=order,
        full_kv_num_blocks=full_counts,
        full_kv_indices=full_order,
        BLOCK_SIZE=_BLOCK,
        mask_mod=may_see,
        seq_lengths=(queries, keys),
    )


def blocks_shown(visible: Tensor, queries: int, keys: int, own: bool = False) -> Blocks:
    """The blocks of keys that each block of queries reads: those to be checked, and those wholly open.

    Worked out once for all layers, and not compiled, which is suspected of a crash of flex attention with
    40,000 keys (torch 2.11; benchmarks/RESULTS.md).
    """
    return _never_compiled()(visible, queries, keys, own)


@functools.cache
def _never_compiled() -> Callable[..., Blocks]:
    return torch.compiler.disable(_blocks_shown)  # not before it is needed: this imports much


def _blocks_shown(visible: Tensor, queries: int, keys: int, own: bool) -> Blocks:
    before, always = keys - queries, keys - visible.shape[1]
    some, all_ = _some_and_all(visible, always)  # (B, columns)
    first = torch.arange(0, queries, _BLOCK, device=visible.device)[:, None] + before  # a row's first query
    last = (first + _BLOCK - 1).clamp(max=keys - 1)
    starts = torch.arange(0, keys, _BLOCK, device=visible.device)
    open_ = all_[:, None] & (starts + _BLOCK - 1 <= first)  # (B, rows, columns)
    own_block = (starts <= last) & (starts + _BLOCK > first)
    checked = (some[:, None] | own_block if own else some[:, None]) & (starts <= last) & ~open_
    return *_listed(checked), *_listed(open_)


def _some_and_all(visible: Tensor, always: int) -> tuple[Tensor, Tensor]:
    """Of which blocks of keys some, and of which all, may be seen: (B, columns) each."""
    shown = F.pad(visible, (always, 0), value=True)
    rest = -shown.shape[1] % _BLOCK
    some, all_ = (F.pad(shown, (0, rest), value=x).unflatten(1, (-1, _BLOCK)) for x in (False, True))
    return some.any(-1), all_.all(-1)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the columns (B, rows, columns) are set in each row, and all, those that are first."""
    order = (~blocks).to(torch.int8).argsort(dim=-1, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]


def _attend_by_rows(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, own: bool) -> Tensor:
    """SDPA over a few queries at a time, on any device: only their rows of the mask exist at once."""
    rows, before = min(256, math.ceil(q.shape[2] / 4)), k.shape[2] - q.shape[2]
    parts = []
    for start in range(0, q.shape[2], rows):
        stop = min(start + rows, q.shape[2])
        open_ = _open(q, k, visible, own, start, stop)
        # A row without a single open key would be NaN: open it, and zero its result.
        some = open_.any(dim=-1, keepdim=True)
        part = masked(q[:, :, start:stop], k[:, :, : before + stop], v[:, :, : before + stop], open_ | ~some)
        parts.append(part * some)
    return torch.cat(parts, dim=2)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """SDPA, but not by cuDNN, which torch 2.11 prefers on Hopper; with masks it errs (pytorch 196678)."""
    if q.device.type != "cuda":
        return F.scaled_dot_product_attention(q, k, v, mask)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q, k, v, mask)


def _attend_in_two(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, own: bool) -> Tensor:
    """On the CPU: the keys before the queries' own densely, the last N causally, then merged."""
    return _InParts.apply(q, k, v, visible, own, None)


@functools.cache
def _attend_together() -> Callable[..., Tensor]:
    """The same with keys that other processes hold. They talk, which is not for a compiler to move."""
    return torch.compiler.disable(_InParts.apply)


class _InParts(torch.autograd.Function):
    """A call of flash attention for each part of the keys, merged by their log-sum-exps.

    The merged output and log-sum-exp, handed to each part's backward, give the exact gradients of
    the whole. Processes that share the keys have the same queries and the same gradients of what
    comes out. Each gets all of the queries' gradients; but those of keys and values, which one of
    them has, count as often as there are processes, since what they all find is averaged later.
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
            hidden = _HIDDEN if q.device.type == "cpu" else _SPARE * _LOWER / math.sqrt(q.shape[-1])
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
"""What was attended to, (B, H, N, K), and the log-sum-exp of its scores, (B, H, N)."""


def _nothing(q: Tensor) -> Part:
    """What a process without keys has."""
    exact = torch.promote_types(q.dtype, torch.float32)
    return torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=exact)


def _merged(one: Part, other: Part) -> Part:
    total = torch.logaddexp(one[1], other[1])
    a, b = (out * (lse - total).exp().to(out.dtype)[..., None] for out, lse in (one, other))
    return a + b, total


def _merged_by_all(out: Tensor, lse: Tensor, share: Share) -> Part:
    lse = lse.contiguous()  # as processes without keys have it: what is told has no strides
    top = share.max(lse.clone())
    weight = (lse - top).exp()
    whole = share.sum(weight.clone())
    merged = share.sum((out * weight[..., None]).contiguous()) / whole[..., None]
    return merged.to(out.dtype), top + whole.log()


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, shown: Tensor | None, own: bool) -> Part:
    """shown (B, M): which keys may be seen."""
    if q.device.type == "cpu":
        mask = _bias(q, k, causal, shown, own)
        attend_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return attend_(q, k, v, 0.0, causal and mask is None, attn_mask=mask)
    width = q.shape[-1]
    q, k, v = _with_spare(q, k, v, shown)
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
        mask = _bias(q, k, causal, shown, own)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, q, k, v, out, lse, 0.0, causal and mask is None, attn_mask=mask)
    width = q.shape[-1]
    q, k, v = _with_spare(q, k, v, shown)
    grad, out = (F.pad(x, (0, q.shape[-1] - width)) for x in (grad, out))
    random = (q.new_zeros(size, dtype=torch.uint64) for size in ((2,), ()))  # of dropout, which there is not
    found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, *random,
        scale=1 / math.sqrt(width),
    )  # fmt: skip
    return tuple(x[..., :width] for x in found)


def _bias(q: Tensor, k: Tensor, causal: bool, shown: Tensor | None, own: bool) -> Tensor | None:
    """What is added to scores, (B, 1, N or 1, M), where some keys are hidden."""
    if shown is None:
        return None
    open_ = _open(q, k, shown, own, 0, q.shape[2]) if causal else shown[:, None, None]
    return torch.zeros(open_.shape, dtype=q.dtype).masked_fill(~open_, _HIDDEN)


_SPARE, _LOWER = 8, -1e4
"""Channels more, and by how much each lowers a hidden key's score before scaling: it has no weight then."""


def _with_spare(q: Tensor, k: Tensor, v: Tensor, shown: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The same with spare channels, by which a GPU's kernels, which take no mask, hide keys."""
    if shown is None:
        return q, k, v
    lower = torch.where(shown, 0.0, _LOWER).to(k.dtype)[:, None, :, None].expand(*k.shape[:3], _SPARE)
    return F.pad(q, (0, _SPARE), value=1.0), torch.cat((k, lower), dim=-1), F.pad(v, (0, _SPARE))


_HIDDEN = -1e9
"""Added to the score of a hidden key; finite, so that a row of nothing else stays a number."""


def _parts(
    q: Tensor, k: Tensor, visible: Tensor | None, share: Share | None
) -> list[tuple[slice, bool, Tensor | None]]:
    """Keys, causality, and which are shown, of the part before the queries' own, and of those, if here."""
    last = q.shape[2] if share is None or share.rank == share.size - 1 else 0
    before = k.shape[2] - last
    shown = None if visible is None else F.pad(visible, (k.shape[2] - visible.shape[1], 0), value=True)
    told_apart = visible is not None and visible.shape[1] > last
    parts = [
        (slice(0, before), False, shown[:, :before] if shown is not None and told_apart else None),
        (slice(before, None), True, None if shown is None else shown[:, before:]),
    ]
    return [part for part, keys in zip(parts, (before, last), strict=True) if keys]
