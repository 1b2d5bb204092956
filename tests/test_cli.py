"""The command line, as a user meets it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from perceiver_ar import __version__, cli, presets
from tests.forked import run


def test_presets_are_listed_with_their_sizes() -> None:
    result = run("presets")
    assert result.returncode == 0
    lines = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()}
    assert lines["name"] == ["task", "context", "latents", "layers", "channels", "parameters"]
    assert lines["imagenet64"] == ["image", "12,289", "1,024", "60", "1,024", "770.1M"]
    assert set(presets.names()) <= set(lines)


def test_odd_texts_contexts_and_presets(tmp_path: Path) -> None:
    (tmp_path / "bb.txt").write_text("some bold text :warning:[/b]\n" * 40)
    assert run("prepare", "text", str(tmp_path / "bb.txt"), "--out", str(tmp_path / "store")).returncode == 0
    small = ("--model.context", "32", "--model.latents", "16", "--model.layers", "1")
    where = ("--data", str(tmp_path / "store"), "--out", str(tmp_path / "run"))
    trained = run("train", "tiny", *SMALL, *small, "--train.evaluate-every", "2", *where)
    assert trained.returncode == 0, trained.stderr
    assert ":warning:[/b]" in trained.stderr
    short = run("evaluate", str(tmp_path / "run"), "--context", "5", "--json")  # fewer than latents
    assert short.returncode == 0, short.stderr
    elsewhere = ("--data", str(tmp_path / "store"), "--out", str(tmp_path / "x"))
    wrong = run("train", "imagenet64", *SMALL, *elsewhere)
    assert wrong.returncode == 2
    assert "axial positions are for tasks that give them" in wrong.stderr
    assert not (tmp_path / "x").exists()
    drawn = run("generate", str(tmp_path / "run"), "--out", str(tmp_path / "a.png"))
    assert (drawn.returncode, "is text, which is not written to" in drawn.stderr) == (2, True)
    cut = run("generate", str(tmp_path / "run"), "--prompt-file", str(tmp_path / "bb.txt"), "--keep", "-2")
    assert (cut.returncode, cut.stderr) == (2, "perceiver-ar: --keep must be at least 1, but is -2.\n")


def test_a_document_without_tokens_is_not_scored(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("one two three two one\n" * 40)
    (tmp_path / "empty.txt").write_text("")
    words = ("--tokenizer", "words", "--out", str(tmp_path / "store"))
    assert run("prepare", "text", str(tmp_path / "words.txt"), *words).returncode == 0
    small = ("--model.context", "8", "--model.latents", "4", "--model.layers", "1")
    where = ("--data", str(tmp_path / "store"), "--out", str(tmp_path / "run"))
    trained = run("train", "tiny", *SMALL, *small, *where)
    assert trained.returncode == 0, trained.stderr
    scored = run("score", str(tmp_path / "run"), str(tmp_path / "empty.txt"), "--json")
    assert scored.returncode == 2
    assert "holds no tokens to score" in scored.stderr


def test_presets_as_json_are_one_object_on_one_line() -> None:
    result = run("presets", "--json")
    (line,) = result.stdout.splitlines()
    assert json.loads(line)["copy-131k"]["context"] == 131_072


def test_mistakes_end_with_status_2_and_no_traceback() -> None:
    for args in ((), ("presest",), ("presets", "--jsn"), ("train",), ("prepare",), ("plan",)):
        result = run(*args)
        assert result.returncode == 2, args
        assert "Traceback" not in result.stderr
        assert result.stdout == ""


def test_a_mistake_shows_where_it_was_noticed_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERCEIVER_AR_TRACEBACK", "1")
    result = run("evaluate", "nowhere")
    assert "Traceback" in result.stderr
    assert result.returncode == 1


SMALL = (
    "--model.channels", "16", "--model.heads", "2", "--train.steps", "4", "--train.batch-size", "4",
    "--train.checkpoint-every", "2", "--device", "cpu",
)  # fmt: skip


def test_train_evaluate_and_score_work_together(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 9, size=(20, 60)))
    prepared = run("prepare", "tokens", str(tmp_path / "ids.npy"), "--out", str(tmp_path / "store"))
    assert prepared.returncode == 0, prepared.stderr
    assert "train: 19 documents, 1,159 tokens" in prepared.stdout
    where = ("--data", str(tmp_path / "store"), "--out", str(tmp_path / "run"))
    trained = run("train", "copy-32", *SMALL, *where)
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout == ""
    assert "Using the store's vocabulary of 12 tokens" in trained.stderr

    plot = tmp_path / "plot.png"
    options = ("--stride", "3", "--latents", "5", "--plot", str(plot), "--json", "--device", "cpu")
    evaluated = run("evaluate", str(tmp_path / "run"), *options)
    (line,) = evaluated.stdout.splitlines()
    report = json.loads(line)
    assert report["tokens"] == 60
    assert report["nats"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "nats" in run("evaluate", str(tmp_path / "run"), "--compile").stdout

    curve = tmp_path / "curve.png"
    assert run("plot", str(tmp_path / "run"), "--out", str(curve)).returncode == 0
    assert curve.read_bytes().startswith(b"\x89PNG")

    # The model folder alone, moved elsewhere, is enough.
    (tmp_path / "run/model").rename(tmp_path / "alone")
    np.save(tmp_path / "one.npy", np.arange(9))
    scored = run("score", str(tmp_path / "alone"), str(tmp_path / "one.npy"))
    assert len([float(value) for value in scored.stdout.split()]) == 9
    np.save(tmp_path / "beyond.npy", np.arange(10))
    beyond = run("score", str(tmp_path / "alone"), str(tmp_path / "beyond.npy"))
    assert beyond.returncode == 2
    assert "tokens that the model does not know" in beyond.stderr
    assert run("score", str(tmp_path / "alone"), str(tmp_path / "missing.npy")).returncode == 2

    weights = bytearray((tmp_path / "alone/model.safetensors").read_bytes())
    weights[-5] ^= 1
    (tmp_path / "alone/model.safetensors").write_bytes(weights)
    damaged = run("evaluate", str(tmp_path / "alone"))
    assert damaged.returncode == 2
    assert "model.safetensors is damaged" in damaged.stderr


def test_generate_types_writes_and_reports(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 9, size=(20, 60)))
    run("prepare", "tokens", str(tmp_path / "ids.npy"), "--out", str(tmp_path / "store"))
    folder = str(tmp_path / "run")
    settings = ("--model.positions", "rotary", "--data", str(tmp_path / "store"), "--out", folder)
    trained = run("train", "copy-32", *SMALL, *settings)
    assert trained.returncode == 0, trained.stderr

    typed = run("generate", folder, "--prompt", "5, 8 3", "--tokens", "70")
    assert typed.returncode == 0, typed.stderr
    ids = [int(word) for word in typed.stdout.split()]
    assert ids[:3] == [5, 8, 3]
    assert set(ids) <= set(range(9))
    assert "tokens in" in typed.stderr

    options = ("--samples", "3", "--tokens", "20", "--top-k", "6", "--seed", "4", "--latents", "5")
    reported = run("generate", folder, *options, "--json")
    (line,) = reported.stdout.splitlines()
    report = json.loads(line)
    samples = [sample["text"].split() for sample in report["samples"]]
    assert len({tuple(sample) for sample in samples}) == 3
    assert report["tokens"] == sum(len(sample["tokens"]) for sample in report["samples"])
    shown = run("generate", folder, *options).stdout.splitlines()
    assert [line.split()[1:] for line in shown] == samples
    written = run("generate", folder, *options, "--out", str(tmp_path / "new.npy")).stdout.split()
    assert written == [str(tmp_path / f"new-{index}.npy") for index in (1, 2, 3)]
    assert [np.load(path).astype(str).tolist() for path in written] == samples
    kept = run("generate", folder, *options, "--seed", "5", "--out", str(tmp_path / "new.npy"))
    assert (kept.returncode, kept.stdout) == (2, "")
    assert "new-1.npy exists already: add --overwrite, or choose another --out." in kept.stderr
    assert np.load(written[0]).astype(str).tolist() == samples[0]
    replaced = run(
        "generate", folder, *options, "--seed", "5", "--out", str(tmp_path / "new.npy"), "--overwrite"
    )
    assert replaced.stdout.split() == written
    assert np.load(written[0]).astype(str).tolist() != samples[0]
    again = run("generate", folder, "--prompt-file", written[0], "--out", str(tmp_path / "more.jsonl"))
    assert again.returncode == 0, again.stderr
    begun = np.load(written[0]).tolist()
    assert json.loads((tmp_path / "more.jsonl").read_text())[: len(begun)] == begun

    for wrong, sentence in (
        (("--prompt", "5 x"), "'5 x' is not a row of ids such as 5 17 3."),
        (("--prompt", "9"), "tokens of the prompt must be from 0 to 11"),
        (("--samples", "0"), "samples must be from 1 to 10,000, but is 0."),
        (("--prompt", "5", "--prompt-file", "x"), "give --prompt or --prompt-file, not both."),
        (("--out", str(tmp_path / "no/new.npy")), "new.npy cannot be written: give a file in a folder"),
        (("--out", str(tmp_path)), "cannot be written"),
        (("--tokens", "0"), "at least 1 token must be asked for"),
        (("--seed", str(2**64)), "seed must be from 0 to 2**63 - 1"),
        (("--out", str(tmp_path / "new.txt")), "is neither a .npy nor a .jsonl file"),
        (("--top-p", "2"), "top_p must be above 0 and at most 1"),
    ):
        result = run("generate", folder, "--tokens", "5", *wrong)
        assert result.returncode == 2
        assert sentence in result.stderr
        assert "Traceback" not in result.stderr
        assert result.stdout == ""


def test_a_copy_is_generated_from_hexadecimal_bytes(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    assert run("train", "copy-32", *SMALL, "--out", folder).returncode == 0
    prompt = " ".join(f"{byte:02x}" for byte in range(15))
    words = run("generate", folder, "--prompt", prompt).stdout.split()
    assert words[:16] == ["··", *prompt.split()]
    assert len(words) <= 32
    assert run("generate", folder, "--seed", "1").stdout != run("generate", folder, "--seed", "2").stdout
    assert run("generate", folder, "--seed", str(2**64)).returncode == 2
    for wrong, sentence in (("0g", "hexadecimal bytes"), ("01 02", "has 2 bytes, but 15 are to be copied")):
        result = run("generate", folder, "--prompt", wrong)
        assert result.returncode == 2
        assert sentence in result.stderr


def test_evaluating_the_copy_task_shows_what_is_predicted(tmp_path: Path) -> None:
    assert run("train", "copy-32", *SMALL, "--out", str(tmp_path / "run")).returncode == 0
    shown = run("evaluate", str(tmp_path / "run")).stdout
    assert "accuracy" in shown
    assert "predicted" in shown


def test_errors_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/mine.txt").touch()
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "none.jsonl").write_text("\n")
    np.save(tmp_path / "ids.npy", np.arange(30))
    assert (
        run("prepare", "tokens", str(tmp_path / "ids.npy"), "--out", str(tmp_path / "store")).returncode == 0
    )
    assert run("train", "copy-32", *SMALL, "--out", str(tmp_path / "run")).returncode == 0
    ran, out = str(tmp_path / "run"), ("--out", str(tmp_path / "new"))
    for arguments, sentence in (
        (("train", "copy32"), "'copy32' is not a preset; did you mean 'copy-32'?"),
        (("train", "maestro-v3", *out), "the task 'music'"),
        (
            ("train", "copy-32", "--data", str(tmp_path / "empty"), *out),
            "is not a token store: make one with",
        ),
        (("train", "copy-32", "--model.latents", "64", *out), "latents (64) cannot exceed the context (32)"),
        (("train", "copy-32", "--task.length", "31", *out), "must be an even number"),
        (("train", "copy-32", "--task.length", "64", *out), "longer than the context of 32"),
        (("train", "copy-32", "--train.steps", "0", *out), "steps must be at least 1"),
        (("train", "copy-32", "--device", "warp", *out), "device 'warp' cannot be used here"),
        (("train", "copy-32", "--train.logger", "wandb", *SMALL, *out), "pip install wandb"),
        (("train", "copy-32", *SMALL, "--out", ran), "exists already: add --resume"),
        (
            ("train", "copy-32", *SMALL, "--out", ran, "--resume", "--train.seed", "5"),
            "train.seed was 0 and is 5",
        ),
        (("evaluate", str(tmp_path / "nowhere")), "does not exist: give the folder of a run"),
        (("evaluate", str(tmp_path / "empty")), "is not a run that can be used: it holds no model"),
        (("evaluate", ran, "--latents", "33"), "latents must be from 1 to 32, but is 33"),
        (("evaluate", ran, "--stride", "17"), "stride must be from 1 to the 16 latents, but is 17"),
        (
            ("evaluate", ran, "--data", str(tmp_path / "store")),
            "store is for the task tokens, but the model for copy.",
        ),
        (("score", ran, str(tmp_path / "ids.npy")), "the task copy has no files that could be scored"),
        (("evaluate", ran, "--split", "test"), "the copy task has no split 'test'"),
        (("evaluate", ran, "--batch-size", "0"), "batch_size must be at least 1"),
        (("evaluate", ran, "--plot", str(tmp_path / "no/x.png")), "there is no folder"),
        (("plot", str(tmp_path), "--out", str(tmp_path / "x.png")), "is not a run that has begun"),
        (("plot", ran, "--out", str(tmp_path / "x.txt")), "a plot is written to .png, .svg or .pdf"),
        (("plot", "--out", str(tmp_path / "x.png")), "at least one run"),
        (("download", "maestr", *out[1:]), "did you mean 'maestro-v3'?"),
        (("train", "copy-32", "--train.learning-rate", "inf", *out), "above 0, and finite"),
        (
            ("train", "copy-32", *SMALL, "--out", str(tmp_path / "other")),
            "is no run, and not empty: choose another",
        ),
        (("train", "copy-32", *SMALL, "--out", str(tmp_path / "ids.npy")), "ids.npy"),
        (("prepare", "tokens", str(tmp_path / "empty"), *out), "holds no .npy, .bin or .jsonl files"),
        (("prepare", "tokens", str(tmp_path / "odd.bin"), *out), "3 bytes, which are not ids of type uint16"),
        (("prepare", "tokens", str(tmp_path / "none.jsonl"), *out), "holds no documents"),
    ):
        monkeypatch.setattr(sys, "argv", ["perceiver-ar", *arguments])
        with pytest.raises(SystemExit, match="2"):  # in this process, to save the starts
            cli.main()
        said = capsys.readouterr()
        assert sentence in said.err, (arguments, said.err)
        assert said.out == ""
        assert not (tmp_path / "new").exists()


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version").stdout == f"perceiver-ar {__version__}\n"


def test_train_explains_itself() -> None:
    assert "train PRESET" in run("train", "--help").stdout
    shown = run("train", "copy-32", "--help").stdout
    assert "--model.latents INT" in shown
    assert "--task.centred" in shown


FULL = "there is not enough memory for this: ask for less, or for less at a time."


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("the sentence."), "the sentence."),
        (
            FileNotFoundError(2, "No such file or directory", "x.txt"),
            "x.txt cannot be used: no such file or directory.",
        ),
        (OSError("of no file"), "of no file"),
        (MemoryError(), FULL),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), FULL),
    ],
)
def test_what_stops_a_command_is_told_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, said: str
) -> None:
    def names() -> list[str]:
        raise error

    monkeypatch.setattr(presets, "names", names)
    monkeypatch.setattr(sys, "argv", ["perceiver-ar", "presets"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert capsys.readouterr().err == f"perceiver-ar: {said}\n"


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> list[str]:
        raise RuntimeError("a fault")

    monkeypatch.setattr(presets, "names", names)
    monkeypatch.setattr(sys, "argv", ["perceiver-ar", "presets"])
    with pytest.raises(RuntimeError, match="a fault"):
        cli.main()


def test_help_comes_without_importing_torch() -> None:
    code = "import sys, perceiver_ar.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "presets" in run("--help").stdout


def test_a_reader_that_has_seen_enough_is_no_mistake() -> None:
    code = "import sys; from perceiver_ar.cli import main; sys.argv[1:] = ['download']; main()"
    command = [sys.executable, "-u", "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(60) == 141
