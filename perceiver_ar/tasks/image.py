"""Images: the bytes of square RGB pictures, in one of two orders, with their row, column and colour."""

import math
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from perceiver_ar.config import AnyModelConfig, TransformerXLConfig
from perceiver_ar.extras import need
from perceiver_ar.fetching import unpack
from perceiver_ar.reading import readable
from perceiver_ar.special import BOS, FIRST
from perceiver_ar.splits import SPLITS, Shares, below, by_folder, by_split, divide, top
from perceiver_ar.store import Store, check_new, write_store
from perceiver_ar.tasks.base import Document, Task
from perceiver_ar.windows import Tokens

Order = Literal["raster", "rgb"]
Pixels = NDArray[np.uint8]
SPARE = 2
"""Rows of each position table before the first pixel's; BOS has the second of them."""
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
ARRAYS = (".npy", ".npz")


@dataclass(frozen=True)
class ImageTask(Task):
    """The bytes of square RGB images, after a BOS."""

    name: ClassVar[str] = "image"
    suffix: ClassVar[str] = ".png"

    size: int = 64
    """Width and height in pixels; taken from the store."""
    order: Order = "raster"
    """raster: R, G, B of each pixel; rgb: all R, then all G, then all B. Taken from the store."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 1:
            raise ValueError(f"the size of an image must be at least 1 pixel, but is {self.size}.")

    @property
    def ends(self) -> bool:
        return False

    @property
    def length(self) -> int:
        """Bytes of an image."""
        return 3 * self.size**2

    @property
    def axes(self) -> tuple[int, int, int]:
        """Rows of the tables of positions that it needs."""
        return self.size + SPARE, self.size + SPARE, 3 + SPARE

    def suited(self, model: AnyModelConfig) -> AnyModelConfig:
        if isinstance(model, TransformerXLConfig) or model.axes:
            return model
        return replace(model, positions="axial", axes=self.axes)

    def check(self, model: AnyModelConfig) -> None:
        if isinstance(model, TransformerXLConfig):
            raise ValueError(
                "images need axial positions, which Transformer-XL does not have: take another model."
            )
        if len(model.axes) != 3 or any(has < needs for has, needs in zip(model.axes, self.axes, strict=True)):
            raise ValueError(
                f"images of {self.size} pixels need at least these rows of positions: "
                f"--model.axes {' '.join(map(str, self.axes))}"
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

    def save_all(self, samples: list[Tokens], path: Path) -> bool:
        need("PIL.Image", "image").fromarray(self.sheet(samples, border=1)).save(path)
        return True

    def sheet(self, samples: list[Tokens], border: int) -> Pixels:
        """Images side by side."""
        columns, edge = math.ceil(math.sqrt(len(samples))), (border, border)
        cells = [np.pad(self.decode(tokens), (edge, edge, (0, 0))) for tokens in samples]
        cells += [np.zeros_like(cells[0])] * (-len(cells) % columns)
        rows = [np.concatenate(cells[i : i + columns], axis=1) for i in range(0, len(cells), columns)]
        return np.concatenate(rows)


def read_picture(size: int, path: Path) -> Pixels:
    """Pixels (size, size, 3) of a file, upright, on white; another shape is cropped and resized."""
    image, operations = need("PIL.Image", "image"), need("PIL.ImageOps", "image")
    try:
        with image.open(path) as opened:
            picture = operations.exif_transpose(opened)
            if picture.mode == "F":
                raise ValueError("its pixels are no whole numbers")
            if picture.mode.startswith("I"):  # 16 bits of grey
                picture = image.fromarray((np.asarray(picture).clip(0, 65_535) // 257).astype(np.uint8))
            rgba = picture.convert("RGBA")
            white = image.new("RGBA", rgba.size, "white")
            picture = image.alpha_composite(white, rgba).convert("RGB")
    except Exception as error:  # of every kind, on damaged files
        raise ValueError(f"{path} is not a picture that can be read: {error}") from None
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
        source: A folder of pictures, or a .tar or .zip of them; or .npy or .npz arrays of uint8, of shape
            (N, size, size, 3), or (N, 3 * size * size) as in Downsampled ImageNet. Folders named train,
            validation and test are the splits; missing ones are drawn from the rest.
        out: New folder for the store.
        size: Width and height in pixels. Other pictures are cropped at the centre and resized.
        order: raster: R, G, B of each pixel; rgb: all R, then all G, then all B.
        validation: Fraction of the images to hold out for validation.
        test: Fraction of the images to hold out for testing.
        workers: Number of processes. Default: one per core.
    """
    check_new(out)
    task, shares = ImageTask(size, order), Shares(validation, test)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        source = _unpack(source, Path(scratch) / "unpacked")
        pictures = below(source, PICTURES) if source.is_dir() else []
        if pictures:
            need("PIL.Image", "image")
            pixels = Path(scratch) / "pixels.npy"
            splits = _from_pictures(pictures, source, task, shares, workers, pixels)
        else:
            splits = _from_arrays(source, task, shares)
        return write_store(out, splits, 256 + FIRST, "image", task.to_dict())


