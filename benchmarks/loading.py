"""Batches from a token store, made by one thread."""

import itertools
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.measure import Figure
from benchmarks.sizes import Size
from perceiver_ar.data import Crops, collate
from perceiver_ar.store import write_store
from perceiver_ar.tasks.tokens import TokensTask
from perceiver_ar.timing import time_repeatedly


def time_loading(name: str, size: Size, repeats: int) -> Figure:
    """Sequences per second: random windows of eight documents, each three contexts long."""
    config, cpu, task = size.model, torch.device("cpu"), TokensTask()
    documents = np.random.default_rng(0).integers(3, config.vocab_size, (8, 3 * config.context))
    with tempfile.TemporaryDirectory() as folder:
        store = write_store(Path(folder) / "store", {"train": documents}, config.vocab_size, "tokens")
        crops = Crops(store.split("train"), config.context, task)
        steps = itertools.count()

        def load() -> None:
            collate(crops.windows(0, next(steps), size.batch, config.latents), config.latents, task)

        rates = [size.batch / seconds for seconds in time_repeatedly(load, cpu, repeats)]
    return Figure("load", name, "sequences/s", rates, cpu, {"batch": size.batch})
