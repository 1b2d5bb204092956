"""Token stores: what is written is what is read, and damage is always noticed."""

import json
from pathlib import Path

import numpy as np
import pytest
from damage import every_flip_is_noticed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perceiver_ar.sealed import Damaged, read_sealed, write_sealed
from perceiver_ar.source import open_source
from perceiver_ar.special import BOS, FIRST
from perceiver_ar.store import BLOCK, Store, smallest_dtype, write_store
from perceiver_ar.tasks.tokens import prepare


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 70_000), min_size=1, max_size=50), min_size=1, max_size=8))
def test_documents_come_back_as_they_were_written(tmp_path_factory, documents: list[list[int]]) -> None:
    folder = tmp_path_factory.mktemp("store") / "store"
    store = write_store(folder, {"train": (np.array(d) for d in documents)}, 70_001, "tokens")
    split = store.split("train")
    assert [split.read(index).tolist() for index in range(len(split))] == documents
    assert split.lengths().tolist() == [len(d) for d in documents]


def test_the_smallest_integer_type_that_fits_is_used() -> None:
    assert [smallest_dtype(v) for v in (2, 256, 257, 65_536, 65_537)] == [
        "uint8", "uint8", "uint16", "uint16", "uint32",
    ]  # fmt: skip


def test_a_stretch_of_a_document_can_be_read(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 1000, size=200_000)
    split = write_store(tmp_path / "s", {"train": [ids[:70_000], ids[70_000:]]}, 1000, "tokens").split(
        "train"
    )
    assert np.array_equal(split.read(1, 60_000, 61_000), ids[130_000:131_000])
    assert split.verified.sum() < len(split.verified)  # only what was touched is read


def everything(folder: Path) -> list[list[int]]:
    store = Store.open(folder)
    return [
        store.split(name).read(index).tolist()
        for name in store.meta["splits"]
        for index in range(len(store.split(name)))
    ]


def test_every_single_bit_flip_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    documents = [random.integers(0, 300, size=n) for n in (5, 70_000, 900)]
    folder = tmp_path / "store"
    write_store(folder, {"train": documents, "validation": documents[:1]}, 300, "tokens")
    assert len(everything(folder)) == 4
    assert (folder / "train/tokens.bin").stat().st_size > BLOCK
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    every_flip_is_noticed(files, 500, lambda: everything(folder))


def test_missing_and_shortened_files_are_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    write_store(folder, {"train": [np.arange(100)]}, 100, "tokens")
    tokens = folder / "train/tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(Damaged, match="wrong size"):
        everything(folder)
    with pytest.raises(ValueError, match="is not a token store"):
        Store.open(tmp_path)
    with pytest.raises(ValueError, match="add --split with one that it has, train"):
        Store.open(folder).split("test")
    with pytest.raises(ValueError, match="exists already"):
        write_store(folder, {"train": []}, 100, "tokens")


@pytest.mark.parametrize("wrong", [[2, 44, 200], [2, -1], [2.5]])
@pytest.mark.parametrize("dtype", ["int64", "uint16", "int8"])
def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path, wrong: list[float], dtype: str) -> None:
    found = np.array(wrong) if 2.5 in wrong else np.array(wrong).astype(dtype)
    with pytest.raises(ValueError, match="a document holds tokens from"):
        write_store(tmp_path / "store", {"train": [np.arange(200), iter([found[:1], found])]}, 200, "tokens")
    assert not (tmp_path / "store").exists()


def test_an_interrupted_store_does_not_look_whole(tmp_path: Path) -> None:
    def broken():
        yield np.arange(10)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_store(tmp_path / "store", {"train": broken()}, 10, "tokens")
    with pytest.raises(ValueError, match="is not a token store"):
        Store.open(tmp_path / "store")
    write_store(tmp_path / "store", {"train": [np.arange(10)]}, 10, "tokens")


