"""What a training will cost: arithmetic, memory and time, by sums that were fitted to one H200.

Letters: P parameters, C channels, E input width, M inputs, N latents, L layers.
"""

from dataclasses import dataclass, replace
from typing import Any

from perceiver_ar.architectures import parameter_count
from perceiver_ar.config import AnyModelConfig, Experiment, ModelConfig, Parallel, TransformerXLConfig
from perceiver_ar.flops import attention_flops, forward_flops
from perceiver_ar.strict import unknown


@dataclass(frozen=True)
class Gpu:
    """What a GPU does in bf16, in units of 10^9: bytes it holds; operations and bytes a second."""

    memory: float
    products: float
    bandwidth: float
    link: float
    """Bytes a second to the other GPUs of its machine."""


# The H200's are measured (benchmarks/RESULTS.md); others have the same share of what their makers say.
GPUS = {
    "h200": Gpu(150, 760e3, 4300, 400),
    "h100": Gpu(85, 760e3, 3000, 400),
    "a100": Gpu(85, 240e3, 1800, 270),
    "l40s": Gpu(48, 140e3, 770, 25),
    "4090": Gpu(25, 125e3, 900, 20),
}
_ATTENTION, _HALF = 0.65, 450
"""Share of the products' rate that attention reaches, and latents at which a self-attend has half of it."""
_SAVED = 36
"""Bytes a block keeps for the backward pass, of each latent and channel: its stream twice (8), what is
behind the layer norms (4), queries, keys and values (6), what was attended to (2), the MLP twice (16)."""
_MOVED = 200, 26
"""Bytes that are read and written outside of products and attention: of each latent and channel in a
block, and of each input and channel in the cross-attend."""
_OPTIMIZER = 34
"""Bytes an update reads and writes a parameter."""
_LOST = 1.07
"""How much longer a step takes than its parts: clocks fall under load, kernels start late."""
_STARTED = 1.55e-3
"""Seconds that the host takes to start a block's kernels, which is what the smallest models wait for."""
_WORKSPACE = 80e6
"""Bytes that the libraries of products take for themselves."""


@dataclass(frozen=True)
class Plan:
    """What one of the GPUs does for a step, and all of them for the run."""

    gpus: int
    batch: int
    steps: int
    parameters: int
    step_flops: float
    """Operations of a step, on all GPUs."""
    rows: int
    """Sequences of a step that one GPU has."""
    sequences: int
    """How many of them it takes at once."""
    room: float
    """Bytes of memory that one GPU has."""
    memory: dict[str, float]
    """Bytes that one GPU needs, by part."""
    seconds: dict[str, float]
    """How long a step takes, by part."""
    hours: float
    advice: list[str]
    """What to change where it does not fit."""

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    def __str__(self) -> str:
        memory, seconds = sum(self.memory.values()), self.step_seconds
        lines = [
            f"parameters   {self.parameters:,}",
            f"each step    {self.batch:,} sequences, {self.step_flops / 1e12:,.1f} TFLOP",
            f"each GPU     {self.rows:,} sequences per step, {self.sequences:,} at once",
            f"GPU memory   {memory / 1e9:.1f} of {self.room / 1e9:.0f} GB: {_listed(self.memory, 1e9)}",
            f"step time    {seconds:.4g} s: {_listed(self.seconds, seconds / 100)} %",
            f"whole run    {self.steps:,} steps, {_time(self.hours)} on {self.gpus:,} "
            f"GPU{'s' * (self.gpus > 1)}, compiled",
        ]
        if self.advice:
            lines.append(
                f"It does not fit into memory. Any of these makes it fit: {'; or '.join(self.advice)}."
            )
        return "\n".join(lines)


def _time(hours: float) -> str:
    return f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"


_PRINTED = {
    "blocks": "activations of the blocks",
    "inputs": "activations of the inputs",
    "average": "average of the weights",
    "output": "logits",
    "products": "matrix products",
    "between": "other operations",
    "starting": "waiting for kernel launches",
    "sending": "waiting for gradients of other GPUs",
}
"""What parts of memory and time are called in print, where not by their names."""


def _listed(parts: dict[str, float], unit: float) -> str:
    shown = ((_PRINTED.get(name, name), value / unit) for name, value in parts.items())
    return ", ".join(f"{name} {value:.1f}" for name, value in shown if value >= 0.05)


