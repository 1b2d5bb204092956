"""The command: which benchmarks, at which sizes; JSON lines on standard output, then a table."""

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
import tyro

from benchmarks import evaluation, generation, kernels, loading, training
from benchmarks.measure import Figure, show_table
from benchmarks.sizes import SIZES
from perceiver_ar import PerceiverAR
from perceiver_ar.architectures import compile_blocks
from perceiver_ar.device import Precision, best_dtype, pick_device
from perceiver_ar.quantized import quantize
from perceiver_ar.strict import unknown

KINDS = ("train", "attention", "generate", "evaluate", "load")


def main(
    names: tyro.conf.Positional[tuple[str, ...]] = (),
    device: str = "auto",
    repeats: int = 10,
    compile: bool = False,
    cross_dropout: float = 0.0,
    plain: bool = False,
    profile: bool = False,
    fp8: bool = False,
    precision: Precision = "auto",
    batch: tuple[int, ...] = (1, 16, 64),
    prompt: tuple[int, ...] = (),
    tokens: int | None = None,
    mode: generation.Mode = "cached",
    int8: bool = False,
) -> None:
    """Time the library: one JSON line per measurement, and a table at the end.

    Args:
        names: Benchmarks (train, attention, generate, evaluate, load) and sizes (laptop, 8k, 12k-60, 131k,
            1m, 8m). Sizes alone: train at these sizes. Benchmarks alone: at the size laptop on a CPU, at 8k
            on a GPU, generate there at 12k-60. Neither: all benchmarks.
        device: Where to compute: auto, cpu, cuda, mps ...
        repeats: Number of timed repetitions, after a warm-up (not for generate).
        compile: Compile each block.
        cross_dropout: train: fraction of inputs that the cross-attention drops.
        plain: train: without the model's fast paths, for comparison with them. (TFLOP/s count the arithmetic
            of this version, some of which the fast paths save.)
        profile: train: also show where the time goes.
        fp8: train: compute linear maps with 8-bit floats, to see what that would gain.
        precision: train: auto, float32 or bf16.
        batch: generate: number of rows generated at once; several values are timed one after the other.
        prompt: generate: tokens of the prompt; several values likewise. Default: half the context.
        tokens: generate: number of tokens. Default: through four refreshes, or 24 without a cache.
        mode: generate: with a cache, or with all latents recomputed at every step (the paper's "no caching").
        int8: generate: with the blocks' weights in 8 bits.
    """
    kinds, sizes = choose(names)
    asked = {"repeats": (repeats,), "batch": batch, "prompt": prompt, "tokens": (tokens,)}
    for option, values in asked.items():
        least = 5 if option == "tokens" else 1
        if any(value is not None and value < least for value in values):
            raise ValueError(f"--{option} must be at least {least}.")
    where = pick_device(device)
    train = {
        "compiled": compile,
        "cross_dropout": cross_dropout,
        "plain": plain,
        "profiled": profile,
        "fp8": fp8,
        "precision": precision,
    }
    drawn = {
        "rows": batch,
        "prompts": prompt,
        "int8": int8,
        "tokens": tokens,
        "mode": mode,
        "compiled": compile,
    }
    figures = []
    try:
        for kind in kinds:
            for figure in run(kind, sizes, where, repeats, train, drawn):
                print(figure.line(), flush=True)
                figures.append(figure)
    finally:
        show_table(figures)


def choose(names: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Benchmarks and sizes among the names."""
    for name in names:
        if name not in KINDS and name not in SIZES:
            raise ValueError(unknown("benchmark or size", name, (*KINDS, *SIZES)))
    kinds, sizes = [n for n in names if n in KINDS], [n for n in names if n in SIZES]
    if sizes and kinds == ["attention"]:
        raise ValueError("attention is timed at shapes of its own: give no size.")
    return kinds or (["train"] if sizes else list(KINDS)), sizes


def run(
    kind: str,
    sizes: list[str],
    device: torch.device,
    repeats: int,
    train: dict[str, Any],
    drawn: dict[str, Any],
) -> Iterator[Figure]:
    """All figures of one benchmark."""
    if kind == "attention":
        yield from kernels.time_attention(device, repeats)
        return
    usual = "laptop" if device.type != "cuda" else "12k-60" if kind == "generate" else "8k"
    for name in sizes or [usual]:
        size = SIZES[name]
        if kind == "train":
            yield training.time_training(name, size, device, repeats, **train)
        elif kind == "generate":
            yield from draw(name, device, **drawn)
        elif kind == "evaluate":
            yield from evaluation.time_evaluation(name, size, device, repeats, train["compiled"])
        else:
            yield loading.time_loading(name, size, repeats)


def draw(
    name: str,
    device: torch.device,
    rows: tuple[int, ...],
    prompts: tuple[int, ...],
    int8: bool,
    **settings: Any,
) -> Iterator[Figure]:
    """Generation at several batch sizes, after several prompts, by one model."""
    config = SIZES[name].model
    with device:
        model = PerceiverAR(config).to(best_dtype(device)).eval()
    if int8:
        quantize(model)
    if settings["compiled"] and settings["mode"] == "no-caching":
        compile_blocks(model)
    for count, given in itertools.product(rows, prompts or (config.context // 2,)):
        case = f"{name}, int8" if int8 else name
        yield from generation.time_generation(case, model, count, given, **settings)


if __name__ == "__main__":
    try:
        tyro.cli(main, prog="python -m benchmarks", config=(tyro.conf.FlagCreatePairsOff,))
    except ValueError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        sys.exit(2)
