"""The baselines that Perceiver AR is compared with: a decoder-only Transformer, and Transformer-XL.

Both share the interface of Perceiver AR for calls, training, evaluation and generation; "the last N" are
the outputs at the last N inputs. State computed from earlier inputs is passed in and returned: the
Transformer's keys and values, Transformer-XL's memory.

Letters: B batch, M inputs, N outputs, T keys (memory and inputs), C channels, H heads, K head width,
L layers.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perceiver_ar.attention import attend, masked
from perceiver_ar.chance import branch, branches, drop, kept
from perceiver_ar.config import TransformerConfig, TransformerXLConfig
from perceiver_ar.decoder import Decoder, Engine, Inputs
from perceiver_ar.embedding import (
    AdaptiveEmbedding,
    InputEmbedding,
    Output,
    Scores,
    SinusoidalPositions,
    TiedAdaptiveOutput,
)
from perceiver_ar.layers import Linear, Vectors
from perceiver_ar.model import MLP, Block


@dataclass(frozen=True)
class Past:
    """What a model keeps of earlier inputs: a KV cache or a memory."""

    kept: list[tuple[Tensor, ...]]
    """Per layer: keys and values (B, H, T, K), or hidden states (B, T, C)."""
    visible: Tensor | None
    """(B, T): mask of the inputs that are not padding; None: no padding."""


class Transformer(Decoder):
    """A decoder-only Transformer with the blocks and positions of Perceiver AR."""

    config_class = TransformerConfig
    model_type = TransformerConfig.model_type
    config: TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = InputEmbedding(config.stack())
        self.self_attends = nn.ModuleList(
            Block(config.channels, config.heads, config.residual_dropout) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.channels)
        self.output = Output(config.stack())

    def _latents(self, given: Inputs, count: int) -> Tensor:
        inputs, visible = given.tokens.shape[1], given.visible
        z, turn = self.embedding(given.tokens, given.positions), self.self_turn(given.positions)
        blocks = self._blocks(visible, inputs, inputs)
        seeds = branches(given.seeds, self.config.layers)
        for block, block_seeds in zip(self.self_attends, seeds, strict=True):
            z = self._run(block, z, None, (turn, turn), visible=visible, blocks=blocks, seeds=block_seeds)
        return z[:, -count:]

    def held(self, total: int) -> int:
        """How many of the inputs so far are used: when the context is full, half of it is dropped."""
        context, keep = self.config.context, self.config.context // 2
        return total if total <= context else keep + 1 + (total - context - 1) % (context - keep)

    def extend(
        self, tokens: Tensor, positions: Tensor, past: Past | None, visible: Tensor | None = None
    ) -> tuple[Tensor, Past]:
        """Appends inputs (B, T): the logits (B, V) after the last of them, and the extended KV cache."""
        visible = _joined(past, visible, tokens)
        z, turn, kept = self.embedding(tokens, positions), self.self_turn(positions), []
        for index, block in enumerate(self.self_attends):
            assert isinstance(block, Block)
            q, k, v = block.project(z, None, (turn, turn))
            if past is not None:
                k, v = (torch.cat(pair, dim=2) for pair in zip(past.kept[index], (k, v), strict=True))
            kept.append((k, v))
            z = block.update(z, attend(q, k, v, visible))
        return self.output(self.norm(z[:, -1]), self.embedding.tokens), Past(kept, visible)


def _joined(past: Past | None, visible: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Mask of the inputs that are not padding, past and new ones; None: no padding."""
    before = None if past is None else past.visible
    if past is None or (before is None and visible is None):
        return visible
    held = past.kept[0][0].shape[-2]
    before = tokens.new_ones(len(tokens), held, dtype=torch.bool) if before is None else before
    visible = torch.ones_like(tokens, dtype=torch.bool) if visible is None else visible
    return torch.cat((before, visible), dim=1)


