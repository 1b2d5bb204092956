"""Audio: codes to tokens and back, codecs in chunks, sound files of every kind, and damaged ones."""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perceiver_ar import codecs, presets
from perceiver_ar.sound import at_level, read_sound, write_spectrogram, write_wav
from perceiver_ar.source import open_source
from perceiver_ar.special import BOS, FIRST
from perceiver_ar.tasks import audio
from perceiver_ar.tasks.audio import AudioTask, prepare
from tests.forked import run
from tests.mutants import outcomes

LYRA = Path(__file__).resolve().parents[2] / "shared/data/soundstream"
needs_lyra = pytest.mark.skipif(not LYRA.exists(), reason="needs ../shared/data/soundstream")


def save_codec(kind: str, folder: Path) -> None:
    """A small one with random weights: 3,200 samples a second, 32 codes."""
    import transformers

    torch.manual_seed(0)
    filters = {"num_filters": 4, "hidden_size": 16, "upsampling_ratios": [4, 4, 2]}
    common: dict[str, Any] = {"sampling_rate": 3200, "codebook_size": 32}
    if kind == "encodec":
        config: Any = transformers.EncodecConfig(
            codebook_dim=16, target_bandwidths=[0.5, 2.0], **filters, **common
        )
        model: Any = transformers.EncodecModel(config)
    elif kind == "dac":
        sizes = {"encoder_hidden_size": 8, "decoder_hidden_size": 64, "codebook_dim": 4, "n_codebooks": 4}
        model = transformers.DacModel(
            transformers.DacConfig(downsampling_ratios=[2, 4, 4], **sizes, **common)
        )
    else:
        config = transformers.MimiConfig(
            codebook_dim=8,
            vector_quantization_hidden_dimension=8,
            num_quantizers=4,
            num_semantic_quantizers=1,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=16,
            upsample_groups=16,
            sliding_window=20,
            **filters,
            **common,
        )
        model = transformers.MimiModel(config)
    for name, table in model.named_buffers():
        if name.endswith(("embed", "embed_sum")):
            table.normal_(std=0.003)
    for name, parameter in model.named_parameters():  # so that sounds differ by more than a little
        if "bias" in name:
            torch.nn.init.zeros_(parameter)
    model.save_pretrained(folder)


def noise(seconds: float, rate: int) -> np.ndarray:
    count = int(seconds * rate)
    hiss = np.random.default_rng(0).standard_normal(count)
    return (np.sin(np.arange(count) / 7) * 0.3 + hiss / 20).astype(np.float32)


def make(source: Path, out: Path, *options: str) -> Any:
    return run("prepare", "audio", str(source), "--out", str(out), *options)


@settings(deadline=None)
@given(st.data())
def test_codes_survive_flattening(data: st.DataObject) -> None:
    task = AudioTask(levels=data.draw(st.integers(1, 46)), codes=data.draw(st.sampled_from([2, 16, 1024])))
    frames, seed = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 99))
    codes = np.random.default_rng(seed).integers(0, task.codes, (frames, task.levels))
    tokens = task.encode(codes)
    assert tokens[0] == BOS
    assert tokens.max(initial=0) < task.vocab_size
    assert np.array_equal(task.decode(tokens), codes)
    # A level's codes are its own, and only they may stand in its place.
    for place, token in enumerate(tokens[1:].tolist(), 1):
        allowed = task.allowed(place, task.vocab_size)
        assert allowed[token]
        assert allowed.sum() == task.codes
        assert (token - FIRST) // task.codes == (place - 1) % task.levels
    # A frame that is not whole is left out.
    assert np.array_equal(task.decode(tokens[:-1]), codes[: len(codes) - 1] if frames else codes)


def test_vocabularies_are_the_presets() -> None:
    for name in (name for name in presets.names() if name.startswith("soundstream")):
        experiment = presets.get(name)
        assert AudioTask.from_dict(experiment.options).vocab_size == experiment.model.vocab_size