def test_a_sealed_file_notices_any_change(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    data = {"a": [1, 1e-08, None], "b": {"c": "t\u00e9xt"}}
    write_sealed(path, data)
    good = path.read_bytes()
    assert read_sealed(path) == data
    for place in range(len(good) * 8):
        bad = bytearray(good)
        bad[place // 8] ^= 1 << (place % 8)
        path.write_bytes(bad)
        with pytest.raises(Damaged):
            read_sealed(path)


def test_raw_ids_are_prepared_from_every_kind_of_file(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    np.save(raw / "a.npy", np.array([[1, 2], [3, 4]]))
    np.array([5, 6, 7], dtype="<u2").tofile(raw / "b.bin")
    (raw / "c.jsonl").write_text(json.dumps([8]) + "\n\n" + json.dumps({"ids": [9, 10]}) + "\n")
    store = prepare(raw, tmp_path / "store", validation=0)
    split = store.split("train")
    found = [split.read(index) for index in range(len(split))]
    assert all(document[0] == BOS for document in found)
    assert [(d[1:] - FIRST).tolist() for d in found] == [[1, 2], [3, 4], [5, 6, 7], [8], [9, 10]]
    assert store.vocab_size == 11 + FIRST


def test_splits_are_given_or_made(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.arange(100))
    one = prepare(tmp_path / "one.npy", tmp_path / "s1", validation=0.1)
    assert [one.split(name).length(0) for name in ("train", "validation")] == [91, 11]
    np.save(tmp_path / "many.npy", np.arange(100).reshape(20, 5))
    many = prepare(tmp_path / "many.npy", tmp_path / "s2", validation=0.1)
    assert [len(many.split(name)) for name in ("train", "validation")] == [18, 2]
    both = prepare(tmp_path / "one.npy", tmp_path / "s4", validation=0.1, test=0.2)
    assert [both.split(name).length(0) for name in ("train", "validation", "test")] == [71, 11, 21]
    for name in ("train", "validation"):
        (tmp_path / "given" / name).mkdir(parents=True)
        np.save(tmp_path / "given" / name / "x.npy", np.arange(7))
    given_ = prepare(tmp_path / "given", tmp_path / "s3")
    assert set(given_.meta["splits"]) == {"train", "validation"}


def test_no_ids_are_dropped_however_folders_are_called(tmp_path: Path) -> None:
    def counts(*folders: str) -> dict[str, int]:
        source = tmp_path / "-".join(folders)
        for name in folders:
            (source / name).mkdir(parents=True)
            np.save(source / name / "ids.npy", np.arange(50).reshape(10, 5))
        store = prepare(source, source / "store", validation=0.2)
        return {name: split["documents"] for name, split in store.meta["splits"].items()}

    assert counts("ids", "test") == {"train": 8, "validation": 2, "test": 10}
    assert counts("train", "valid") == {"train": 10, "validation": 10}


def test_ids_are_read_again_in_the_type_that_they_were_prepared_in(tmp_path: Path) -> None:
    path = tmp_path / "ids.bin"
    np.arange(90_000, 90_100, dtype="<u4").tofile(path)
    prepare(path, tmp_path / "wide", dtype="uint32")
    wide = open_source("tokens", {}, tmp_path / "wide").task
    assert (wide.read(path).tokens[1:] - FIRST).tolist() == list(range(90_000, 90_100))
    assert (wide.prompt_file(path, 1).tolist()) == [BOS, 90_000 + FIRST]
    with pytest.raises(ValueError, match="--keep must be at least 1, but is 0"):
        wide.prompt_file(path, 0)
    # What an older version wrote did not say, and the same ids from another file may be mixed with it.
    kept = Store.open(tmp_path / "wide").split("train")
    write_store(tmp_path / "older", {"train": [kept.read(0)]}, 90_100 + FIRST, "tokens")
    assert open_source("tokens", {}, tmp_path / "older").task.to_dict() == {"dtype": "uint16"}
    open_source("tokens", {}, {tmp_path / "wide": 1.0, tmp_path / "older": 1.0})


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("x.txt", b"hello", "is not a .npy, .bin or .jsonl file"),
        ("x.jsonl", b"[1, 2\n", "line 1 is not a JSON list"),
        ("x.jsonl", b"[1, -2]\n", "negative id -2"),
        ("x.jsonl", b"[1.5]\n", "whole numbers"),
        ("x.jsonl", b"[1]\n" + b"[" * 100_000, r"x\.jsonl, line 2 is not a JSON list"),
        ("x.jsonl", b'{"ids": "\xe9"}\n', r"x\.jsonl, line 1 is not a JSON list"),
        ("x.npy", b"", r"x\.npy is not an array of ids that can be read"),
        ("x.npy", b"\x93NUMPY\1\0\xff", r"x\.npy is not an array of ids that can be read"),
        ("x.npy", b"PK\5\6" + bytes(18), r"x\.npy is not an array of ids that can be read"),
    ],
)
def test_files_that_are_not_ids_are_refused(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        prepare(tmp_path / name, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_other_mistakes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        prepare(tmp_path / "nowhere", tmp_path / "store")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no \.npy"):
        prepare(tmp_path / "empty", tmp_path / "store")
    np.save(tmp_path / "x.npy", np.arange(10))
    with pytest.raises(ValueError, match="holds the id 9, beyond the vocabulary of 5"):
        prepare(tmp_path / "x.npy", tmp_path / "store", vocab_size=5)
