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
from perceiver_ar.device import best_dtype, pick_device
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
    batch: tuple[int, ...] = (1, 16, 64),
    prompt: tuple[int, ...] = (),
    tokens: int | None = None,
    mode: generation.Mode = "cached",
    int8: bool = False,
) -> None:
    """Times the library: one JSON line a figure, and a table at the end.

    Args:
        names: Benchmarks (train, attention, generate, evaluate, load) and sizes (laptop, 8k, 12k-60,
            131k, 1m). Sizes alone: their training. Benchmarks alone: on a CPU at the size laptop, on a
            GPU at 8k and generation at 12k-60. Nothing: all benchmarks.
        device: auto, cpu, cuda, mps ...
        repeats: How often each is timed, once it is warm.
        compile: Compile each block.
        cross_dropout: train: share of inputs that the cross-attend drops.
        plain: train: without the fast paths of the model, which is what they are compared with. (TFLOP/s
            count what it computes, which fast paths may save.)
        profile: train: also show where the time goes.
        fp8: train: linear maps by products of eight-bit floats, to see what they would give.
        batch: generate: rows drawn at once; several are timed one after the other.
        prompt: generate: tokens of the prompt, the same. Default: half the context.
        tokens: generate: how many to draw. Default: through four refreshes, or 24 without a cache.
        mode: generate: with a cache, or all latents of every step computed anew (the paper's "no caching").
        int8: generate: with the blocks' weights in eight bits.
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