@pytest.mark.parametrize("kind", ["encodec", "dac", "mimi"])
def test_chunks_of_a_neural_codec_have_no_seams(tmp_path: Path, kind: Any) -> None:
    save_codec(kind, tmp_path / "codec")
    codec: Any = codecs.load(kind, str(tmp_path / "codec"))
    sound, levels = noise(9.3, codec.rate), 3
    codec.chunk = 10**6
    codes = codec.encode(sound, levels)
    whole = codec.decode(codes)
    assert codes.shape == (int(np.ceil(len(sound) / codec.hop)), levels)
    assert len(whole) == len(codes) * codec.hop
    assert len(np.unique(codes)) > 3
    assert codes.max() < codec.codes
    codec.chunk, codec.before, codec.after = 100, 100, 100
    assert np.array_equal(codec.encode(sound, levels), codes)
    assert np.abs(codec.decode(codes) - whole).max() < 1e-4 * np.abs(whole).max()
    assert np.array_equal(codec.encode(sound, 4)[:, :levels], codes)  # levels build on one another


def test_a_rate_that_its_hop_does_not_divide(tmp_path: Path) -> None:
    import transformers

    sizes = {"encoder_hidden_size": 4, "decoder_hidden_size": 64, "codebook_dim": 4, "codebook_size": 32}
    config = transformers.DacConfig(
        sampling_rate=44_100, downsampling_ratios=[2, 4, 8, 8], n_codebooks=2, **sizes
    )
    transformers.DacModel(config).save_pretrained(tmp_path / "codec")
    codec: Any = codecs.load("dac", str(tmp_path / "codec"))
    assert codec.hop == 512
    sound = noise(3, 44_100)
    codes = codec.encode(sound, 2)
    assert len(codes) == math.ceil(3 * 44_100 / 512)
    codec.chunk, codec.before, codec.after = 60, 30, 30
    assert np.array_equal(codec.encode(sound, 2), codes)
    assert len(codec.decode(codes)) == len(codes) * 512


@needs_lyra
def test_lyra_through_the_task_is_lyra_alone(tmp_path: Path) -> None:
    from ai_edge_litert.interpreter import Interpreter

    from perceiver_ar import midi
    from tests.test_music import piece

    midi.write_wav(piece(seed=1), tmp_path / "piano.wav")
    sound = read_sound(tmp_path / "piano.wav", 16_000, None)[: 320 * 200]
    networks = [
        Interpreter(str(LYRA / f"{name}.tflite")) for name in ("soundstream_encoder", "quantizer", "lyragan")
    ]
    for network in networks:
        network.allocate_tensors()
    encoder, quantizer, decoder = networks
    quantize, restore = (quantizer.get_signature_runner(name) for name in ("encode", "decode"))
    alone = []
    for frame in sound.reshape(-1, 320):
        encoder.set_tensor(encoder.get_input_details()[0]["index"], frame[None])
        encoder.invoke()
        features = encoder.get_tensor(encoder.get_output_details()[0]["index"])
        codes = quantize(input_frames=features, num_quantizers=np.array(46, np.int32))["output_0"]
        heard = restore(encoding_indices=codes)["output_0"]
        decoder.set_tensor(decoder.get_input_details()[0]["index"], heard)
        decoder.invoke()
        alone.append(decoder.get_tensor(decoder.get_output_details()[0]["index"])[0].copy())

    prepare(tmp_path / "piano.wav", tmp_path / "store", weights=str(LYRA), levels=46, loudness=None)
    source = open_source("audio", {}, tmp_path / "store")
    tokens = source.documents("train")[0].tokens[: 1 + 46 * 200]
    source.task.save(tokens, tmp_path / "again.wav")
    again = read_sound(tmp_path / "again.wav", 16_000, None)
    assert np.concatenate(alone).shape == again.shape

    def noise_ratio(decoded: np.ndarray) -> float:
        return 10 * np.log10(np.square(sound).sum() / np.square(sound - decoded).sum())

    assert abs(noise_ratio(again) - noise_ratio(np.concatenate(alone))) < 0.1
    assert noise_ratio(again) > 0


