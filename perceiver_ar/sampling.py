"""From logits to a token: repetition penalty, temperature, filters, and the draw.

Letters: B batch, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How logits become probabilities; the settings apply in this order."""

    repetition_penalty: float = 1.0
    """Logits of tokens that occurred before are divided by this if positive, multiplied if negative."""
    temperature: float = 1.0
    """Logits are divided by this; 0 takes the most likely token."""
    top_k: int | None = None
    """Only the k most likely tokens."""
    top_p: float | None = None
    """Only the most likely tokens that together reach this probability."""
    min_p: float | None = None
    """Only tokens at least this fraction as likely as the most likely one."""

    def __post_init__(self) -> None:
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty must be above 0, but is {self.repetition_penalty}.")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or more, but is {self.temperature}.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, but is {self.top_k}.")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, but is {value}.")


def sample(
    logits: Tensor,
    chance: Tensor,
    sampling: Sampling,
    allowed: Tensor | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """Samples one token per row by inverting the cumulative distribution at `chance`, a number in [0, 1).

    logits (B, V); chance (B,); allowed (V,) or (B, V): mask of the tokens that may come next; seen
    (B, V): mask of those that occurred before.
    """
    logits = adjust(logits, sampling, allowed, seen)
    if sampling.temperature == 0:
        return logits.argmax(-1)
    bounds = logits.softmax(-1).cumsum(-1)  # (B, V)
    whole = bounds[:, -1:]
    # If chance is rounded up to 1, the last token with any probability is drawn.
    return ((bounds <= chance.to(bounds)[:, None] * whole) & (bounds < whole)).sum(-1)


def adjust(logits: Tensor, sampling: Sampling, allowed: Tensor | None, seen: Tensor | None) -> Tensor:
    """The logits that are sampled from: -inf for tokens that cannot be drawn."""
    # Float32 would merge the last tokens of a large vocabulary's cumulative sum; MPS lacks float64.
    logits = logits.to(torch.float32 if logits.device.type == "mps" else torch.float64)
    if seen is not None and sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    if sampling.temperature == 0:
        return logits
    logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        best = logits.topk(sampling.top_k, dim=-1)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, best.indices, best.values)
    if sampling.top_p is not None:
        logits = logits.masked_fill(_beyond(logits, sampling.top_p), -torch.inf)
    if sampling.min_p is not None:
        probabilities = logits.softmax(-1)
        least = sampling.min_p * probabilities.amax(-1, keepdim=True)
        logits = logits.masked_fill(probabilities < least, -torch.inf)
    return logits


def _beyond(logits: Tensor, share: float) -> Tensor:
    """Mask of the tokens outside the nucleus: the most likely ones that together reach the share."""
    probabilities, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = probabilities.cumsum(-1) - probabilities
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= share)
