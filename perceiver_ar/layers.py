"""Linear maps and embeddings that start as the authors' do, and quick look-ups."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_CLIPPED_STD = 0.87962566103423978
"""Standard deviation of a unit normal cut off at two: what variance scaling divides by."""


def truncated_normal_(x: Tensor, std: float) -> None:
    """Fills in place from a normal cut off at two standard deviations."""
    nn.init.trunc_normal_(x, std=std, a=-2 * std, b=2 * std)


class Linear(nn.Linear):
    """Starts with variance 1 / fan_in and no bias."""

    def reset_parameters(self) -> None:
        truncated_normal_(self.weight, std=1 / math.sqrt(self.in_features) / _CLIPPED_STD)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class ZeroLinear(nn.Linear):
    """Starts at zero, for logits: every token is equally likely at first."""

    def __init__(self, width: int, out: int, bias: bool = False) -> None:
        super().__init__(width, out, bias)

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class Embedding(nn.Embedding):
    """Starts at std 1; at 0.02 where the output shares it, or the first logits would be huge."""

    def __init__(self, rows: int, width: int, std: float = 1.0) -> None:
        self.std = std
        super().__init__(rows, width)

    def reset_parameters(self) -> None:
        truncated_normal_(self.weight, self.std)


class Vectors(nn.Module):
    """A learned table that is used whole, such as one query a latent."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        truncated_normal_(self.weight, std=0.02)


def look_up(table: Tensor, ids: Tensor) -> Tensor:
    """Rows (V, E) of a table by their numbers (B, M), which are many and come again and again."""
    return F.embedding(ids, table) if torch.compiler.is_exporting() else _LookUp.apply(table, ids)


class _LookUp(torch.autograd.Function):
    """F.embedding, whose gradient on a GPU is one product instead of a sum that all threads wait for."""

    @staticmethod
    def forward(table: Tensor, ids: Tensor) -> Tensor:
        return F.embedding(ids, table)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        table, ids = inputs
        ctx.rows = table.shape[0]
        ctx.save_for_backward(ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        if grad.device.type == "cuda" and ctx.rows <= _FEW:
            which = torch.arange(ctx.rows, device=ids.device)[:, None] == ids.flatten()  # (V, B * M)
            return which.to(grad.dtype) @ grad.flatten(0, -2), None
        exact = grad.to(torch.promote_types(grad.dtype, torch.float32))
        summed = torch.ops.aten.embedding_dense_backward(exact, ids, ctx.rows, -1, False)
        return summed.to(grad.dtype), None


_FEW = 2048
"""Rows up to which a matrix of ones and zeros, one column an id, is small enough."""
