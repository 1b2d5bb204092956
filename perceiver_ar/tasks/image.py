"""Images: the bytes of square RGB pictures, in one of two orders, with their row, column and colour."""

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from perceiver_ar.config import ModelConfig
from perceiver_ar.extras import need
from perceiver_ar.report import readable
from perceiver_ar.splits import SPLITS, Shares, draw_splits, named_split, splits_of
from perceiver_ar.store import Store, check_new, write_store
from perceiver_ar.tasks.base import BOS, FIRST, Document, Task
from perceiver_ar.windows import Tokens

Order = Literal["raster", "rgb"]
Pixels = NDArray[np.uint8]
SPARE = 2
"""Rows of each position table before the first pixel's; BOS has the second of them."""
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")


@dataclass(frozen=True)
class ImageTask(Task):
    """Bytes after a BOS: R, G, B of each pixel, or all R, then all G, then all B."""

    name: ClassVar[str] = "image"

    size: int = 64
    """Pixels of a side."""
    order: Order = "raster"
    """raster: pixel by pixel; rgb: colour by colour."""

    @property
    def ends(self) -> bool:
        return False

    @property
    def length(self) -> int:
        """Bytes of an image."""
        return 3 * self.size**2

    def check(self, model: ModelConfig) -> None:
        rows = (self.size + SPARE, self.size + SPARE, 3 + SPARE)
        if len(model.axes) != 3 or any(has < needs for has, needs in zip(model.axes, rows, strict=True)):
            raise ValueError(
                f"images of {self.size} pixels need --model.positions axial --model.axes "
                f"{' '.join(map(str, rows))} or more."
            )

    def positions(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Column, row and colour of each byte."""
        byte, size = places - 1, self.size
        pixel, colour = (byte // 3, byte % 3) if self.order == "raster" else (byte % size**2, byte // size**2)
        found = np.stack((pixel % size, pixel // size, colour), axis=-1) + SPARE
        return np.where((byte < 0)[..., None], SPARE - 1, found)

    def encode(self, pixels: Pixels) -> Tokens:
        """Tokens of (size, size, 3)."""
        ordered = pixels if self.order == "raster" else pixels.transpose(2, 0, 1)
        return np.concatenate(([BOS], ordered.reshape(-1).astype(np.int64) + FIRST))

    def decode(self, tokens: Tokens) -> Pixels:
        """Pixels of tokens; grey where there are too few."""
        values = (tokens[tokens >= FIRST] - FIRST)[: self.length].astype(np.uint8)
        whole = np.concatenate((values, np.full(self.length - len(values), 128, np.uint8)))
        if self.order == "raster":
            return whole.reshape(self.size, self.size, 3)
        return whole.reshape(3, self.size, self.size).transpose(1, 2, 0)

    def read(self, path: Path) -> Document:
        tokens = self.encode(read_picture(self.size, path))
        return Document(tokens, 1, len(tokens))

    def prompt_file(self, path: Path, keep: int | None = None) -> Tokens:
        """The upper rows of a picture; half of them unless it is said how many."""
        if self.order != "raster":
            raise ValueError("only images in raster order can be completed from a row on.")
        rows = self.size // 2 if keep is None else keep
        if not 0 <= rows < self.size:
            raise ValueError(f"--keep must be from 0 to {self.size - 1} rows, but is {rows}.")
        return self.read(path).tokens[: 1 + 3 * self.size * rows]

    def count(self, prompt: Tokens) -> int:
        return 1 + self.length - len(prompt)

    def report(self, nats: float, tokens: int, counts: Mapping[str, int]) -> dict[str, float]:
        return {"bits_per_dim": nats / tokens / math.log(2)}

    def check_file(self, path: Path) -> None:
        if path.suffix != ".png":
            raise ValueError(f"images are written to .png files, not to {path}.")

    def save(self, tokens: Tokens, path: Path) -> None:
        need("PIL.Image", "image").fromarray(self.decode(tokens)).save(path)

    def save_all(self, samples: list[Tokens], path: Path) -> None:
        """A contact sheet."""
        columns = math.ceil(math.sqrt(len(samples)))
        cells = [np.pad(self.decode(tokens), ((1, 1), (1, 1), (0, 0))) for tokens in samples]
        cells += [np.zeros_like(cells[0])] * (-len(cells) % columns)
        rows = [np.concatenate(cells[i : i + columns], axis=1) for i in range(0, len(cells), columns)]
        need("PIL.Image", "image").fromarray(np.concatenate(rows)).save(path)


def read_picture(size: int, path: Path) -> Pixels:
    """Pixels (size, size, 3) of a file; grey becomes RGB, another shape is cropped and resized."""
    image, operations = need("PIL.Image", "image"), need("PIL.ImageOps", "image")
    try:
        with image.open(path) as opened:
            picture = opened.convert("RGB")
    except Exception as error:  # of every kind, on damaged files
        raise ValueError(f"not a picture that can be read ({error})") from None
    if picture.size != (size, size):
        picture = operations.fit(picture, (size, size), image.Resampling.LANCZOS)
    return np.asarray(picture)


def prepare(
    source: Path,
    /,
    out: Path,
    size: int = 64,
    order: Order = "raster",
    validation: float = 0.05,
    test: float = 0.0,
    workers: int | None = None,
) -> Store:
    """Turn images into a token store.

    Args:
        source: A folder of pictures, perhaps with train, validation and test below it; a .tar or .zip of
            them; or a .npy or .npz of uint8, (N, size, size, 3), or (N, 3 * size * size) as Downsampled
            ImageNet has them.
        out: Folder of the store.
        size: Pixels of a side. Other pictures are cropped in the middle and resized.
        order: raster: R, G, B of each pixel; rgb: all R, then all G, then all B.
        validation: Share of the images that is kept for validation.
        test: The same for the test.
        workers: Processes. Default: as many as there are cores.
    """
    check_new(out)
    task, shares = ImageTask(size, order), Shares(validation, test)
    unpacked = out.with_name(f".{out.name}.source")
    source = _unpack(source, unpacked)
    arrays = sorted(
        p for p in ([source] if source.is_file() else source.rglob("*")) if p.suffix in (".npy", ".npz")
    )
    if arrays:
        splits = _from_arrays(arrays, task, source, shares)
    else:
        splits = _from_pictures(source, task, shares, workers, unpacked)
    store = write_store(out, splits, 256 + FIRST, "image", task.to_dict())
    shutil.rmtree(unpacked, ignore_errors=True)
    return store


def _unpack(source: Path, unpacked: Path) -> Path:
    """A folder with what an archive holds."""
    if not source.exists():
        raise ValueError(f"{source} does not exist.")
    if source.is_dir() or source.suffix in (".npy", ".npz"):
        return source
    try:
        if source.suffix == ".zip":
            shutil.unpack_archive(source, unpacked)
        else:
            shutil.unpack_archive(source, unpacked, filter="data")
    except Exception as error:  # of every kind, on damaged archives
        raise ValueError(
            f"{source} is neither a folder, an array nor an archive that can be read: {error}"
        ) from None
    return unpacked


def _from_pictures(
    source: Path, task: ImageTask, shares: Shares, workers: int | None, scratch: Path
) -> dict[str, Iterator[Tokens]]:
    """Read on all cores into one array on disk; what cannot be read is named and left out."""
    files = sorted(p for p in source.rglob("*") if p.suffix.lower() in PICTURES)
    if not files:
        raise ValueError(f"{source} holds no pictures ({', '.join(PICTURES)}), no .npy and no .npz.")
    scratch.mkdir(parents=True, exist_ok=True)
    shape = (len(files), task.size, task.size, 3)
    pixels: Any = np.lib.format.open_memmap(scratch / "pixels.npy", "w+", np.uint8, shape)
    numbers = {path: index for index, path in enumerate(files)}
    named: dict[str, list[tuple[Any, int]]] = {split: [] for split in SPLITS}
    splits = splits_of(files, source, shares)
    for path, picture in readable(partial(read_picture, task.size), files, workers):
        pixels[numbers[path]] = picture
        named[splits[numbers[path]]].append((pixels, numbers[path]))
    if not any(named.values()):
        raise ValueError(f"{source} holds no picture that can be read.")
    return _encoded(
        task, {split: sorted(images, key=lambda image: image[1]) for split, images in named.items()}
    )


def _encoded(task: ImageTask, chosen: dict[str, list[tuple[Any, int]]]) -> dict[str, Iterator[Tokens]]:
    """The images of each split that has any, one at a time."""
    return {
        split: (task.encode(array[index]) for array, index in images)
        for split, images in chosen.items()
        if images
    }


def _from_arrays(
    paths: list[Path], task: ImageTask, source: Path, shares: Shares
) -> dict[str, Iterator[Tokens]]:
    images = [(path, _load(path, task.size)) for path in paths]
    drawn = iter(draw_splits(sum(len(array) for _, array in images), shares))
    splits: dict[str, list[tuple[Any, int]]] = {name: [] for name in SPLITS}
    for path, array in images:
        given = named_split(path.relative_to(source).parts[0]) if source.is_dir() else None
        for index in range(len(array)):
            split = next(drawn)
            splits[given or split].append((array, index))
    return _encoded(task, splits)


def _load(path: Path, size: int) -> Any:
    """Images (N, size, size, 3) of an array file."""
    try:
        opened: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # of every kind, on damaged files
        raise ValueError(f"{path} is not an array of numbers that can be read: {error}") from None
    array = opened if path.suffix == ".npy" else opened["data" if "data" in opened else opened.files[0]]
    if array.dtype == np.uint8 and array.ndim == 2 and array.shape[1] == 3 * size**2:
        return array.reshape(-1, 3, size, size).transpose(0, 2, 3, 1)
    if array.dtype != np.uint8 or array.shape[1:] != (size, size, 3):
        raise ValueError(
            f"{path} holds {array.dtype} of shape {array.shape}, not uint8 of shape (N, {size}, {size}, 3) "
            f"or (N, {3 * size**2}): set --size."
        )
    return array
