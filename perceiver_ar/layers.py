"""Linear maps and embeddings with the authors' initialisation, and fast look-ups."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_CLIPPED_STD = 0.87962566103423978
"""Standard deviation of a unit normal truncated at two: variance scaling divides by it."""


def truncated_normal_(x: Tensor, std: float) -> None:
    """Fills x in place from a normal truncated at two standard deviations."""
    nn.init.trunc_normal_(x, std=std, a=-2 * std, b=2 * std)


class Linear(nn.Linear):
    """A linear map initialised with variance 1 / fan_in and zero bias."""

    def reset_parameters(self) -> None:
        truncated_normal_(self.weight, std=1 / math.sqrt(self.in_features) / _CLIPPED_STD)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class ZeroLinear(nn.Linear):
    """A linear map to logits, initialised with zeros, so that all tokens are equally likely at first."""

    def __init__(self, width: int, out: int, bias: bool = False) -> None:
        super().__init__(width, out, bias)

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class Embedding(nn.Embedding):
    """An embedding with a std of 1; tied to the output, it needs 0.02, or the first logits would be huge."""

    def __init__(self, rows: int, width: int, std: float = 1.0) -> None:
        self.std = std
        super().__init__(rows, width)

    def reset_parameters(self) -> None:
        truncated_normal_(self.weight, self.std)


class Vectors(nn.Module):
    """A learned table that is used whole, such as one query per latent."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        truncated_normal_(self.weight, std=0.02)


def look_up(table: Tensor, ids: Tensor) -> Tensor:
    """Rows (B, M, E) of a table (V, E) at ids (B, M), with a fast gradient where ids repeat often."""
    return F.embedding(ids, table) if torch.compiler.is_exporting() else _LookUp.apply(table, ids)


class _LookUp(torch.autograd.Function):
    """F.embedding whose gradient, for small tables on a GPU, is one matrix product, not a contended sum."""

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
"""Table rows up to which the one-hot matrix (V, B * M) is small enough."""
