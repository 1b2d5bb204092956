"""Perceiver AR: one causal cross-attend from many inputs to few latents, then a deep stack on the latents.

Letters: B batch, M inputs (context), N latents, C channels, E input width, H heads, K head width,
L layers, V vocabulary, A position axes.

Notable:
- there is one latent for each of the last N inputs, and N is chosen per call, not fixed by the weights;
- positions are an explicit input, padding is given by lengths, and no token is special;
- cross-attend dropout selects the inputs to keep before anything is computed from them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perceiver_ar.attention import Rotation, attend, attend_packed, rotate, unpack
from perceiver_ar.chance import branch, branches, draws, drop, kept
from perceiver_ar.config import ModelConfig
from perceiver_ar.decoder import Decoder, Inputs
from perceiver_ar.embedding import AdaptiveOutput, InputEmbedding, Output
from perceiver_ar.flex import Blocks
from perceiver_ar.layers import Linear, Vectors, look_up
from perceiver_ar.parts import Share

Turns = tuple[Rotation | None, Rotation | None]
"""Rotations of the queries and of the keys; None where positions are not rotary."""


class MLP(nn.Module):
    """Two linear maps, four times as wide in between, with a squared ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.widen = Linear(channels, 4 * channels)
        self.narrow = Linear(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.relu(self.widen(x)).square())


class Block(nn.Module):
    """Pre-norm attention and a pre-norm MLP, each with a residual connection to the latents.

    With an input width it is a cross-attend: keys and values come from the inputs, and queries, keys and
    values have the inputs' width. Without, it is a self-attend.
    """

    def __init__(self, channels: int, heads: int, dropout: float, input_width: int | None = None) -> None:
        super().__init__()
        width = input_width or channels
        self.heads = heads
        self.norm = nn.LayerNorm(channels)
        self.input_norm = nn.LayerNorm(width) if input_width else None
        self.query = Linear(channels, width)
        self.key = Linear(width, width)
        self.value = Linear(width, width)
        self.out = Linear(width, channels)
        self.mlp_norm = nn.LayerNorm(channels)
        self.mlp = MLP(channels)
        self.dropout = dropout
        self.share: Share | None = None
        """The processes that split the inputs between them; None: this process has all of them."""

    def forward(
        self,
        z: Tensor,
        inputs: Tensor | None,
        turns: Turns,
        *,
        visible: Tensor | None = None,
        own: bool = False,
        blocks: Blocks | None = None,
        tokens: Tensor | None = None,
        seeds: Tensor | None = None,
    ) -> Tensor:
        if self._is_joint(inputs):
            attended = attend_packed(self._joint(self.norm(z)), turns[0], visible, own, blocks)
        else:
            attended = attend(*self.project(z, inputs, turns, tokens), visible, own, blocks, self.share)
        return self.update(z, attended, seeds)

    def project(
        self, z: Tensor, inputs: Tensor | None, turns: Turns, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the latents (B, N, C); keys and values of the inputs (B, M, E) or the latents."""
        latents = self.norm(z)
        if z.shape[1] > 1 and self._is_joint(inputs):
            return unpack(self._joint(latents), turns[0])
        source = latents if inputs is None else inputs
        return self.ask(latents, turns[0]), *self.keys_values(source, turns[1], tokens)

    def _is_joint(self, inputs: Tensor | None) -> bool:
        """Whether one product can give queries, keys and values: in a self-attend that is not quantized."""
        return inputs is None and isinstance(self.query, nn.Linear)

    def _joint(self, latents: Tensor) -> Tensor:
        """Packed queries, keys and values (B, N, 3, H, K) by one product, which is faster than three."""
        maps = self.query, self.key, self.value
        weight, bias = (torch.cat([getattr(m, name) for m in maps]) for name in ("weight", "bias"))
        return F.linear(latents, weight, bias).unflatten(-1, (3, self.heads, -1))

    def ask(self, latents: Tensor, turn: Rotation | None) -> Tensor:
        """Queries (B, H, N, K) of already normed latents."""
        return self._heads(self.query(latents), turn)

    def keys_values(
        self, inputs: Tensor, turn: Rotation | None, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the inputs or, in a self-attend, of already normed latents.

        Given tokens (B, M), inputs are the vectors of the whole vocabulary (V, E): each is projected
        once, and the results are looked up.
        """
        source = inputs if self.input_norm is None else self.input_norm(inputs)
        k, v = self.key(source), self.value(source)
        if tokens is not None:
            k, v = look_up(k, tokens), look_up(v, tokens)
        return self._heads(k, turn), self._heads(v, None)

    def _heads(self, x: Tensor, turn: Rotation | None) -> Tensor:
        x = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, T, H * K) -> (B, H, T, K)
        return x if turn is None else rotate(x, turn)

    def update(self, z: Tensor, attended: Tensor, seeds: Tensor | None = None) -> Tensor:
        """Adds the attention output (B, H, N, K), projected, and then the MLP; seeds (B,): for dropout."""
        z = z + drop(self.out(attended.transpose(1, 2).flatten(2)), self.dropout, seeds)
        return z + drop(self.mlp(self.mlp_norm(z)), self.dropout, branch(seeds, 1))


