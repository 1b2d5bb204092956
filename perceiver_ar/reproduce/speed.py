"""How fast three architectures train, by context, until memory runs out."""

from typing import Any

from perceiver_ar.config import AnyModelConfig, ModelConfig, TransformerConfig, TransformerXLConfig
from perceiver_ar.presets import BYTES
from perceiver_ar.reproduce.cells import timed
from perceiver_ar.reproduce.study import Bench, Cell, Row, Scale, Study


def _models(context: int, latents: int, **sizes: Any) -> dict[str, AnyModelConfig]:
    """Three that see as much, with as many layers of one width."""
    memory: dict[str, Any] = {"memory": context - latents, "evaluation_memory": context - latents}
    return {
        "Transformer": TransformerConfig(BYTES, context, **sizes),
        "Transformer-XL": TransformerXLConfig(BYTES, latents, **memory, **sizes),
        "Perceiver AR": ModelConfig(BYTES, context, latents, **sizes),
    }


def _speed(bench: Bench) -> list[Cell]:
    """Longer and longer contexts; what does not fit is a result, too."""
    sizes: dict[str, int] = {"channels": 1024, "heads": 16, "layers": 6}
    contexts, latents, batch = [1024 << i for i in range(0, 11, 2)], 1024, 4
    if bench.scale == "smoke":
        sizes, contexts, latents, batch = {"channels": 16, "heads": 1, "layers": 1}, [16, 32], 16, 2
    return [
        timed({"model": name, "context": context}, model, batch, bench)
        for context in contexts
        for name, model in _models(context, latents, **sizes).items()
    ]


def _reaches_furthest(rows: list[Row], scale: Scale) -> bool:
    """The longest context is Perceiver AR's, and it is the fastest from four times its latents on."""
    fits: dict[Any, float] = {(r.about["model"], r.about["context"]): r.found["steps/s"] or 0.0 for r in rows}
    ours = {context: rate for (name, context), rate in fits.items() if name == "Perceiver AR"}
    theirs = [(context, rate) for (name, context), rate in fits.items() if name != "Perceiver AR" and rate]
    faster = all(rate < ours[context] for context, rate in theirs if context >= 4 * min(ours))
    longest = max((context for context, rate in ours.items() if rate), default=0)
    return faster and longest > max((context for context, _ in theirs), default=0)


STUDIES = [
    Study(
        "speed",
        "figure 3",
        "Perceiver AR trains faster than a Transformer and Transformer-XL, and at contexts for which these "
        "run out of memory.",
        "Six layers of 1,024 channels, batches of 4 sequences, bf16, each block compiled, no activations "
        "recomputed, AdamW. The Transformer learns from all its inputs, the others from the last 1,024. "
        "Transformer-XL is given its memory, which is the rest of the context, as the step before would have "
        "left it. All use fused attention kernels, but Transformer-XL's scores by distance are written to "
        "memory, which no kernel avoids. Contexts grow fourfold up to 1,048,576, or until memory runs out.",
        _speed,
        _reaches_furthest,
        ("context", "steps/s"),
    ),
]