def _unpack(source: Path, unpacked: Path) -> Path:
    """The folder of the images, perhaps out of an archive, or the array file that was given."""
    if not source.exists():
        raise ValueError(f"{source} does not exist.")
    if source.is_dir():
        return top(source)
    if source.suffix in ARRAYS:
        return source
    unpack(source, unpacked)
    return top(unpacked)


def _from_pictures(
    files: list[Path], source: Path, task: ImageTask, shares: Shares, workers: int | None, scratch: Path
) -> dict[str, Iterator[Tokens]]:
    """Reads pictures on all cores into one array on disk; what cannot be read is named and left out."""
    shape = (len(files), task.size, task.size, 3)
    pixels: Any = np.lib.format.open_memmap(scratch, "w+", np.uint8, shape)
    numbers = {path: index for index, path in enumerate(files)}
    read = set()
    for path, picture in readable(partial(read_picture, task.size), files, workers):
        pixels[numbers[path]] = picture
        read.add(path)
    if not read:
        raise ValueError(f"{source} holds no picture that can be read.")
    return {
        split: (task.encode(pixels[numbers[path]]) for path in chosen)
        for split, chosen in by_split(by_folder(files, source), read, shares).items()
    }


def _from_arrays(source: Path, task: ImageTask, shares: Shares) -> dict[str, Iterator[Tokens]]:
    """Reads array files, one in memory at a time; those that hold no such images are named and left out."""
    paths = [source] if source.is_file() else below(source, ARRAYS)
    if not paths:
        raise ValueError(f"{source} holds no pictures ({', '.join(PICTURES)}), no .npy and no .npz.")
    counts = {}
    for path in paths:
        try:
            counts[path] = len(_load(path, task.size))
        except ValueError as error:
            if len(paths) == 1:
                raise
            print(f"skipped {error}", file=sys.stderr)
    if not sum(counts.values()):
        raise ValueError(f"{source} holds no images.")
    names = {source: None} if source.is_file() else by_folder(paths, source)
    splits = np.array(divide([names[path] for path, count in counts.items() for _ in range(count)], shares))
    return {split: _chosen(task, counts, splits == split) for split in SPLITS if split in splits}


def _chosen(task: ImageTask, counts: dict[Path, int], which: NDArray[np.bool_]) -> Iterator[Tokens]:
    """The chosen ones of all images of these files, one after the other."""
    for path, mask in zip(counts, np.split(which, np.cumsum([*counts.values()])[:-1]), strict=True):
        if mask.any():
            images = _load(path, task.size)
            yield from (task.encode(images[index]) for index in np.flatnonzero(mask))


def _load(path: Path, size: int) -> Any:
    """Images (N, size, size, 3) of an array file."""
    try:
        opened: Any = np.load(path, mmap_mode="r", allow_pickle=False)
        arrays = [opened] if path.suffix == ".npy" else [opened[name] for name in opened.files]
    except Exception as error:  # of every kind, on damaged files
        raise ValueError(f"{path} is not an array of numbers that can be read: {error}") from None
    for array in arrays:
        if array.dtype == np.uint8 and array.ndim == 2 and array.shape[1] == 3 * size**2:
            return array.reshape(-1, 3, size, size).transpose(0, 2, 3, 1)
        if array.dtype == np.uint8 and array.shape[1:] == (size, size, 3):
            return array
    held = " and ".join(f"{array.dtype} of shape {array.shape}" for array in arrays) or "nothing"
    raise ValueError(
        f"{path} holds {held}, not uint8 of shape (N, {size}, {size}, 3) or (N, {3 * size**2}): set --size."
    )