class Queries(nn.Module):
    """The initial latents, before the cross-attend: a map of the last N inputs, or learned vectors."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.style = config.queries
        if config.queries in ("linear", "mlp"):
            self.linear = Linear(config.input_width, config.channels)
        if config.queries == "mlp":
            self.mlp = nn.ModuleList(Linear(config.channels, config.channels) for _ in range(3))
        if config.queries in ("learned", "learned-shared"):
            self.learned = Vectors(config.latents if config.queries == "learned" else 1, config.channels)

    def forward(self, inputs: Tensor, numbers: Tensor) -> Tensor:
        # (B, N, E), (B or 1, N) -> (B, N, C)
        if self.style == "learned-shared":
            return self.learned.weight.expand(*inputs.shape[:2], -1)
        if self.style == "learned":
            return self.learned.weight[numbers].expand(inputs.shape[0], -1, -1)
        z = inputs if self.style == "inputs" else self.linear(inputs)
        if self.style == "mlp":
            for layer in self.mlp:
                z = F.gelu(layer(z), approximate="tanh")
        return z


def latent_numbers(count: int, lengths: Tensor | None, device: torch.device) -> Tensor:
    """Numbers the latents 0, 1, ... from the first real one, so that adding a latent renumbers none."""
    numbers = torch.arange(count, device=device)[None]
    if lengths is None:
        return numbers
    return (numbers - (count - lengths[:, None]).clamp(min=0)).clamp(min=0)


class Seen(NamedTuple):
    """The inputs that the cross-attend attends to."""

    tokens: Tensor  # (B, M)
    positions: Tensor  # (B or 1, M, A)
    visible: Tensor | None  # (B, W): mask of the last W inputs; those before are visible. None: all are


class PerceiverAR(Decoder):
    """Perceiver AR (Hawthorne, Jaegle et al., ICML 2022)."""

    config_class = ModelConfig
    model_type = ModelConfig.model_type
    config: ModelConfig

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = InputEmbedding(config)
        self.queries = Queries(config)
        self.cross_attend = Block(
            config.channels, config.cross_head_count, config.residual_dropout, config.input_width
        )
        self.self_attends = nn.ModuleList(
            Block(config.channels, config.heads, config.residual_dropout) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.channels)
        self.output = (AdaptiveOutput if config.cutoffs else Output)(config)

    def _latents(self, given: Inputs, count: int) -> Tensor:
        """One cross-attend from the last N inputs to all inputs, then the self-attends (section 3)."""
        cross_seeds, *self_seeds = branches(given.seeds, 1 + self.config.layers)
        seen = self._seen(given, count)
        z = self._attend_inputs(given, seen, count, cross_seeds)
        return self._attend_latents(z, given, self_seeds)

    def _seen(self, given: Inputs, count: int) -> Seen:
        """The inputs that cross-attend dropout keeps (appendix E), and of those this process's part."""
        seen = Seen(given.tokens, given.positions, given.visible)
        config, seeds = self.config, given.seeds
        if seeds is not None and config.cross_dropout > 0:
            if config.cross_dropout_scope != "latents":
                before = given.tokens.shape[1] - count
                keep = round(before * (1 - config.cross_dropout))
                seen = _keep_some(seen, draws(branch(seeds, -2), before), keep)
            if config.cross_dropout_scope != "prefix":
                visible = _hide_last(seen.visible, count, config.cross_dropout, branch(seeds, -3))
                seen = seen._replace(visible=visible)
        share = self.cross_attend.share
        return seen if share is None else _own_part(seen, count, share)

    def _attend_inputs(self, given: Inputs, seen: Seen, count: int, seeds: Tensor | None) -> Tensor:
        """The latents after the cross-attend, (B, N, C)."""
        inputs, ids = self._embed(seen)
        positions, alone = given.positions[:, -count:], self.cross_attend.share is None
        reuse = ids is None and alone  # the last N inputs are embedded already
        last = inputs[:, -count:] if reuse else self.embedding(given.tokens[:, -count:], positions)
        z = self.queries(last, latent_numbers(count, given.lengths, last.device))
        turns = self.cross_turn(positions), self.cross_turn(seen.positions)
        blocks = self._blocks(seen.visible, count, seen.tokens.shape[1]) if alone else None
        options = {"visible": seen.visible, "blocks": blocks, "tokens": ids, "seeds": seeds}
        return self._run(self.cross_attend, z, inputs, turns, **options)

    def _embed(self, seen: Seen) -> tuple[Tensor, Tensor | None]:
        """The embedded inputs (B, M, E) or, if that is less work, the vocabulary (V, E) and the token ids."""
        table = self.embedding.table
        if table is not None and 2 * len(table) <= seen.tokens.numel():
            return table, seen.tokens
        return self.embedding(seen.tokens, seen.positions), None

    def _attend_latents(self, z: Tensor, given: Inputs, seeds: Sequence[Tensor | None]) -> Tensor:
        """The latents after the self-attends.

        A latent dropped by latent dropout is hidden from all other latents, in every layer.
        """
        count, share = z.shape[1], self.config.latent_dropout
        visible = given.visible if given.padded else None
        visible = None if visible is None else visible[:, -count:]
        drops = given.seeds is not None and share > 0
        if drops:
            visible = _hide_last(visible, count, share, branch(given.seeds, -1))
        turn = self.self_turn(given.positions[:, -count:])
        blocks = self._blocks(visible, count, count, drops)
        for block, block_seeds in zip(self.self_attends, seeds, strict=True):
            options = {"visible": visible, "own": drops, "blocks": blocks, "seeds": block_seeds}
            z = self._run(block, z, None, (turn, turn), **options)
        return z

    def cross_turn(self, positions: Tensor) -> Rotation | None:
        """Rotation of the cross-attend's queries and keys at positions (B, T, A); None if not rotary."""
        return self._turn(positions, self.config.input_width // self.config.cross_head_count)


def _hide_last(visible: Tensor | None, count: int, share: float, seeds: Tensor) -> Tensor:
    """Also hides a random share of the last `count` inputs: (B, W), or (B, count) if there was no mask."""
    left = kept(seeds, share, count)
    return left if visible is None else visible & F.pad(left, (visible.shape[1] - count, 0), value=True)


def _keep_some(seen: Seen, chances: Tensor, keep: int) -> Seen:
    """Keeps, in each example, the `keep` earlier inputs with the lowest chances (B, M - N), and the last N.

    The order of the earlier ones does not matter, since they all precede every latent.
    """
    (batch, inputs), before = seen.tokens.shape, chances.shape[1]
    chosen = chances.argsort(dim=1, stable=True)[:, :keep]
    if seen.visible is not None:
        chosen = chosen.sort(dim=1).values  # padding stays contiguous, so whole blocks are hidden or visible
    last = torch.arange(before, inputs, device=seen.tokens.device).expand(batch, -1)
    index = torch.cat((chosen, last), dim=1)  # (B, keep + N)
    positions = seen.positions.expand(batch, -1, -1)
    return Seen(
        seen.tokens.gather(1, index),
        positions.gather(1, index[..., None].expand(-1, -1, positions.shape[-1])),
        None if seen.visible is None else seen.visible.gather(1, index),
    )


def _own_part(seen: Seen, count: int, share: Share) -> Seen:
    """The inputs that this process attends to; the last `count` belong to the last process."""
    tokens, positions, visible = seen
    inputs = tokens.shape[1]
    begin, end = ((inputs - count) * rank // share.size for rank in (share.rank, share.rank + 1))
    part = slice(begin, inputs if share.rank == share.size - 1 else end)
    if visible is not None:
        visible = F.pad(visible, (inputs - visible.shape[1], 0), value=True)[:, part]
    return Seen(tokens[:, part], positions[:, part], visible)
