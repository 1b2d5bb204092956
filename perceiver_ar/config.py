"""Every setting on one page: frozen dataclasses, checked when they are made.

Letters: B batch, M inputs (context), N latents, C channels, E input width, H heads, K head width,
L layers, V vocabulary, A position axes.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, get_args

from perceiver_ar.strict import Config, require, unknown

FORMAT_VERSION = 1
"""Of config.json. Raise it when a field changes its meaning, and keep reading the version before."""


Positions = Literal["rotary", "sinusoidal", "learned", "axial", "none"]
Queries = Literal["linear", "inputs", "mlp", "learned", "learned-shared"]


class Latents:
    """For the configs of all models: how many latents, that is, outputs at the last inputs, a call has."""

    @property
    def most_latents(self: "AnyModelConfig") -> int:
        """No call can have more than training has."""
        return self.latents

    def check_latents(self: "AnyModelConfig", latents: int | None) -> int:
        """As many as are asked for, if that can be; by default as many as in training."""
        if latents is not None and not 1 <= latents <= self.most_latents:
            raise ValueError(f"latents must be from 1 to {self.most_latents}, but is {latents}.")
        return self.latents if latents is None else latents


@dataclass(frozen=True)
class ModelConfig(Config, Latents):
    """Architecture of a Perceiver AR. Built-in defaults: the paper's (appendix F.1), but without dropout."""

    vocab_size: int
    """V: number of token ids, special ones included (bytes: 256 + 3). A store brings its own."""
    context: int
    """M: maximum number of inputs of the cross-attention."""
    latents: int
    """N: number of latents in training; each call can choose another, up to the context (with
    learned queries: up to N)."""
    channels: int = 1024
    """C: width of the latents."""
    heads: int = 16
    """Attention heads in each self-attention layer."""
    layers: int = 12
    """L: number of causal self-attention layers after the cross-attention."""
    input_channels: int | None = None
    """E: width of the embedded inputs, and of the cross-attention's queries, keys and values. Default: C."""
    cross_heads: int | None = None
    """Attention heads in the cross-attention. Default: as many as in the self-attention layers."""

    positions: Positions = "rotary"
    """rotary: applied to queries and keys; sinusoidal (fixed), learned, or axial (one learned table per
    axis): added to the inputs; none."""
    rotary_fraction: float = 0.5
    """Fraction of each head's channels to which rotary positions are applied."""
    max_wavelength: float | None = None
    """Longest wavelength of rotary (default: the context) or sinusoidal (default: 10,000) positions."""
    axes: tuple[int, ...] = ()
    """Rows of each table of axial positions, such as 66 66 5 for an image's column, row and colour."""

    queries: Queries = "linear"
    """How the latents are initialized. linear: a linear map of the last N inputs; inputs: those inputs
    themselves; mlp: the linear map, then three layers with GELU; learned: one learned vector per latent;
    learned-shared: the same learned vector for all."""
    tied: bool = False
    """Share the token embedding's weights with the output layer."""
    cutoffs: tuple[int, ...] = ()
    """Token ids at which the bands of adaptive input embeddings and of the adaptive softmax begin, for
    large vocabularies sorted by frequency, such as 20000 40000 200000. Default: no bands."""
    cutoff_factor: int = 4
    """Factor by which each band of adaptive embeddings is narrower than the one before."""

    residual_dropout: float = 0.0
    """Dropout rate on the output of each attention and MLP."""
    latent_dropout: float = 0.0
    """Fraction of latents hidden from all later ones, alike in all self-attention layers."""
    cross_dropout: float = 0.0
    """Fraction of inputs hidden from the cross-attention; those before the last N are not computed at all."""
    cross_dropout_scope: Literal["all", "latents", "prefix"] = "all"
    """Inputs that cross-attention dropout may hide: all; latents: the last N; prefix: those before, which
    needs no mask."""
    checkpoint_activations: bool = False
    """Recompute each block in the backward pass instead of storing activations: less memory, more time."""

    model_type: ClassVar[str] = "perceiver_ar"

    @property
    def unbounded(self) -> bool:
        """Whether positions mean something beyond the context; axial ones are always given."""
        return self.positions in ("rotary", "axial", "none")

    @property
    def most_latents(self) -> int:
        """As many as there are inputs, but each learned query is one latent's own."""
        return self.latents if self.queries == "learned" else self.context

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (
            "vocab_size",
            "context",
            "latents",
            "channels",
            "heads",
            "input_width",
            "cross_head_count",
        ):
            require(getattr(self, name) >= 1, f"{name} must be at least 1.")
        require(self.layers >= 0, "layers cannot be negative.")
        require(
            self.latents <= self.context,
            f"latents ({self.latents}) cannot exceed the context ({self.context}): lower latents.",
        )
        require(
            self.channels % self.heads == 0,
            f"channels ({self.channels}) must be divisible by heads ({self.heads}).",
        )
        require(
            self.input_width % self.cross_head_count == 0,
            f"input_channels ({self.input_width}) must be divisible by cross_heads "
            f"({self.cross_head_count}).",
        )
        for name in ("residual_dropout", "latent_dropout", "cross_dropout"):
            require(0 <= getattr(self, name) < 1, f"{name} must be at least 0 and below 1.")
        self._check_positions()
        self._check_embedding()

    def _check_positions(self) -> None:
        if self.positions == "rotary":
            require(
                0 < self.rotary_fraction <= 1,
                f"rotary_fraction must be above 0 and at most 1, but is {self.rotary_fraction}.",
            )
            narrowest = min(self.channels // self.heads, self.input_width // self.cross_head_count)
            require(
                int(narrowest * self.rotary_fraction) >= 2,
                f"rotary_fraction {self.rotary_fraction} of a head width of {narrowest} leaves no pair "
                "of channels to turn: use fewer heads or a larger fraction.",
            )
        if self.positions == "sinusoidal":
            require(
                self.input_width % 2 == 0 and self.input_width >= 4,
                f"sinusoidal positions need an even input width of 4 or more, but it is {self.input_width}.",
            )
        require(self.max_wavelength is None or self.max_wavelength >= 1, "max_wavelength must be at least 1.")
        require(
            (self.positions == "axial") == bool(self.axes),
            "axial positions and axes go together: give the rows of each table, such as axes=(66, 66, 5), "
            "with positions='axial', and no axes otherwise.",
        )
        require(all(rows >= 1 for rows in self.axes), "each of the axes needs at least 1 row.")

    def _check_embedding(self) -> None:
        for option, wanted in (("tied", self.tied), ("queries='inputs'", self.queries == "inputs")):
            require(
                not wanted or self.input_width == self.channels,
                f"{option} needs input_channels ({self.input_width}) equal to channels ({self.channels}).",
            )
        bounds = (0, *self.cutoffs, self.vocab_size)
        require(
            all(low < high for low, high in itertools.pairwise(bounds)),
            f"cutoffs {self.cutoffs} must grow, above 0 and below vocab_size ({self.vocab_size}).",
        )
        require(self.cutoff_factor >= 1, "cutoff_factor must be at least 1.")
        narrowest = min(self.channels, self.input_width) // self.cutoff_factor ** len(self.cutoffs)
        require(
            narrowest >= 1, "the last band of adaptive embeddings would have no channels: use fewer cutoffs."
        )
        require(not (self.tied and self.cutoffs), "adaptive embeddings (cutoffs) cannot be tied.")

    @property
    def input_width(self) -> int:
        """E, with its default filled in."""
        return self.channels if self.input_channels is None else self.input_channels

    @property
    def cross_head_count(self) -> int:
        """Heads of the cross-attend, with the default filled in."""
        return self.heads if self.cross_heads is None else self.cross_heads


@dataclass(frozen=True)
class TransformerConfig(Config, Latents):
    """A decoder-only Transformer: Perceiver AR's self-attention stack, over all inputs."""

    vocab_size: int
    """V: number of token ids, special ones included. A store brings its own."""
    context: int
    """M: maximum number of inputs."""
    channels: int = 1024
    """C: width of the model."""
    heads: int = 16
    """Attention heads in each layer."""
    layers: int = 12
    """L: number of self-attention layers."""
    positions: Positions = "rotary"
    """rotary: applied to queries and keys; sinusoidal (fixed), learned, or axial (one learned table per
    axis): added to the inputs; none."""
    rotary_fraction: float = 0.5
    """Fraction of each head's channels to which rotary positions are applied."""
    max_wavelength: float | None = None
    """Longest wavelength of rotary (default: the context) or sinusoidal (default: 10,000) positions."""
    axes: tuple[int, ...] = ()
    """Rows of each table of axial positions."""
    tied: bool = False
    """Share the token embedding's weights with the output layer."""
    residual_dropout: float = 0.0
    """Dropout rate on the output of each attention and MLP."""
    checkpoint_activations: bool = False
    """Recompute each block in the backward pass instead of storing activations: less memory, more time."""

    model_type: ClassVar[str] = "transformer"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.layers >= 1, "layers must be at least 1.")
        self.stack()

    def stack(self) -> ModelConfig:
        """Perceiver AR with as many latents as inputs, which has all of this but a cross-attend."""
        return ModelConfig(**self.to_dict(), latents=self.context, queries="inputs")

    @property
    def latents(self) -> int:
        """Every input has an output."""
        return self.context

    @property
    def unbounded(self) -> bool:
        """Whether positions mean something beyond the context."""
        return self.stack().unbounded


