"""The data of studies: a store that the user names; for smoke, a little that is made on the spot."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from perceiver_ar.reproduce.study import Bench
from perceiver_ar.special import BOS, FIRST
from perceiver_ar.store import Split, Store, write_store
from perceiver_ar.tasks.audio import AudioTask
from perceiver_ar.tasks.image import ImageTask, Order
from perceiver_ar.windows import Tokens

SIZE, LEVELS, CODES = 8, 4, 16
"""Pixels of a side of smoke's images; codes of a frame of its sounds, and their values."""


@dataclass(frozen=True)
class Data:
    """Where the tokens of a training come from."""

    find: Callable[[], Path | None]
    """Finds, or makes, the store when it is asked for."""
    seal: str
    """A text that changes when the data do."""
    changes: str = ""
    """Which setting of the given store is changed."""


NONE = Data(lambda: None, "none")
"""For tasks that make their own tokens."""


def store(bench: Bench, task: str) -> Data:
    """The store that was named."""
    return Data(partial(_store, bench, task), bench.seal)


def part(bench: Bench, task: str, documents: int) -> Data:
    """Only so many of its documents to train on, so that a short training sees them many times."""

    def few(split: Split) -> Iterator[Tokens]:
        count = documents if split.folder.name == "train" else len(split)
        return (split.read(i) for i in range(min(count, len(split))))

    name = f"{task}-{documents}"
    return Data(lambda: _made(bench, _store(bench, task), name, few), f"{bench.seal}, {documents}")


def reordered(bench: Bench, order: Order) -> Data:
    """Its images with their bytes in another order."""

    def find() -> Path:
        given = _store(bench, "image")
        options = Store.open(given).meta["options"]
        if options["order"] == order:
            return given
        before, after = ImageTask(options["size"], options["order"]), ImageTask(options["size"], order)

        def turned(split: Split) -> Iterator[Tokens]:
            return (after.encode(before.decode(split.read(i))) for i in range(len(split)))

        return _made(bench, given, f"image-{order}", turned, after.to_dict())

    return Data(find, f"{bench.seal}, {order}", changes="order")


def _made(
    bench: Bench,
    given: Path,
    name: str,
    of: Callable[[Split], Iterator[Tokens]],
    options: dict[str, Any] | None = None,
) -> Path:
    """Another store, made of a given one once."""
    before = Store.open(given)
    folder = bench.folder / "data" / f"{name}-{bench.seal}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        splits = {split: of(before.split(split)) for split in before.meta["splits"]}
        write_store(folder, splits, before.vocab_size, before.meta["task"], options or before.meta["options"])
    return folder


def _store(bench: Bench, task: str) -> Path:
    if bench.scale != "smoke":
        assert bench.data is not None
        return bench.data
    folder = bench.folder / "data" / task
    if not folder.exists():
        documents, size, options = _MAKERS[task](np.random.default_rng(0))
        splits: dict[str, Iterable[Tokens]] = {"train": documents[:-2], "validation": documents[-2:]}
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_store(folder, splits, size, task, options)
    return folder


Made = tuple[list[Tokens], int, dict[str, Any]]
"""Documents, the size of their vocabulary, and the task's settings."""


def _texts(random: np.random.Generator) -> Made:
    words = [bytes(random.integers(97, 123, size).tolist()) for size in random.integers(2, 8, 50)]
    texts = [b" ".join(words[i] for i in random.zipf(1.5, 300) % 50) for _ in range(10)]
    tokens = [np.concatenate(([BOS], np.frombuffer(text, np.uint8).astype(int) + FIRST)) for text in texts]
    return tokens, 259, {"tokenizer": "bytes"}


def _images(random: np.random.Generator) -> Made:
    task = ImageTask(SIZE)
    ramps = random.integers(0, 200, (20, 1, 1, 3)) + 4 * np.arange(SIZE)[:, None, None]
    pixels = np.broadcast_to(ramps, (20, SIZE, SIZE, 3)).astype(np.uint8)
    return [task.encode(image) for image in pixels], 259, task.to_dict()


def _pieces(random: np.random.Generator) -> Made:
    notes = [random.integers(60, 72, (80, 1)) for _ in range(10)]
    events = [np.hstack((pitch, 256 + pitch % 5, pitch + 128)).reshape(-1) for pitch in notes]
    return [np.concatenate(([BOS], piece + FIRST)) for piece in events], 388 + FIRST, {}


def _sounds(random: np.random.Generator) -> Made:
    task = AudioTask(LEVELS, CODES)
    frames = [random.integers(0, 4, (60, LEVELS)) for _ in range(10)]
    return [task.encode(codes) for codes in frames], task.vocab_size, task.to_dict()


_MAKERS = {"text": _texts, "image": _images, "music": _pieces, "audio": _sounds}
