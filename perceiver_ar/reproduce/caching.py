"""What a cache saves in generation, and what one that is never refreshed costs in loss."""

import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perceiver_ar import presets
from perceiver_ar.architectures import compile_blocks
from perceiver_ar.caching import Cache, decode_at, prefill, step, through
from perceiver_ar.config import Experiment, ModelConfig
from perceiver_ar.device import best_dtype, pick_device
from perceiver_ar.generation import generate
from perceiver_ar.model import PerceiverAR
from perceiver_ar.presets import BYTES
from perceiver_ar.reproduce.cells import check_store, finish, hours, named
from perceiver_ar.reproduce.materials import store
from perceiver_ar.reproduce.recipes import recipe
from perceiver_ar.reproduce.study import Bench, Cell, Row, Scale, Study
from perceiver_ar.store import Store
from perceiver_ar.tasks.image import ImageTask
from perceiver_ar.timing import synchronize


def _caching(bench: Bench) -> list[Cell]:
    """Minutes of images by batch, with and without a cache; and what never refreshing costs in loss."""
    if bench.scale == "smoke":
        size, smaller = 4, ModelConfig(BYTES, 64, 16, channels=16, heads=1, layers=1)
        model = replace(smaller, context=49, positions="axial", axes=(6, 6, 5))
    else:
        size, smaller = 64, ModelConfig(BYTES, 4096, 512, channels=512, heads=8, layers=8)
        model = presets.get("imagenet64").model
        assert isinstance(model, ModelConfig)
    paper = {(1, True): 3.68, (1, False): 7.93}
    cells = [
        _drawn(bench, model, ImageTask(size), batch, cached, paper.get((batch, cached)))
        for batch in (1, 16)
        for cached in (True, False)
    ]
    return [*cells, _naive(bench, Experiment("caching", "text", smaller, recipe(bench.scale, 1500)))]


def _drawn(
    bench: Bench, config: ModelConfig, task: ImageTask, batch: int, cached: bool, paper: float | None
) -> Cell:
    """Bytes in the middle of images, by a model with random weights; at the paper's size, whole images."""
    about = {"batch": batch, "mode": "cached" if cached else "no caching"}
    whole = bench.scale == "paper"
    given = 1 if whole else task.length // 2
    count = task.length if whole else min(1200 if cached else 40, task.length - given)

    def work(place: Path) -> list[Row]:
        device = pick_device(bench.device)
        with device:
            model = PerceiverAR(config).to(best_dtype(device)).eval()
        if device.type == "cuda" and not cached:
            compile_blocks(model)
        prompt = torch.randint(config.vocab_size, (batch, given), device=device)
        places = torch.from_numpy(task.positions(np.arange(given + count)[None]))

        def draw(tokens: int) -> float:
            began = time.perf_counter()
            generate(
                model,
                prompt,
                tokens,
                cache=cached,
                grow_latents=cached,
                positions=places[:, : given + tokens],
            )
            synchronize(device)
            return (time.perf_counter() - began) / tokens

        draw(min(8, count))
        each = draw(count)
        found = {"ms/step": 1000 * each, "minutes a batch of images": each * task.length / 60}
        theirs = {} if paper is None else {"minutes a batch of images": paper}
        return [Row(about, found, theirs, "TPUv3 core")]

    settings = {"model": config.to_dict(), "tokens": count, "about": about, **bench.machine}
    return Cell(named(about), settings, work)


def _naive(bench: Bench, experiment: Experiment) -> Cell:
    """A trained model's nats of what was written, token by token: with refreshes, and without any."""
    context = experiment.model.context

    def check() -> None:
        check_store(experiment, data, bench)
        if bench.scale == "smoke":
            return
        assert bench.data is not None
        if Store.open(bench.data).split("validation").lengths().max() < context:
            raise ValueError(f"{bench.data} has no validation text of {context:,} tokens: take longer ones.")

    def work(place: Path) -> list[Row]:
        found = finish(experiment, data.find(), bench)
        assert isinstance(found.model, PerceiverAR)
        texts = (
            document.tokens[start : start + context]
            for document in found.documents
            for start in range(0, len(document.tokens) - context + 1, context)
        )
        rows = np.stack(list(islice(texts, 64))).astype(np.int64)
        tokens = torch.from_numpy(rows).to(found.model.norm.weight.device)
        return [
            Row({"cache": name}, {"nats": nats_one_by_one(found.model, tokens, refreshed)})
            for name, refreshed in (("refreshed", True), ("never refreshed", False))
        ]

    data = store(bench, "text")
    settings = {"experiment": experiment.to_dict()}
    return Cell("naive", settings, work, data=data.seal, hours=hours(experiment), check=check)


@torch.inference_mode()
def nats_one_by_one(model: PerceiverAR, tokens: Tensor, refreshed: bool) -> float:
    """Mean nats of the second half of tokens (B, T), each from a cache of those before.

    Without refreshes a latent keeps what it was when it came, and sees latents that have long lost their
    place; the oldest makes room for the newest.
    """
    model.eval()
    given, total = tokens.shape[1] // 2, tokens.shape[1]
    places = torch.arange(total, device=tokens.device)[None, :, None]
    room = total, model.config.latents
    logits, cache = prefill(model, tokens[:, :given], places[:, :given], room)
    newest, nats = cache.latents, torch.zeros((), device=tokens.device)
    for place in range(given, total):
        token, position = tokens[:, place], places[:, place : place + 1]
        nats += torch.nn.functional.cross_entropy(logits.float(), token)
        if refreshed:
            logits, cache = step(model, cache, token, position)
        else:
            logits, cache = _kept_on(model, cache, token, position, newest)
            newest += 1
    return float(nats) / (total - given)


def _kept_on(
    model: PerceiverAR, cache: Cache, token: Tensor, position: Tensor, number: int
) -> tuple[Tensor, Cache]:
    """One more latent, in the place of the oldest if there is no other."""
    latents = min(cache.latents + 1, cache.room[1])
    column, slot = (torch.full((1,), n, device=token.device) for n in (cache.inputs, number % cache.room[1]))
    logits = decode_at(model, cache.cut(cache.inputs + 1, latents), token, position, column, slot, through)
    return logits, replace(cache, inputs=cache.inputs + 1, latents=latents)


def _caching_pays(rows: list[Row], scale: Scale) -> bool:
    """Whether it does at batch 1 and 16, by more than half; and refreshing is better than not to."""
    times = {
        (row.about["batch"], row.about["mode"]): row.found["ms/step"] or 0.0
        for row in rows
        if "mode" in row.about
    }
    nats = {row.about["cache"]: row.found["nats"] or 0.0 for row in rows if "cache" in row.about}
    faster = all(times[batch, "cached"] < times[batch, "no caching"] / 2 for batch in (1, 16))
    return faster and nats["refreshed"] < nats["never refreshed"]


STUDIES = [
    Study(
        "caching",
        "appendix E",
        "With a cache, generating an image takes 3.68 minutes instead of 7.93; with a cache that is never "
        "refreshed, latents would see what they never saw in training.",
        "The ImageNet model with random weights generates at batch sizes of 1 and 16, with the cache, and "
        "with N latents recomputed at every step in compiled blocks: whole images, at `small` bytes from the "
        "middle of images on. Then a model is trained on text, and its nats on the second halves of up to 64 "
        "validation texts are computed token by token, with refreshes and without.",
        _caching,
        _caching_pays,
        ("batch", "ms/step"),
        "text: perceiver-ar prepare text FOLDER --out STORE",
    ),
]
