"""Text: exact round trips, stores that come out the same however they were made, and what is reported."""

import filecmp
import io
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from perceiver_ar import corpus, evaluate, presets, splits, tasks, train, vocabulary
from perceiver_ar.config import Experiment, ModelConfig, TrainConfig
from perceiver_ar.run import load
from perceiver_ar.source import open_source
from perceiver_ar.special import BOS, EOS
from perceiver_ar.store import Store
from perceiver_ar.tasks.text import TextTask, prepare
from perceiver_ar.vocabulary import Bytes, Pieces, TokenizerFile, Vocabulary, Words, as_utf8
from tests.forked import run

SHARED = Path(__file__).resolve().parents[2] / "shared/data/text"
PROSE = [
    "The quick brown fox jumps over the lazy dog, again and again and again.",
    "  Spaces at both ends, and\ttabs;  éàü, ﬁ, 漢字, 😀.  ",
    "It was the best of times, it was the worst of times.",
] * 60


def pieces(kind: Any = "unigram", size: int = 310) -> Pieces:
    return Pieces.train(iter(PROSE), kind, size)


def byte_level() -> TokenizerFile:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(PROSE, trainer)
    return TokenizerFile(tokenizer.to_str().encode())


def foreign_pieces() -> Pieces:
    """As others train them: normalizing, with a space put before everything."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PROSE), model_writer=model, vocab_size=310, byte_fallback=True, minloglevel=2
    )
    return Pieces(model.getvalue())


EXACT = {
    "bytes": Bytes(),
    "unigram": pieces(),
    "bpe": pieces("bpe"),
    "foreign": foreign_pieces(),
    "tokenizers": byte_level(),
}
ANY_TEXT = st.text() | st.text(alphabet=" \n\t\r▁<>0xéﬁ①é́\u00a0\u2028\x00ab", max_size=40)


@pytest.mark.parametrize("name", EXACT)
@settings(deadline=None, max_examples=300)
@given(text=ANY_TEXT)
def test_any_text_comes_back_exactly(name: str, text: str) -> None:
    words, data = EXACT[name], text.encode()
    tokens = words.encode(data, final=True)
    assert words.decode(tokens) == data
    assert len(tokens) == 0 or (tokens.min() >= 3 and tokens.max() < words.size)
    spell = words.speller()
    assert "".join(spell(int(token)) for token in tokens) == text


@pytest.mark.parametrize("name", ["bytes", "unigram", "bpe", "foreign"])
@settings(deadline=None, max_examples=300)
@given(data=st.binary(max_size=60))
def test_bytes_that_are_no_utf8_come_back_too(name: str, data: bytes) -> None:
    words = EXACT[name]
    assert words.decode(words.encode(data, final=True)) == data


@given(data=st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
@example(data="Il a dit\u00a0: oui\u2028\u3000non\u0085x\x1cy".encode())
def test_words_are_counted_as_python_splits_them(data: bytes) -> None:
    assert Bytes().count_words(data, np.zeros(0)) == len(data.decode(errors="surrogateescape").split())


def test_texts_with_lone_surrogates_are_read_all_the_same() -> None:
    assert as_utf8("\ud83d \udcff é") == b"\xef\xbf\xbd \xff \xc3\xa9"


def test_words_have_an_end_of_line_and_an_unknown() -> None:
    words = Words.choose({"b": 5, "a": 3, "rare": 1, "<eos>": 4}, 3 + 4)
    assert words.words == ["b", "<eos>", "a", "<unk>"]  # by count, but what is needed stays
    tokens = words.encode(b"a rare b\n\nb", final=True)
    assert words.decode(tokens) == b"a <unk> b \n\nb \n"
    assert Words.load(words.save()).words == words.words


@pytest.mark.parametrize("size", [5, 6, 50, 51, None])
def test_words_of_any_number_know_the_unknown(size: int | None) -> None:
    one_line = {f"w{n}": 100 - n for n in range(90)} | {"<eos>": 1}
    words = Words.choose(one_line, size)
    assert words.size == (size or 92 + 3)
    assert words.decode(words.encode(b"w0 new", final=True)).endswith(b"<unk> \n")
    assert [*words.counts.values()] == sorted(words.counts.values(), reverse=True)


def test_a_prompt_of_words_does_not_end_its_line(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_bytes(Words.choose({"a": 3, "b": 2}, None).save())
    task = TextTask("words", sha256((tmp_path / "words.txt").read_bytes()).hexdigest()).at(tmp_path)
    (tmp_path / "prompt").write_text("a\nb")
    for prompt in (task.prompt("a\nb"), task.prompt_file(tmp_path / "prompt")):
        assert task.vocabulary.decode(prompt) == b"a \nb "
    assert task.vocabulary.decode(task.read(tmp_path / "prompt").tokens) == b"a \nb \n"


def write(folder: Path, **files: str | bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def texts(store: Store, split: str) -> list[bytes]:
    """Its documents, decoded."""
    task = tasks.get("text", store.meta["options"]).at(store.folder)
    assert isinstance(task, TextTask)
    found = store.split(split)
    return [task.vocabulary.decode(found.read(index)) for index in range(len(found))]


def make(source: Path | str, out: Path, **options: Any) -> Store:
    return prepare(str(source), out, **{"workers": 1} | options)


def test_each_file_is_a_document_between_bos_and_eos(tmp_path: Path) -> None:
    source = write(tmp_path / "a", x_txt="one", y_txt="", z_md="three\n")
    store = make(source, tmp_path / "s", validation=0)
    split = store.split("train")
    assert texts(store, "train") == [b"one", b"three\n"]
    assert split.read(0).tolist() == [BOS, *(ord(c) + 3 for c in "one"), EOS]
    assert split.meta["counts"] == {"bytes": 9, "words": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "s"]
    with pytest.raises(ValueError, match="exists already"):
        make(source, tmp_path / "s")


def test_lines_of_json_and_rows_of_parquet_are_documents(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [f"text {n} é" for n in range(300)]
    lines = "".join(json.dumps({"text": row}) + "\n" for row in rows) + "\n"
    write(tmp_path, a_jsonl=lines)
    table = pyarrow.table({"text": [*rows, None, ""], "other": list(range(302))})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet", row_group_size=50)
    stores = [make(tmp_path / name, tmp_path / name[0], validation=0.2) for name in ("a.jsonl", "b.parquet")]
    for store in stores:
        assert sorted(texts(store, "train") + texts(store, "validation")) == sorted(r.encode() for r in rows)
        assert 30 < len(store.split("validation")) < 90
    assert texts(stores[0], "validation") == texts(stores[1], "validation")
    with pytest.raises(ValueError, match=r"no column 'body': choose one of text, other"):
        make(tmp_path / "b.parquet", tmp_path / "c", key="body")
    with pytest.raises(ValueError, match="not an object with a text at 'body'"):
        make(tmp_path / "a.jsonl", tmp_path / "d", key="body")


def test_splits_that_are_given_are_kept(tmp_path: Path) -> None:
    source = write(
        tmp_path / "a", train__x_txt="one", train__y_txt="two", validation__z_txt="three", test_txt="4"
    )
    store = make(source, tmp_path / "s", validation=0.5)
    assert {name: texts(store, name) for name in store.meta["splits"]} == {
        "train": [b"one", b"two"],
        "validation": [b"three"],
        "test": [b"4"],
    }


def test_a_single_document_is_cut_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PART", 64)
    data = "".join(f"line {n} é漢\n" for n in range(100)).encode() + b"x" * 300
    source = write(tmp_path / "a", x_txt=data) / "x.txt"
    for kind, words in (("bytes", EXACT["bytes"]), ("unigram", EXACT["unigram"])):
        (tmp_path / "p.model").write_bytes(words.save())
        given_file = {"tokenizer_file": tmp_path / "p.model"} if kind == "unigram" else {}
        store = make(source, tmp_path / kind, validation=0.1, test=0.1, **given_file)
        held = round(len(data) * 0.1)
        parts = [texts(store, name) for name in ("train", "validation", "test")]
        if kind == "bytes":
            assert parts == [[data[: -2 * held]], [data[-2 * held : -held]], [data[-held:]]]
        assert b"".join(text for part in parts for text in part) == data
        assert [len(part) for part in parts] == [1, 1, 1]
        assert [store.split(s).read(0)[-1] == EOS for s in store.meta["splits"]] == [False, False, True]


def test_documents_are_divided_and_none_is_lost(tmp_path: Path) -> None:
    source = write(tmp_path / "a", **{f"f{n}_txt": f"text {n}" for n in range(40)})
    store = make(source, tmp_path / "s", validation=0.1, test=0.05)
    parts = {name: texts(store, name) for name in ("train", "validation", "test")}
    assert [len(part) for part in parts.values()] == [34, 4, 2]
    assert sorted(text for part in parts.values() for text in part) == sorted(
        f"text {n}".encode() for n in range(40)
    )


def test_standard_input_is_a_document(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from perceiver_ar.cli import main; main()", "prepare", "text", "-"]
    options = ["--out", str(tmp_path / "s"), "--validation", "0.5"]
    result = subprocess.run([*command, *options], input=b"some text", capture_output=True, check=False)
    assert result.returncode == 0, result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    store = Store.open(tmp_path / "s")
    assert texts(store, "train") + texts(store, "validation") == [b"some ", b"text"]


def test_a_dataset_of_the_hub_is_read_through_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class Datasets:
        @staticmethod
        def load_dataset(*names: str, streaming: bool) -> dict[str, Any]:
            asked.append(names)
            if "missing" in names:
                raise OSError("there is no network\nat all")
            return {"train": iter([{"text": "one"}, {"text": "two\n"}]), "test": iter([{"text": "three"}])}

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    store = make("some/books:small", tmp_path / "s")
    assert asked == [("some/books", "small")]
    assert texts(store, "train") == [b"one", b"two\n"]
    assert texts(store, "test") == [b"three"]
    with pytest.raises(ValueError, match="has no 'body': choose another --key"):
        make("some/books", tmp_path / "other", key="body")
    assert texts(make("other/books", tmp_path / "other"), "train") == [b"one", b"two\n"]  # nothing stale
    with pytest.raises(ValueError, match=r"nor a dataset that can be read: there is no network$"):
        make("missing", tmp_path / "t")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"this needs datasets: pip install 'perceiver-ar\[text\]'"):
        make("some/books", tmp_path / "u")


def test_mistakes_are_told_by_name(tmp_path: Path) -> None:
    source = write(tmp_path / "a", x_txt="text " * 50, y_png=b"\x89PNG\0\0\0")
    write(tmp_path / "empty")
    write(tmp_path / "bare", x_txt="")
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "broken.model").write_text("no model")
    write(tmp_path, prose_txt="not words\n", twice_txt="a 3\na 3\n<unk> 0\n<eos> 0\n", few_txt="a 3\n")
    lowercase = json.loads(byte_level().save())
    lowercase["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "lower.json").write_text(json.dumps(lowercase))
    import pyarrow
    import pyarrow.parquet

    write(tmp_path / "odd", deep_jsonl="[" * 100_000, latin_jsonl=b'"\xe9"\n')
    write(tmp_path / "blank", x_jsonl='\n{"text": ""}\n{"text": null}\n')
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), tmp_path / "ints.parquet")
    for what, options, sentence in (
        (tmp_path / "blank", {}, "there is no text to train on"),
        (tmp_path / "odd/deep.jsonl", {}, "deep.jsonl holds a line that is not an object with a text"),
        (tmp_path / "odd/latin.jsonl", {}, "latin.jsonl holds a line that is not an object with a text"),
        (tmp_path / "ints.parquet", {}, "the column 'text' of .*ints.parquet holds no text"),
        (source / "x.txt", {"tokenizer": "words", "vocab_size": 4}, "--vocab-size must be at least 5"),
        (source, {}, "y.png is a binary file, not text"),
        (tmp_path / "none.txt", {}, "none.txt does not exist"),
        (tmp_path / "empty", {}, r"holds no files that fit '\*'"),
        (source, {"pattern": "*.doc"}, r"holds no files that fit '\*.doc'"),
        (tmp_path / "bare", {}, "all of these files are empty"),
        (source / "x.txt", {"validation": 0.6, "test": 0.5}, "together below 1"),
        (source / "x.txt", {"validation": float("nan")}, "together below 1"),
        (source / "x.txt", {"workers": 0}, "at least 1 process, not 0: set --workers"),
        (
            source / "x.txt",
            {"tokenizer_file": tmp_path / "empty"},
            "empty has no pieces.model, tokenizer.json, words.txt",
        ),
        (source / "x.txt", {"vocab_size": 300}, "--vocab-size is for tokenizers that are made here"),
        (
            source / "x.txt",
            {"tokenizer": "bpe", "vocab_size": 9000},
            "no vocabulary of 9000 could be made from this text: set --vocab-size to at most",
        ),
        (source / "x.txt", {"tokenizer_file": tmp_path / "no.model"}, "no.model does not exist"),
        (source / "x.txt", {"tokenizer_file": tmp_path / "broken.json"}, "this is not a tokenizer.json"),
        (source / "x.txt", {"tokenizer_file": tmp_path / "broken.model"}, "neither a sentencepiece model"),
        *(
            (source / "x.txt", {"tokenizer_file": tmp_path / name}, "this is not the words.txt of a store")
            for name in ("prose.txt", "twice.txt", "few.txt")
        ),
        (
            source / "x.txt",
            {"tokenizer_file": tmp_path / "lower.json"},
            "lower.json changes or loses some text",
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            make(what, tmp_path / "s", **options)
    assert not (tmp_path / "s").exists()
    assert texts(make(source, tmp_path / "t", pattern="*.txt", validation=0), "train") == [b"text " * 50]


def test_a_binary_line_without_an_end_fits_in_memory_by_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "PART", 1000)
    source = write(tmp_path / "a", x_txt="é" * 5000) / "x.txt"
    parts = corpus.parts_of(corpus.find_files(source, "*"), splits.Shares(0, 0), to_the_byte=False)
    assert max(span.size for part in parts for span in part) <= 1003
    assert texts(make(source, tmp_path / "s", validation=0), "train") == ["é".encode() * 5000]


def test_words_are_not_cut_nor_lines_ended_where_parts_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "PART", 100)
    source = write(tmp_path / "a", x_txt="\n".join(["word " * 300, "other " * 50])) / "x.txt"
    counts = make(source, tmp_path / "s", tokenizer="words", validation=0).meta["splits"]["train"]["counts"]
    assert counts["words"] == 300 + 50 + 2
    bytes_ = make(source, tmp_path / "t", validation=0).meta["splits"]["train"]["counts"]
    assert bytes_["words"] == 350
    both = make(source, tmp_path / "u", tokenizer="words", validation=0.3)
    assert sum(split["counts"]["words"] for split in both.meta["splits"].values()) == 300 + 50 + 2
    tokenizer = {"tokenizer_file": write_vocabulary(tmp_path / "t.json", byte_level())}
    accents = write(tmp_path / "b", x_txt="é" * 501) / "x.txt"
    split = make(accents, tmp_path / "v", validation=0.3, **tokenizer)
    assert b"".join(texts(split, "train") + texts(split, "validation")) == "é".encode() * 501


def write_vocabulary(path: Path, words: Vocabulary) -> Path:
    path.write_bytes(words.save())
    return path


def test_parts_of_another_tokenizer_are_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perceiver_ar import preparing

    source = write(tmp_path / "a", x_txt="\n".join(PROSE)) / "x.txt"
    first, second = (
        write_vocabulary(tmp_path / f"{name}.model", words)
        for name, words in (("one", EXACT["unigram"]), ("two", EXACT["bpe"]))
    )

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(preparing, "_join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make(source, tmp_path / "s", validation=0, tokenizer_file=first)
    assert list((tmp_path / ".s.parts").glob("*/part-*"))
    store = make(source, tmp_path / "s", validation=0, tokenizer_file=second)
    assert texts(store, "train") == ["\n".join(PROSE).encode()]
    assert not (tmp_path / ".s.parts").exists()


def test_splits_are_known_by_their_usual_names(tmp_path: Path) -> None:
    names = {"train-00000-of-00001_jsonl": '"one"', "valid-0_jsonl": '"two"', "test-0_jsonl": '"three"'}
    store = make(write(tmp_path / "a", **names), tmp_path / "s")
    assert [texts(store, split) for split in splits.SPLITS] == [[b"one"], [b"two"], [b"three"]]
    alone = write(tmp_path / "b", **{f"train__{n}_txt": f"text {n}" for n in range(10)})
    assert len(make(alone, tmp_path / "u", validation=0.2).split("validation")) == 2
    few = write(tmp_path / "c", train__x_txt="one", dev__x_txt="two", test__x_txt="three")
    assert set(make(few, tmp_path / "v", validation=0.05, test=0.05).meta["splits"]) == set(splits.SPLITS)


def test_what_no_split_is_named_for_is_for_training(tmp_path: Path) -> None:
    held = {"test__t_txt": "test", "validation__v_txt": "validation"}
    books = write(tmp_path / "a/top", **{f"books__{n}_txt": f"text {n}" for n in range(4)}, **held)
    store = make(books.parent, tmp_path / "s", test=0.2)
    assert [len(texts(store, split)) for split in splits.SPLITS] == [4, 1, 1]
    assert [texts(store, split) for split in splits.SPLITS[1:]] == [[b"validation"], [b"test"]]
    # Of what is not named for a split, what is missing is taken out: documents, lines, or an end.
    lines = "".join(json.dumps(f"line {n}") + "\n" for n in range(100))
    store = make(write(tmp_path / "b", all_jsonl=lines, test_jsonl='"test"'), tmp_path / "t", validation=0.3)
    assert texts(store, "test") == [b"test"]
    assert 15 < len(texts(store, "validation")) < 45
    store = make(write(tmp_path / "c", one_md="0123456789", test_txt="test"), tmp_path / "u", validation=0.2)
    assert [texts(store, split) for split in splits.SPLITS] == [[b"01234567"], [b"89"], [b"test"]]


def test_code_that_is_called_as_a_split_is_text_like_any_other(tmp_path: Path) -> None:
    code = write(tmp_path / "a", train_py="a", model_py="b", **{"test-model_py": "c", "test_py": "d"})
    store = make(code, tmp_path / "s", pattern="*.py", validation=0)
    assert texts(store, "train") == [b"b", b"c", b"d", b"a"]


def test_tokenizer_files_that_lose_text_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "a", x_txt="a <mask> b, over and over. " * 300) / "x.txt"
    base = json.loads(byte_level().save())
    cut = base | {
        "truncation": {"direction": "Right", "max_length": 128, "strategy": "LongestFirst", "stride": 0}
    }
    (tmp_path / "cut.json").write_text(json.dumps(cut))
    store = make(source, tmp_path / "s", validation=0, tokenizer_file=tmp_path / "cut.json")
    assert texts(store, "train") == [source.read_bytes()]  # the limit is not taken over

    from tokenizers import AddedToken, Tokenizer

    greedy = Tokenizer.from_str(json.dumps(base))
    greedy.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    (tmp_path / "greedy.json").write_text(greedy.to_str())
    with pytest.raises(ValueError, match=r"x\.txt: this tokenizer.json changes or loses some of the text"):
        make(source, tmp_path / "t", tokenizer_file=tmp_path / "greedy.json")
    holes = json.loads(json.dumps(base))
    last = max(holes["model"]["vocab"], key=holes["model"]["vocab"].get)
    holes["model"]["vocab"][last] = 70_000
    (tmp_path / "holes.json").write_text(json.dumps(holes))
    store = make(source, tmp_path / "u", validation=0, tokenizer_file=tmp_path / "holes.json")
    assert store.vocab_size == 70_000 + 1 + 3
    assert texts(store, "train") == [source.read_bytes()]


@pytest.mark.parametrize("kind", ["unigram", "bpe", "words"])
def test_a_store_of_a_tokenizer_that_was_made_before_can_be_mixed_with_its_first(
    tmp_path: Path, kind: Any
) -> None:
    source = write(tmp_path / "a", x_txt="\n".join(PROSE)) / "x.txt"
    size = {"vocab_size": 310 if kind != "words" else 20}
    first = make(source, tmp_path / "s", tokenizer=kind, **size)
    again = make(source, tmp_path / "t", tokenizer_file=tmp_path / "s" / vocabulary.FILES[kind])
    from_store = make(source, tmp_path / "u", tokenizer_file=tmp_path / "s")
    assert first.meta == again.meta == from_store.meta
    open_source("text", {}, {tmp_path / "s": 1.0, tmp_path / "t": 1.0})


def test_sentencepiece_with_rules_of_its_own_is_exact_too() -> None:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PROSE),
        model_writer=model,
        vocab_size=310,
        byte_fallback=True,
        normalization_rule_name="nmt_nfkc_cf",
        minloglevel=2,
    )
    words = Pieces(model.getvalue())
    for text in ("It Was ﬁne, CAPITALS and ①", " two  spaces ", "\r\n"):
        assert words.decode(words.encode(text.encode(), final=True)) == text.encode()


def test_text_with_brackets_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    from perceiver_ar.report import show

    show({"tokens": 1, "by_position": {}}, "see [/quote] and [red]this")
    assert "see [/quote] and [red]this" in capsys.readouterr().out


def test_long_lines_give_pieces_too(tmp_path: Path) -> None:
    rng = random.Random(0)
    words = ("".join(rng.choices("abcdefgh", k=rng.randint(1, 9))) for _ in range(30_000))
    source = write(tmp_path / "a", x_txt=" ".join(words)) / "x.txt"
    assert source.stat().st_size > 1 << 17
    store = make(source, tmp_path / "s", tokenizer="unigram", vocab_size=310, validation=0)
    assert texts(store, "train") == [source.read_bytes()]


def same(a: Path, b: Path) -> bool:
    """Two folders hold the same bytes."""
    names = sorted(str(path.relative_to(a)) for path in a.rglob("*") if path.is_file())
    other = sorted(str(path.relative_to(b)) for path in b.rglob("*") if path.is_file())
    return names == other and not filecmp.cmpfiles(a, b, names, shallow=False)[1]


@pytest.mark.slow
def test_killed_at_random_moments_the_store_comes_out_the_same(tmp_path: Path) -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(1, 9))) for _ in range(1000)]
    source = tmp_path / "a"
    source.mkdir()
    for index in range(3):
        lines = (" ".join(rng.choices(words, k=12)) for _ in range(8_000))
        (source / f"{index}.txt").write_text("\n".join(lines))
    code = "import perceiver_ar.corpus as c; c.PART = 1 << 16; from perceiver_ar.cli import main; main()"
    options = ["--tokenizer", "unigram", "--vocab-size", "400", "--workers", "2"]
    command = [sys.executable, "-c", code, "prepare", "text", str(source), *options, "--out"]

    def parts() -> int:
        return len(list((tmp_path / ".parts.parts").glob("*/part-*.npz")))

    subprocess.run([*command, str(tmp_path / "whole")], check=True, capture_output=True)
    kills = 0
    while not (tmp_path / "parts").exists():
        process = subprocess.Popen(
            [*command, str(tmp_path / "parts")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        # At some moment before, or after so many more parts are there.
        limit, wanted = time.monotonic() + rng.choice((0.2, 0.5, 20)), parts() + rng.randint(1, 4)
        while process.poll() is None and time.monotonic() < limit and parts() < wanted:
            time.sleep(0.005)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
        assert kills < 100
    assert kills >= 3
    assert same(tmp_path / "whole", tmp_path / "parts")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "parts", "whole"]


def test_wikitext_counts_as_others_count_it(tmp_path: Path) -> None:
    source = SHARED / "wikitext103.valid.tokens"
    if not source.exists():
        pytest.skip("needs ../shared/data/text")
    store = make(source, tmp_path / "s", tokenizer="words", validation=0)
    assert store.meta["splits"]["train"]["counts"]["words"] == 217_646
    assert store.meta["splits"]["train"]["tokens"] == 217_646 + 1


SMALL = ModelConfig(259, 64, 16, channels=16, heads=2, layers=1)


def trained(data: Path, out: Path, model: ModelConfig = SMALL, **settings: Any) -> Path:
    settings = {"steps": 3, "batch_size": 4, "warmup_steps": 1, "log_every": 1} | settings
    train(Experiment("small", "text", model, TrainConfig(**settings)), data, out, device="cpu", show=False)
    return out


@pytest.mark.parametrize("kind", ["bytes", "unigram", "words"])
def test_reports_are_a_byte_and_a_word(tmp_path: Path, kind: Any) -> None:
    source = write(tmp_path / "a", **{f"f{n}_txt": line for n, line in enumerate(PROSE)})
    size = {} if kind == "bytes" else {"vocab_size": 310 if kind == "unigram" else 60}
    store = make(source, tmp_path / "s", tokenizer=kind, validation=0.1, **size)
    run_folder = trained(tmp_path / "s", tmp_path / "run")
    (tmp_path / "run/model").rename(tmp_path / "alone")  # with its vocabulary
    model, task, _ = load(tmp_path / "alone", "cpu")
    documents = open_source("text", {}, tmp_path / "s").documents("validation")
    report = evaluate(model, task, documents)
    counts = store.meta["splits"]["validation"]["counts"]
    total = report["nats"] * report["tokens"]
    assert report["tokens"] == store.meta["splits"]["validation"]["tokens"] - len(documents)  # all but BOS
    if kind == "words":
        assert "bits_per_byte" not in report
    else:
        assert report["bits_per_byte"] == pytest.approx(total / math.log(2) / counts["bytes"])
    assert report["word_perplexity"] == pytest.approx(math.exp(total / counts["words"]))
    assert report["perplexity"] == pytest.approx(math.exp(report["nats"]))
    if kind == "bytes":
        assert counts["bytes"] == sum(len(text) for text in texts(store, "validation"))
    assert run_folder.exists()


def test_the_commands_work_on_text(tmp_path: Path) -> None:
    source = write(tmp_path / "a", **{f"f{n}_txt": line for n, line in enumerate(PROSE[:40])})
    folder = str(tmp_path / "run")
    prepared = run("prepare", "text", str(source), "--out", str(tmp_path / "s"), "--validation", "0.1")
    assert prepared.returncode == 0, prepared.stderr
    assert "validation: 4 documents" in prepared.stdout
    settings_ = (
        "--model.channels",
        "16",
        "--model.heads",
        "2",
        "--model.layers",
        "1",
        "--model.context",
        "64",
    )
    more = ("--model.latents", "16", "--train.steps", "3", "--train.batch-size", "4", "--device", "cpu")
    small = (*settings_, *more, "--model.input-channels", "16", "--model.cross-heads", "2")
    begun = run("train", "pg19-2k", *small, "--data", str(tmp_path / "s"), "--out", folder)
    assert begun.returncode == 0, begun.stderr
    shown = run("evaluate", folder)
    assert "bits_per_byte" in shown.stdout, shown.stderr
    assert "word_perplexity" in shown.stdout
    drawn = run("generate", folder, "--prompt", "The é", "--tokens", "20", "--out", str(tmp_path / "new.txt"))
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / "new.txt").read_bytes().startswith("The é".encode())
    typed = run("generate", folder, "--prompt", "The é", "--tokens", "20")
    assert typed.stdout.startswith("The é")
    scored = run("score", folder, str(source / "f0.txt"))
    assert len(scored.stdout.split()) == len(PROSE[0]) + 1


@pytest.mark.parametrize("name", ["pg19-2k", "books-1k", "wikitext103-1k"])
def test_the_papers_presets_train_on_what_was_prepared(tmp_path: Path, name: str) -> None:
    from dataclasses import replace

    source = write(tmp_path / "a", x_txt="\n".join(PROSE))
    preset = presets.get(name)
    kind = preset.options["tokenizer"]
    make(
        source, tmp_path / "s", tokenizer=kind, vocab_size=310 if kind == "unigram" else None, validation=0.2
    )
    shrunk: dict[str, Any] = {"channels": 64, "heads": 2, "layers": 1, "context": 64, "latents": 16}
    wide = {"input_channels": 128, "cross_heads": 4} if preset.model.input_channels else {"cross_heads": 2}
    model = replace(preset.model, **shrunk, **wide)
    settings_ = replace(preset.train, steps=2, batch_size=2)
    train(
        replace(preset, model=model, train=settings_),
        tmp_path / "s",
        tmp_path / "run",
        device="cpu",
        show=False,
    )
    assert (tmp_path / "run/model/model.safetensors").exists()


def test_a_damaged_vocabulary_is_noticed(tmp_path: Path) -> None:
    source = write(tmp_path / "a", x_txt="\n".join(PROSE))
    make(source, tmp_path / "s", tokenizer="unigram", vocab_size=310)
    path = tmp_path / "s/pieces.model"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"pieces.model is missing or damaged"):
        open_source("text", {}, tmp_path / "s")


def test_every_kind_of_vocabulary_is_loaded_from_its_file() -> None:
    for kind, words in (("unigram", EXACT["unigram"]), ("tokenizers", EXACT["tokenizers"])):
        again: Vocabulary = vocabulary.load(kind, words.save())
        data = PROSE[1].encode()
        assert again.encode(data, final=True).tolist() == words.encode(data, final=True).tolist()


def test_stores_are_mixed_by_weight(tmp_path: Path) -> None:
    for name, letter in (("a", "x"), ("b", "y"), ("c", "z")):
        source = write(tmp_path / f"source-{name}", **{f"f{n}_txt": letter * 50 for n in range(20)})
        make(source, tmp_path / name, validation=0.1 if name != "c" else 0)
    mixture = {tmp_path / "a": 3.0, tmp_path / "b": 1.0, tmp_path / "c": 1.0}
    source = open_source("text", {}, mixture)
    examples = source.examples(context=16)
    windows = [w for step in range(200) for w in examples.windows(0, step, 10, 8)]
    share = np.mean([ord("x") + 3 in w.tokens for w in windows])
    assert 0.56 < share < 0.64
    again = open_source("text", {}, mixture).examples(context=16).windows(0, 7, 10, 8)
    assert all((a.tokens == b.tokens).all() for a, b in zip(windows[70:80], again, strict=True))
    documents = source.documents("validation")
    assert len(documents) == 4
    assert {int(document.tokens[1]) for document in documents} == {ord("x") + 3, ord("y") + 3}

    out = trained_mixture(mixture, tmp_path / "run", steps=2)
    trained_mixture(None, out, steps=4, resume=True)  # which remembers its data
    model, task, data = load(out, "cpu")
    report = evaluate(model, task, open_source("text", {}, data).documents("validation"))
    assert report["bits_per_byte"] == pytest.approx(report["nats"] * report["tokens"] / math.log(2) / 200)
    with pytest.raises(ValueError, match="was begun on other data"):
        trained_mixture({**mixture, tmp_path / "a": 2.0}, out, steps=4, resume=True)
    with pytest.raises(ValueError, match="must be above 0"):
        open_source("text", {}, {tmp_path / "a": 0.0})
    make(tmp_path / "source-a", tmp_path / "words", tokenizer="words")
    with pytest.raises(ValueError, match=r"words has tokens of another tokenizer than .*a: prepare"):
        open_source("text", {}, {tmp_path / "a": 1.0, tmp_path / "words": 1.0})


def trained_mixture(data: Any, out: Path, steps: int, resume: bool = False) -> Path:
    settings_ = TrainConfig(steps=steps, batch_size=4, warmup_steps=1, schedule="constant")
    experiment = Experiment("mixed", "text", SMALL, settings_)
    train(experiment, data, out, resume=resume, device="cpu", show=False)
    return out


def test_weights_of_the_command_fit_its_stores() -> None:
    result = run("train", "copy-32", "--data", "a", "b", "--weights", "1")
    assert result.returncode == 2
    assert "1 weights do not fit 2 stores of --data" in result.stderr