@needs_lyra
def test_lyra_goes_wherever_its_models_go(tmp_path: Path) -> None:
    for index in range(4):
        write_wav(noise(2, 16_000), 16_000, tmp_path / f"{index}.wav")
    result = make(tmp_path, tmp_path / "s", "--weights", str(LYRA), "--levels", "4")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    small = ["--model.channels", "16", "--model.heads", "2", "--train.steps", "2", "--train.batch-size", "2"]
    assert (
        run("train", "tiny", *small, "--data", str(tmp_path / "s"), "--out", str(tmp_path / "r")).returncode
        == 0
    )
    report = json.loads(run("evaluate", str(tmp_path / "r"), "--json").stdout)
    assert report["seconds"] == 2
    assert report["seconds_of_context"] == 1024 / 4 / 50
    (tmp_path / "r/model").rename(tmp_path / "alone")
    drawn = run("generate", str(tmp_path / "alone"), "--tokens", "40", "--out", str(tmp_path / "n.wav"),
                "--prompt-file", str(tmp_path / "0.wav"), "--keep", "1", "--seed", "1")  # fmt: skip
    assert drawn.returncode == 0, drawn.stderr
    assert soundfile.info(tmp_path / "n.wav").duration == pytest.approx(1 + 10 / 50)
    (tmp_path / "alone/lyragan.tflite").write_bytes(b"")
    assert "missing or damaged" in run("generate", str(tmp_path / "alone"), "--out", "x.wav").stderr


@pytest.mark.parametrize("suffix", [".wav", ".flac", ".ogg", ".mp3"])
@pytest.mark.parametrize(("rate", "channels"), [(44_100, 2), (8_000, 1), (48_000, 6)])
def test_files_of_any_kind_rate_and_channels_are_read(
    tmp_path: Path, suffix: str, rate: int, channels: int
) -> None:
    if suffix in (".ogg", ".mp3"):
        channels = min(channels, 2)  # of more, ogg changes the loudness
    path = tmp_path / f"tone{suffix}"
    tone = 0.25 * np.sin(2 * np.pi * 440 * np.arange(2 * rate) / rate)
    soundfile.write(path, np.repeat(tone[:, None], channels, axis=1), rate)
    sound = read_sound(path, 16_000, None)
    assert abs(len(sound) - 32_000) < 16_000 * 0.08  # mp3 pads
    middle = sound[8_000:24_000]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    assert spectrum.argmax() == 440
    assert np.sqrt(np.square(middle).mean()) == pytest.approx(0.25 / np.sqrt(2), rel=0.02)
    assert len(read_sound(path, 16_000, None, seconds=1)) == 16_000


def test_resampling_in_blocks_equals_resampling_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import soxr

    sound = noise(3, 22_050)
    soundfile.write(tmp_path / "a.wav", sound, 22_050, subtype="FLOAT")
    monkeypatch.setattr("perceiver_ar.sound.BLOCK", 1000)
    found = read_sound(tmp_path / "a.wav", 16_000, None)
    assert np.abs(found - soxr.resample(sound, 22_050, 16_000)).max() < 1e-4


def test_loudness_is_brought_to_a_level_without_clipping() -> None:
    quiet = np.concatenate((noise(2, 16_000) / 100, np.zeros(48_000, np.float32)))
    loud = at_level(quiet, 16_000, -20.0)
    heard = loud[:32_000]
    assert 10 * np.log10(np.square(heard).mean()) == pytest.approx(-20, abs=0.2)  # silence does not count
    assert np.isfinite(at_level(np.full(9, 1e-41, np.float32), 16_000, -20.0)).all()
    with pytest.raises(ValueError, match="loudness must be from -200 to 0 dB"):
        AudioTask(loudness=float("nan"))
    click = np.zeros(16_000, np.float32)
    click[100] = 0.5
    assert np.abs(at_level(click, 16_000, -6.0)).max() == pytest.approx(1)
    assert not at_level(np.zeros(100, np.float32), 16_000, -20.0).any()
    assert at_level(np.array([3.0, -0.5], np.float32), 16_000, None).tolist() == [1.0, -0.5]


def test_a_spectrogram_shows_a_tone_where_it_is(tmp_path: Path) -> None:
    from PIL import Image

    write_spectrogram(np.sin(2 * np.pi * 2000 * np.arange(16_000) / 16_000), 16_000, tmp_path / "a.png")
    picture = np.asarray(Image.open(tmp_path / "a.png"))
    assert picture.shape == (513, 101)
    assert (512 - picture[:, 50].argmin()) * 16_000 / 1024 == pytest.approx(2000, abs=16)


def test_damaged_sound_is_refused_or_read_and_never_crashes(tmp_path: Path) -> None:
    found = outcomes(tmp_path, 200, (".wav", ".flac", ".ogg", ".mp3"))
    assert sum(found.values()) == 200
    assert {what.split(": ")[1] for what in found} <= {"read", "ValueError"}


