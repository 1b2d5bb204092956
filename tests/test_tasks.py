"""Every task keeps the same promises, and the example of docs/extend.md is one of them."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from perceiver_ar import midi, tasks
from perceiver_ar.data import collate
from perceiver_ar.evaluation import windows
from perceiver_ar.source import open_source
from perceiver_ar.special import BOS, FIRST
from tests.forked import run
from tests.test_audio import save_codec
from tests.test_music import piece

ROOT = Path(__file__).resolve().parents[1]
SMALL = {
    "--model.channels": "16", "--model.heads": "2", "--model.layers": "1", "--model.latents": "16",
    "--model.context": "193", "--train.steps": "3", "--train.batch-size": "2", "--device": "cpu",
}  # fmt: skip


def make_text(folder: Path) -> list[str]:
    for index in range(8):
        (folder / f"{index}.txt").write_text(f"Some text, number {index}. " * 20)
    return []


def make_tokens(folder: Path) -> list[str]:
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(0, 9, (8, 60)))
    return []


def make_music(folder: Path) -> list[str]:
    for index in range(8):
        midi.write_midi(piece(seed=index), folder / f"{index}.mid")
    return []


def make_image(folder: Path) -> list[str]:
    for index in range(8):
        pixels = np.random.default_rng(index).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    return ["--size", "8"]


def make_audio(folder: Path) -> list[str]:
    for index in range(8):
        tone = np.sin(np.arange(4000) / (5 + index)) * 0.5
        soundfile.write(folder / f"{index}.wav", tone, 3200)
    save_codec("dac", folder.parent / "codec")
    return ["--codec", "dac", "--weights", str(folder.parent / "codec"), "--levels", "3"]


MAKERS = {
    "audio": (make_audio, "soundstream-8k-12kbps", ".wav"),
    "text": (make_text, "pg19-2k", ".txt"),
    "tokens": (make_tokens, "tiny", ".npy"),
    "music": (make_music, "maestro-v3", ".mid"),
    "image": (make_image, "imagenet64", ".png"),
}


def command(*args: str) -> str:
    result = run(*args)
    assert result.returncode == 0, (args, result.stderr)
    return result.stdout


@pytest.mark.parametrize("name", MAKERS)
def test_a_task_goes_through_the_same_commands(tmp_path: Path, name: str) -> None:
    make, preset, suffix = MAKERS[name]
    (tmp_path / "source").mkdir()
    options = make(tmp_path / "source")
    store, run = str(tmp_path / "store"), str(tmp_path / "run")
    command("prepare", name, str(tmp_path / "source"), "--out", store, "--validation", "0.25", *options)
    settings = [part for pair in SMALL.items() for part in pair]
    wide = ["--model.input-channels", "16", "--model.cross-heads", "2"]
    command("train", preset, *settings, *wide, "--data", store, "--out", run)
    report = json.loads(command("evaluate", run, "--json"))
    assert report["nats"] > 0

    # Every document begins with BOS and holds nothing special after it but, perhaps, EOS at its end.
    source = open_source(name, {}, store)
    documents = source.documents("validation")
    assert report["tokens"] == sum(document.stop - document.first for document in documents)
    for document in documents:
        assert document.tokens[0] == BOS
        body = document.tokens[1:-1] if source.task.ends else document.tokens[1:]
        assert body.min() >= FIRST
        assert document.tokens.max() < source.stores[0].vocab_size
    # Positions go with the places of a document, wherever a window begins.
    batch = collate([w for w, _ in windows(documents[0], 60, 16)][:3], 16, source.task)
    if batch.positions is not None:
        assert batch.positions.shape[1] == batch.inputs.shape[1]

    out = tmp_path / f"new{suffix}"
    command("generate", run, "--tokens", "12", "--samples", "2", "--seed", "3", "--out", str(out))
    assert out.with_stem("new-1").exists()
    one = ("--tokens", "12", "--out", str(out), "--overwrite", "--json")
    drawn = json.loads(command("generate", run, *one))
    assert len(drawn["samples"][0]["tokens"]) <= 12
    assert min(drawn["samples"][0]["tokens"]) >= (1 if source.task.ends else FIRST)
    # Whatever a model may draw, sense or not, can be written.
    for seed in range(20):
        nonsense = np.random.default_rng(seed).integers(FIRST, source.stores[0].vocab_size, 5 * seed)
        source.task.save(np.concatenate(([BOS], nonsense)), out)
    command("generate", run, "--tokens", "60", "--out", str(out), "--overwrite")
    # What was written can be gone on from.
    more = ("--prompt-file", str(out), "--keep", "1", "--tokens", "3")
    command("generate", run, *more, "--out", str(out), "--overwrite")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs/extend.md").read_text(), re.DOTALL)


def test_the_example_of_a_new_task_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from perceiver_ar import cli

    (code,) = blocks("python")
    module: Any = ModuleType("perceiver_ar.tasks.dna")
    monkeypatch.setitem(sys.modules, "perceiver_ar.tasks.dna", module)
    monkeypatch.setitem(tasks._TASKS, "dna", "DnaTask")
    exec(compile(code, "docs/extend.md", "exec"), module.__dict__)
    assert importlib.import_module("perceiver_ar.tasks.dna") is module
    monkeypatch.chdir(tmp_path)
    letters = np.random.default_rng(0).choice(list("ACGT"), (4, 300))
    Path("genome.fa").write_text("".join(f">{i}\n{''.join(row)}\n" for i, row in enumerate(letters)))
    (shown,) = blocks("sh")
    for line in shown.splitlines():
        monkeypatch.setattr(sys, "argv", line.split())
        cli.main()
    printed = capsys.readouterr().out
    assert "train: 3 documents, 903 tokens" in printed
    assert "validation: 1 documents, 301 tokens" in printed
    assert "bits_per_base" in printed
    last = printed.splitlines()[-1]
    assert last.startswith("ACGT")
    assert set(last) <= set("ACGTN")
    assert len(last) == 54


@pytest.mark.parametrize("name", ["text", "image", "music", "tokens"])
def test_preparing_does_not_wait_for_torch(name: str) -> None:
    code = (
        f"from perceiver_ar import tasks; tasks.preparer({name!r}); import sys; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