class RelativeBlock(nn.Module):
    """Attention to a memory and the inputs, with scores by content and by distance, then an MLP."""

    def __init__(self, channels: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(channels)
        self.query = Linear(channels, channels, bias=False)
        self.key = Linear(channels, channels)
        self.value = Linear(channels, channels)
        self.distance = Linear(channels, channels, bias=False)
        self.out = Linear(channels, channels)
        self.mlp_norm = nn.LayerNorm(channels)
        self.mlp = MLP(channels)
        self.dropout = dropout

    def forward(
        self,
        z: Tensor,
        before: Tensor,
        distances: Tensor,
        biases: tuple[Tensor, Tensor],
        *,
        mask: Tensor,
        seeds: Tensor | None,
    ) -> Tensor:
        # z (B, N, C), before (B, T - N, C), distances (T, C) from T - 1 down, mask (B, 1, N, T)
        source = self.norm(torch.cat((before, z), dim=1))
        q = self._heads(self.query(source[:, -z.shape[1] :]))
        k, v = self._heads(self.key(source)), self._heads(self.value(source))
        r = self._heads(self.distance(distances)[None])
        content, distance = (bias.view(self.heads, 1, -1).to(q.dtype) for bias in biases)
        scores = _shifted((q + distance) @ r.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        seen = masked(q + content, k, v, scores.masked_fill(~mask, -torch.inf))
        z = z + drop(self.out(seen.transpose(1, 2).flatten(2)), self.dropout, seeds)
        return z + drop(self.mlp(self.mlp_norm(z)), self.dropout, branch(seeds, 1))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def _shifted(scores: Tensor) -> Tensor:
    """Scores by distance, (B, H, N, T) from T - 1 down to 0, realigned to scores by key.

    Those of future keys are meaningless.
    """
    queries, keys = scores.shape[-2:]
    return F.pad(scores, (1, 0)).flatten(-2)[..., queries:].unflatten(-1, (queries, keys))


class TransformerXL(Decoder):
    """Transformer-XL with pre-norm blocks, as in Perceiver AR.

    Each call computes the memory of its window; `segment` and `extend` take a memory and return the next.
    In generation each token is a segment of its own, which attends to the memory and itself.
    """

    config_class = TransformerXLConfig
    model_type = TransformerXLConfig.model_type
    config: TransformerXLConfig

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = InputEmbedding(config.stack())
        if config.cutoffs:  # with a small std, since the output shares them
            sizes = config.vocab_size, config.channels, config.cutoffs, config.cutoff_factor
            self.embedding.tokens = AdaptiveEmbedding(*sizes, std=0.02)
        self.distances = SinusoidalPositions(config.channels, 10_000.0)
        self.biases = Vectors(2, config.channels)  # for content and distance, shared by all layers
        self.self_attends = nn.ModuleList(
            RelativeBlock(config.channels, config.heads, config.residual_dropout)
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.channels)
        self.output = (TiedAdaptiveOutput if config.cutoffs else Output)(config.stack())

    @property
    def reach(self) -> int:
        """How many states before a segment it attends to."""
        return self.config.memory if self.training else self.config.evaluation_memory

    def _latents(self, given: Inputs, count: int) -> Tensor:
        """Runs the segments in order; no gradient flows from a segment to earlier ones."""
        tokens, visible, seeds = given.tokens, given.visible, given.seeds
        end, past = tokens.shape[1], None
        last, begin = end - count, max(0, end - count - self.reach)
        for number, stop in enumerate(reversed(range(last, begin, -self.config.segment)), 1):
            part = slice(begin, stop)
            with torch.no_grad():
                shown = None if visible is None else visible[:, part]
                _, past = self.segment(tokens[:, part], past, shown, seeds=branch(seeds, -number))
            begin = stop
        shown = None if visible is None else visible[:, last:]
        z, _ = self.segment(tokens[:, last:], past, shown, keep=0, seeds=seeds)
        return z

    def segment(
        self,
        tokens: Tensor,
        past: Past | None,
        visible: Tensor | None,
        keep: int | None = None,
        seeds: Tensor | None = None,
    ) -> tuple[Tensor, Past]:
        """The final states (B, N, C) of a segment's inputs, and the memory for the next segment.

        keep: the length of that memory, by default as many states as a segment attends to.
        """
        visible = _joined(past, visible, tokens)
        z = self.embedding.tokens(tokens)
        before = [(z[:, :0],)] * len(self.self_attends) if past is None else past.kept
        held = before[0][0].shape[1]
        keys = held + z.shape[1]
        gone = max(0, keys - (self.reach if keep is None else keep))
        shown = z.new_ones(len(z), keys, dtype=torch.bool) if visible is None else visible
        of_memory, *layers_seeds = branches(seeds, 1 + self.config.layers)
        mask = self._mask(shown, z.shape[1], of_memory)
        distances = self.distances(torch.arange(keys - 1, -1, -1, device=z.device)[:, None]).to(z.dtype)
        biases, states = self.biases.weight.unbind(), []
        for block, (memory,), block_seeds in zip(self.self_attends, before, layers_seeds, strict=True):
            states.append((torch.cat((memory[:, gone:], z[:, max(0, gone - held) :]), dim=1).detach(),))
            z = self._run(block, z, memory, distances, biases, mask=mask, seeds=block_seeds)
        return z, Past(states, None if visible is None else visible[:, gone:])

    def blank(self, rows: int) -> Past:
        """A memory of zeros, as long as a segment attends to."""
        like = self.norm.weight
        return Past([(like.new_zeros(rows, self.reach, len(like)),)] * len(self.self_attends), None)

    def score_on(
        self, tokens: Tensor, targets: Tensor, past: Past | None, visible: Tensor | None
    ) -> tuple[Scores, Past]:
        """The Scores of a segment's targets (B, N), and the memory for the next segment."""
        z, past = self.segment(tokens, past, visible, seeds=self._seeds(tokens))
        return self.output(self.norm(z), self.embedding.tokens, targets), past

    def _mask(self, shown: Tensor, inputs: int, seeds: Tensor | None) -> Tensor:
        """Causal mask (B, 1, N, T) of the keys that are shown (B, T), and each input's own.

        seeds: of the memory dropout, which hides a share of the memory from the whole segment.
        """
        keys, before = shown.shape[1], shown.shape[1] - inputs
        if seeds is not None and self.config.memory_dropout:
            shown = shown & F.pad(kept(seeds, self.config.memory_dropout, before), (0, inputs), value=True)
        key = torch.arange(keys, device=shown.device)
        own = key[before:, None]
        return ((key <= own) & (shown[:, None] | (key == own)))[:, None]

    def held(self, total: int) -> int:
        """How many of the inputs so far are used: all, through the memory."""
        return total

    def extend(
        self, tokens: Tensor, positions: Tensor, past: Past | None, visible: Tensor | None = None
    ) -> tuple[Tensor, Past]:
        """Appends inputs (B, T): the logits (B, V) after the last of them, and the new memory."""
        z = None
        for start in range(0, tokens.shape[1], self.config.segment):
            part = slice(start, start + self.config.segment)
            z, past = self.segment(tokens[:, part], past, None if visible is None else visible[:, part])
        assert z is not None
        assert past is not None
        return self.output(self.norm(z[:, -1]), self.embedding.tokens), past


def continued(
    model: Transformer | TransformerXL, tokens: Tensor, places: Tensor, lengths: Tensor | None
) -> Engine:
    """Generates with a cache: each token is computed once."""
    past, begin, done, given = None, 0, 0, tokens.shape[1]
    while True:
        total = tokens.shape[1]
        first = total - model.held(total)
        if first > begin:
            past, begin, done = None, first, first
        part = slice(done, total)
        columns = torch.arange(done, total, device=tokens.device)
        visible = None if lengths is None else columns >= given - lengths[:, None]
        logits, past = model.extend(tokens[:, part], places[:, part], past, visible)
        done, token = total, (yield logits)
        tokens = torch.cat((tokens, token[:, None]), dim=1)


def recomputed(
    model: Transformer | TransformerXL, tokens: Tensor, places: Tensor, lengths: Tensor | None
) -> Engine:
    """As `continued`, but recomputes the whole window at every step.

    Transformer-XL then sees no further back than its memory is long.
    """
    given = tokens.shape[1]
    while True:
        total = tokens.shape[1]
        inputs = min(model.held(total), model.config.context)
        real = None if lengths is None else (lengths + total - given).clamp(max=inputs)
        window = places[:, total - inputs : total]
        logits = model(tokens[:, -inputs:], positions=window, latents=1, lengths=real)
        token = yield logits[:, -1]
        tokens = torch.cat((tokens, token[:, None]), dim=1)
