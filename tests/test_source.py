"""What a run is trained on, and whether a model knows the tokens that it is given."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perceiver_ar import Experiment, ModelConfig, TrainConfig, train
from perceiver_ar.run import load
from perceiver_ar.source import open_source
from perceiver_ar.store import write_store
from perceiver_ar.tasks.image import ImageTask
from perceiver_ar.tasks.image import prepare as prepare_images
from perceiver_ar.tasks.text import prepare as prepare_text

SIZES: dict[str, Any] = {"channels": 8, "heads": 1, "layers": 1}


def brief(task: str, options: dict[str, Any] | None = None, **model: Any) -> Experiment:
    """A step of a tiny model."""
    config = ModelConfig(259, 16, 8, **SIZES | {"positions": "sinusoidal"} | model)
    settings = TrainConfig(steps=1, batch_size=2, warmup_steps=1)
    return Experiment("brief", task, config, settings, options or {})


def words(folder: Path, name: str, text: str, **settings: Any) -> Path:
    source = folder / f"{name}.txt"
    source.write_text(f"{text}\n" * 100)
    return prepare_text(str(source), folder / name, workers=1, **settings).folder


def test_a_model_is_not_used_on_another_vocabulary_of_its_size(tmp_path: Path) -> None:
    mine = words(tmp_path, "mine", "one two three", tokenizer="words")
    other = words(tmp_path, "other", "four five six", tokenizer="words")
    same = words(tmp_path, "same", "three two one", tokenizer="words")
    train(brief("text"), mine, tmp_path / "run", show=False)
    model, task, _ = load(tmp_path / "run", "cpu")
    assert open_source("text", {}, other).stores[0].vocab_size == model.config.vocab_size
    with pytest.raises(ValueError, match="other has tokens of another tokenizer than the model: prepare it"):
        open_source(task.name, task.to_dict(), other)
    with pytest.raises(ValueError, match=r"other has tokens of another tokenizer than .*run: prepare it"):
        train(brief("text"), other, tmp_path / "tuned", init=tmp_path / "run", show=False)
    assert not (tmp_path / "tuned").exists()
    for store in (mine, same):
        assert open_source(task.name, task.to_dict(), store).documents("validation")


def test_a_store_made_with_the_tokenizer_of_a_model_fits_it(tmp_path: Path) -> None:
    text = "".join(map(chr, range(32, 120)))
    mine = words(tmp_path, "mine", text, tokenizer="bpe", vocab_size=360)
    train(brief("text"), mine, tmp_path / "run", show=False)
    again = words(tmp_path, "again", text[::-1], tokenizer_file=tmp_path / "run/model/pieces.model")
    _, task, _ = load(tmp_path / "run", "cpu")
    assert open_source(task.name, task.to_dict(), again).documents("validation")
    train(brief("text"), again, tmp_path / "tuned", init=tmp_path / "run", show=False)


def test_a_model_of_one_order_is_not_used_on_images_of_another(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((20, 4, 4, 3), np.uint8))
    for order in ("raster", "rgb"):
        prepare_images(tmp_path / "x.npy", tmp_path / order, size=4, order=order)
    task = ImageTask(4, "raster")
    assert len(open_source("image", task.to_dict(), tmp_path / "raster").documents("validation")) == 1
    with pytest.raises(ValueError, match="rgb has tokens of another order than the model"):
        open_source("image", task.to_dict(), tmp_path / "rgb")
    with pytest.raises(ValueError, match="rgb is for the task image, but the model for text"):
        open_source("text", {}, tmp_path / "rgb")
    axial = brief("image", task.to_dict(), positions="axial", axes=(6, 6, 5))
    train(axial, tmp_path / "rgb", tmp_path / "run", show=False)  # in training the store says it
    _, learned, _ = load(tmp_path / "run", "cpu")
    assert learned == ImageTask(4, "rgb")


def test_what_only_training_uses_is_no_part_of_what_tokens_mean(tmp_path: Path) -> None:
    pieces = [np.arange(3, 40) for _ in range(3)]
    store = write_store(tmp_path / "store", {"train": pieces, "validation": pieces}, 391, "music")
    train(brief("music", {"transpose": 3}), store.folder, tmp_path / "run", show=False)
    _, task, _ = load(tmp_path / "run", "cpu")
    assert task.to_dict()["transpose"] == 3
    assert open_source(task.name, task.to_dict(), store.folder).documents("validation")
    train(brief("music"), store.folder, tmp_path / "tuned", init=tmp_path / "run", show=False)


def test_a_task_whose_settings_give_way_to_the_store_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = words(tmp_path, "store", "some text")
    train(brief("copy", {"length": 16}), store, tmp_path / "run")
    assert "Using the store's task, text, instead of the preset's, copy." in capfd.readouterr().err
    for task in ("text", "tokens"):
        train(brief(task), store, tmp_path / task)
        assert "Using the store's task" not in capfd.readouterr().err
