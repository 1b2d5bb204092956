"""Perceiver AR: one causal cross-attend from many inputs to few latents, then a deep stack on those.

Letters: B batch, M inputs (context), N latents, C channels, E input width, H heads, K head width,
L layers, V vocabulary, A position axes.

Notable:
- latents are the last N inputs, and N is a choice of each call, not of the weights;
- positions are an explicit input, padding is told by lengths, and no token is special;
- cross-attend dropout picks the inputs that it keeps before anything is computed from them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from perceiver_ar.attention import Rotation, attend, rotate, rotation
from perceiver_ar.config import ModelConfig
from perceiver_ar.embedding import AdaptiveOutput, InputEmbedding, Output
from perceiver_ar.layers import Linear, Vectors, look_up
from perceiver_ar.pretrained import Pretrained

Turns = tuple[Rotation | None, Rotation | None]
"""Of the queries and of the keys; None where positions are not rotary."""


class MLP(nn.Module):
    """Four times as wide inside, with a squared ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.widen = Linear(channels, 4 * channels)
        self.narrow = Linear(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.relu(self.widen(x)).square())


class Block(nn.Module):
    """Attention, then an MLP, each behind a layer norm and with a residual to the latents.

    With an input width it is a cross-attend: keys and values come from the inputs, and queries,
    keys and values have the inputs' width. Without, it is a self-attend.
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
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        z: Tensor,
        inputs: Tensor | None,
        turns: Turns,
        visible: Tensor | None,
        own: bool = False,
        tokens: Tensor | None = None,
    ) -> Tensor:
        q, k, v = self.project(z, inputs, turns, tokens)
        return self.update(z, attend(q, k, v, visible, own))

    def project(
        self, z: Tensor, inputs: Tensor | None, turns: Turns, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the latents (B, N, C); keys and values of the inputs (B, M, E) or the latents."""
        latents = self.norm(z)
        source = latents if inputs is None else inputs
        return self.ask(latents, turns[0]), *self.keys_values(source, turns[1], tokens)

    def ask(self, latents: Tensor, turn: Rotation | None) -> Tensor:
        """Queries of the latents behind their layer norm."""
        return self._heads(self.query(latents), turn)

    def keys_values(
        self, inputs: Tensor, turn: Rotation | None, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Those of the inputs; in a self-attend, of the latents behind their layer norm.

        Given tokens (B, M), inputs are the vectors (V, E) of all there are: each is projected once.
        """
        source = inputs if self.input_norm is None else self.input_norm(inputs)
        k, v = self.key(source), self.value(source)
        if tokens is not None:
            k, v = look_up(k, tokens), look_up(v, tokens)
        return self._heads(k, turn), self._heads(v, None)

    def _heads(self, x: Tensor, turn: Rotation | None) -> Tensor:
        x = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, T, H * K) -> (B, H, T, K)
        return x if turn is None else rotate(x, turn)

    def update(self, z: Tensor, attended: Tensor) -> Tensor:
        """Adds what was attended to, (B, H, N, K), and then the MLP of the sum."""
        z = z + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return z + self.dropout(self.mlp(self.mlp_norm(z)))


class Queries(nn.Module):
    """What the latents are before the cross-attend: made from the last N inputs, or learned."""

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
    """0, 1, ... from the first real latent on, so that adding a latent renumbers none: (B or 1, N)."""
    numbers = torch.arange(count, device=device)[None]
    if lengths is None:
        return numbers
    return (numbers - (count - lengths[:, None]).clamp(min=0)).clamp(min=0)


class PerceiverAR(Pretrained):
    """Perceiver AR (Hawthorne, Jaegle et al., ICML 2022)."""

    config_class = ModelConfig
    model_type = "perceiver_ar"
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
    ) -> Any:
        """Logits at the last N inputs, (B, N, V); or, given the targets (B, N), their Scores.

        tokens (B, M) are padded on the left where lengths (B,) are below M; what comes out for the
        padding itself means nothing. Lengths are best left on the CPU, where they can be looked at for
        nothing: without padded latents the self-attends are faster. positions (B, M) or (B, M, A)
        default to 0, 1, ... from the first real token. latents defaults to the config's, and to the
        number of targets.
        """
        # One entry for logits and loss, since DDP and FSDP only see calls of forward.
        if targets is not None:
            _check_targets(tokens, targets, latents)
            latents, targets = targets.shape[1], targets.long()
        count = self._count(tokens, latents)
        padded, tokens = _some_padded(tokens, lengths, count), tokens.long()
        lengths = None if lengths is None else lengths.to(tokens.device, non_blocking=tokens.is_cuda)
        positions = self.place(tokens, positions, lengths)
        z = self.norm(self._latents(tokens, positions, count, lengths, padded))
        if targets is None:
            return self.output(z, self.embedding.tokens)
        return self.output.score(z, targets, self.embedding.tokens)

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

    def _latents(
        self, tokens: Tensor, positions: Tensor, count: int, lengths: Tensor | None, padded: bool
    ) -> Tensor:
        """The latents, of which some may be padded, after all attends, (B, N, C)."""
        config = self.config
        visible = None if lengths is None else _real(tokens, lengths)
        latents_visible = visible[:, -count:] if visible is not None and padded else None
        latents_positions = positions[:, -count:]
        drop_inputs = self.training and config.cross_dropout > 0
        drop_latents = self.training and config.latent_dropout > 0
        if drop_latents:
            latents_visible = _hide_last(latents_visible, tokens, count, config.latent_dropout)
        if drop_inputs:
            if config.cross_dropout_scope == "all":
                keep = round((tokens.shape[1] - count) * (1 - config.cross_dropout))
                tokens, positions, visible = _keep_some(tokens, positions, visible, count, keep)
            visible = _hide_last(visible, tokens, count, config.cross_dropout)

        inputs, of_table = self.embedding.table, tokens
        if inputs is None or 2 * len(inputs) > tokens.numel():
            inputs, of_table = self.embedding(tokens, positions), None  # (B, M, E)
            last = inputs[:, -count:]
        else:
            last = self.embedding(tokens[:, -count:], latents_positions)
        z = self.queries(last, latent_numbers(count, lengths, tokens.device))
        turns = self.cross_turn(latents_positions), self.cross_turn(positions)
        z = self._run(self.cross_attend, z, inputs, turns, visible, False, of_table)
        turn = self.self_turn(latents_positions)
        for block in self.self_attends:
            z = self._run(block, z, None, (turn, turn), latents_visible, drop_latents)
        return z

    def cross_turn(self, positions: Tensor) -> Rotation | None:
        """How far the cross-attend turns what stands at these positions (B, T, A)."""
        return self._turn(positions, self.config.input_width // self.config.cross_head_count)

    def self_turn(self, positions: Tensor) -> Rotation | None:
        """The same of every self-attend."""
        return self._turn(positions, self.config.channels // self.config.heads)

    def _turn(self, positions: Tensor, head_width: int) -> Rotation | None:
        config = self.config
        if config.positions != "rotary":
            return None
        wavelength = config.max_wavelength or config.context
        return rotation(positions[..., 0], head_width, config.rotary_fraction, wavelength)

    def _run(self, block: nn.Module, *args: object) -> Tensor:
        if self.training and self.config.checkpoint_activations:
            return checkpoint(block, *args, use_reentrant=False)
        return block(*args)


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
    """Whether padding may reach into the last few inputs, once the lengths are found to be right."""
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


def _real(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Which inputs are not padding, (B, M)."""
    return torch.arange(tokens.shape[1], device=tokens.device) >= tokens.shape[1] - lengths[:, None]


def _hide_last(visible: Tensor | None, tokens: Tensor, count: int, share: float) -> Tensor:
    """Hides a random share of the last few inputs; (B, count), or as many as were told apart before."""
    kept = torch.rand(tokens.shape[0], count, device=tokens.device) >= share
    return kept if visible is None else visible & F.pad(kept, (visible.shape[1] - count, 0), value=True)


def _keep_some(
    tokens: Tensor, positions: Tensor, visible: Tensor | None, count: int, keep: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A random choice of inputs, then the last few, in each example.

    Which of those chosen comes first does not matter: all stand before every latent.
    """
    batch, inputs = tokens.shape
    before = inputs - count
    chosen = torch.rand(batch, before, device=tokens.device).argsort(dim=1)[:, :keep]
    last = torch.arange(before, inputs, device=tokens.device).expand(batch, -1)
    index = torch.cat((chosen, last), dim=1)  # (B, keep + N)
    positions = positions.expand(batch, -1, -1)
    return (
        tokens.gather(1, index),
        positions.gather(1, index[..., None].expand(-1, -1, positions.shape[-1])),
        None if visible is None else visible.gather(1, index),
    )


def build(config: ModelConfig) -> PerceiverAR:
    """The module that a config describes."""
    return PerceiverAR(config)


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """Compiles each block, as torch.compile does; those of one shape share what is compiled.

    Training, evaluation, padding and changing lengths each need it once more: more often, together,
    than torch would compile before it goes on without a word, and without compiling.
    """
    import torch._dynamo  # it takes a second

    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = max(64, dynamo.recompile_limit)
    for module in model.modules():
        if isinstance(module, Block):
            module.compile(**options)


def parameter_count(config: ModelConfig) -> int:
    """How many parameters the module of a config has, without making them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config).parameters())
