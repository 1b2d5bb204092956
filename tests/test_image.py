"""Images: bytes in both orders and back, positions as the authors have them, and what cannot be read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from perceiver_ar.source import open_source
from perceiver_ar.special import BOS, FIRST
from perceiver_ar.store import Store
from perceiver_ar.tasks.image import ImageTask, prepare, read_picture
from tests.forked import run
from tests.test_official import load as load_fixture


def pixels(size: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)


@pytest.mark.parametrize("order", ["raster", "rgb"])
def test_pixels_come_back_exactly(order: Any) -> None:
    task, picture = ImageTask(8, order), pixels()
    tokens = task.encode(picture)
    assert tokens[0] == BOS
    assert len(tokens) == 1 + 3 * 64
    assert np.array_equal(task.decode(tokens), picture)
    if order == "raster":
        assert (tokens[1:7] - FIRST).tolist() == [*picture[0, 0].tolist(), *picture[0, 1].tolist()]
    else:
        assert (tokens[1:9] - FIRST).tolist() == picture[0, :, 0].tolist()


def test_positions_are_the_authors() -> None:
    known = load_fixture("c_images_axial")["input_idxs"]
    found = ImageTask(4).positions(np.arange(known.shape[1])[None])
    assert np.array_equal(found, known[:1])


def test_positions_move_with_the_order_of_the_bytes() -> None:
    picture = pixels()
    for order in ("raster", "rgb"):
        task = ImageTask.from_dict({"size": 8, "order": order})
        column, row, colour = (task.positions(np.arange(1, 193)) - 2).T
        assert np.array_equal(task.encode(picture)[1:] - FIRST, picture[row, column, colour])


def test_grey_and_odd_sizes_are_handled(tmp_path: Path) -> None:
    Image.fromarray(pixels(8)[..., 0]).save(tmp_path / "grey.png")
    assert np.array_equal(read_picture(8, tmp_path / "grey.png"), pixels(8)[..., :1].repeat(3, axis=2))
    Image.fromarray(np.full((30, 50, 3), (10, 20, 30), np.uint8)).save(tmp_path / "wide.png")
    assert (read_picture(8, tmp_path / "wide.png") == (10, 20, 30)).all()
    (tmp_path / "no.png").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a picture that can be read"):
        read_picture(8, tmp_path / "no.png")


def test_transparent_turned_and_deep_pictures_are_read_as_they_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    clear = np.zeros((8, 8, 4), np.uint8)
    clear[..., 0] = 255  # red that is not seen
    clear[4:, :, 3] = 255
    Image.fromarray(clear).save(path)
    assert (read_picture(8, path)[:4] == 255).all()
    assert (read_picture(8, path)[4:] == (255, 0, 0)).all()
    deep = np.linspace(0, 65_535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(deep).save(path)
    assert np.array_equal(
        read_picture(8, path), np.repeat((deep // 257).astype(np.uint8)[..., None], 3, axis=2)
    )
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    Image.fromarray(pixels()).save(path, exif=exif)
    assert np.array_equal(read_picture(8, path), np.rot90(pixels(), -1))


def test_a_failed_attempt_leaves_nothing_for_the_next(tmp_path: Path) -> None:
    import shutil

    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/a.png").write_bytes(b"nothing")
    shutil.make_archive(str(tmp_path / "bad"), "tar", tmp_path / "bad")
    shutil.make_archive(
        str(tmp_path / "good"), "tar", folder_of_pictures(tmp_path / "good/ds/train").parents[1]
    )
    with pytest.raises(ValueError, match="holds no picture that can be read"):
        prepare(tmp_path / "bad.tar", tmp_path / "s", size=8, workers=1)
    # What an attempt that was killed left behind is not taken for images.
    (tmp_path / ".s.left").mkdir()
    np.save(tmp_path / ".s.left/pixels.npy", np.zeros((9, 8, 8, 3), np.uint8))
    store = prepare(tmp_path / "good.tar", tmp_path / "s", size=8, workers=1)
    assert sorted(x.tobytes() for split in ("train", "validation") for x in images(store, split)) == sorted(
        pixels(8, index).tobytes() for index in range(20)
    )
    assert len(prepare(tmp_path / "good", tmp_path / "good/t", size=8, workers=1).split("train")) == 19


def test_arrays_beside_others_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    wanted = np.stack([pixels(8, index) for index in range(12)])
    np.savez(tmp_path / "a/train_1.npz", labels=np.arange(6), images=wanted[:6])
    np.save(tmp_path / "a/train_2.npy", wanted[6:10])
    np.savez(tmp_path / "a/val_data.npz", data=wanted[10:])
    np.save(tmp_path / "a/labels.npy", np.arange(12))
    store = prepare(tmp_path / "a", tmp_path / "s", size=8)
    assert np.array_equal(images(store, "train"), wanted[:10])
    assert np.array_equal(images(store, "validation"), wanted[10:])
    assert "skipped" in (told := capsys.readouterr().err)
    assert "labels.npy holds int64 of shape (12,)" in told


def folder_of_pictures(folder: Path, count: int = 20, size: int = 8) -> Path:
    folder.mkdir(parents=True)
    for index in range(count):
        Image.fromarray(pixels(size, index)).save(folder / f"{index:02}.png")
    return folder


def images(store: Store, split: str) -> list[np.ndarray]:
    task = open_source("image", {}, store.folder).task
    assert isinstance(task, ImageTask)
    found = store.split(split)
    return [task.decode(found.read(index)) for index in range(len(found))]


@pytest.mark.parametrize("order", ["raster", "rgb"])
def test_folders_arrays_and_archives_hold_the_same_images(tmp_path: Path, order: Any) -> None:
    import shutil

    source = folder_of_pictures(tmp_path / "a")
    wanted = np.stack([pixels(8, index) for index in range(20)])
    np.save(tmp_path / "b.npy", wanted)
    np.savez(tmp_path / "c.npz", data=wanted.transpose(0, 3, 1, 2).reshape(20, -1), labels=np.arange(20))
    shutil.make_archive(str(tmp_path / "d"), "zip", source)
    shutil.make_archive(str(tmp_path / "e"), "tar", source)
    for name in ("a", "b.npy", "c.npz", "d.zip", "e.tar"):
        out = tmp_path / f"store-{name[0]}"
        store = prepare(tmp_path / name, out, size=8, order=order, validation=0.1, workers=1)
        assert len(store.split("validation")) == 2
        found = images(store, "train") + images(store, "validation")
        assert sorted(x.tobytes() for x in found) == sorted(x.tobytes() for x in wanted)
        assert not list(tmp_path.glob(".*"))  # nothing is left behind


def test_damaged_pictures_are_named_and_left_out(tmp_path: Path) -> None:
    source = folder_of_pictures(tmp_path / "a/train", 5)
    folder_of_pictures(tmp_path / "a/validation", 2)
    (source / "broken.png").write_bytes((source / "00.png").read_bytes()[:60])
    result = run("prepare", "image", str(tmp_path / "a"), "--out", str(tmp_path / "s"), "--size", "8")
    assert result.returncode == 0, result.stderr
    assert "broken.png" in result.stderr
    assert "1 of 8 files were skipped." in result.stderr
    assert "train: 5 documents, 965 tokens" in result.stdout
    assert "validation: 2 documents" in result.stdout


def test_mistakes_are_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    np.save(tmp_path / "floats.npy", np.zeros((2, 8, 8, 3)))
    (tmp_path / "x.txt").write_text("no archive")
    np.savez(tmp_path / "cut.npz", data=np.zeros((2, 192), np.uint8))
    whole = bytearray((tmp_path / "cut.npz").read_bytes())
    (tmp_path / "cut.npz").write_bytes(whole[:100])
    whole[300] ^= 1
    (tmp_path / "flipped.npz").write_bytes(whole)
    np.savez(tmp_path / "nothing.npz")
    np.save(tmp_path / "none.npy", np.zeros((0, 8, 8, 3), np.uint8))
    for source, sentence in (
        ("none", "none does not exist"),
        ("empty", "holds no pictures"),
        ("floats.npy", r"holds float64 of shape \(2, 8, 8, 3\), not uint8"),
        ("cut.npz", "cut.npz is not an array of numbers"),
        ("x.txt", "x.txt is not an archive that can be unpacked"),
        ("flipped.npz", "flipped.npz is not an array of numbers"),
        ("nothing.npz", "nothing.npz holds nothing, not uint8"),
        ("none.npy", "holds no images"),
    ):
        with pytest.raises(ValueError, match=sentence):
            prepare(tmp_path / source, tmp_path / "s", size=8)
    with pytest.raises(ValueError, match=r"images are written to \.png files"):
        ImageTask(8).check_file(tmp_path / "a.jpg")
    with pytest.raises(ValueError, match="at least 1 pixel"):
        prepare(tmp_path, tmp_path / "s", size=0)
    with pytest.raises(ValueError, match="at least 1 process"):
        prepare(folder_of_pictures(tmp_path / "p"), tmp_path / "s", size=8, workers=-1)


def test_images_are_trained_evaluated_drawn_and_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder_of_pictures(tmp_path / "a", 12)
    folder = str(tmp_path / "run")
    run("prepare", "image", str(source), "--out", str(tmp_path / "s"), "--size", "8", "--validation", "0.2")
    small = ("--model.channels", "16", "--model.heads", "2", "--model.layers", "1", "--model.latents", "16")
    more = ("--model.context", "193", "--train.steps", "2", "--train.batch-size", "2", "--device", "cpu")
    few = ("--model.axes", "10", "9", "5", "--data", str(tmp_path / "s"), "--out", folder)
    refused = run("train", "imagenet64", *small, *more, *few)
    assert refused.returncode == 2
    assert "images of 8 pixels need at least these rows of positions: --model.axes 10 10 5" in refused.stderr
    other = run(
        "train", "tiny", *small, *more, "--data", str(tmp_path / "s"), "--out", str(tmp_path / "other")
    )
    assert other.returncode == 0, other.stderr
    assert "Using axial positions, as the task image needs, not rotary." in other.stderr
    trained = run("train", "imagenet64", *small, *more, "--data", str(tmp_path / "s"), "--out", folder)
    assert trained.returncode == 0, trained.stderr
    report = json.loads(run("evaluate", folder, "--json").stdout)
    assert report["tokens"] == 2 * 192
    assert report["bits_per_dim"] == pytest.approx(report["bits"])
    drawn = run("generate", folder, "--samples", "3", "--out", str(tmp_path / "new.png"))
    assert drawn.returncode == 0, drawn.stderr
    assert Image.open(tmp_path / "new-3.png").size == (8, 8)
    assert Image.open(tmp_path / "new.png").size == (20, 20)  # the contact sheet
    assert drawn.stdout.splitlines()[-1] == str(tmp_path / "new.png")
    assert "give one" in run("generate", folder, "--keep", "5", "--out", str(tmp_path / "x.png")).stderr
    options = ("--prompt-file", str(source / "00.png"), "--keep", "5", "--out", str(tmp_path / "rest.png"))
    assert run("generate", folder, *options).returncode == 0
    completed = np.asarray(Image.open(tmp_path / "rest.png"))
    assert np.array_equal(completed[:5], pixels(8, 0)[:5])
    assert not np.array_equal(completed[5:], pixels(8, 0)[5:])
    options = ("--prompt-file", str(source / "00.png"), "--keep", "0", "--out", str(tmp_path / "new.png"))
    assert (
        run("generate", folder, *options, "--overwrite").returncode == 0
    )  # no row of it: as without a picture
    monkeypatch.chdir(tmp_path)
    for name in ("run.png", "run-2.png"):  # no text, so a new file
        assert run("generate", folder).stdout == f"{name}\n"
        assert Path(name).exists()
