"""Damaged files: `python -m tests.mutants 6000 .mid .png .jpg` reads 6000 of them, and counts outcomes."""

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from perceiver_ar.midi import Notes, encode_midi, write_midi
from perceiver_ar.sound import SOUNDS, read_sound
from perceiver_ar.tasks.image import read_picture
from perceiver_ar.workers import each

KINDS = (".mid", ".png", ".jpg", ".wav", ".flac", ".ogg", ".mp3")


def originals(folder: Path) -> None:
    """Makes one file of each kind."""
    import soundfile
    from PIL import Image

    rng = np.random.default_rng(0)
    start = np.sort(rng.integers(0, 3000, 200))
    pitch, velocity = rng.integers(21, 109, 200), rng.integers(1, 128, 200)
    write_midi(Notes(start, start + rng.integers(1, 200, 200), pitch, velocity), folder / "a.mid")
    picture = Image.fromarray(rng.integers(0, 256, (48, 40, 3), dtype=np.uint8))
    picture.save(folder / "a.png")
    picture.save(folder / "a.jpg")
    tone = np.sin(np.arange(22_050)[:, None] / (9, 11)) * 0.5 + rng.standard_normal((22_050, 2)) * 0.05
    for kind in (".wav", ".flac", ".ogg", ".mp3"):
        soundfile.write(folder / f"a{kind}", tone, 22_050)


def mutants(folder: Path, count: int, kinds: Sequence[str], seed: int = 0) -> Iterator[Path]:
    """Yields files that are cut short, or have bits flipped or bytes overwritten."""
    rng = random.Random(seed)
    originals(folder)
    for index in range(count):
        path = folder / f"a{kinds[index % len(kinds)]}"
        data = bytearray(path.read_bytes())
        kind = rng.randrange(3)
        if kind == 0:
            del data[rng.randrange(len(data)) :]
        for _ in range(rng.choice((1, 3, 30)) if kind else 0):
            place = rng.randrange(len(data))
            data[place] = data[place] ^ (1 << rng.randrange(8)) if kind == 1 else rng.randrange(256)
        mutant = folder / f"{index}{path.suffix}"
        mutant.write_bytes(data)
        yield mutant


def read(path: Path) -> int:
    """Reads a file as `prepare` does; returns how much was found."""
    if path.suffix == ".mid":
        return len(encode_midi(path))
    return (read_sound(path, 16_000, -20.0) if path.suffix in SOUNDS else read_picture(32, path)).size


def outcomes(folder: Path, count: int, kinds: Sequence[str] = KINDS, seed: int = 0) -> Counter[str]:
    """How often each outcome occurred, by kind of file."""
    results = each(read, mutants(folder, count, kinds, seed), workers=2, seconds=20)
    return Counter(
        f"{path.suffix}: {type(error).__name__ if error else 'read'}" for path, _, error in results
    )


if __name__ == "__main__":
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        for what, times in sorted(outcomes(Path(place), int(sys.argv[1]), sys.argv[2:] or KINDS).items()):
            print(f"{what} {times}")
    print(f"{time.monotonic() - began:.0f} s")
