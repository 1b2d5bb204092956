"""Symbolic music: MIDI files as performance events."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from perceiver_ar import midi
from perceiver_ar.extras import need
from perceiver_ar.midi import EVENTS, NOTE_OFF, SHIFT, STEPS, VELOCITY, encode_midi
from perceiver_ar.reading import read_alone, readable
from perceiver_ar.special import BOS, FIRST
from perceiver_ar.splits import Shares, by_split, recordings
from perceiver_ar.store import Store, check_new, write_store
from perceiver_ar.tasks.base import Document, Task
from perceiver_ar.windows import Tokens

WRITERS = {".mid": midi.write_midi, ".midi": midi.write_midi, ".wav": midi.write_wav, ".png": midi.write_roll}


@dataclass(frozen=True)
class MusicTask(Task):
    """Performance events after a BOS."""

    name: ClassVar[str] = "music"
    lasting: ClassVar[float | None] = 20.0

    transpose: int = 0
    """In training, transpose pieces at random by up to this many semitones up or down."""
    stretch: float = 0.0
    """In training, play pieces faster or slower at random, by up to this fraction."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.transpose <= 24 or not 0 <= self.stretch <= 0.5:
            raise ValueError("transpose must be from 0 to 24 semitones, and stretch from 0 to 0.5.")

    @property
    def ends(self) -> bool:
        return False

    def augment(self, tokens: Tokens, random: np.random.Generator) -> Tokens:
        if self.transpose:
            tokens = transposed(tokens, int(random.integers(-self.transpose, self.transpose + 1)))
        if self.stretch:
            tokens = stretched(tokens, float(random.uniform(1 - self.stretch, 1 + self.stretch)))
        return tokens

    def read(self, path: Path) -> Document:
        tokens = self.prompt_file(path)
        return Document(tokens, 1, len(tokens))

    def prompt_file(self, path: Path, keep: int | None = None) -> Tokens:
        """A MIDI file, or only its first seconds."""
        if keep is not None and keep < 0:
            raise ValueError(f"--keep must be at least 0 seconds, but is {keep}.")
        events = read_alone(encode_midi, path)
        if keep is not None:
            steps = np.cumsum(np.where(_is_shift(events), events.astype(np.int64) - SHIFT + 1, 0))
            events = events[steps <= keep * STEPS]
        return _stored(events)

    def count_for(self, seconds: float) -> int:
        """More tokens than any music has, so that what never lets time pass comes to an end."""
        return math.ceil(400 * seconds)

    def seconds(self, tokens: Tokens) -> NDArray[np.float64]:
        events = tokens.astype(np.int64) - FIRST
        return np.where(_is_shift(events), (events - SHIFT + 1) / STEPS, 0.0)

    def check_file(self, path: Path) -> None:
        if path.suffix and path.suffix not in WRITERS:
            raise ValueError(
                f"music is written to {', '.join(WRITERS)}, or without any of these to three, not to {path}."
            )
        for module in ("symusic", "pretty_midi", "PIL.Image"):  # better to fail now than after composing
            need(module, "music")

    def files_of(self, path: Path) -> list[Path]:
        """The file itself; without a suffix three, to be played, heard and seen."""
        return [path] if path.suffix else [path.with_suffix(suffix) for suffix in (".mid", ".wav", ".png")]

    def save(self, tokens: Tokens, path: Path) -> None:
        WRITERS[path.suffix](midi.decode(tokens[tokens >= FIRST] - FIRST), path)


def _stored(events: Tokens) -> Tokens:
    return np.concatenate(([BOS], events.astype(np.int64) + FIRST))


def _is_shift(events: Tokens) -> NDArray[np.bool_]:
    return (events >= SHIFT) & (events < VELOCITY)


def transposed(tokens: Tokens, semitones: int) -> Tokens:
    """All pitches moved; those that would leave the 128 by some octaves less."""
    events = tokens.astype(np.int64) - FIRST
    of_note = (events >= 0) & (events < SHIFT)
    pitch = events % NOTE_OFF + semitones
    pitch += 12 * (np.maximum(-pitch + 11, 0) // 12)
    pitch -= 12 * (np.maximum(pitch - NOTE_OFF + 12, 0) // 12)
    return np.where(of_note, events // NOTE_OFF * NOTE_OFF + pitch + FIRST, tokens)


def stretched(tokens: Tokens, factor: float) -> Tokens:
    """All times multiplied, and written in as few shifts as they need."""
    events = tokens.astype(np.int64) - FIRST
    shift = _is_shift(events)
    passed = np.cumsum(np.where(shift, events - SHIFT + 1, 0))
    # Before each other event, and at the end, stand the steps since the last.
    wanted = np.round(np.append(passed[~shift], passed[-1]) * factor).astype(np.int64)
    gap = np.diff(wanted, prepend=0)
    ends = np.cumsum((gap + STEPS - 1) // STEPS + 1)
    out = np.full(int(ends[-1]), SHIFT + STEPS - 1)
    out[ends[gap > 0] - 2] = SHIFT + (gap[gap > 0] - 1) % STEPS
    out[ends[:-1] - 1] = events[~shift]
    return out[:-1] + FIRST


def prepare(
    source: Path,
    /,
    out: Path,
    validation: float = 0.05,
    test: float = 0.0,
    min_events: int = 1,
    max_events: int | None = None,
    workers: int | None = None,
) -> Store:
    """Turn MIDI files into a token store.

    Args:
        source: A .mid file, or a folder of them. Its splits follow from a MAESTRO .csv or from folders
            named train, validation and test; missing ones are drawn from the rest.
        out: New folder for the store.
        validation: Fraction of the pieces to hold out for validation.
        test: Fraction of the pieces to hold out for testing.
        min_events: Leave out pieces with fewer events.
        max_events: Leave out pieces with more events.
        workers: Number of processes. Default: one per core.
    """
    check_new(out)
    need("symusic", "music")
    shares, named = Shares(validation, test), recordings(source, (".mid", ".midi"), "midi_filename")
    read = dict(readable(encode_midi, named, workers))
    longest = math.inf if max_events is None else max_events
    pieces = {path: _stored(events) for path, events in read.items() if min_events <= len(events) <= longest}
    if len(pieces) < len(read):
        print(f"Left out {len(read) - len(pieces)} pieces with too few or too many events.", file=sys.stderr)
    if not pieces:
        raise ValueError(f"{source} holds no piece that can be used.")
    chosen = by_split(named, pieces, shares).items()
    return write_store(
        out, {name: [pieces[p] for p in files] for name, files in chosen}, EVENTS + FIRST, "music"
    )
