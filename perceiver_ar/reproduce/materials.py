"""The data of studies: a store that the user names; for smoke, a little that is made on the spot."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from perceiver_ar.reproduce.study import Bench
from perceiver_ar.store import Split, Store, write_store
from perceiver_ar.tasks.audio import AudioTask
from perceiver_ar.tasks.base import BOS, FIRST
from perceiver_ar.tasks.image import ImageTask, Order
from perceiver_ar.windows import Tokens

SIZE, LEVELS, CODES = 8, 4, 16
"""Of smoke's images and sounds."""


def store(bench: Bench, task: str) -> Callable[[], Path]:
    """What finds, or makes, a store of the task when it is asked for."""
    return partial(_store, bench, task)


def _store(bench: Bench, task: str) -> Path:
    if bench.scale != "smoke":
        assert bench.data is not None
        found = Store.open(bench.data).meta["task"]
        if found != task:
            raise ValueError(f"{bench.data} is a store of the task {found}, but {task} is needed.")
        return bench.data
    folder = bench.folder / "data" / task
    if not folder.exists():
        random = np.random.default_rng(0)
        documents, size, options = _MAKERS[task](random)
        splits = {"train": documents[:-2], "validation": documents[-2:]}
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_store(folder, splits, size, task, options)
    return folder


def _texts(random: np.random.Generator) -> tuple[list[Tokens], int, dict[str, object]]:
    words = [bytes(random.integers(97, 123, size)) for size in random.integers(2, 8, 50)]
    texts = [b" ".join(words[i] for i in random.zipf(1.5, 300) % 50) for _ in range(10)]
    options = {"tokenizer": "bytes"}
    return (
        [np.concatenate(([BOS], np.frombuffer(t, np.uint8).astype(int) + FIRST)) for t in texts],
        259,
        options,
    )


def _images(random: np.random.Generator) -> tuple[list[Tokens], int, dict[str, object]]:
    task = ImageTask(SIZE)
    ramps = random.integers(0, 200, (20, 1, 1, 3)) + 4 * np.arange(SIZE)[:, None, None]
    pixels = np.broadcast_to(ramps, (20, SIZE, SIZE, 3)).astype(np.uint8)
    return [task.encode(image) for image in pixels], 259, task.to_dict()


def _pieces(random: np.random.Generator) -> tuple[list[Tokens], int, dict[str, object]]:
    notes = [random.integers(60, 72, (80, 1)) for _ in range(10)]
    events = [np.hstack((pitch, 256 + pitch % 5, pitch + 128)).reshape(-1) for pitch in notes]
    return [np.concatenate(([BOS], piece + FIRST)) for piece in events], 388 + FIRST, {}


def _sounds(random: np.random.Generator) -> tuple[list[Tokens], int, dict[str, object]]:
    task = AudioTask(LEVELS, CODES)
    frames = [random.integers(0, 4, (60, LEVELS)) for _ in range(10)]
    return [task.encode(codes) for codes in frames], task.vocab_size, task.to_dict()


_MAKERS = {"text": _texts, "image": _images, "music": _pieces, "audio": _sounds}


def part(bench: Bench, task: str, documents: int) -> Callable[[], Path]:
    """Only so many documents to train on, so that a short training sees them many times."""
    return partial(_part, bench, task, documents)


def _part(bench: Bench, task: str, documents: int) -> Path:
    given = Store.open(_store(bench, task))
    folder = bench.folder / "data" / f"{task}-{documents}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        train, validation = given.split("train"), given.split("validation")
        few = (train.read(i) for i in range(min(documents, len(train))))
        rest = (validation.read(i) for i in range(len(validation)))
        write_store(folder, {"train": few, "validation": rest}, given.vocab_size, task, given.meta["options"])
    return folder


def reordered(bench: Bench, order: Order) -> Callable[[], Path]:
    """The same images with their bytes in another order."""
    return partial(_reordered, bench, order)


def _reordered(bench: Bench, order: Order) -> Path:
    given = Store.open(_store(bench, "image"))
    if given.meta["options"]["order"] == order:
        return given.folder
    folder = bench.folder / "data" / f"image-{order}"
    if not folder.exists():
        size = given.meta["options"]["size"]
        before, after = ImageTask(size, given.meta["options"]["order"]), ImageTask(size, order)
        folder.parent.mkdir(parents=True, exist_ok=True)

        def images(split: Split) -> Iterator[Tokens]:
            return (after.encode(before.decode(split.read(i))) for i in range(len(split)))

        splits = {name: images(given.split(name)) for name in given.meta["splits"]}
        write_store(folder, splits, given.vocab_size, "image", after.to_dict())
    return folder