@dataclass(frozen=True)
class TransformerXLConfig(Config, Latents):
    """Transformer-XL (Dai et al., 2019): segments that attend to the states of those before them."""

    vocab_size: int
    """V: number of token ids, special ones included. A store brings its own."""
    segment: int = 1024
    """N: inputs per segment, which are computed and trained on at once."""
    memory: int = 384
    """Number of states before a segment that it attends to in training."""
    evaluation_memory: int = 1600
    """Number of states before a segment that it attends to in evaluation and generation."""
    channels: int = 1024
    """C: width of the model."""
    heads: int = 16
    """Attention heads in each layer."""
    layers: int = 18
    """L: number of self-attention layers."""
    cutoffs: tuple[int, ...] = ()
    """Token ids at which the bands of adaptive embeddings begin. Default: plain embeddings. The output shares
    the embedding's weights either way."""
    cutoff_factor: int = 4
    """Factor by which each band of adaptive embeddings is narrower than the one before."""
    residual_dropout: float = 0.0
    """Dropout rate on the output of each attention and MLP."""
    memory_dropout: float = 0.0
    """Fraction of the memory that is hidden from a whole segment in training."""
    checkpoint_activations: bool = False
    """Recompute each block in the backward pass instead of storing activations: less memory, more time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(min(self.memory, self.evaluation_memory) >= 0, "a memory cannot be negative.")
        require(self.layers >= 1 and self.segment >= 1, "layers and segment must be at least 1.")
        require(
            self.channels % 2 == 0 and self.channels >= 4,
            f"distances need an even number of channels, 4 or more, but there are {self.channels}.",
        )
        require(0 <= self.memory_dropout < 1, "memory_dropout must be at least 0 and below 1.")
        self.stack()

    def stack(self) -> ModelConfig:
        """A Perceiver AR of these sizes, for the parts that are the same."""
        same = ("vocab_size", "channels", "heads", "layers", "cutoffs", "cutoff_factor", "residual_dropout")
        shared = {name: getattr(self, name) for name in same}
        tied = not self.cutoffs
        return ModelConfig(context=self.context, latents=self.segment, positions="none", tied=tied, **shared)

    @property
    def latents(self) -> int:
        """Each input of a segment has an output."""
        return self.segment

    @property
    def context(self) -> int:
        """M: the most inputs that a call makes use of."""
        return self.segment + max(self.memory, self.evaluation_memory)

    model_type: ClassVar[str] = "transformer_xl"
    positions: ClassVar[Positions] = "none"
    axes: ClassVar[tuple[int, ...]] = ()
    unbounded: ClassVar[bool] = True


AnyModelConfig = ModelConfig | TransformerConfig | TransformerXLConfig


Parallel = Literal["ddp", "zero1", "fsdp", "hybrid"]


@dataclass(frozen=True)
class TrainConfig(Config):
    """How the model is trained. Built-in defaults: the paper's (appendix F.1)."""

    steps: int = 100_000
    """Number of optimizer steps."""
    batch_size: int = 128
    """Sequences per step, over all processes."""
    micro_batch_size: int | None = None
    """Sequences that a process computes at once. Default: its whole share of the batch. A single process
    halves this automatically when it runs out of memory."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: orthogonalized steps for all linear maps but the output layer, AdamW for the rest."""
    learning_rate: float = 3e-4
    """Peak learning rate."""
    warmup_steps: int = 10_000
    """Steps of linear learning rate warm-up."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or cosine decay to 0."""
    cosine_steps: int | None = None
    """Steps at the end over which cosine decays; constant before. Default: all after the warm-up."""
    betas: tuple[float, ...] = (0.9, 0.999)
    """Adam's beta1 and beta2. (For beta1 the paper prints 0.1; the authors' code has 0.9.)"""
    epsilon: float = 1e-8
    """Adam's epsilon."""
    weight_decay: float = 0.0
    """Weight decay, applied to matrices only."""
    clip_norm: float = 1.0
    """Maximum global norm of the gradient, which is scaled down if it is larger."""
    z_loss: float = 1e-4
    """Weight of the z-loss log(z)^2, which keeps the softmax's normalizer near 1."""
    label_smoothing: float = 0.0
    """Fraction of each target's probability that is spread evenly over the vocabulary."""
    ema: float = 0.0
    """Decay of a moving average of the weights, such as 0.999. If set, the average is evaluated and saved."""
    latents_drawn: tuple[int, ...] = ()
    """Numbers of latents, one of which is drawn at random for each step, so that one model is good at all.
    Default: always model.latents."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """auto: bf16 on GPUs that support it, float32 elsewhere. CPUs with instructions for bf16 (avx512_bf16 in
    /proc/cpuinfo) train about twice as fast with it."""
    compile: bool = False
    """Compile each block: faster on a GPU, after about a minute of compiling."""
    parallel: Parallel = "ddp"
    """What is sharded over processes under torchrun. ddp: nothing; zero1: the optimizer's state; fsdp:
    weights and gradients too; hybrid: the same, but only within each machine."""
    context_parallel: int = 1
    """Under torchrun: number of processes that share the inputs of each sequence, for very long contexts."""
    timeout_minutes: float = 10.0
    """Under torchrun: minutes without progress after which the hanging process is named and all stop."""
    deterministic: bool = False
    """Give up some speed so that a resumed run on a GPU is bit-identical to an uninterrupted one."""
    log_every: int = 10
    """Steps between log lines, on screen and in metrics.jsonl."""
    checkpoint_every: int = 1000
    """Steps between checkpoints."""
    keep: int = 2
    """Number of checkpoints to keep, the newest ones."""
    evaluate_every: int = 0
    """Steps between evaluations on the validation split, by which the best model is saved. 0: no evaluations;
    the newest model is saved."""
    patience: int = 0
    """Stop after this many evaluations in a row without improvement. 0: never."""
    logger: Literal["none", "tensorboard", "wandb", "trackio"] = "none"
    """Also send metrics to this logger, besides metrics.jsonl."""
    seed: int = 0
    """Seed of the initial weights, the data order and dropout."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("steps", "batch_size", "log_every", "checkpoint_every", "keep"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1.")
        for name in ("warmup_steps", "evaluate_every", "patience", "weight_decay", "z_loss", "seed"):
            require(getattr(self, name) >= 0, f"{name} cannot be negative.")
        for name in ("label_smoothing", "ema"):
            require(0 <= getattr(self, name) < 1, f"{name} must be at least 0 and below 1.")
        require(
            self.micro_batch_size is None or self.micro_batch_size >= 1,
            "micro_batch_size must be at least 1.",
        )
        require(0 < self.learning_rate < float("inf"), "learning_rate must be above 0, and finite.")
        require(self.clip_norm > 0, "clip_norm must be above 0.")
        require(self.context_parallel >= 1, "context_parallel must be at least 1.")
        require(
            self.optimizer == "adamw" or self.parallel == "ddp",
            "muon needs whole matrices: set parallel to ddp.",
        )
        require(0 < self.timeout_minutes <= 10_000, "timeout_minutes must be above 0 and at most 10,000.")
        require(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "betas must be two numbers below 1."
        )
        require(
            not self.patience or self.evaluate_every > 0, "patience needs evaluations: set evaluate_every."
        )


