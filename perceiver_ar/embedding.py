"""From token ids to vectors and back: token embeddings, absolute positions, adaptive input and softmax.

Letters: B batch, M inputs, N latents, C channels, E input width, V vocabulary, A position axes.
"""

import functools
import itertools
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perceiver_ar.attention import angles
from perceiver_ar.config import ModelConfig
from perceiver_ar.layers import Embedding, Linear, ZeroLinear, look_up

SINUSOID_WAVELENGTH = 10_000.0


class Scores(NamedTuple):
    """Statistics of each target, (B, N); all 0 where a target is negative, that is, not scored."""

    nats: Tensor
    """Negative log-likelihood."""
    log_z: Tensor
    """Log of the softmax's normalizer; of the first of its two steps, if it is adaptive."""
    uniform: Tensor | None
    """Cross-entropy with the uniform distribution over the vocabulary; None for an adaptive softmax."""
    right: Tensor | None
    """Whether the target is the most likely token; None for an adaptive softmax."""


class InputEmbedding(nn.Module):
    """Embeds tokens, and adds their positions if those are absolute."""

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

    @property
    def table(self) -> Tensor | None:
        """The vectors of the whole vocabulary (V, E), if a token's vector does not depend on its position.

        None in an exported program: that serves all input sizes, and the table only pays off for some.
        """
        plain = self.positions is None and isinstance(self.tokens, Embedding)
        return self.tokens.weight if plain and not torch.compiler.is_exporting() else None

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        # (B, M), (B or 1, M, A) -> (B, M, E)
        x = self.tokens(tokens)
        return x if self.positions is None else x + self.positions(positions).to(x.dtype)


