"""FlashAttention 4, where it is installed: what Hopper and later GPUs have kernels of their own for.

Torch's own flash attention was made for older GPUs. pip install 'perceiver-ar[flash]' adds the newer.

Letters: B batch, T places, H heads, K head width, N queries.
"""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perceiver_ar.extras import need


def _find() -> bool:
    """Whether it is there, without importing it, which takes seconds."""
    spec = importlib.util.find_spec("flash_attn")
    places = (spec.submodule_search_locations if spec else None) or ()
    return any(Path(place, "cute", "interface.py").exists() for place in places)


INSTALLED = _find()


def serves(q: Tensor) -> bool:
    """Whether it has a kernel for such queries (B, H, N, K), of 16 bits on a GPU."""
    return (
        INSTALLED
        and q.shape[-1] in (32, 64, 128)  # 4.0.0b36 errs with some others: queries' gradients are wrong
        and torch.cuda.get_device_capability(q.device)[0] in (9, 10)
        and not torch.are_deterministic_algorithms_enabled()
    )


def attend(q: Tensor, k: Tensor, v: Tensor, visible: None, own: bool) -> Tensor:
    """Causal attention with the queries aligned to the last keys."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return _forward(q, k, v)[0].transpose(1, 2)


def _kernels() -> Any:
    """What is called of these is not for the public, but torch's own hook for them calls the same."""
    return need("flash_attn.cute.interface", "flash")


# A custom operator is one node of a compiled graph.
@torch.library.custom_op("perceiver_ar::flash4", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(B, N, H, K) x (B, T, H, K): what is attended to, and its log-sum-exp (B, H, N)."""
    out, lse, *_ = _kernels()._flash_attn_fwd(q, k, v, causal=True, return_lse=True)
    return out, lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    rows, queries, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((rows, heads, queries), dtype=torch.float32)


@torch.library.custom_op("perceiver_ar::flash4_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    into = {f"d{name}": x.new_empty(x.shape) for name, x in (("q", q), ("k", k), ("v", v))}
    return _kernels()._flash_attn_bwd(q, k, v, out, grad.contiguous(), lse, causal=True, **into)


@_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor, of_lse: None) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(*ctx.saved_tensors, grad)


_forward.register_autograd(_differentiate, setup_context=_save)
