"""MIDI to performance events and back (Oore et al., as used by Music Transformer and the paper).

128 note-on, 128 note-off, 100 time shifts of 10 ms to 1 s, 32 velocities: 388 events. A note that the
sustain pedal holds ends when the pedal is released or the same pitch is struck again.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perceiver_ar import sound
from perceiver_ar.extras import need
from perceiver_ar.windows import Tokens

NOTE_ON, NOTE_OFF, SHIFT, VELOCITY, EVENTS = 0, 128, 256, 356, 388
"""The first id of each kind of event, and the number of events."""
STEPS = 100
"""Steps per second, and steps of the longest shift."""
BIN = 4
"""MIDI velocities per velocity event."""
SUSTAIN = 64
"""The controller number of the pedal, and also the value from which it is down."""

UNENDED = 5
"""Seconds that a note lasts whose end is missing."""

LONGEST = 86_400.0
"""Longest plausible seconds of a piece: damaged files may claim years."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Notes:
    """The notes of a piece; starts and ends are in seconds or in steps."""

    start: NDArray[Any]
    end: NDArray[Any]
    pitch: Ints
    velocity: Ints

    def __len__(self) -> int:
        return len(self.pitch)

    def take(self, which: Any) -> "Notes":
        return Notes(self.start[which], self.end[which], self.pitch[which], self.velocity[which])


def encode_midi(path: str | Path) -> Tokens:
    """The events of a MIDI file, 0 to 387."""
    return encode(quantize(read_midi(path)))


def read_midi(path: str | Path) -> Notes:
    """The notes of a MIDI file, in seconds, with the pedal folded into their lengths; without drums."""
    symusic = need("symusic", "music")
    try:
        score = symusic.Score.from_midi(Path(path).read_bytes())
    except Exception as error:  # symusic raises its own, of many kinds
        reason = " ".join(str(error).split()).removeprefix(str(path))
        raise ValueError(f"{path} is not a MIDI file that can be read: {reason:.200}") from None
    if score.tpq < 1:
        raise ValueError(f"{path} says that a quarter note has no ticks.")
    clock = _clock(score)
    played = [_played(track, clock) for track in score.tracks if not track.is_drum]
    played = [part for part in played if len(part[0])]
    if not played:
        raise ValueError(f"{path} holds no notes.")
    last = max(float(np.append(times, notes.end).max()) for notes, times, _ in played)
    if not last < LONGEST:
        raise ValueError(f"{path} lasts more than a day: its times are not to be believed.")
    parts = [fold_pedal(notes, times, down, last) for notes, times, down in played]
    fields = zip(*((p.start, p.end, p.pitch, p.velocity) for p in parts), strict=True)
    return Notes(*map(np.concatenate, fields))


def _played(track: Any, seconds: Any) -> tuple[Notes, Floats, NDArray[np.bool_]]:
    """The notes of a track, the times when its pedal moves, and whether it moves down."""
    notes, pedal = track.notes.numpy(), track.controls.numpy()
    start = notes["time"].astype(np.int64)
    end = start + np.maximum(notes["duration"].astype(np.int64), 0)
    pitch, velocity = (notes[name].astype(np.int64) for name in ("pitch", "velocity"))
    found = Notes(seconds(start), seconds(end), pitch, velocity).take(velocity > 0)
    of_pedal = pedal["number"] == SUSTAIN
    times, down = seconds(pedal["time"][of_pedal].astype(np.int64)), pedal["value"][of_pedal] >= SUSTAIN
    return found, times, down


def _clock(score: Any) -> Any:
    """A function from ticks to seconds that follows all changes of tempo."""
    tempos = score.tempos.numpy()
    ticks, micros = tempos["time"].astype(np.int64), tempos["mspq"].astype(np.float64)
    if not len(ticks) or ticks[0] > 0:
        ticks, micros = np.append(0, ticks), np.append(500_000.0, micros)
    scale = micros / 1e6 / score.tpq
    passed = np.append(0.0, np.cumsum(np.diff(ticks) * scale[:-1]))

    def seconds(tick: Ints) -> Floats:
        index = np.searchsorted(ticks, tick, side="right") - 1
        return passed[index] + (tick - ticks[index]) * scale[index]

    return seconds


def fold_pedal(notes: Notes, times: Floats, down: NDArray[np.bool_], last: float) -> Notes:
    """Notes as long as they sound, given when the pedal moves, whether down, and when the piece ends."""
    if not len(times):
        return notes
    order = np.lexsort((~down, times))  # moved both ways at once, it ends up, as in note-seq
    times, down = times[order], down[order]
    lifts = np.append(times[~down], last)

    def held(at: Floats) -> NDArray[np.bool_]:
        """Whether the pedal is down, counting movements at that very time."""
        return np.append(False, down)[np.searchsorted(times, at, side="right")]

    # By pitch, then by time, so that the next note of the same pitch follows directly.
    order = np.lexsort((notes.start, notes.pitch))
    start, end, pitch = notes.start[order], notes.end[order], notes.pitch[order]
    count, struck = len(start), held(start)
    following = np.arange(1, count + 1)

    def same(index: Ints) -> NDArray[np.bool_]:
        return (index < count) & (pitch[np.minimum(index, count - 1)] == pitch)

    def onset(index: Ints) -> Floats:
        return np.where(same(index), start[np.minimum(index, count - 1)], np.inf)

    # A note whose key is struck again before its end is cut short only if the pedal is down.
    while True:
        passes = (onset(following) <= end) & ~struck[np.minimum(following, count - 1)]
        if not passes.any():
            break
        following = following + passes
    again = onset(following)
    lifted = lifts[np.minimum(np.searchsorted(lifts, end, side="right"), len(lifts) - 1)]
    sounding = np.where(held(end), np.minimum(np.maximum(lifted, end), again), end)
    sounding = np.where(again <= end, again, sounding)
    kept = (sounding > start) | (again != start)  # one of two struck at once
    back = np.argsort(order[kept], kind="stable")
    return Notes(start[kept], sounding[kept], pitch[kept], notes.velocity[order][kept]).take(back)