def plan(experiment: Experiment, gpu: str = "h200", gpus: int = 1) -> Plan:
    """The cost of a training with compiled blocks, and FlashAttention 4 where there is one."""
    if gpu not in GPUS:
        raise ValueError(unknown("GPU", gpu, sorted(GPUS)))
    model, train = experiment.model, experiment.train
    together = train.context_parallel
    if gpus < 1:
        raise ValueError(f"gpus must be at least 1, but is {gpus}.")
    if gpus % together:
        raise ValueError(f"{gpus} GPUs cannot be put into groups of {together} that share inputs.")
    if train.batch_size % (gpus // together):
        raise ValueError(
            f"batch_size must be a multiple of {gpus // together}, the GPUs that have rows of their own, "
            f"but is {train.batch_size}."
        )
    here = train.batch_size // (gpus // together)
    at_once = min(train.micro_batch_size or here, here)
    memory = _memory(experiment, at_once, gpus)
    seconds = _seconds(experiment, GPUS[gpu], here, gpus)
    return Plan(
        gpus=gpus,
        batch=train.batch_size,
        steps=train.steps,
        parameters=parameter_count(model),
        step_flops=3 * forward_flops(model) * train.batch_size,
        rows=here,
        sequences=at_once,
        room=GPUS[gpu].memory * 1e9,
        memory=memory,
        seconds=seconds,
        hours=sum(seconds.values()) * train.steps / 3600,
        advice=_advice(experiment, GPUS[gpu], memory, at_once, gpus),
    )


@dataclass(frozen=True)
class _Work:
    """What a model does with one sequence."""

    inputs: int
    """Inputs of the cross-attend that are not dropped, on one GPU of those that share them; 0 without one."""
    blocks: int
    products: float
    """Operations of the forward's matrix products that are really done."""
    long: float
    """Operations of the cross-attend's attention."""
    square: float
    """Operations of the self-attends' attention."""


def _work(config: AnyModelConfig, together: int) -> _Work:
    latents, width = config.latents, config.channels
    keys = latents + (config.memory if isinstance(config, TransformerXLConfig) else 0)
    square = config.layers * attention_flops(latents, keys, width)
    if not isinstance(config, ModelConfig):
        return _Work(0, config.layers, forward_flops(config) - square, 0.0, square)
    wide, dropped = (
        config.input_width,
        config.cross_dropout if config.cross_dropout_scope != "latents" else 0.0,
    )
    whole, here = (latents + round((config.context - latents) * (1 - dropped) / n) for n in (1, together))
    keys_values = 0 if _by_look_up(config) else here
    products = forward_flops(config) - attention_flops(latents, whole, wide) - square
    products += 4 * (keys_values - whole) * wide**2
    return _Work(here, config.layers + 1, products, attention_flops(latents, here, wide), square)


def _by_look_up(config: ModelConfig) -> bool:
    """Whether keys and values depend on tokens alone, so that each token's are computed once."""
    return config.positions in ("rotary", "none") and not config.cutoffs


def _memory(experiment: Experiment, sequences: int, gpus: int) -> dict[str, float]:
    """Bytes by part, when they are most: at the end of the forward, or in the cross-attend's backward."""
    config, train = experiment.model, experiment.train
    work, parameters = _work(config, train.context_parallel), parameter_count(config)
    state, weights = _shares(train.parallel, gpus)
    fixed = {
        "weights": 4 * parameters * weights,
        "Adam": 8 * parameters * state,  # Muon has half of it for linear maps
        "average": 4 * parameters * weights if train.ema else 0.0,
        "workspace": _WORKSPACE,
    }
    gradients = {"gradients": 4 * parameters * weights}
    places = sequences * config.latents
    each = (_SAVED + 2 * (config.residual_dropout > 0)) * config.channels * places
    kept = 4 * config.channels * places * work.blocks + each
    blocks = {"blocks": kept if config.checkpoint_activations else each * work.blocks}
    output = {"output": 10.0 * places * min(config.vocab_size, 100_000)}
    inputs = {"inputs": 0.0}
    if isinstance(config, ModelConfig):
        per = 4 if _by_look_up(config) else 10  # keys and values; inputs, too, before and behind the norm
        inputs = {"inputs": per * config.input_width * float(work.inputs) * sequences}
    one_hot = 2 * config.vocab_size * work.inputs * sequences if config.vocab_size <= 2048 else 0
    before = sequences * gpus < train.batch_size * train.context_parallel  # of other micro-batches
    forward = fixed | (gradients if before else {}) | blocks | inputs | output
    backward = fixed | gradients | {"inputs": 2 * inputs["inputs"] + one_hot}
    return max(forward, backward, key=lambda parts: sum(parts.values()))


def _shares(parallel: str, gpus: int) -> tuple[float, float]:
    """Which share of the optimizer's state, and of weights and gradients, one GPU holds."""
    within = min(gpus, 8) if parallel == "hybrid" else gpus
    return 1.0 if parallel == "ddp" else 1 / within, 1 / within if parallel in ("fsdp", "hybrid") else 1.0


def _seconds(experiment: Experiment, gpu: Gpu, sequences: int, gpus: int) -> dict[str, float]:
    """How long a step takes, by part."""
    config, train = experiment.model, experiment.train
    work, parameters = _work(config, train.context_parallel), parameter_count(config)
    again = 1 + config.checkpoint_activations / 3
    rate, square = gpu.products * 1e9, config.latents / (config.latents + _HALF)
    of_block, of_input = _MOVED
    wide = config.input_width if isinstance(config, ModelConfig) else 0
    moved = of_block * config.channels * config.latents * work.blocks + of_input * wide * work.inputs
    state, weights = _shares(train.parallel, gpus)
    found = {
        "products": 3 * again * work.products * sequences / rate,
        "attention": 3.5 * again * sequences * (work.long + work.square / square) / _ATTENTION / rate,
        "between": again * moved * sequences / gpu.bandwidth / 1e9,
        "optimizer": (_OPTIMIZER + 12 * (train.ema > 0))
        * parameters
        * min(state, weights)
        / gpu.bandwidth
        / 1e9,
    }
    sent = 2 * 4 * parameters * (gpus - 1) / gpus / gpu.link / 1e9
    beside = 2 / 3 * sum(found.values())  # gradients are sent while others are computed
    found = {name: _LOST * value for name, value in found.items()}
    started = _STARTED * work.blocks
    return found | {
        "starting": max(0.0, started - sum(found.values())),
        "sending": max(0.0, sent - beside),
    }


def _advice(
    experiment: Experiment, gpu: Gpu, memory: dict[str, float], sequences: int, gpus: int
) -> list[str]:
    """Changes each of which would make it fit, the mildest first."""
    room = 0.95 * gpu.memory * 1e9
    if sum(memory.values()) <= room:
        return []

    def fits(micro: int, on: int = gpus, recomputed: bool = False, **train: Any) -> bool:
        kind = experiment.model
        kind = replace(kind, checkpoint_activations=recomputed or kind.checkpoint_activations)
        changed = replace(experiment, model=kind, train=replace(experiment.train, **train))
        if changed.train.batch_size % (on // changed.train.context_parallel):
            return False
        return sum(_memory(changed, micro, on).values()) <= room

    smaller = next((sequences >> n for n in range(1, sequences.bit_length()) if fits(sequences >> n)), None)
    found = [] if smaller is None else [f"--train.micro-batch-size {smaller}"]
    if fits(sequences, recomputed=True):
        found.append("--model.checkpoint-activations, for a third more time")
    whole = experiment.train.optimizer == "muon"  # which needs whole matrices
    modes: list[Parallel] = ["zero1", "fsdp"] if gpus > 1 and not whole else []
    found += [f"--train.parallel {mode}" for mode in modes if fits(sequences, parallel=mode)]
    if found:
        return found
    least = "--train.parallel fsdp --train.micro-batch-size 1 --model.checkpoint-activations"
    for more in (n for n in (2, 4, 8, 16, 32, 64, 128, 256) if n >= gpus and not whole):
        if fits(1, more, True, parallel="fsdp"):
            return [f"{more} GPUs with {least}"]
        shared = isinstance(experiment.model, ModelConfig)
        if shared and fits(1, more, True, parallel="fsdp", context_parallel=more):
            return [f"{more} GPUs with {least} --train.context-parallel {more}"]
    return ["fewer inputs, latents, channels or layers"]
