"""One latent through a block in a few Triton kernels: the fast equivalent of caching.through.

A step of generation reads all weights and the cache once and computes little with them, so its time is
that of memory reads, and of waiting for the previous kernel. The kernels, and how they deal with that,
are in fused_kernels.py; this file chooses their block sizes and launches them.

Letters: B batch, C channels, E input width, H heads, K head width, N keys, O outputs, I inputs of a
linear map, S splits: of the keys, or of a linear map's inputs.
"""

import math

import torch
import triton  # ty: ignore[import-not-found]
from torch import Tensor, nn

from perceiver_ar.fused_kernels import attend_kernel, linear_kernel, project_kernel, settle_kernel
from perceiver_ar.model import Block, Turns
from perceiver_ar.quantized import Int8Linear

_PROGRAMS = 256
"""Roughly how many programs a GPU runs at once, with two on each multiprocessor."""


def serves(block: Block) -> bool:
    """Whether the kernels support this block on its GPU: heads must be a power of two wide, at least 16."""
    device = block.query.weight.device
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    head = block.query.out_features // block.heads
    widest = max(block.norm.normalized_shape[0], block.query.out_features)
    return head >= 16 and head & (head - 1) == 0 and widest <= 4096


def through(
    block: Block,
    z: Tensor,
    inputs: Tensor | None,
    turns: Turns,
    keys: Tensor,
    values: Tensor,
    place: Tensor,
    visible: Tensor | None,
) -> Tensor:
    """Runs one latent (B, 1, C) through a block; writes its key and value to `place` in the cache."""
    several = len(z) > 1
    normal, source = z, inputs
    if several:  # for a single row, the layer norm is fused
        normal = _settle(z, norm=block.norm)[1]
        source = None if inputs is None else _settle(inputs, norm=block.input_norm)[1]
    query = _project(block, normal, source, turns, keys, values, place)
    parts, scale = _attend(query, keys, values, place, visible)
    if not several:
        z = _linear(block.out, parts, residual=z, scale=scale)
        hidden = _linear(block.mlp.widen, z, norm=block.mlp_norm, squared=True)
        return _linear(block.mlp.narrow, hidden, residual=z)
    if parts.shape[2] > 1:
        parts = (scale.softmax(-1)[..., None] * parts).sum(2, keepdim=True).to(z.dtype)
    z, normal = _settle(z, _linear(block.out, parts, split=True), block.out, block.mlp_norm)
    hidden = _linear(block.mlp.widen, normal, squared=True)
    return _settle(z, _linear(block.mlp.narrow, hidden, split=True), block.mlp.narrow)[0]


def _early(x: Tensor) -> dict[str, bool]:
    """Whether a kernel may be launched before the previous one ends (programmatic dependent launch)."""
    early = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"EARLY": early, "launch_pdl": early}


