"""What all models share: from tokens to logits or scores, with explicit padding and positions.

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
"""A token generator: yields the logits (B, V) of the next token, and is sent the token drawn (B,)."""


class Inputs(NamedTuple):
    """The arguments of a call, checked."""

    tokens: Tensor  # (B, M)
    positions: Tensor  # (B or 1, M, A)
    lengths: Tensor | None = None  # (B,): real inputs, after padding on the left; None: no padding
    padded: bool = False  # whether padding may reach into the last N inputs
    seeds: Tensor | None = None  # (B,): dropout seed of each example; None: no dropout

    @property
    def visible(self) -> Tensor | None:
        """Mask of the inputs that are not padding, (B, M); None: no padding."""
        return None if self.lengths is None else real(self.tokens, self.lengths)


class Decoder(Pretrained):
    """Embeds tokens, computes latents for the last N of them, and maps those to logits."""

    embedding: InputEmbedding
    norm: nn.LayerNorm
    output: Output | AdaptiveOutput

    def _latents(self, given: Inputs, count: int) -> Tensor:
        """Final latents of the last N inputs, padding included, (B, N, C): where the models differ."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Reinitialises all weights, for example of a model that was built on the meta device."""
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

        tokens (B, M) are padded on the left where lengths (B,) are below M; outputs at padding are
        meaningless. Leave lengths on the CPU, where reading them does not stall a GPU: self-attention is
        faster if it is known that no latent is padded. positions (B, M) or (B, M, A) default to 0, 1, ...
        from the first real token. latents defaults to the number of targets, else to the config's. In
        training, an example's dropout is determined by its seed, a 32-bit integer: seeds (B,), random by
        default.
        """
        # One entry point for logits and loss, since DDP and FSDP only wrap forward.
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
        """Dropout seeds of the examples, (B,): as given, or random; None if nothing is dropped."""
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
        """The number of latents: as requested, but at most the number of inputs."""
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise ValueError(f"tokens must be whole numbers of shape (B, M), not {_describe(tokens)}.")
        config, inputs = self.config, tokens.shape[1]
        if not 1 <= inputs <= config.context:
            raise ValueError(f"{inputs} inputs given, but the model takes from 1 to {config.context}.")
        return min(config.check_latents(latents), inputs)

    def place(self, tokens: Tensor, positions: Tensor | None, lengths: Tensor | None) -> Tensor:
        """Positions (B or 1, M, A) of tokens (B, M): as given, or counted from the first real token."""
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
        """Rotation of self-attention's queries and keys at positions (B, T, A); None if not rotary."""
        return self._turn(positions, self.config.channels // self.config.heads)

    def _turn(self, positions: Tensor, head_width: int) -> Rotation | None:
        config = self.config
        if config.positions != "rotary":
            return None
        wavelength = config.max_wavelength or config.context
        return rotation(positions[..., 0], head_width, config.rotary_fraction, wavelength)

    def _blocks(self, visible: Tensor | None, queries: int, keys: int, own: bool = False) -> Blocks | None:
        """The key blocks that flex attention reads, computed once for all layers; only used on a GPU."""
        return None if visible is None or not visible.is_cuda else blocks_shown(visible, queries, keys, own)

    def _run(self, block: nn.Module, *args: object, **options: Any) -> Tensor:
        """Calls a block, recomputing its activations in the backward pass if the config says so."""
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
    """Checks the lengths, and returns whether padding may reach into the last `count` inputs."""
    if lengths is None:
        return False
    if lengths.shape != tokens.shape[:1] or lengths.is_floating_point():
        raise ValueError(
            f"lengths must be whole numbers of shape ({tokens.shape[0]},), not {_describe(lengths)}."
        )
    # Reading the values would stall a GPU, and break a compiled graph: assume padding.
    if lengths.device.type != "cpu" or torch.compiler.is_compiling():
        return True
    low, high = (int(x) for x in lengths.aminmax()) if len(lengths) else (0, 0)
    if low < 0 or high > tokens.shape[1]:
        raise ValueError(
            f"lengths must be from 0 to the {tokens.shape[1]} inputs, but go from {low} to {high}."
        )
    return low < count


def real(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Mask of the inputs that are not padding, (B, M)."""
    return torch.arange(tokens.shape[1], device=tokens.device) >= tokens.shape[1] - lengths[:, None]
