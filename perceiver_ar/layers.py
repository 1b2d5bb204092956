"""Linear maps and embeddings that start as the authors' do."""

import math

import torch
from torch import Tensor, nn

_CLIPPED_STD = 0.87962566103423978
"""Standard deviation of a unit normal cut off at two: what variance scaling divides by."""


def truncated_normal_(x: Tensor, std: float) -> None:
    """Fills in place from a normal cut off at two standard deviations."""
    nn.init.trunc_normal_(x, std=std, a=-2 * std, b=2 * std)


def variance_scaling_(weight: Tensor) -> None:
    """Fills an (out, in) matrix in place, with variance 1 / in."""
    truncated_normal_(weight, std=1 / math.sqrt(weight.shape[1]) / _CLIPPED_STD)


class Linear(nn.Linear):
    """Starts with variance 1 / fan_in and no bias."""

    def reset_parameters(self) -> None:
        variance_scaling_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


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
