"""What all models share: from tokens to logits or losses, with padding and positions told from outside.

Letters: B batch, M inputs, N latents, C channels, V vocabulary, A position axes.
"""

from collections.abc import Generator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from perceiver_ar.attention import Rotation, rotation
from perceiver_ar.chance import new_seeds
from perceiver_ar.embedding import AdaptiveOutput, InputEmbedding, Output
from perceiver_ar.flex import Blocks, blocks_shown
from perceiver_ar.pretrained import Pretrained

Engine = Generator[Tensor, Tensor, None]
"""A model that tokens are drawn from: yields the logits (B, V) of the next, and is sent that token (B,)."""


class Inputs(NamedTuple):
    """What a call was given, once it is checked."""

    tokens: Tensor  # (B, M)
    positions: Tensor  # (B or 1, M, A)
    lengths: Tensor | None = None  # (B,): how many are real, after padding on the left; None: all are
    padded: bool = False  # whether padding may reach into the last N
    seeds: Tensor | None = None  # (B,): by which each example's dropout is drawn; None: nothing is dropped

    @property
    def visible(self) -> Tensor | None:
        """Which are not padding, (B, M); None: all."""
        return None if self.lengths is None else real(self.tokens, self.lengths)


class Decoder(Pretrained):
    """Embeds tokens, makes latents of the last N of them, and maps those to logits."""

    embedding: InputEmbedding
    norm: nn.LayerNorm
    output: Output | AdaptiveOutput

    def _latents(self, given: Inputs, count: int) -> Tensor:
        """The latents of the last N inputs, padded ones too, (B, N, C): what tells one model from another."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draws all weights anew, such as those of a model that was built on the meta device."""
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if module is not self and callable(reset):
                reset()

    def nats(
        self,
        tokens: Tensor,
        targets: Tensor,
        positions: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Negative log-likelihood of the tokens that follow the last N inputs, (B, N), unreduced.

        Negative targets are not scored: their nats are 0.
        """
        return self(tokens, positions=positions, lengths=lengths, targets=targets).nats

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        latents: int | None = None,
        lengths: Tensor | None = None,
        targets: Tensor | None = None,
        seeds: Tensor | None = None,
    ) -> Any:
        """Logits at the last N inputs, (B, N, V); or, given the targets (B, N), their Scores.

        tokens (B, M) are padded on the left where lengths (B,) are below M; what comes out for the
        padding itself means nothing. Leave lengths on the CPU, where looking at them costs nothing: the
        self-attends are faster when it is known that no latent is padded. positions (B, M) or (B, M, A)
        default to 0, 1, ... from the first real token. latents defaults to the config's, and to the
        number of targets. In training, what is dropped of an example follows from its seed, (B,) whole
        numbers of 32 bits, by default drawn.
        """
        # One entry for logits and loss, since DDP and FSDP only see calls of forward.
        if targets is not None:
            _check_targets(tokens, targets, latents)
            latents, targets = targets.shape[1], targets.long()
        count = self._count(tokens, latents)
        padded, tokens = _some_padded(tokens, lengths, count), tokens.long()
        lengths = None if lengths is None else lengths.to(tokens.device, non_blocking=tokens.is_cuda)
        positions = self.place(tokens, positions, lengths)
        given = Inputs(tokens, positions, lengths, padded, self._seeds(tokens, seeds))
        return self.output(self.norm(self._latents(given, count)), self.embedding.tokens, targets)

    def _seeds(self, tokens: Tensor, seeds: Tensor | None = None) -> Tensor | None:
        """The seeds of each example's dropout, (B,): as given, or drawn; None where nothing is dropped."""
        if seeds is not None and (seeds.shape != tokens.shape[:1] or seeds.is_floating_point()):
            raise ValueError(
                f"seeds must be whole numbers of shape ({len(tokens)},), not {_describe(seeds)}."
            )
        shares = ("residual_dropout", "latent_dropout", "cross_dropout", "memory_dropout")
        if not self.training or not any(getattr(self.config, share, 0.0) for share in shares):
            return None
        if seeds is None:
            return new_seeds(len(tokens), tokens.device)
        return seeds.to(tokens.device, torch.int32)

    def _count(self, tokens: Tensor, latents: int | None) -> int:
        """The number of latents: as asked, but no more than there are inputs."""
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise ValueError(f"tokens must be whole numbers of shape (B, M), not {_describe(tokens)}.")
        config, inputs = self.config, tokens.shape[1]
        if not 1 <= inputs <= config.context:
            raise ValueError(f"{inputs} inputs given, but the model takes from 1 to {config.context}.")
        return min(config.check_latents(latents), inputs)

    def place(self, tokens: Tensor, positions: Tensor | None, lengths: Tensor | None) -> Tensor:
        """Where tokens (B, M) stand, (B or 1, M, A): as told, or counted from the first real one."""
        axes = max(1, len(self.config.axes))
        if positions is None:
            if self.config.axes:
                raise ValueError(f"axial positions must be given: positions of shape (B, M, {axes}).")
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
            if lengths is not None:
                positions = (positions - (tokens.shape[1] - lengths[:, None])).clamp(min=0)
        if positions.dim() == 2:
            positions = positions[..., None]
        if positions.shape[1:] != (tokens.shape[1], axes) or positions.shape[0] not in (1, tokens.shape[0]):
            raise ValueError(
                f"positions of shape {tuple(positions.shape)} do not fit tokens of shape "
                f"{tuple(tokens.shape)} with {axes} position(s) each."
            )
        return positions

    def self_turn(self, positions: Tensor) -> Rotation | None:
        """What self-attends turn queries and keys at these positions (B, T, A) by, if rotary."""
        return self._turn(positions, self.config.channels // self.config.heads)

    def _turn(self, positions: Tensor, head_width: int) -> Rotation | None:
        config = self.config
        if config.positions != "rotary":
            return None
        wavelength = config.max_wavelength or config.context
        return rotation(positions[..., 0], head_width, config.rotary_fraction, wavelength)

    def _blocks(self, visible: Tensor | None, queries: int, keys: int, own: bool = False) -> Blocks | None:
        """Which blocks of keys are hidden, found once for all layers; only flex attention, on a GPU, asks."""
        return None if visible is None or not visible.is_cuda else blocks_shown(visible, queries, keys, own)

    def _run(self, block: nn.Module, *args: object, **options: Any) -> Tensor:
        """Calls a block; where activations are to be recomputed, they are not kept."""
        if self.training and self.config.checkpoint_activations:
            return checkpoint(block, *args, use_reentrant=False, **options)
        return block(*args, **options)


def _describe(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape)}"


def _check_targets(tokens: Tensor, targets: Tensor, latents: int | None) -> None:
    fits = targets.dim() == tokens.dim() == 2 and targets.shape[0] == tokens.shape[0]
    if not fits or not 1 <= targets.shape[1] <= tokens.shape[1] or latents not in (None, targets.shape[1]):
        raise ValueError(
            f"targets, {_describe(targets)}, do not fit tokens, {_describe(tokens)}: give the tokens "
            "that follow the last inputs, one for each latent."
        )


def _some_padded(tokens: Tensor, lengths: Tensor | None, count: int) -> bool:
    """Checks the lengths, and tells whether padding may reach into the last few inputs."""
    if lengths is None:
        return False
    if lengths.shape != tokens.shape[:1] or lengths.is_floating_point():
        raise ValueError(
            f"lengths must be whole numbers of shape ({tokens.shape[0]},), not {_describe(lengths)}."
        )
    # On a GPU, or in a graph, looking at the values would cost more than it tells.
    if lengths.device.type != "cpu" or torch.compiler.is_compiling():
        return True
    low, high = (int(x) for x in lengths.aminmax()) if len(lengths) else (0, 0)
    if low < 0 or high > tokens.shape[1]:
        raise ValueError(
            f"lengths must be from 0 to the {tokens.shape[1]} inputs, but go from {low} to {high}."
        )
    return low < count


def real(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Which inputs are not padding, (B, M)."""
    return torch.arange(tokens.shape[1], device=tokens.device) >= tokens.shape[1] - lengths[:, None]