def _blocks(x: Tensor, inputs: int, outputs: int) -> dict[str, int]:
    """The part of a product that one program computes: for a single row, a few outputs over all inputs."""
    if len(x) == 1:
        each = triton.next_power_of_2(max(2, outputs // _PROGRAMS))
        wide = min(4096, triton.next_power_of_2(inputs))
        return {"ROWS": 1, "OUT": each, "IN": wide, "num_warps": min(16, max(4, each * wide // 4096))}
    rows = min(64, max(16, triton.next_power_of_2(len(x))))
    read = (512 if _early(x)["EARLY"] else 256) // x.element_size()  # limited by shared memory
    return {"ROWS": rows, "OUT": 32, "IN": read, "num_warps": 4, "num_stages": 3}


def _splits(rows: int, inputs: int, outputs: int, blocks: dict[str, int]) -> int:
    """Into how many parts a product's inputs are split, so that there are enough programs."""
    programs = triton.cdiv(rows, blocks["ROWS"]) * triton.cdiv(outputs, blocks["OUT"])
    return max(1, min(triton.cdiv(inputs, blocks["IN"]), _PROGRAMS // 2 // programs))


def _stretches(keys: Tensor) -> tuple[int, dict[str, int]]:
    """Into how many parts keys (B, H, N, K) are split, and the settings of attend_kernel.

    With few heads, a program prefetches its first keys before it waits for the previous kernel (no
    stages). With many, it pipelines its reads.
    """
    heads, most = keys.shape[0] * keys.shape[1], keys.shape[2]
    if heads < _PROGRAMS:
        return min(16 if most > 4096 else 8, _PROGRAMS // heads), {"KEYS": 64, "STAGES": 0, "num_warps": 4}
    fit = 16384 // (keys.shape[3] * keys.element_size())
    return 1, {"KEYS": min(128, fit), "STAGES": 3, "num_warps": 4}


def _grid(rows: int, outputs: int, blocks: dict[str, int], maps: int = 1) -> tuple[int, int, int]:
    return triton.cdiv(outputs, blocks["OUT"]), maps, triton.cdiv(rows, blocks["ROWS"])


def _vectors(norm: nn.LayerNorm | None, unused: Tensor) -> tuple[Tensor, Tensor]:
    return (unused, unused) if norm is None else (norm.weight, norm.bias)


def _weights(linear: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, the scale of each output (only read for int8 weights), and biases."""
    assert isinstance(linear, nn.Linear | Int8Linear)
    scale = linear.scale if isinstance(linear, Int8Linear) else linear.weight
    return linear.weight, scale, linear.bias


def _project(
    block: Block, z: Tensor, inputs: Tensor | None, turns: Turns, keys: Tensor, values: Tensor, place: Tensor
) -> Tensor:
    """Queries (B, 1, E); keys and values are written to `place` in (B, H, N, K)."""
    assert keys.stride() == values.stride()
    rows, width, head = len(z), block.query.out_features, keys.shape[-1]
    source = z if inputs is None else inputs
    norm = block.norm if rows == 1 else None
    source_norm = norm if norm is None or inputs is None else block.input_norm
    query = z.new_empty(rows, 1, width)
    own, other = turns[0] or (query, query)
    blocks = _blocks(z, max(z.shape[-1], source.shape[-1]), 3 * width)
    project_kernel[_grid(rows, width, blocks, maps=3)](
        z, source, *_vectors(norm, z), *_vectors(source_norm, source),
        *_weights(block.query), *_weights(block.key), *_weights(block.value), own, other,
        own.stride(0) if len(own) > 1 else 0, query, keys, values, place, *keys.stride()[:3], block.norm.eps,
        B=rows, C=z.shape[-1], E=source.shape[-1], WIDTH=width, HEAD=head,
        SCALED=isinstance(block.query, Int8Linear), NORM=norm is not None, TURNED=turns[0] is not None,
        **_early(z), **blocks,
    )  # fmt: skip
    return query


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, place: Tensor, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The attention output of each split of the keys, (B, H, S, K), and its log-sum-exp (B, H, S)."""
    rows, heads, _, width = keys.shape
    stretches, lanes = _stretches(keys)
    kind = query.dtype if stretches == 1 else torch.float32
    parts = query.new_empty(rows, heads, stretches, width, dtype=kind)
    scale = query.new_empty(rows, heads, stretches, dtype=torch.float32)
    attend_kernel[(rows * heads, stretches)](
        query, keys, values, place, place if visible is None else visible, parts, scale,
        *keys.stride()[:3], heads, stretches, 1 / math.sqrt(width),
        0 if visible is None else visible.stride(0), MASKED=visible is not None, WIDTH=width,
        **_early(query), **lanes,
    )  # fmt: skip
    return parts, scale


def _linear(
    linear: nn.Module,
    x: Tensor,
    *,
    norm: nn.LayerNorm | None = None,
    squared: bool = False,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    split: bool = False,
) -> Tensor:
    """A linear map of x (B, 1, I), or of attention over S splits, merged by their log-sum-exps, scale.

    split: returns partial sums over parts of the inputs, (S, B, O), without the bias.
    """
    weight, of_weight, bias = _weights(linear)
    outputs, inputs = weight.shape
    rows = len(x)
    stretches, head = (1, 1) if scale is None else x.shape[2:]
    blocks = _blocks(x, inputs, outputs)
    splits, out = 1, bias.new_empty(rows, 1, outputs)
    if split:
        splits = _splits(rows, inputs, outputs, blocks)
        out = bias.new_empty(splits, rows, outputs, dtype=torch.float32)
    linear_kernel[_grid(rows, outputs, blocks, maps=splits)](
        x, bias if scale is None else scale, *_vectors(norm, bias), weight, of_weight, bias,
        bias if residual is None else residual, out, 0.0 if norm is None else norm.eps,
        B=rows, INPUTS=inputs, WIDTH=outputs, HEAD=head, SCALED=isinstance(linear, Int8Linear),
        NORM=norm is not None, MERGED=stretches > 1, SQUARED=squared, ADDED=residual is not None,
        SPLIT=split, STRETCHES=stretches, **_early(x), **blocks,
    )  # fmt: skip
    return out


def _settle(
    z: Tensor, parts: Tensor | None = None, linear: nn.Module | None = None, norm: nn.LayerNorm | None = None
) -> tuple[Tensor, Tensor]:
    """Latents (B, 1, C) plus a linear map's partial sums (S, B, C) and bias, and the layer norm of that."""
    rows, _, width = z.shape
    out, normal = z if parts is None else torch.empty_like(z), torch.empty_like(z)
    bias = z if linear is None else _weights(linear)[2]
    settle_kernel[(rows,)](
        z, z if parts is None else parts, bias, *_vectors(norm, z), out, normal,
        0.0 if norm is None else norm.eps, rows, width, SPLITS=0 if parts is None else len(parts),
        NORM=norm is not None, CHANNELS=triton.next_power_of_2(width), num_warps=4, **_early(z),
    )  # fmt: skip
    return out, normal
