"""The models that come with this package do their work wherever they are called by name."""

import json
import re
import time
import wave
from pathlib import Path

import numpy as np
import pytest

from perceiver_ar.evaluation import evaluate
from perceiver_ar.playground.shown import Shown
from perceiver_ar.run import BOX, boxed, load, named
from perceiver_ar.special import BOS, FIRST
from perceiver_ar.tasks.base import Document
from tests.forked import run

EVENTS = Path(__file__).parents[2] / "shared/data/maestro/events-validation.npz"
FILES = [f"piano{suffix}" for suffix in (".mid", ".wav", ".png")]


def composed(*asked: str) -> list[str]:
    result = run("generate", "piano", *asked)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_piano_is_composed_for_twenty_seconds_in_less_than_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    began = time.perf_counter()
    assert composed() == FILES
    assert time.perf_counter() - began < 60
    with wave.open("piano.wav") as sound:
        assert 15 < sound.getnframes() / sound.getframerate() < 30  # the last notes may end sooner or fade


def test_what_was_composed_is_kept_and_can_be_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert composed("--tokens", "60") == FILES
    first = Path("piano.mid").read_bytes()
    again = composed("--tokens", "30", "--prompt-file", "piano.mid", "--keep", "10", "--seed", "1")
    assert again == [file.replace("piano", "piano-2") for file in FILES]
    assert Path("piano.mid").read_bytes() == first
    assert len(composed("--tokens", "5", "--samples", "2")) == 6
    assert {path.suffix for path in tmp_path.iterdir()} == {".mid", ".wav", ".png"}
    assert len(list(tmp_path.iterdir())) == 12


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--samples", "1000000000"), "samples must be from 1 to 10,000"),
        (("--out", "."), ". cannot be written: give a file in a folder that exists."),
        (("--out", ".."), ".. cannot be written"),
        (("--out", "folder"), "folder cannot be written"),
        (("--out", "piano.mid"), "piano.mid exists already"),
        (("--out", "nowhere/x"), "nowhere/x cannot be written"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_composed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: tuple[str, str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("piano.mid").symlink_to("nowhere/else")  # counts as taken, though nothing is there
    result = run("generate", "piano", "--tokens", "3", *asked)
    assert result.returncode == 2
    assert said in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "piano.mid"]


def test_new_files_are_named_beside_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("piano.png").write_bytes(b"mine")
    assert composed("--tokens", "3") == [file.replace("piano", "piano-2") for file in FILES]
    assert Path("piano.png").read_bytes() == b"mine"
    assert composed("--tokens", "3", "--overwrite") == FILES
    assert Path("piano.png").read_bytes() != b"mine"


def test_a_folder_of_ones_own_comes_before_the_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert named("piano") == BOX / "piano"
    Path("piano").mkdir()
    assert named("piano") == Path("piano")
    Path("note").write_text("x")
    for name, what in (("pianno", "does not exist"), ("note", "is no folder")):
        result = run("generate", name)
        assert result.returncode == 2
        assert f"{name} {what}: give the folder of a run, or piano." in result.stderr


def test_other_commands_take_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("export", "piano", "exported").returncode == 0
    assert run("pack", "piano", "packed").returncode == 0
    assert "license: cc-by-nc-sa-4.0" in Path("exported/README.md").read_text()
    for folder in ("exported", "packed"):
        assert Path(folder, "LICENSE").read_bytes() == (BOX / "piano/LICENSE").read_bytes()
    assert load("exported", "cpu")[0].config == load("piano", "cpu")[0].config
    assert Shown(Path("piano"), "cpu").get()[1].name == "music"


@pytest.mark.parametrize("name", boxed())
def test_a_card_says_what_the_model_is(name: str) -> None:
    card, report = ((BOX / name / file).read_text() for file in ("README.md", "evaluation.json"))
    nats = json.loads(report)["nats"]
    assert f"**{nats:.3f} nats per event**" in card
    assert f"value: {nats:.4f}" in card
    assert re.search(r"^license: cc-by-nc-sa-4\.0$", card, re.MULTILINE)
    assert sum(path.stat().st_size for path in (BOX / name).iterdir()) < 30e6


@pytest.mark.skipif(not EVENTS.exists(), reason="needs ../shared")
def test_the_loss_is_about_what_the_card_says() -> None:
    events, documents = np.load(EVENTS), []
    for piece in range(0, 137, 17):
        start = events["offsets"][piece]
        tokens = np.concatenate(([BOS], events["events"][start : start + 1024].astype(np.int64) + FIRST))
        documents.append(Document(tokens, 1, len(tokens)))
    model, task, _ = load("piano", "cpu")
    stated = json.loads((BOX / "piano/evaluation.json").read_text())["nats"]
    assert evaluate(model, task, documents)["nats"] == pytest.approx(stated, abs=0.2)
