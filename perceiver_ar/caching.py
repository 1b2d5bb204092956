"""The KV cache of generation, as the pieces of a loop: prefill, step, refresh.

The keys and values of the cross-attend depend only on a token and its position, so they are computed once
per input and kept. Those of the self-attends are kept for up to N latents; the next token then triggers a
refresh, which recomputes N / 2 latents over the same inputs (appendix E). The logits of every step equal
the last row of an uncached forward over the same inputs with as many latents.

Letters: B batch, P prompt, M inputs that are kept, N latents that are kept, T a few inputs, H heads,
K head width, L layers, V vocabulary, A position axes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from perceiver_ar.attention import attend
from perceiver_ar.decoder import Decoder
from perceiver_ar.model import Block, PerceiverAR, Turns, latent_numbers

Decode = Callable[[PerceiverAR, "Cache", Tensor, Tensor], Tensor]
"""A function like decode_one: model, cache, token (B,) and position (B or 1, 1, A) to logits (B, V)."""

Stack = Callable[[PerceiverAR, "Cache", Tensor, Tensor, Tensor | None], Tensor]
"""A function like deepen: model, cache, latents (B, T, C), their positions and mask to logits (B, V)."""

_STRETCH = 16_384
"""How many inputs' keys and values are computed at a time."""


