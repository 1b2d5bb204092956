"""Images: bits per dimension, latents at test time, and the order of the bytes."""

import time
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch

from perceiver_ar import presets
from perceiver_ar.config import Experiment, ModelConfig
from perceiver_ar.device import best_dtype
from perceiver_ar.generation import generate
from perceiver_ar.reproduce.cells import Ask, Figures, Trained, trained
from perceiver_ar.reproduce.materials import SIZE, reordered, store
from perceiver_ar.reproduce.recipes import recipe
from perceiver_ar.reproduce.study import Bench, Cell, Found, Row, Scale, Study
from perceiver_ar.tasks.image import ImageTask, Order

BITS: Figures = {"bits/dim": itemgetter("bits_per_dim")}
NEEDS = "images: perceiver-ar prepare image FOLDER --out STORE --size 64"
SMALLER = {"small": NEEDS.replace("64", "32"), "paper": NEEDS}
THEIRS = 49_999
"""Validation images of the paper's Downsampled ImageNet, which is no longer published."""
OTHERS = "van den Oord's images, which are harder"
PAPER_BITS = {16: 3.5664, 64: 3.4946, 512: 3.4139, 1024: 3.4025, 1536: 3.3986, 2048: 3.4018, 4096: 3.5569}
PAPER_MINUTES = {16: 1.99, 64: 2.02, 512: 2.81, 1024: 3.68, 1536: 4.69, 2048: 5.88, 4096: 12.28}


def _image(bench: Bench, size: int, context: int, latents: int, steps: int) -> Experiment:
    """The model of all trainings at small and smoke."""
    small = bench.scale == "small"
    model = ModelConfig(
        259,
        context,
        latents,
        channels=512 if small else 16,
        heads=8 if small else 1,
        layers=8 if small else 1,
        positions="axial",
        axes=(size + 2, size + 2, 5),
    )
    train = recipe(bench.scale, steps, ema=0.998)
    return Experiment("image", "image", model, train, {"size": size, "order": "raster"})


def _density(bench: Bench) -> list[Cell]:
    if bench.scale == "paper":
        experiment = presets.get("imagenet64")
    else:
        size = 64 if bench.scale == "small" else SIZE
        latents = 1024 if bench.scale == "small" else 16
        experiment = _image(bench, size, 3 * size**2 + 1, latents, 6000)
    ask = Ask(
        paper={"bits/dim": 3.40}, at=OTHERS if bench.scale == "paper" else "another model, other images"
    )
    return list(trained({}, experiment, store(bench, "image"), bench, BITS, [ask], _sheets))


