"""Splits: as folders, files and tables name them, and drawn where none does."""

import os
from collections import Counter
from pathlib import Path

import pytest

from perceiver_ar.splits import Shares, by_folder, by_split, divide, draw_splits, recordings, top

SOME = Shares(0.1, 0.0)


def touch(folder: Path, *names: str) -> list[Path]:
    paths = [folder / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return paths


def test_what_is_named_is_kept_and_the_rest_is_drawn() -> None:
    assert Counter(divide([None] * 20, SOME)) == {"train": 18, "validation": 2}
    named = ["train"] * 20 + ["validation"] * 3
    assert divide(named, SOME) == named
    # Where only some are named, what is missing comes out of the training ones.
    assert Counter(divide(["train"] * 20, SOME)) == {"train": 18, "validation": 2}
    assert Counter(divide(["train"] * 20 + ["test"] * 5, SOME)) == {"train": 18, "validation": 2, "test": 5}
    assert Counter(divide([None] * 4 + ["validation"], Shares(0.5, 0.25))) == {
        "train": 3,
        "validation": 1,
        "test": 1,
    }


def test_every_share_gets_something_and_one_alone_is_for_training() -> None:
    assert draw_splits(1, Shares(0.05, 0.05)) == ["train"]
    assert sorted(draw_splits(3, Shares(0.05, 0.05))) == ["test", "train", "validation"]
    with pytest.raises(ValueError, match="2 documents are too few"):
        draw_splits(2, Shares(0.05, 0.05))


def test_folders_are_split_names_and_files_are_not(tmp_path: Path) -> None:
    files = touch(tmp_path, "ds/train/a.x", "ds/train/b.x", "ds/val/c.x")
    assert top(tmp_path) == tmp_path / "ds"
    assert [*by_folder(files, tmp_path / "ds").values()] == ["train", "train", "validation"]
    flat = touch(tmp_path / "flat", *(f"train_{i}.x" for i in range(10)), *(f"tram_{i}.x" for i in range(10)))
    assert set(by_folder(flat, tmp_path / "flat").values()) == {None}


def test_files_of_data_sets_are_named_after_splits_too(tmp_path: Path) -> None:
    names = {
        "train.txt": "train", "test-00000-of-00001.txt": "test", "val_data.npz": "validation",
        "test-short.txt": None, "test.py": None, "other.jsonl": None, "Valid.JSONL": "validation",
    }  # fmt: skip
    files = touch(tmp_path, *names)
    assert [*by_folder(files, tmp_path).values()] == [*names.values()]


def test_only_what_can_be_used_is_divided() -> None:
    named = dict.fromkeys(map(Path, "abcdefgh"))
    for missing in named:
        found = by_split(named, named.keys() - {missing}, SOME)
        assert {split: len(files) for split, files in found.items()} == {"train": 6, "validation": 1}


def test_a_table_gives_the_splits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = touch(tmp_path / "inner", "a.mid", "2004/b.mid")
    (tmp_path / "inner/maestro-v1.csv").write_text(
        "midi_filename,split\na.mid,train\n2004/b.mid,valid\nc.mid,test\n"
    )
    assert recordings(tmp_path, (".mid", ".midi"), "midi_filename") == {a: "train", b: "validation"}
    assert "1 of the 3 files" in capsys.readouterr().err
    (tmp_path / "inner/maestro-v1.csv").write_text("midi_filename,split\na.mid,other\n")
    with pytest.raises(ValueError, match="with a split 'other'"):
        recordings(tmp_path, (".mid", ".midi"), "midi_filename")
    (tmp_path / "inner/maestro-v1.csv").write_text("midi_filename,split\na.mid\n")
    with pytest.raises(ValueError, match="a line without a file"):
        recordings(tmp_path, (".mid", ".midi"), "midi_filename")
    (tmp_path / "inner/maestro-v1.csv").write_text("x,y\n1,2\n")
    with pytest.raises(ValueError, match="is not MAESTRO's table"):
        recordings(tmp_path, (".mid", ".midi"), "midi_filename")


def test_what_is_hidden_is_left_alone(tmp_path: Path) -> None:
    touch(tmp_path, ".cache/a.wav", "b.wav", ".c.wav")
    (tmp_path / "folder.wav").mkdir()
    os.mkfifo(tmp_path / "pipe.wav")
    assert list(recordings(tmp_path, (".wav", ".mp3"), "audio_filename")) == [tmp_path / "b.wav"]
    with pytest.raises(ValueError, match=r"holds no \.flac or \.ogg files"):
        recordings(tmp_path, (".flac", ".ogg"), "audio_filename")
