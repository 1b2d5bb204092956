"""Weights of a few bits, for smaller files: each matrix as integers, with one scale per row."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SCALE = ".scale"
"""Suffix of the scales' names."""
FEW = range(2, 9)
"""The numbers of bits that a weight can have."""


def pack(weights: Mapping[str, Tensor], bits: int) -> dict[str, Tensor]:
    """Matrices as tightly packed bits, and their scales in float16; all other weights in float32."""
    if bits not in FEW:
        raise ValueError(f"weights can have from {FEW[0]} to {FEW[-1]} bits, not {bits}.")
    packed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.dim() < 2:
            packed[name] = weight.float()
            continue
        matrix, most = weight.float().flatten(1), 2 ** (bits - 1) - 1
        scale = (matrix.abs().amax(1, keepdim=True) / most).half().float().clamp(min=2.0**-24)
        if not scale.isfinite().all():
            raise ValueError(f"{name} has weights that are too large to be packed, or not numbers.")
        whole = (matrix / scale).round().clamp(-most, most) + most
        spelled = np.unpackbits(whole.byte().cpu().numpy().reshape(-1, 1), axis=1)[:, -bits:]
        packed[name] = torch.from_numpy(np.packbits(spelled))
        packed[name + SCALE] = scale.squeeze(1).half()
    return packed


def unpack(packed: Mapping[str, Tensor], bits: int, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Weights of these shapes, in float32; any that do not fit stay packed, for the loader to report."""
    weights = dict(packed)
    for name, shape in shapes.items():
        scale, size = packed.get(name + SCALE), shape.numel()
        if scale is None or name not in weights or scale.shape != shape[:1]:
            continue
        if weights[name].dtype != torch.uint8 or weights[name].numel() != -(-size * bits // 8):
            continue
        del weights[name + SCALE]
        whole = torch.from_numpy(_spread(weights[name].cpu().numpy(), bits)[:size]).view(len(scale), -1)
        matrix = (whole.float() - (2 ** (bits - 1) - 1)) * scale.float().cpu()[:, None]
        weights[name] = matrix.view(shape)
    return weights


def _spread(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """The numbers of so many bits each that are packed in bytes, eight of them in every `bits` bytes."""
    words = np.zeros(-(-len(packed) // bits), dtype=np.uint64)
    padded = np.pad(packed, (0, -len(packed) % bits)).reshape(-1, bits)
    for byte in padded.T:
        words = words << np.uint64(8) | byte
    shifts = np.arange(7, -1, -1, dtype=np.uint64) * np.uint64(bits)
    return (words[:, None] >> shifts & np.uint64(2**bits - 1)).astype(np.uint8).reshape(-1)