@dataclass(frozen=True)
class Experiment(Config):
    """A task, a model and how to train it: what a preset returns."""

    name: str
    task: str
    """What the tokens mean: copy, text, image, music, audio or tokens."""
    model: AnyModelConfig
    train: TrainConfig
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the task, such as the byte order of images."""

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.model.most_latents
        require(
            all(1 <= count <= most for count in self.train.latents_drawn),
            f"latents_drawn must be numbers from 1 to {most}.",
        )
        require(
            not (self.train.label_smoothing and getattr(self.model, "cutoffs", ())),
            "label_smoothing does not go with an adaptive softmax (cutoffs): set it to 0.",
        )
        require(
            self.train.context_parallel == 1 or isinstance(self.model, ModelConfig),
            "context_parallel shares out the inputs of Perceiver AR's cross-attend: set it to 1.",
        )

    def record(self) -> dict[str, Any]:
        """As from_dict reads it, with the kind of the model."""
        data = self.to_dict()
        return data | {"model": {"model_type": self.model.model_type, **data["model"]}}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Where an older run did not record the kind of its model, the settings tell."""
        model = data.get("model")
        if isinstance(model, dict) and "model_type" in model:
            kinds = {kind.model_type: kind for kind in get_args(AnyModelConfig)}
            settings = dict(model)
            kind = str(settings.pop("model_type"))
            require(kind in kinds, unknown("type of model", kind, kinds))
            data = data | {"model": kinds[kind].from_dict(settings)}
        return super().from_dict(data)