@dataclass(frozen=True)
class Cache:
    """What a step needs of the inputs before it, in tensors of fixed size.

    A value: each function below takes one and returns the next. They share their tensors, which are
    written in place after the entries already held; clone those to continue from one cache in two ways.
    """

    tokens: Tensor  # (B, M)
    positions: Tensor  # (B or 1, M, A)
    keys: Tensor  # (B, H, M, K), of the cross-attend
    values: Tensor
    self_keys: Tensor  # (L, B, H, N, K)
    self_values: Tensor
    first: Tensor | None  # (B,): column of the first input that is not padding; None: no padding
    inputs: int = 0
    """How many of the M columns are filled."""
    latents: int = 0
    """How many of the N latents are filled; they belong to the last inputs."""

    @classmethod
    def empty(
        cls,
        model: PerceiverAR,
        batch: int,
        inputs: int,
        latents: int,
        first: Tensor | None = None,
        position_rows: int = 1,
    ) -> "Cache":
        """An empty cache with room for these numbers of inputs and latents."""
        config, like = model.config, model.norm.weight
        axes, width = max(1, len(config.axes)), config.input_width // config.cross_head_count
        cross = (batch, config.cross_head_count, inputs, width)
        stack = (config.layers, batch, config.heads, latents, config.channels // config.heads)
        return cls(
            tokens=like.new_zeros((batch, inputs), dtype=torch.long),
            positions=like.new_zeros((position_rows, inputs, axes), dtype=torch.long),
            keys=like.new_zeros(cross),
            values=like.new_zeros(cross),
            self_keys=like.new_zeros(stack),
            self_values=like.new_zeros(stack),
            first=first,
        )

    @property
    def room(self) -> tuple[int, int]:
        """M and N: how many inputs and latents fit."""
        return self.tokens.shape[1], self.self_keys.shape[3]

    def with_room(self, inputs: int) -> "Cache":
        """A copy with room for this number of inputs."""
        more = inputs - self.room[0]
        return replace(
            self,
            tokens=F.pad(self.tokens, (0, more)),
            positions=F.pad(self.positions, (0, 0, 0, more)),
            keys=F.pad(self.keys, (0, 0, 0, more)),
            values=F.pad(self.values, (0, 0, 0, more)),
        )

    def rows(self, index: Tensor) -> "Cache":
        """A copy with the given rows of the batch, possibly repeated; shared positions are not copied."""
        index = index.to(self.tokens.device)
        return replace(
            self,
            tokens=self.tokens[index],
            positions=self.positions if len(self.positions) == 1 else self.positions[index],
            keys=self.keys[index],
            values=self.values[index],
            self_keys=self.self_keys[:, index],
            self_values=self.self_values[:, index],
            first=None if self.first is None else self.first[index],
        )

    def cut(self, inputs: int, latents: int) -> "Cache":
        """A view of the first columns and latents, on the same tensors."""
        return replace(
            self,
            tokens=self.tokens[:, :inputs],
            positions=self.positions[:, :inputs],
            keys=self.keys[:, :, :inputs],
            values=self.values[:, :, :inputs],
            self_keys=self.self_keys[:, :, :, :latents],
            self_values=self.self_values[:, :, :, :latents],
        )


@torch.no_grad()
def prefill(
    model: PerceiverAR,
    tokens: Tensor,
    positions: Tensor,
    room: tuple[int, int],
    lengths: Tensor | None = None,
) -> tuple[Tensor, Cache]:
    """Reads a prompt (B, P) at positions (B or 1, P, A): the next token's logits (B, V), and the cache.

    room: how many inputs and latents to keep at most; prefill computes half of those latents.
    """
    first = None if lengths is None else tokens.shape[1] - lengths
    cache = Cache.empty(model, len(tokens), *room, first, len(positions))
    cache = read(model, cache, tokens, positions)
    return refresh(model, cache, half(cache.inputs, room[1]))


@torch.no_grad()
def read(model: PerceiverAR, cache: Cache, tokens: Tensor, positions: Tensor) -> Cache:
    """Appends inputs (B, T): computes their keys and values in the cross-attend."""
    begin, end = cache.inputs, cache.inputs + tokens.shape[1]
    if end > cache.room[0]:
        raise ValueError(f"{end} inputs do not fit into a cache with room for {cache.room[0]}.")
    cache.tokens[:, begin:end] = tokens
    cache.positions[:, begin:end] = positions
    stretch = max(1, _STRETCH // len(tokens))
    for start in range(begin, end, stretch):
        part = slice(start, min(start + stretch, end))
        inputs = model.embedding(cache.tokens[:, part], cache.positions[:, part])  # (B, T, E)
        turn = model.cross_turn(cache.positions[:, part])
        cache.keys[:, :, part], cache.values[:, :, part] = model.cross_attend.keys_values(inputs, turn)
    return replace(cache, inputs=end)


@torch.no_grad()
def refresh(
    model: PerceiverAR, cache: Cache, latents: int, stack: Stack | None = None
) -> tuple[Tensor, Cache]:
    """Recomputes the last `latents` latents from the cached inputs: logits (B, V), and the cache."""
    if not 1 <= latents <= min(cache.inputs, cache.room[1]):
        raise ValueError(
            f"latents must be from 1 to the {cache.inputs} inputs, and no more than there is room for "
            f"({cache.room[1]}), but are {latents}."
        )
    held, positions = cache.inputs, cache.positions[:, cache.inputs - latents : cache.inputs]
    visible = lengths = None
    if cache.first is not None:
        visible = torch.arange(held, device=cache.first.device) >= cache.first[:, None]  # (B, M)
        lengths = held - cache.first
    inputs = model.embedding(cache.tokens[:, held - latents : held], positions)
    z = model.queries(inputs, latent_numbers(latents, lengths, inputs.device))
    cross, turn = model.cross_attend, model.cross_turn(positions)
    q = cross.ask(cross.norm(z), turn)
    z = cross.update(z, attend(q, cache.keys[:, :, :held], cache.values[:, :, :held], visible))
    latents_visible = None if visible is None else visible[:, held - latents :]
    logits = (stack or deepen)(model, cache, z, positions, latents_visible)
    return logits, replace(cache, latents=latents)


def deepen(model: PerceiverAR, cache: Cache, z: Tensor, positions: Tensor, visible: Tensor | None) -> Tensor:
    """Runs latents (B, T, C) through the self-attends, caching keys and values; returns logits (B, V)."""
    turn, latents = model.self_turn(positions), z.shape[1]
    for block, keys, values in _layers(model, cache):
        q, k, v = block.project(z, None, (turn, turn))
        keys[:, :, :latents], values[:, :, :latents] = k, v
        z = block.update(z, attend(q, k, v, visible))
    return _logits(model, z)


@torch.no_grad()
def step(
    model: PerceiverAR,
    cache: Cache,
    token: Tensor,
    position: Tensor,
    decode: Decode | None = None,
    stack: Stack | None = None,
) -> tuple[Tensor, Cache]:
    """Appends a token (B,) at position (B or 1, 1, A), with one more latent, or a refresh when full."""
    inputs, latents = grow(cache.inputs, cache.latents, *cache.room)
    if (inputs, latents) == (cache.inputs + 1, cache.latents + 1):
        logits = (decode or decode_one)(model, cache, token, position)
        return logits, replace(cache, inputs=inputs, latents=latents)
    if inputs <= cache.inputs:
        cache = forget(model, cache, inputs - 1)
    return refresh(model, read(model, cache, token[:, None], position), latents, stack)


def grow(inputs: int, latents: int, most_inputs: int, most_latents: int) -> tuple[int, int]:
    """How many inputs and latents there are after one more token.

    One more of each. If either is full, there are N / 2 latents; if the inputs are full, only the last
    M - N / 2 of them are kept.
    """
    if inputs < most_inputs and latents < most_latents:
        return inputs + 1, latents + 1
    inputs = inputs + 1 if inputs < most_inputs else most_inputs - most_latents // 2
    return inputs, half(inputs, most_latents)


def half(inputs: int, most_latents: int) -> int:
    """The number of latents after a refresh."""
    return min(inputs, max(1, most_latents // 2))


def forget(model: PerceiverAR, cache: Cache, keep: int) -> Cache:
    """Keeps only the last `keep` inputs, moved to the front, and drops all latents."""
    check_forgetting(model)
    gone = cache.inputs - keep
    for tensor, axis in ((cache.tokens, 1), (cache.positions, 1), (cache.keys, 2), (cache.values, 2)):
        tensor.narrow(axis, 0, keep).copy_(tensor.narrow(axis, gone, keep).clone())
    if cache.first is not None:
        cache.first.sub_(gone).clamp_(min=0)
    return replace(cache, inputs=keep, latents=0)


def check_forgetting(model: Decoder) -> None:
    """Raises if the model cannot represent positions beyond its context."""
    if not model.config.unbounded:
        raise ValueError(
            f"a model with {model.config.positions} positions cannot go beyond its context of "
            f"{model.config.context} inputs: ask for fewer tokens or give a shorter prompt."
        )


def decode_one(model: PerceiverAR, cache: Cache, token: Tensor, position: Tensor) -> Tensor:
    """Appends one input and its latent to the cache; returns logits (B, V)."""
    column, slot = (torch.full((1,), n, device=token.device) for n in (cache.inputs, cache.latents))
    return decode_at(
        model, cache.cut(cache.inputs + 1, cache.latents + 1), token, position, column, slot, through
    )


def decode_at(
    model: PerceiverAR,
    cache: Cache,
    token: Tensor,
    position: Tensor,
    column: Tensor,
    slot: Tensor,
    through: Callable[..., Tensor],
) -> Tensor:
    """As decode_one, with the indices of the input's column and the latent's slot as tensors (1,).

    Attention covers the whole of the cache's tensors or, with `first`, is masked from there up to the
    current input. From step to step only tensors change, so a step can be captured in a CUDA graph.
    """
    cache.tokens.index_copy_(1, column, token[:, None])
    cache.positions.index_copy_(1, column, position)
    visible = latents_visible = None
    number = slot[None]
    if cache.first is not None:
        first = cache.first[:, None]
        columns, slots = (torch.arange(n, device=token.device) for n in cache.room)
        visible = (first <= columns) & (columns <= column)  # (B, M)
        latents_visible = (first <= slots + column - slot) & (slots <= slot)  # (B, N)
        number = torch.minimum(slot, column - first)
    inputs = model.embedding(token[:, None], position)  # (B, 1, E)
    z = model.queries(inputs, number)
    turn = model.cross_turn(position)
    z = through(model.cross_attend, z, inputs, (turn, turn), cache.keys, cache.values, column, visible)
    turn = model.self_turn(position)
    for block, keys, values in _layers(model, cache):
        z = through(block, z, None, (turn, turn), keys, values, slot, latents_visible)
    return _logits(model, z)


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
    q, k, v = block.project(z, inputs, turns)
    keys.index_copy_(2, place, k)
    values.index_copy_(2, place, v)
    return block.update(z, attend(q, keys, values, visible))


def _layers(model: PerceiverAR, cache: Cache) -> Iterator[tuple[Block, Tensor, Tensor]]:
    blocks = cast("Iterator[Block]", iter(model.self_attends))
    return zip(blocks, cache.self_keys, cache.self_values, strict=True)


def _logits(model: PerceiverAR, z: Tensor) -> Tensor:
    """Logits of the last latent, (B, V)."""
    return model.output(model.norm(z[:, -1]), model.embedding.tokens)
