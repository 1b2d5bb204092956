"""Audio: recordings as the codes of a codec, level by level in each frame.

Letters: F frames, L levels.
"""

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from perceiver_ar import codecs
from perceiver_ar.codecs import HUB, Codec, Codes, Kind, Lyra
from perceiver_ar.extras import need
from perceiver_ar.reading import read_alone, readable
from perceiver_ar.sealed import Damaged
from perceiver_ar.sound import SOUNDS, read_sound, write_spectrogram, write_wav
from perceiver_ar.special import BOS, FIRST
from perceiver_ar.splits import Shares, by_split, recordings
from perceiver_ar.store import Store, check_new, smallest_dtype, write_store
from perceiver_ar.tasks.base import Document, Task
from perceiver_ar.windows import Tokens

WRITERS = {".wav": write_wav, ".png": write_spectrogram}
LONGEST = 3600.0
"""Seconds that one recording may take."""


@dataclass(frozen=True)
class AudioTask(Task):
    """Codes of a codec after a BOS, frame by frame; each level has its own slice of the vocabulary."""

    name: ClassVar[str] = "audio"
    suffix: ClassVar[str] = ".wav"

    levels: int = 16
    """Codes per frame; taken from the store, like all of these."""
    codes: int = 16
    """Number of values of a code."""
    frame_rate: float = 50.0
    """Frames per second."""
    codec: Kind = "lyra"
    """Codec that encodes and decodes them."""
    weights: str = ""
    """The codec's name on the hub, or its folder. Lyra's files are copied into the store and the model."""
    sha256: str = ""
    """Digest of Lyra's files."""
    loudness: float | None = field(default=-20.0, compare=False)
    """Loudness to which recordings are normalized, in dB."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loudness is not None and not -200 <= self.loudness <= 0:
            raise ValueError(f"loudness must be from -200 to 0 dB, but is {self.loudness}.")

    def at(self, folder: Path) -> Self:
        """With Lyra's files, if those are needed, that lie there."""
        if self.codec == "lyra" and self.sha256:
            if digest(folder) != self.sha256:
                raise Damaged(f"Lyra's files in {folder} are missing or damaged.")
            object.__setattr__(self, "folder", folder)
        return self

    folder: ClassVar[Path | None] = None

    def files(self) -> dict[str, bytes]:
        return {} if self.folder is None else {name: (self.folder / name).read_bytes() for name in Lyra.FILES}

    def _source(self) -> str:
        if not self.weights and self.folder is None:
            raise ValueError("it is not known which codec made these codes, so they cannot be heard.")
        return self.weights or str(self.folder)

    def _voice(self) -> Codec:
        return codecs.load(self.codec, self._source())

    @property
    def ends(self) -> bool:
        return False

    @property
    def vocab_size(self) -> int:
        return self.levels * self.codes + FIRST

    def encode(self, codes: Codes) -> Tokens:
        """(F, L) to a BOS and F * L tokens."""
        return np.concatenate(([BOS], (codes + self.codes * np.arange(self.levels) + FIRST).reshape(-1)))

    def decode(self, tokens: Tokens) -> Codes:
        """The whole frames among the tokens after a BOS."""
        whole = tokens[1 : 1 + (len(tokens) - 1) // self.levels * self.levels].astype(np.int64)
        return (whole.reshape(-1, self.levels) - FIRST) % self.codes

    def allowed(self, place: int, vocab_size: int) -> NDArray[np.bool_]:
        """The codes of the level that is due."""
        first = FIRST + (place - 1) % self.levels * self.codes
        allowed = np.zeros(vocab_size, dtype=bool)
        allowed[first : first + self.codes] = True
        return allowed

    def report(self, nats: float, tokens: int, counts: Mapping[str, int]) -> dict[str, float]:
        seconds = tokens / self.levels / self.frame_rate
        return {"seconds": seconds, "bits_per_second": nats / math.log(2) / seconds}

    def reach(self, context: int) -> dict[str, float]:
        return {"seconds_of_context": context / self.levels / self.frame_rate}

    def read(self, path: Path) -> Document:
        tokens = self.prompt_file(path)
        return Document(tokens, 1, len(tokens))

    def prompt_file(self, path: Path, keep: int | None = None) -> Tokens:
        """A recording, or only its first seconds."""
        if keep is not None and keep < 1:
            raise ValueError(f"--keep must be at least 1 second, but is {keep}.")
        work = partial(codes_of, self.codec, self._source(), self.levels, self.loudness, keep)
        return self.encode(read_alone(work, path, LONGEST))

    def count(self, prompt: Tokens) -> int:
        return self.count_for(5.0)

    def count_for(self, seconds: float) -> int:
        return max(1, round(seconds * self.frame_rate)) * self.levels

    def check_file(self, path: Path) -> None:
        if path.suffix not in WRITERS:
            raise ValueError(f"audio is written to {', '.join(WRITERS)}, not to {path}.")
        self._voice()  # which may be missing, and that is better told before anything is drawn

    def save(self, tokens: Tokens, path: Path) -> None:
        voice = self._voice()
        WRITERS[path.suffix](voice.decode(self.decode(tokens)), voice.rate, path)


def digest(folder: Path) -> str:
    """A digest of Lyra's files; empty if one is missing."""
    paths = [folder / name for name in Lyra.FILES]
    if not all(path.is_file() for path in paths):
        return ""
    return sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def codes_of(
    codec: Kind, weights: str, levels: int, loudness: float | None, seconds: float | None, path: Path
) -> Codes:
    """Codes (F, L) of a recording."""
    voice = codecs.load(codec, weights)
    return voice.encode(read_sound(path, voice.rate, loudness, seconds), levels)


def prepare(
    source: Path,
    /,
    out: Path,
    codec: Kind = "lyra",
    weights: str | None = None,
    levels: int | None = None,
    loudness: float | None = -20.0,
    validation: float = 0.05,
    test: float = 0.0,
    workers: int | None = None,
) -> Store:
    """Turn recordings into a token store. If interrupted, run the same command again to continue.

    Args:
        source: A .wav, .flac, .ogg or .mp3 file, or a folder of them. Its splits follow from a MAESTRO .csv
            or from folders named train, validation and test; missing ones are drawn from the rest.
        out: New folder for the store.
        codec: lyra: SoundStream with the weights of Lyra v2; encodec, dac or mimi: those of transformers.
        weights: For lyra, required: the folder of its .tflite files, model_coeffs in Lyra's repository. For
            others: a folder or a name on the hub. Default: the published weights.
        levels: Codes per frame: more sound better and make longer sequences. Default: 16 for lyra, else 8.
        loudness: Loudness to which every recording is normalized, in dB (RMS relative to full scale). None:
            unchanged.
        validation: Fraction of the recordings to hold out for validation.
        test: Fraction of the recordings to hold out for testing.
        workers: Number of processes. Default: one per core; a single one if the codec runs on a GPU.
    """
    check_new(out)
    for module in ("soundfile", "soxr"):
        need(module, "audio")
    shares, named = Shares(validation, test), recordings(source, SOUNDS, "audio_filename")
    weights = _weights(codec, weights)
    voice = codecs.load(codec, weights)
    levels = voice.usual if levels is None else levels
    if not 1 <= levels <= voice.most:
        raise ValueError(f"--levels must be from 1 to {voice.most} for {weights}, but is {levels}.")
    mark, kept = (digest(Path(weights)), "") if codec == "lyra" else ("", weights)
    task = AudioTask(
        levels=levels,
        codes=voice.codes,
        frame_rate=voice.rate / voice.hop,
        codec=codec,
        weights=kept,
        sha256=mark,
        loudness=loudness,
    )
    scratch = out.with_name(f".{out.name}.codes")
    work = partial(_keep, task, weights, scratch)
    alone = workers is None and voice.device == "cuda"
    done = dict(readable(work, named, 1 if alone else workers, LONGEST))
    if not done:
        raise ValueError(f"{source} holds no recording that can be used.")
    store = write_store(
        out,
        {name: (np.load(done[p]) for p in files) for name, files in by_split(named, done, shares).items()},
        task.vocab_size,
        "audio",
        task.to_dict(),
        files=task.at(Path(weights)).files(),
    )
    shutil.rmtree(scratch)
    return store


def _weights(codec: Kind, given: str | None) -> str:
    """A codec's folder, from wherever it will be looked for, or its name on the hub."""
    weights = given or HUB.get(codec)
    if weights is None:
        raise ValueError(
            "--weights must name the folder of Lyra's .tflite files (model_coeffs in its repository); "
            "or take --codec encodec, which fetches its own."
        )
    return str(Path(weights).resolve()) if Path(weights).is_dir() else weights


def _keep(task: AudioTask, weights: str, scratch: Path, path: Path) -> Path:
    """Where the tokens of a recording lie, made if they are not there yet."""
    about = path.stat()
    key = f"{path.resolve()} {about.st_size} {about.st_mtime_ns} {weights} {task.to_dict()}"
    kept = scratch / f"{sha256(os.fsencode(key)).hexdigest()}.npy"
    if not kept.exists():
        codes = codes_of(task.codec, weights, task.levels, task.loudness, None, path)
        scratch.mkdir(parents=True, exist_ok=True)
        beside = kept.with_suffix(".partial")
        with beside.open("wb") as file:
            np.save(file, task.encode(codes).astype(smallest_dtype(task.vocab_size)))
        beside.rename(kept)
    return kept
