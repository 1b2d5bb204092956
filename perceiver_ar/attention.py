"""Right-aligned causal attention, rotary embeddings, and the choice of kernel.

The last query is aligned with the last key: query n of N attends to keys 0 ... M - N + n of M, its own
included. The mask is never built as an N x M table of floats.

Letters: B batch, M keys, N queries, H heads, K head width, W keys that can be hidden.
"""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from perceiver_ar import flash4, flex, parts, products
from perceiver_ar.flex import Blocks
from perceiver_ar.parts import Share

Rotation = tuple[Tensor, Tensor]
"""Factors (B or 1, 1, T, K) of each channel itself, and of the other channel of its pair."""


def rotation(positions: Tensor, head_width: int, fraction: float, max_wavelength: float) -> Rotation:
    """Rotary factors for the leading fraction of each head's channels, in interleaved pairs.

    Wavelengths (over 2 pi) are log-spaced from 1 to max_wavelength, both ends included, as in the
    authors' code.
    """
    pairs = int(head_width * fraction) // 2
    turns = angles(positions, max_wavelength, pairs).unsqueeze(1)  # (B, 1, T, pairs)
    rest = (0, head_width - 2 * pairs)
    own = turns.cos().repeat_interleave(2, dim=-1)
    other = torch.stack((-turns.sin(), turns.sin()), dim=-1).flatten(-2)
    return F.pad(own, rest, value=1.0), F.pad(other, rest)


def angles(positions: Tensor, max_wavelength: float, count: int) -> Tensor:
    """Position times each of the log-spaced frequencies from 1 down to 1 / max_wavelength, modulo 2 pi."""
    # Float32 is off by 0.06 radians at position 1,000,000, so reduce in float64, which MPS lacks.
    dtype = torch.float32 if positions.device.type == "mps" else torch.float64
    exponents = torch.linspace(0, 1, count, dtype=dtype, device=positions.device)
    turns = positions[..., None].to(dtype) * max_wavelength**-exponents
    return turns.remainder(2 * math.pi).float()


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotates the leading channels of queries or keys (B, H, T, K); the others pass through."""
    own, other = by
    if x.shape[-1] % 2:  # the last channel has no partner
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

    visible (B, W), W >= N, marks which of the last W keys may be attended to; all keys before those
    are visible. With own, a query always sees its own key, even one that is hidden from others.
    A query that sees no key gives zeros. blocks: the result of blocks_shown, if it is already known.
    share: processes that split the keys between them. k and v are then this process's part, and all of
    its keys precede the queries, except in the last process, whose final N keys are the queries' own.
    """
    # (B, H, N, K) x (B, H, M, K): query n sees keys up to M - N + n.
    assert k.shape == v.shape
    if share is not None:
        return parts.attend_together()(q, k, v, visible, own, share)
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
    """Causal self-attention on packed queries, keys and values (B, N, 3, H, K), not yet rotated."""
    q, k, _ = unpack(qkv, None)
    if _kernel(q, k, visible, own, blocks) is flash4.attend:
        return flash4.attend_packed(qkv if turn is None else _turn_packed(qkv, turn))
    return attend(*unpack(qkv, turn), visible, own, blocks)


def unpack(qkv: Tensor, turn: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
    """Splits packed queries, keys and values into (B, H, N, K) each, and rotates queries and keys."""
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    return (q, k, v) if turn is None else (rotate(q, turn), rotate(k, turn), v)


def _turn_packed(qkv: Tensor, turn: Rotation) -> Tensor:
    """Rotates packed queries and keys without unpacking them.

    The values are rotated too and then discarded: the compiled gradient of a slice is slow.
    """
    own, other = (x.transpose(1, 2)[:, :, None] for x in turn)  # (B or 1, N, 1, 1, K)
    of_values = torch.arange(3, device=qkv.device)[:, None, None] == 2
    return torch.where(of_values, qkv, rotate(qkv, (own, other)))


def _kernel(
    q: Tensor, k: Tensor, visible: Tensor | None, own: bool, blocks: Blocks | None
) -> Callable[..., Tensor]:
    """The fastest kernel for this device and shape (CPU measurements: docs/log.md)."""
    if torch.onnx.is_in_onnx_export():  # ONNX has none of the kernels, but every operation of the reference
        return reference
    queries, keys, width = q.shape[2], k.shape[2], q.shape[-1]
    short = q.device.type == "cuda" and _has_flash(q.device) and q.dtype in (torch.bfloat16, torch.float16)
    if short and queries > 1 and flash4.serves(q, k, visible, own):
        return flash4.attend
    if q.device.type == "cpu" and products.serves(q, k):
        return products.attend
    if visible is None and (queries == 1 or queries == keys):
        return _attend_square
    if q.device.type == "cpu" and (visible is None or (4 * queries <= keys and q.dtype != torch.float16)):
        return parts.attend_in_two
    if short:
        if visible is None and width <= 256:
            return _attend_flash
        if visible is not None and queries >= flex.BLOCK and width in (16, 32, 64, 128, 256):
            return functools.partial(flex.attend, blocks=blocks)
    return _attend_by_rows


def _has_flash(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def reference(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None, own: bool = False) -> Tensor:
    """The reference implementation of attend: slow, and what every kernel below is tested against."""
    open_ = _open(q, k, visible, own, 0, q.shape[2])
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~open_, -torch.inf).softmax(dim=-1)
    return weights.nan_to_num(0.0) @ v  # a softmax over -inf alone: no visible key


def _open(q: Tensor, k: Tensor, visible: Tensor | None, own: bool, start: int, stop: int) -> Tensor:
    """Mask of the keys that queries start ... stop - 1 may attend to, (B or 1, 1, rows, keys)."""
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
    """SDPA, whose causal mask fits as many queries as keys, or a single query, which sees all keys."""
    if q.shape[2] == 1:
        return F.scaled_dot_product_attention(q, k, v)
    if q.device.type != "cuda":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with sdpa_kernel(_CUDA_ORDER, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


# cuDNN first: on Hopper it is faster than flash when N = M (benchmarks/RESULTS.md).
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


def _attend_by_rows(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, own: bool) -> Tensor:
    """SDPA over a few queries at a time, on any device: the mask is only built for those rows."""
    rows, before = min(256, math.ceil(q.shape[2] / 4)), k.shape[2] - q.shape[2]
    parts = []
    for start in range(0, q.shape[2], rows):
        stop = min(start + rows, q.shape[2])
        open_ = _open(q, k, visible, own, start, stop)
        # A row without a visible key would be NaN: unmask it, and zero its result.
        some = open_.any(dim=-1, keepdim=True)
        part = masked(q[:, :, start:stop], k[:, :, : before + stop], v[:, :, : before + stop], open_ | ~some)
        parts.append(part * some)
    return torch.cat(parts, dim=2)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """SDPA without cuDNN, which torch 2.11 prefers on Hopper but which errs with masks (pytorch 196678)."""
    if q.device.type != "cuda":
        return F.scaled_dot_product_attention(q, k, v, mask)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q, k, v, mask)
