"""Music: events as note-seq makes them, and back; pieces that are moved and stretched; damaged files."""

import json
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perceiver_ar import ModelConfig, PerceiverAR, midi, presets
from perceiver_ar.distributed import Ranks
from perceiver_ar.drawing import draw
from perceiver_ar.midi import EVENTS, Notes, decode, encode, encode_midi, fold_pedal, quantize
from perceiver_ar.run import export
from perceiver_ar.special import BOS, FIRST
from perceiver_ar.store import Store
from perceiver_ar.tasks.audio import AudioTask
from perceiver_ar.tasks.copy import CopyTask
from perceiver_ar.tasks.music import MusicTask, prepare, stretched, transposed
from tests.forked import run
from tests.mutants import outcomes

MAESTRO = Path(__file__).resolve().parents[2] / "shared/data/maestro"
EVENT_LISTS = st.lists(st.integers(0, EVENTS - 1), max_size=200).map(lambda x: np.array(x, dtype=np.int64))


def piece(count: int = 60, seed: int = 0, most: int = 100) -> Notes:
    """Notes in steps, in order; up to 88 of them have each a pitch of its own."""
    rng = np.random.default_rng(seed)
    start = np.sort(rng.integers(0, 1500, count))
    pitch = 21 + np.arange(count) * 7 % 88
    found = Notes(start, start + rng.integers(1, most, count), pitch, rng.integers(1, 128, count))
    return found.take(np.lexsort((found.pitch, found.start)))


def plain_fold(notes: list[list[Any]], pedal: list[tuple[float, bool]]) -> list[list[Any]]:
    """One event after the other, as a player does it: the slow twin of fold_pedal."""
    moves = [(time, 0 if down else 1, None) for time, down in pedal]
    keys = [(note[0], 2, note) for note in notes] + [(note[1], 3, note) for note in notes]
    held, active, gone, time = False, [], [], 0.0
    for time, kind, note in sorted(moves + keys, key=lambda event: event[:2]):
        if kind == 0:
            held = True
        elif kind == 1:
            held = False
            for other in [x for x in active if x[1] < time]:
                other[1] = time
                active.remove(other)
        elif kind == 2:
            if held:
                for other in [x for x in active if x[2] == note[2]]:
                    other[1] = time
                    active.remove(other)
                    if other[0] == time:
                        gone.append(other)
            active.append(note)
        elif not held and any(x is note for x in active):
            active = [x for x in active if x is not note]
    for note in active:
        note[1] = time
    return [note for note in notes if not any(note is x for x in gone)]


@settings(max_examples=300, deadline=None)
@given(
    notes=st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 20), st.integers(60, 62)),
        min_size=1,
        max_size=25,
        unique_by=lambda note: (note[0], note[2]),
    ),
    pedal=st.lists(st.tuples(st.integers(0, 90), st.booleans()), max_size=12, unique_by=lambda move: move[0]),
)
def test_the_pedal_is_folded_as_it_is_played(notes: list[Any], pedal: list[Any]) -> None:
    start, length, pitch = np.array(notes).T
    given_notes = Notes(start * 1.0, (start + length) * 1.0, pitch, np.arange(len(notes)))
    times, down = np.array([t for t, _ in pedal], float), np.array([d for _, d in pedal], bool)
    folded = fold_pedal(given_notes, times, down, float(np.append(times, given_notes.end).max()))
    rows = [[float(s), float(s + n), p, i] for i, (s, n, p) in enumerate(notes)]
    slow = plain_fold(rows, [(float(t), d) for t, d in pedal]) if pedal else rows
    fast = sorted(zip(folded.velocity.tolist(), folded.start.tolist(), folded.end.tolist(), strict=True))
    assert fast == sorted((note[3], note[0], note[1]) for note in slow)


def test_events_equal_note_seqs_on_every_validation_piece(tmp_path: Path) -> None:
    archive = MAESTRO / "midi-train-validation.tar.xz"
    if not archive.exists():
        pytest.skip("needs ../shared/data/maestro")
    import tarfile

    known = np.load(MAESTRO / "events-validation.npz")
    wanted = {str(name) for name in known["files"]}
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.name.removeprefix("maestro/") in wanted:
                tar.extract(member, tmp_path, filter="data")
    for index, name in enumerate(known["files"]):
        events = known["events"][known["offsets"][index] : known["offsets"][index + 1]]
        found = encode_midi(tmp_path / "maestro" / str(name))
        assert np.array_equal(found, events), name
        assert np.array_equal(encode(decode(found)), events), name