def _sheets(found: Trained, ask: Ask, place: Path) -> Found:
    """Samples with fewer and more latents than the model was trained with, from one seed."""
    task, latents = found.task, found.model.config.latents
    assert isinstance(task, ImageTask)
    most = min(2 * latents, found.model.config.context)
    for count in sorted({min(16, latents), latents, min(3 * latents // 2, most), most}):
        samples, _ = drawn(found, count, 16 if latents > 16 else 2)
        task.save_all(samples, place / f"latents-{count}.png")
    return {"images": float(len(found.documents))}


def drawn(found: Trained, latents: int, rows: int) -> tuple[list[np.ndarray], float]:
    """Images, and the minutes that they took."""
    model, task = found.model, found.task
    assert isinstance(task, ImageTask)
    device = model.norm.weight.device
    rough = type(model).from_pretrained(found.run / "model").to(device, best_dtype(device))
    prompt = torch.full((rows, 1), int(task.start(0)[0]), device=device)
    places = torch.from_numpy(task.positions(np.arange(task.length + 1)[None]))
    seconds = 0.0
    for count in (40, task.length):  # a few first, so that nothing is loaded for the first time
        began = time.perf_counter()
        ids = generate(
            rough,
            prompt,
            count,
            latents=latents,
            positions=places[:, : count + 1],
            allowed=lambda t: task.allowed(1 + t, model.config.vocab_size),
        ).cpu()
        seconds = time.perf_counter() - began
    return list(ids.numpy()), seconds / 60


def _by_latents(bench: Bench) -> list[Cell]:
    """One model trained with as many latents at every step, and one with numbers that change."""
    if bench.scale == "paper":
        fixed, counts = presets.get("imagenet64"), tuple(PAPER_BITS)
        stands = {count: count for count in counts}
    else:
        size, latents = (32, 256) if bench.scale == "small" else (SIZE, 16)
        fixed = _image(bench, size, 3 * size**2 + 1, latents, 2000)
        stands = {count * latents // 1024 or 1: count for count in PAPER_BITS}
    latents = fixed.model.latents
    varied = replace(fixed, train=replace(fixed.train, latents_drawn=(latents // 8, latents // 2, latents)))
    cells: list[Cell] = []
    for name, experiment in {"fixed": fixed, "varied": varied}.items():
        asks = [
            Ask(
                {"latents": count},
                {"latents": count},
                {"bits/dim": PAPER_BITS[paper], "minutes": PAPER_MINUTES[paper]} if name == "fixed" else {},
                "" if bench.scale == "paper" else f"{paper:,} latents, 64 x 64",
            )
            for count, paper in stands.items()
        ]
        more = _minutes if name == "fixed" else None  # the other is as fast
        cells += trained(
            {"trained with": name}, experiment, store(bench, "image"), bench, BITS, asks, more, documents=64
        )
    return cells


def _minutes(found: Trained, ask: Ask, place: Path) -> Found:
    """How long one image takes to draw."""
    return {"minutes": drawn(found, int(ask.about["latents"]), 1)[1]}


def _by_order(bench: Bench) -> list[Cell]:
    """A short and a whole context, pixel by pixel and colour by colour."""
    paper: dict[tuple[Order, str], float] = {
        ("raster", "short"): 3.55,
        ("rgb", "short"): 4.63,
        ("raster", "whole"): 3.54,
        ("rgb", "whole"): 3.53,
    }
    cells: list[Cell] = []
    for (order, reach), bits in paper.items():
        if bench.scale == "paper":
            experiment = presets.get(f"imagenet64-order-{order}-{'1k' if reach == 'short' else '12k'}")
        else:
            size, latents = (32, 256) if bench.scale == "small" else (SIZE, 16)
            context = latents if reach == "short" else 3 * size**2 + 1
            experiment = _image(bench, size, context, latents, 2000)
        about = {"context": experiment.model.context, "order": order}
        at = "" if bench.scale == "paper" else f"context {1024 if reach == 'short' else 12_289:,}, 64 x 64"
        ask = Ask(paper={"bits/dim": bits}, at=at)
        cells += trained(about, experiment, reordered(bench, order), bench, BITS, [ask])
    return cells


def _latents_matter_little(rows: list[Row], scale: Scale) -> bool:
    """Fewest: faster, worse by less than a quarter of a bit. Half as many again: no worse. Most: slower."""
    fixed = sorted(
        (row for row in rows if row.about["trained with"] == "fixed"), key=lambda row: row.about["latents"]
    )
    bits, minutes = ([row.found[name] or 0.0 for row in fixed] for name in ("bits/dim", "minutes"))
    usual = list(PAPER_BITS).index(1024)
    cheaper = minutes[0] < minutes[usual] < minutes[-1]
    return cheaper and 0 < bits[0] - bits[usual] < 0.25 and bits[usual + 1] <= bits[usual]


def _order_matters_for_short_contexts(rows: list[Row], scale: Scale) -> bool:
    bits = {(row.about["context"], row.about["order"]): row.found["bits/dim"] or 0.0 for row in rows}
    short, whole = sorted({context for context, _ in bits})
    costs = [bits[context, "rgb"] - bits[context, "raster"] for context in (short, whole)]
    return costs[0] > 0.2 and abs(costs[1]) < costs[0] / 4


def _as_good_as_the_paper_s(rows: list[Row], scale: Scale) -> bool | None:
    """Whether bits a byte are as few as the paper's; None on other images, which cannot show it."""
    found = rows[0].found
    return (found["bits/dim"] or 99) < 3.405 if scale == "paper" and found.get("images") == THEIRS else None


STUDIES = [
    Study(
        "imagenet64",
        "table 3, figure 4",
        "3.40 bits/dim on Downsampled ImageNet, as good as the best published result; samples with 16 to "
        "2,048 latents.",
        "Bits per dimension (byte) of the validation images, stride N / 2; sheets of samples at temperature "
        "1 from one seed, with 16, N, 1.5 N and 2 N latents. The paper's images (van den Oord et al.) are no "
        "longer published. Those that can be downloaded (Chrabaszcz et al.) were downscaled in another way "
        f"and are easier, so only a store of the former, with {THEIRS:,} validation images, can show the "
        "claim. At `small`, other images and a model of 8 layers.",
        _density,
        _as_good_as_the_paper_s,
        None,
        NEEDS,
    ),
    Study(
        "image-latents",
        "table 4",
        "One model can be run with 16 to 4,096 latents: with fewer it is faster and a little worse, with "
        "somewhat more a little better.",
        "A model trained with N latents is evaluated on 64 images with N / 64 to 4 N latents, and generates "
        "one image with each number. It is compared with the same training in which each step has N / 8, "
        "N / 2 or N latents, drawn at random. At `small`, images of 32 x 32 and N = 256.",
        _by_latents,
        _latents_matter_little,
        ("latents", "bits/dim"),
        SMALLER,
    ),
    Study(
        "image-order",
        "table 5",
        "With a short context the order of the bytes matters a lot (3.55 or 4.63 bits/dim); with a context "
        "of the whole image, little.",
        "Four trainings that differ only in the order of the bytes (raster: R, G, B of each pixel; rgb: all "
        "R, then all G, then all B) and in the context. At `small`, images of 32 x 32, contexts of 256 and "
        "3,073, 256 latents.",
        _by_order,
        _order_matters_for_short_contexts,
        ("context", "bits/dim"),
        SMALLER,
    ),
]
