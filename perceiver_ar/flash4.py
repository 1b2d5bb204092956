"""FlashAttention 4, where installed: kernels written for Hopper and newer GPUs.

Torch's own flash attention was written for older GPUs; pip install 'perceiver-ar[flash]' adds this one.
Each function is a custom operator, so that it is a single node of a compiled graph.

Letters: B batch, T keys, H heads, K head width, N queries.
"""

import importlib.util
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from perceiver_ar.extras import need
from perceiver_ar.parts import SPARE, with_spare


def _find() -> bool:
    """Whether the package is installed, without importing it, which takes seconds."""
    spec = importlib.util.find_spec("flash_attn")
    places = (spec.submodule_search_locations if spec else None) or ()
    return any(Path(place, "cute", "interface.py").exists() for place in places)


INSTALLED = _find()
WORTH = 2**35
"""Operations below which torch's kernels are faster: a call of this one takes the host a millisecond."""


def serves(q: Tensor, k: Tensor, visible: Tensor | None, own: bool) -> bool:
    """Whether this kernel supports these 16-bit queries and keys on a GPU, and is the fastest that does."""
    (rows, heads, queries, width), keys = q.shape, k.shape[2]
    if visible is None and 4 * rows * heads * queries * width * (keys - queries // 2) < WORTH:
        return False
    if visible is not None and (own or not visible.shape[1] == queries < keys or width > 64):
        return False
    return (
        INSTALLED
        and width in (32, 64, 128)  # 4.0.0b36 computes wrong query gradients for some others
        and torch.cuda.get_device_capability(q.device)[0] in (9, 10)
        and not torch.are_deterministic_algorithms_enabled()
    )


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, own: bool) -> Tensor:
    """Causal attention, queries aligned to the last keys; visible (B, N): mask of the last N keys."""
    return _forward(*(x.transpose(1, 2) for x in (q, k, v)), visible)[0].transpose(1, 2)


def attend_packed(qkv: Tensor) -> Tensor:
    """Causal self-attention on packed queries, keys and values (B, T, 3, H, K)."""
    return _forward_packed(qkv)[0].transpose(1, 2)


def _kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool, width: int) -> tuple[Tensor, Tensor]:
    """The attention output (B, N, H, K) and its log-sum-exp (B, H, N).

    The functions called here and below are private, but torch's own integration calls the same ones.
    """
    kernels = need("flash_attn.cute.interface", "flash")
    out, lse, *_ = kernels._flash_attn_fwd(
        q, k, v, softmax_scale=1 / math.sqrt(width), causal=causal, return_lse=True
    )
    return out, lse


def _kernel_backward(
    inputs: tuple[Tensor, ...], given: tuple[Tensor, ...], into: tuple[Tensor, ...], causal: bool, width: int
) -> None:
    """Writes the inputs' gradients into `into`; given: the output, its gradient and the log-sum-exp."""
    kernels = need("flash_attn.cute.interface", "flash")
    dq, dk, dv = into
    kernels._flash_attn_bwd(
        *inputs, *given, softmax_scale=1 / math.sqrt(width), causal=causal, dq=dq, dk=dk, dv=dv
    )


@torch.library.custom_op("perceiver_ar::flash4", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """q (B, N, H, K), k and v (B, T, H, K)."""
    queries, width = q.shape[1], q.shape[-1]
    if visible is None:
        return _kernel(q, k, v, True, width)
    before, log = _kernel(q, k[:, :-queries], v[:, :-queries], False, width)
    last = with_spare(q, k[:, -queries:], v[:, -queries:], visible[:, :, None, None])
    own, own_log = _kernel(*last, True, width)
    total = torch.logaddexp(log, own_log)
    part, own_part = ((x - total).exp().transpose(1, 2)[..., None] for x in (log, own_log))
    return (before * part + own[..., :width] * own_part).to(q.dtype), total


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    rows, queries, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((rows, heads, queries), dtype=torch.float32)


@torch.library.custom_op("perceiver_ar::flash4_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, out: Tensor, lse: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad, queries, width = grad.contiguous(), q.shape[1], q.shape[-1]
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    if visible is None:
        _kernel_backward((q, k, v), (out, grad, lse), (dq, dk, dv), True, width)
        return dq, dk, dv
    # With the merged output and log-sum-exp, each part gives its share of the exact gradients.
    before, last = slice(None, -queries), slice(-queries, None)
    _kernel_backward(
        (q, k[:, before], v[:, before]), (out, grad, lse), (dq, dk[:, before], dv[:, before]), False, width
    )
    own = with_spare(q, k[:, last], v[:, last], visible[:, :, None, None])
    into = tuple(x.new_empty(x.shape) for x in own)
    _kernel_backward(own, (F.pad(out, (0, SPARE)), F.pad(grad, (0, SPARE)), lse), into, True, width)
    own_dq, dk[:, last], dv[:, last] = (x[..., :width] for x in into)
    return dq + own_dq, dk, dv


@_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, out: Tensor, lse: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.custom_op("perceiver_ar::flash4_packed", mutates_args=())
def _forward_packed(qkv: Tensor) -> tuple[Tensor, Tensor]:
    return _kernel(*qkv.unbind(2), True, qkv.shape[-1])


@_forward_packed.register_fake
def _(qkv: Tensor) -> tuple[Tensor, Tensor]:
    rows, places, _, heads, width = qkv.shape
    return qkv.new_empty((rows, places, heads, width)), qkv.new_empty(
        (rows, heads, places), dtype=torch.float32
    )


@torch.library.custom_op("perceiver_ar::flash4_packed_backward", mutates_args=())
def _backward_packed(qkv: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> Tensor:
    into = qkv.new_empty(qkv.shape)
    _kernel_backward(qkv.unbind(2), (out, grad.contiguous(), lse), into.unbind(2), True, qkv.shape[-1])
    return into


@_backward_packed.register_fake
def _(qkv: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor, of_lse: None) -> tuple[Tensor | None, ...]:
    return *_backward(*ctx.saved_tensors, grad), None


def _differentiate_packed(ctx: Any, grad: Tensor, of_lse: None) -> Tensor:
    return _backward_packed(*ctx.saved_tensors, grad)


_forward.register_autograd(_differentiate, setup_context=_save)
_forward_packed.register_autograd(_differentiate_packed, setup_context=_save)
