"""From token ids to vectors and back: tokens, absolute positions, adaptive input and output.

Letters: B batch, M inputs, N latents, C channels, E input width, V vocabulary, A position axes.
"""

import functools
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perceiver_ar.attention import angles
from perceiver_ar.config import ModelConfig
from perceiver_ar.layers import Embedding, Linear, variance_scaling_

SINUSOID_WAVELENGTH = 10_000.0


class InputEmbedding(nn.Module):
    """Embeds tokens, and adds their positions where those are absolute."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.input_width
        self.tokens = (
            AdaptiveEmbedding(config.vocab_size, width, config.cutoffs, config.cutoff_factor)
            if config.cutoffs
            else Embedding(config.vocab_size, width, std=0.02 if config.tied else 1.0)
        )
        self.positions: SinusoidalPositions | LearnedPositions | None = None
        if config.positions == "sinusoidal":
            self.positions = SinusoidalPositions(width, config.max_wavelength or SINUSOID_WAVELENGTH)
        elif config.positions in ("learned", "axial"):
            self.positions = LearnedPositions(config.axes or (config.context,), width)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        # (B, M), (B or 1, M, A) -> (B, M, E)
        x = self.tokens(tokens)
        return x if self.positions is None else x + self.positions(positions)


class SinusoidalPositions(nn.Module):
    """Fixed sines, then cosines, of log-spaced wavelengths."""

    def __init__(self, width: int, max_wavelength: float) -> None:
        super().__init__()
        self.width, self.max_wavelength = width, max_wavelength

    def forward(self, positions: Tensor) -> Tensor:
        turns = angles(positions[..., 0], self.max_wavelength, self.width // 2)
        return torch.cat((turns.sin(), turns.cos()), dim=-1)


class LearnedPositions(nn.Module):
    """One learned table for each axis, summed."""

    def __init__(self, rows: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(Embedding(count, width) for count in rows)

    def forward(self, positions: Tensor) -> Tensor:
        return functools.reduce(
            torch.add, (table(positions[..., axis]) for axis, table in enumerate(self.tables))
        )


class AdaptiveEmbedding(nn.Module):
    """Narrower embeddings for rarer tokens, each band projected to the full width (Baevski & Auli)."""

    def __init__(self, vocab_size: int, width: int, cutoffs: tuple[int, ...], factor: int) -> None:
        super().__init__()
        self.bounds = (0, *cutoffs, vocab_size)
        sizes = [high - low for low, high in itertools.pairwise(self.bounds)]
        widths = [width // factor**band for band in range(len(sizes))]
        self.tables = nn.ModuleList(Embedding(s, w) for s, w in zip(sizes, widths, strict=True))
        self.projections = nn.ModuleList(Linear(w, width, bias=False) for w in widths)

    def forward(self, tokens: Tensor) -> Tensor:
        # Every band is computed for every token, which keeps shapes fixed; the first dominates the cost.
        out = None
        bands = zip(itertools.pairwise(self.bounds), self.tables, self.projections, strict=True)
        for (low, high), table, projection in bands:
            # Ids outside the vocabulary stay outside, and raise.
            local = tokens.clamp(low or None, high - 1 if high < self.bounds[-1] else None) - low
            band = projection(table(local))
            out = band if out is None else torch.where((tokens >= low)[..., None], band, out)
        assert out is not None
        return out


class Output(nn.Module):
    """Logits by one linear map, with weights of its own or those of the token embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = None if config.tied else nn.Parameter(torch.empty(config.vocab_size, config.channels))
        self.bias = nn.Parameter(torch.empty(config.vocab_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zeros: every token starts equally likely."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, z: Tensor, embedding: nn.Module) -> Tensor:
        weight = embedding.weight if self.weight is None else self.weight
        assert isinstance(weight, Tensor)
        return F.linear(z, weight, self.bias)

    def nats(self, z: Tensor, targets: Tensor, embedding: nn.Module) -> Tensor:
        logits = self(z, embedding).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


class AdaptiveOutput(nn.Module):
    """Adaptive softmax: rare tokens are scored in two steps, first their band, then themselves."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(
            config.channels, config.vocab_size, list(config.cutoffs), config.cutoff_factor
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zeros in the last maps, as in Output: equally likely bands, then equally likely tokens."""
        nn.init.zeros_(self.softmax.head.weight)
        for band in self.softmax.tail:
            variance_scaling_(band.get_parameter("0.weight"))
            nn.init.zeros_(band.get_parameter("1.weight"))

    def forward(self, z: Tensor, embedding: nn.Module) -> Tensor:
        """Log-probabilities, which are logits too; of all V tokens, so not meant for training."""
        return self.softmax.log_prob(z.flatten(0, 1)).unflatten(0, z.shape[:2])

    def nats(self, z: Tensor, targets: Tensor, embedding: nn.Module) -> Tensor:
        return -self.softmax(z.flatten(0, 1), targets.flatten()).output.view_as(targets)