class SinusoidalPositions(nn.Module):
    """Fixed sines, then cosines, of log-spaced wavelengths, concatenated."""

    def __init__(self, width: int, max_wavelength: float) -> None:
        super().__init__()
        self.width, self.max_wavelength = width, max_wavelength

    def forward(self, positions: Tensor) -> Tensor:
        turns = angles(positions[..., 0], self.max_wavelength, self.width // 2)
        return torch.cat((turns.sin(), turns.cos()), dim=-1)


class LearnedPositions(nn.Module):
    """Learned positions: one table per axis, summed."""

    def __init__(self, rows: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(Embedding(count, width) for count in rows)

    def forward(self, positions: Tensor) -> Tensor:
        tables = [cast(Tensor, table.weight) for table in self.tables]
        parts = (look_up(table, positions[..., axis]) for axis, table in enumerate(tables))
        return functools.reduce(torch.add, parts)


class AdaptiveEmbedding(nn.Module):
    """Narrower embeddings for rarer tokens, each band projected to the full width (Baevski & Auli)."""

    def __init__(
        self, vocab_size: int, width: int, cutoffs: tuple[int, ...], factor: int, std: float = 1.0
    ) -> None:
        super().__init__()
        self.bounds = (0, *cutoffs, vocab_size)
        sizes = [high - low for low, high in itertools.pairwise(self.bounds)]
        widths = [width // factor**band for band in range(len(sizes))]
        self.tables = nn.ModuleList(Embedding(s, w, std) for s, w in zip(sizes, widths, strict=True))
        self.projections = nn.ModuleList(Linear(w, width, bias=False) for w in widths)

    def forward(self, tokens: Tensor) -> Tensor:
        # Every band is computed for every token, which keeps shapes static; the first dominates the cost.
        out = None
        bands = zip(itertools.pairwise(self.bounds), self.tables, self.projections, strict=True)
        for (low, high), table, projection in bands:
            # Ids outside the vocabulary are not clamped, so that they raise an error.
            local = tokens.clamp(low or None, high - 1 if high < self.bounds[-1] else None) - low
            band = projection(table(local))
            out = band if out is None else torch.where((tokens >= low)[..., None], band, out)
        assert out is not None
        return out


class Output(nn.Module):
    """Logits by one linear map, with its own weights or those of the token embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = None if config.tied else nn.Parameter(torch.empty(config.vocab_size, config.channels))
        self.bias = nn.Parameter(torch.empty(config.vocab_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zeros, so that all tokens are equally likely at first."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, z: Tensor, embedding: nn.Module, targets: Tensor | None = None) -> Any:
        """Logits (B, N, V); or, given the targets (B, N), their Scores."""
        weight = embedding.weight if self.weight is None else self.weight
        assert isinstance(weight, Tensor)
        logits = F.linear(z, weight, self.bias)
        if targets is None:
            return logits
        logits, scored = _exact(logits), targets >= 0
        log_z = logits.logsumexp(-1)
        nats = log_z - logits.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
        uniform = log_z - logits.mean(-1)
        right = (logits.argmax(-1) == targets) & scored
        return Scores(nats * scored, log_z * scored, uniform * scored, right)


class AdaptiveOutput(nn.Module):
    """Adaptive softmax: a rare token's probability is that of its band times its own within the band.

    Each band after the first has a narrower map than the one before (Grave et al.).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.cutoffs = config.cutoffs
        bounds = (*config.cutoffs, config.vocab_size)
        sizes = [high - low for low, high in itertools.pairwise(bounds)]
        widths = [config.channels // config.cutoff_factor ** (band + 1) for band in range(len(sizes))]
        self.head = ZeroLinear(config.channels, config.cutoffs[0] + len(sizes))
        self.narrow = nn.ModuleList(Linear(config.channels, width, bias=False) for width in widths)
        self.tails = nn.ModuleList(ZeroLinear(w, size) for w, size in zip(widths, sizes, strict=True))

    def forward(self, z: Tensor, embedding: nn.Module, targets: Tensor | None = None) -> Any:
        """Log-probabilities (B, N, V), which serve as logits; or, given the targets (B, N), their Scores."""
        if targets is not None:
            return self._score(z, targets, embedding)
        head = _exact(self._head(z, embedding)).log_softmax(-1)
        bands = [
            head[..., self.cutoffs[0] + band, None] + self._within(z, band, embedding)
            for band in range(len(self.cutoffs))
        ]
        return torch.cat((head[..., : self.cutoffs[0]], *bands), dim=-1)

    def _score(self, z: Tensor, targets: Tensor, embedding: nn.Module) -> Scores:
        """Computes each band only for the targets in it, so shapes depend on the data."""
        z, flat = z.flatten(0, 1), targets.flatten()
        band = torch.bucketize(flat, torch.tensor(self.cutoffs, device=flat.device), right=True)
        chosen = torch.where(band == 0, flat.clamp(min=0), self.cutoffs[0] + band - 1)
        head = _exact(self._head(z, embedding))
        log_z = head.logsumexp(-1)
        nats = log_z - head.gather(-1, chosen[:, None]).squeeze(-1)
        for index, low in enumerate(self.cutoffs):
            rows = (band == index + 1).nonzero().squeeze(-1)
            inside = (
                self._within(z[rows], index, embedding).gather(-1, (flat[rows] - low)[:, None]).squeeze(-1)
            )
            nats = nats.index_add(0, rows, -inside)
        scored = flat >= 0
        return Scores((nats * scored).view_as(targets), (log_z * scored).view_as(targets), None, None)

    def _head(self, z: Tensor, embedding: nn.Module) -> Tensor:
        """Logits of the first band's tokens, followed by those of the other bands."""
        return self.head(z)

    def _within(self, z: Tensor, band: int, embedding: nn.Module) -> Tensor:
        """Log-probabilities within a band after the first, conditional on that band."""
        return _exact(self.tails[band](self.narrow[band](z))).log_softmax(-1)


class TiedAdaptiveOutput(AdaptiveOutput):
    """Adaptive softmax with the weights of adaptive embeddings.

    Only the first projection, the logits of the bands and the biases have parameters of their own.
    """

    def __init__(self, config: ModelConfig) -> None:
        nn.Module.__init__(self)
        self.cutoffs = config.cutoffs
        self.first = Linear(config.channels, config.channels, bias=False)
        self.bands = ZeroLinear(config.channels, len(config.cutoffs), bias=True)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

    def _head(self, z: Tensor, embedding: nn.Module) -> Tensor:
        assert isinstance(embedding, AdaptiveEmbedding)
        tokens = F.linear(self.first(z), _weight(embedding.tables[0]), self.bias[: self.cutoffs[0]])
        return torch.cat((tokens, self.bands(z)), dim=-1)

    def _within(self, z: Tensor, band: int, embedding: nn.Module) -> Tensor:
        assert isinstance(embedding, AdaptiveEmbedding)
        low, high = embedding.bounds[band + 1 : band + 3]
        narrow = z @ _weight(embedding.projections[band + 1])
        logits = F.linear(narrow, _weight(embedding.tables[band + 1]), self.bias[low:high])
        return _exact(logits).log_softmax(-1)


def _weight(module: nn.Module) -> Tensor:
    assert isinstance(module.weight, Tensor)
    return module.weight


def _exact(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