def test_notes_come_back_from_events_and_from_midi(tmp_path: Path) -> None:
    notes = piece()
    events = encode(notes)
    assert events.max() < EVENTS
    back = decode(events)
    for name in ("start", "end", "pitch"):
        assert np.array_equal(getattr(back, name), getattr(notes, name)), name
    assert np.array_equal(back.velocity, (notes.velocity - 1) // 4 * 4 + 1)
    midi.write_midi(back, tmp_path / "a.mid")
    assert np.array_equal(
        encode_midi(tmp_path / "a.mid"),
        encode(quantize(Notes(back.start / 100, back.end / 100, back.pitch, back.velocity))),
    )


def test_tempo_changes_are_followed(tmp_path: Path) -> None:
    import symusic

    score = symusic.Score(100)
    for time, tempo in ((0, 60.0), (200, 120.0)):
        score.tempos.append(symusic.Tempo(time, tempo))
    track = symusic.Track("piano", 0, False)
    track.notes.append(symusic.Note(100, 300, 60, 64))
    score.tracks.append(track)
    score.dump_midi(str(tmp_path / "a.mid"))
    notes = midi.read_midi(tmp_path / "a.mid")
    assert notes.start[0] == pytest.approx(1.0)
    assert notes.end[0] == pytest.approx(2.0 + 1.0)


def test_notes_without_an_end_do_not_sound_on_and_on() -> None:
    on, off, second = 60, 128 + 60, 256 + 99
    struck = decode(np.array([on, second, on, second, off, second, on, second, off]))
    assert struck.end.tolist() == [100, 200, 400]  # not each one's end taken for the one before
    late = decode(np.array([on] + 9 * [second] + [on, second, off]))
    assert late.end.tolist() == [100 * midi.UNENDED, 1000]
    held = decode(np.array([on] + 9 * [second]))
    assert held.end.tolist() == [100 * midi.UNENDED]


@settings(max_examples=200, deadline=None)
@given(events=EVENT_LISTS)
def test_any_events_decode_to_notes_that_can_be_played(events: np.ndarray) -> None:
    notes = decode(events)
    assert (notes.end > notes.start).all()
    assert len(notes) == (events < 128).sum()
    again = decode(encode(notes)) if len(notes) else notes
    assert np.array_equal(again.start, notes.start)


@settings(max_examples=200, deadline=None)
@given(events=EVENT_LISTS, semitones=st.integers(-24, 24))
def test_transposing_moves_pitches_only(events: np.ndarray, semitones: int) -> None:
    tokens = np.concatenate(([BOS], events + FIRST))
    moved = transposed(tokens, semitones)
    assert moved[0] == BOS
    before, after = events, moved[1:] - FIRST
    assert np.array_equal(after[before >= 256], before[before >= 256])
    assert np.array_equal(after[before < 256] // 128, before[before < 256] // 128)
    assert ((after - before - semitones)[before < 256] % 12 == 0).all()
    inside = (before < 256) & (before % 128 + semitones >= 0) & (before % 128 + semitones < 128)
    assert ((after - before)[inside] == semitones).all()


def test_stretching_multiplies_times() -> None:
    notes = piece(200)
    tokens = np.concatenate(([BOS], encode(notes).astype(np.int64) + FIRST))
    assert np.array_equal(stretched(tokens, 1.0), tokens)
    for factor in (0.9, 1.07):
        slower = decode(stretched(tokens, factor)[1:] - FIRST)
        assert np.abs(slower.start - notes.start * factor).max() <= 1
        assert np.array_equal(slower.pitch, notes.pitch)
        # As the encoder would have it: only whole seconds stand before another shift.
        events = stretched(tokens, factor)[1:] - FIRST
        shift = (events >= 256) & (events < 356)
        assert (events[:-1][shift[:-1] & shift[1:]] == 355).all()
    assert stretched(tokens[:1], 1.5).tolist() == [BOS]


def test_the_pedal_holds_notes_until_the_piece_ends_in_another_track(tmp_path: Path) -> None:
    import symusic

    score = symusic.Score(100)
    score.tempos.append(symusic.Tempo(0, 60.0))
    for start, end, pitch in ((0, 25, 60), (400, 500, 72)):
        track = symusic.Track(str(pitch), 0, False)
        track.notes.append(symusic.Note(start, end - start, pitch, 80))
        score.tracks.append(track)
    score.tracks[0].controls.append(symusic.ControlChange(0, 64, 127))
    score.dump_midi(str(tmp_path / "a.mid"))
    notes = midi.read_midi(tmp_path / "a.mid")
    assert sorted(zip(notes.pitch.tolist(), notes.end.tolist(), strict=True)) == [(60, 5.0), (72, 5.0)]


def test_a_piece_of_years_is_refused(tmp_path: Path) -> None:
    late = b"\xff\xff\xff\x7f"  # ticks, the most that there can be
    events = b"\x00\x90\x3c\x40" + late + b"\x80\x3c\x00\x00\xff\x2f\x00"
    for ticks, words in ((1, "more than a day"), (480, "more than a day"), (0, "no ticks")):
        head = b"MThd\x00\x00\x00\x06\x00\x00\x00\x01" + ticks.to_bytes(2, "big")
        (tmp_path / "a.mid").write_bytes(head + b"MTrk" + len(events).to_bytes(4, "big") + events)
        with pytest.raises(ValueError, match=words):
            encode_midi(tmp_path / "a.mid")


def test_what_is_no_midi_is_named_in_one_short_line(tmp_path: Path) -> None:
    (tmp_path / "a.mid").write_bytes(b"no MIDI\n" * 200)
    with pytest.raises(ValueError, match=r"a\.mid is not a MIDI file that can be read: ") as caught:
        encode_midi(tmp_path / "a.mid")
    said = str(caught.value).removeprefix(str(tmp_path / "a.mid"))
    assert "\n" not in said
    assert len(said) < 250


def folder_of_pieces(folder: Path, count: int = 12) -> Path:
    folder.mkdir()
    for index in range(count):
        midi.write_midi(piece(seed=index), folder / f"{index}.mid")
    return folder


def test_augmentation_follows_seed_and_step_and_spares_the_store(tmp_path: Path) -> None:
    from perceiver_ar.source import open_source

    prepare(folder_of_pieces(tmp_path / "a"), tmp_path / "s", workers=1)
    plain = open_source("music", {}, tmp_path / "s").examples(64)
    moved = open_source("music", {"transpose": 5, "stretch": 0.05}, tmp_path / "s").examples(64)
    first, second = moved.windows(0, 3, 8, 16), moved.windows(0, 3, 8, 16)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(first, second, strict=True))
    assert all(1 <= len(w.tokens) - 1 <= 64 and w.scored <= len(w.tokens) - 1 for w in first)
    untouched = plain.windows(0, 3, 8, 16)
    assert not all(np.array_equal(a.tokens, b.tokens) for a, b in zip(first, untouched, strict=True))


def test_pieces_are_filtered_and_split_by_the_maestro_table(tmp_path: Path) -> None:
    source = folder_of_pieces(tmp_path / "a", 4)
    midi.write_midi(piece(3), source / "short.mid")
    (source / "broken.mid").write_bytes(b"MThd nothing")
    rows = [f"{i}.mid,{s}" for i, s in enumerate(("train", "train", "validation", "test"))]
    table = ["midi_filename,split", *rows, "short.mid,train", "broken.mid,train", "missing.mid,train"]
    (source / "maestro-v3.0.0.csv").write_text("\n".join(table))
    result = run("prepare", "music", str(source), "--out", str(tmp_path / "s"), "--min-events", "50")
    assert result.returncode == 0, result.stderr
    assert "broken.mid" in result.stderr
    assert "1 of 6 files were skipped" in result.stderr
    splits = Store.open(tmp_path / "s").meta["splits"]
    assert {name: split["documents"] for name, split in splits.items()} == {
        "train": 2,
        "validation": 1,
        "test": 1,
    }
    (source / "maestro-v3.0.0.csv").write_text("name,part\n0.mid,train\n")
    wrong = run("prepare", "music", str(source), "--out", str(tmp_path / "t"))
    assert wrong.returncode == 2
    assert "is not MAESTRO's table" in wrong.stderr
    nothing = run("prepare", "music", str(tmp_path / "s"), "--out", str(tmp_path / "t"))
    assert nothing.returncode == 2
    assert "holds no .mid or .midi files" in nothing.stderr


def test_music_is_written_as_midi_sound_and_picture(tmp_path: Path) -> None:
    from PIL import Image

    task, tokens = MusicTask(), np.concatenate(([BOS], encode(piece()).astype(np.int64) + FIRST))
    for suffix in (".mid", ".wav", ".png"):
        task.check_file(tmp_path / f"a{suffix}")
        task.save(tokens, tmp_path / f"a{suffix}")
    assert len(decode(encode_midi(tmp_path / "a.mid"))) == len(piece())
    seconds = piece().end.max() / 100
    with wave.open(str(tmp_path / "a.wav")) as sound:
        assert seconds - 0.1 < sound.getnframes() / sound.getframerate() < seconds + 10
        samples = np.frombuffer(sound.readframes(sound.getnframes()), "<i2")
    assert 1000 < np.abs(samples).max() <= 32_767
    assert np.asarray(Image.open(tmp_path / "a.png")).min() < 200
    with pytest.raises(ValueError, match=r"music is written to \.mid"):
        task.check_file(tmp_path / "a.txt")
    silence = np.array([BOS, FIRST + 300])
    for suffix in (".mid", ".wav", ".png"):
        task.save(silence, tmp_path / f"b{suffix}")


def test_a_prompt_is_the_first_seconds_of_a_piece(tmp_path: Path) -> None:
    notes = piece()
    midi.write_midi(notes, tmp_path / "a.mid")
    whole, five = (MusicTask().prompt_file(tmp_path / "a.mid", keep) for keep in (None, 5))
    assert np.array_equal(whole[: len(five)], five)
    assert len(decode(five[1:] - FIRST)) == (notes.start <= 500).sum()
    with pytest.raises(ValueError, match="--keep must be at least 0 seconds, but is -1"):
        MusicTask().prompt_file(tmp_path / "a.mid", -1)


def test_damaged_files_never_take_the_process_with_them(tmp_path: Path) -> None:
    counts = outcomes(tmp_path, 300)
    assert sum(counts.values()) == 300
    assert sum(times for what, times in counts.items() if "ValueError" in what) > 50
    assert {what.split(": ")[1] for what in counts} <= {"read", "ValueError", "Lost"}


def test_music_of_so_many_seconds_is_composed_played_and_drawn(tmp_path: Path) -> None:
    config = ModelConfig(EVENTS + FIRST, 64, 32, channels=16, heads=2, layers=1)
    experiment = replace(presets.get("maestro-v3"), model=config, options={})
    export(tmp_path / "run/model", PerceiverAR(config), experiment, MusicTask(), None)
    folder, out = str(tmp_path / "run"), str(tmp_path / "piece")
    drawn = run("generate", folder, "--seconds", "3", "--samples", "2", "--out", out, "--json")
    assert drawn.returncode == 0, drawn.stderr
    report = json.loads(drawn.stdout)
    for number, sample in enumerate(report["samples"], 1):
        assert sample["files"] == [f"{out}-{number}{suffix}" for suffix in (".mid", ".wav", ".png")]
        assert sample["file"] == sample["files"][0]
        assert all(Path(file).exists() for file in sample["files"])
        lasting = MusicTask().seconds(np.array(sample["tokens"])).cumsum()
        assert lasting[-1] >= 3 > lasting[-2]  # and not an event more
        with wave.open(f"{out}-{number}.wav") as sound:
            assert 2 < sound.getnframes() / sound.getframerate() < 12
    written = run("generate", folder, "--seconds", "3", "--out", f"{out}.mid")
    assert written.stdout.split() == [f"{out}.mid"]
    for wrong, sentence in (
        (("--seconds", "0"), "--seconds must be above 0 and at most 3,600, but is 0"),
        (("--seconds", "1e14"), "at most 3,600, but is 1e+14"),
        (("--seconds", "2", "--tokens", "5"), "give --tokens or --seconds, not both"),
        (("--out", f"{out}.txt"), "or without any of these to three"),
    ):
        result = run("generate", folder, "--out", out, *wrong)
        assert result.returncode == 2
        assert sentence in result.stderr


def test_music_that_ends_before_its_time_is_said_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ModelConfig(EVENTS + FIRST, 16, 8, channels=16, heads=2, layers=1, positions="learned")
    model, out = PerceiverAR(config), tmp_path / "piece.mid"
    settings: Any = {"seed": 0, "temperature": 1.0}
    quiet = (1, out, True, Ranks(), lambda: None)
    report = draw(model, MusicTask(), np.array([BOS]), None, 100.0, *quiet, **settings)
    assert report["tokens"] == 16
    assert "seconds were generated: the limit on tokens was reached" in capsys.readouterr().err
    with pytest.raises(ValueError, match="not both"):
        draw(model, MusicTask(), np.array([BOS]), 5, 100.0, *quiet, **settings)


def test_only_what_sounds_lasts() -> None:
    with pytest.raises(ValueError, match="the task copy draws does not sound: give --tokens"):
        CopyTask(length=32).count_for(3.0)
    audio = AudioTask(levels=4, codes=16)
    assert audio.count_for(2.99) == 600  # whole frames
    assert audio.seconds(np.zeros(4)) is None