def test_sound_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    for content, rate, words in (
        (np.zeros(0), 16_000, "no sound"),
        (np.full(100, np.nan), 16_000, "not numbers"),
        (np.zeros(100), 3, "3 samples a second"),
        (np.zeros(1), 96_000, "no sound"),  # less than one sample at the rate that is wanted
    ):
        soundfile.write(path, content, rate, subtype="FLOAT")
        with pytest.raises(ValueError, match=words):
            read_sound(path, 16_000, -20.0)
    soundfile.write(tmp_path / "a.flac", noise(1, 16_000), 16_000)
    (tmp_path / "cut.flac").write_bytes((tmp_path / "a.flac").read_bytes()[:9000])
    with pytest.raises(ValueError, match=r"cut short|can be read"):
        read_sound(tmp_path / "cut.flac", 16_000, -20.0)


def test_recordings_are_prepared_with_maestros_splits_and_bad_ones_named(tmp_path: Path) -> None:
    folder = tmp_path / "maestro"
    folder.mkdir()
    save_codec("dac", tmp_path / "codec")
    for name in ("a", "b", "c"):
        soundfile.write(folder / f"{name}.wav", noise(2, 3200), 3200)
    (folder / "d.wav").write_bytes(b"RIFF nothing")
    rows = ["a.wav,train", "b.wav,validation", "c.wav,test", "d.wav,train", "gone.wav,train"]
    (folder / "maestro-v3.csv").write_text("\n".join(["audio_filename,split", *rows]))
    codec = ["--codec", "dac", "--weights", str(tmp_path / "codec"), "--levels", "2"]
    result = make(tmp_path / "maestro", tmp_path / "s", *codec)
    assert result.returncode == 0, result.stderr
    assert "1 of the 5 files" in result.stderr
    assert "d.wav" in result.stderr
    assert "1 of 4 files were skipped" in result.stderr
    splits = open_source("audio", {}, tmp_path / "s").stores[0].meta["splits"]
    assert {name: split["documents"] for name, split in splits.items()} == {
        "train": 1,
        "validation": 1,
        "test": 1,
    }
    assert splits["train"]["tokens"] == 1 + 200 * 2
    assert not (tmp_path / ".s.codes").exists()


def test_what_was_encoded_is_not_encoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_codec("dac", tmp_path / "codec")
    soundfile.write(tmp_path / "a.wav", noise(1, 3200), 3200)
    task = AudioTask(levels=2, codes=32, codec="dac", weights=str(tmp_path / "codec"))
    kept = audio._keep(task, task.weights, tmp_path / "scratch", tmp_path / "a.wav")
    odd = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9.wav"))  # a name that is no UTF-8
    odd.write_bytes((tmp_path / "a.wav").read_bytes())
    assert np.array_equal(np.load(audio._keep(task, task.weights, tmp_path / "scratch", odd)), np.load(kept))
    monkeypatch.setattr(audio, "codes_of", None)
    assert audio._keep(task, task.weights, tmp_path / "scratch", tmp_path / "a.wav") == kept
    (tmp_path / "scratch" / kept.name).unlink()
    with pytest.raises(TypeError):
        audio._keep(task, task.weights, tmp_path / "scratch", tmp_path / "a.wav")


def test_mistakes_get_a_sentence(tmp_path: Path) -> None:
    save_codec("dac", tmp_path / "codec")
    soundfile.write(tmp_path / "a.wav", noise(1, 3200), 3200)
    weights = ("--weights", str(tmp_path / "codec"))
    for arguments, words in (
        ((), "--weights must name the folder of Lyra's .tflite files"),
        (("--weights", str(tmp_path)), "has no soundstream_encoder.tflite"),
        (("--codec", "dac", *weights, "--levels", "5"), "--levels must be from 1 to 4"),
        (("--codec", "mimi", "--weights", str(tmp_path / "nothing")), "is no MimiModel that can be read"),
    ):
        result = make(tmp_path / "a.wav", tmp_path / "s", *arguments)
        assert result.returncode == 2, result.stderr
        assert words in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    for path in (tmp_path / "none", tmp_path / "codec"):
        assert make(path, tmp_path / "s", "--codec", "dac", *weights).returncode == 2
    with pytest.raises(ValueError, match="not known which codec"):
        AudioTask().save(np.array([BOS]), tmp_path / "x.wav")