def quantize(notes: Notes) -> Notes:
    """Notes in steps of 10 ms, each at least one step long, sorted by start and pitch."""
    order = np.lexsort((notes.pitch, notes.start))
    notes = notes.take(order)
    start, end = ((x * STEPS + 0.5).astype(np.int64) for x in (notes.start, notes.end))
    return Notes(start, np.maximum(end, start + 1), notes.pitch, notes.velocity)


def encode(notes: Notes) -> Tokens:
    """The events of notes in steps."""
    count = len(notes)
    step = np.concatenate((notes.start, notes.end))
    which, off = np.tile(np.arange(count), 2), np.repeat([False, True], count)
    order = np.lexsort((off, which, step))
    step, which, off = step[order], which[order], off[order]
    gap = np.diff(step, prepend=0)
    shifts = (gap + STEPS - 1) // STEPS
    bins = (notes.velocity[which] - 1) // BIN + 1
    louder = np.zeros(2 * count, dtype=bool)
    louder[~off] = np.diff(bins[~off], prepend=0) != 0
    ends = np.cumsum(shifts + louder + 1)
    events = np.full(int(ends[-1]) if count else 0, SHIFT + STEPS - 1, dtype=np.uint16)
    events[ends - 1] = notes.pitch[which] + np.where(off, NOTE_OFF, NOTE_ON)
    events[ends[louder] - 2] = VELOCITY + bins[louder] - 1
    moved = gap > 0
    last_shift = (ends - 2 - louder)[moved]
    events[last_shift] = SHIFT + (gap[moved] - 1) % STEPS
    return events


def decode(events: Tokens) -> Notes:
    """Notes in steps, in the order in which they begin.

    Events that make no sense, such as the end of a note that did not begin, are ignored. A key that is
    struck again ends its previous note, so notes of one pitch never overlap, even if the original ones
    did. A note without an end of its own lasts UNENDED seconds, but not beyond the last event.
    """
    now, velocity = 0, 64
    notes: list[list[int]] = []
    sounding: dict[int, list[int]] = {}
    for event in events.tolist():
        if event < SHIFT and (begun := sounding.pop(event % NOTE_OFF, None)):
            struck_again = event < NOTE_OFF
            begun[1] = min(now, begun[0] + UNENDED * STEPS) if struck_again else now
        if event < NOTE_OFF:
            notes.append([now, -1, event, velocity])
            sounding[event] = notes[-1]
        elif SHIFT <= event < VELOCITY:
            now += event - SHIFT + 1
        elif event >= VELOCITY:
            velocity = (event - VELOCITY) * BIN + 1
    start, end, pitch, loudness = np.array(notes, dtype=np.int64).reshape(-1, 4).T
    unended = np.minimum(start + UNENDED * STEPS, now)
    return Notes(start, np.maximum(np.where(end < 0, unended, end), start + 1), pitch, loudness)


def to_score(notes: Notes) -> Any:
    """A piano part with 50 ticks per quarter and 120 quarters per minute, so that a step is a tick."""
    symusic = need("symusic", "music")
    score = symusic.Score(STEPS // 2)
    score.tempos.append(symusic.Tempo(0, 120.0))
    track = symusic.Track("piano", 0, False)
    for start, end, pitch, velocity in zip(notes.start, notes.end, notes.pitch, notes.velocity, strict=True):
        track.notes.append(symusic.Note(int(start), int(end - start), int(pitch), int(velocity)))
    score.tracks.append(track)
    return score


def write_midi(notes: Notes, path: Path) -> None:
    path.write_bytes(to_score(notes).dumps_midi())


def write_wav(notes: Notes, path: Path, rate: int = 44_100) -> None:
    """Renders notes with the General MIDI soundfont that comes with pretty_midi."""
    symusic, home = need("symusic", "music"), need("pretty_midi", "music").__file__
    synthesizer = symusic.Synthesizer(str(Path(home).parent / "TimGM6mb.sf2"), rate)
    # (2, samples); without a note, a second of silence
    played: Any = synthesizer.render(to_score(notes), True) if len(notes) else np.zeros((2, rate))
    sound.write_wav(np.asarray(played).T, rate, path)


def write_roll(notes: Notes, path: Path) -> None:
    need("PIL.Image", "music").fromarray(roll(notes)).save(path)


def roll(notes: Notes) -> NDArray[np.uint8]:
    """A piano roll as an image: time to the right, pitch upwards, darker is louder."""
    width = max(1, int(notes.end.max()) // 2 + 1) if len(notes) else 1
    keys = np.full((88, width), 255, dtype=np.uint8)
    for start, end, pitch, velocity in zip(notes.start, notes.end, notes.pitch, notes.velocity, strict=True):
        row = 108 - int(np.clip(pitch, 21, 108))
        part = keys[row, start // 2 : max(end // 2, start // 2 + 1)]
        np.minimum(part, 200 - int(velocity) * 200 // 127, out=part)
    return np.repeat(keys, 6, axis=0)
