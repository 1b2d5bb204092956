"""Text: from files to tokens and back, and what is reported of it."""

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import ClassVar, Literal, Self

import numpy as np

from perceiver_ar import vocabulary
from perceiver_ar.corpus import find_files, parts_of
from perceiver_ar.extras import need
from perceiver_ar.preparing import Corpus, make_store
from perceiver_ar.report import progress_bar
from perceiver_ar.sealed import Damaged, read_sealed, write_sealed
from perceiver_ar.special import BOS, EOS, FIRST
from perceiver_ar.splits import Shares, left
from perceiver_ar.store import Store, check_new
from perceiver_ar.tasks.base import Document, Task, beginning
from perceiver_ar.vocabulary import FILES, Kind, Pieces, Vocabulary, as_utf8, check_exact
from perceiver_ar.windows import Tokens
from perceiver_ar.workers import processes


@dataclass(frozen=True)
class TextTask(Task):
    """Text. Each document begins with BOS and, unless its tokens are words, ends with EOS."""

    name: ClassVar[str] = "text"

    tokenizer: Kind = "bytes"
    """Kind of tokenizer; taken from the store."""
    sha256: str = ""
    """Digest of the tokenizer's file, if it has one; taken from the store."""

    def at(self, folder: Path) -> Self:
        """With the vocabulary that lies there."""
        name, content = FILES.get(self.tokenizer), b""
        if name is not None:
            path = folder / name
            content = path.read_bytes() if path.exists() else b""
            if sha256(content).hexdigest() != self.sha256:
                raise Damaged(f"{path} is missing or damaged.")
        object.__setattr__(self, "vocabulary", vocabulary.load(self.tokenizer, content))
        return self

    vocabulary: ClassVar[Vocabulary]

    def files(self) -> dict[str, bytes]:
        name = FILES.get(self.tokenizer)
        return {} if name is None else {name: self.vocabulary.save()}

    @property
    def ends(self) -> bool:
        return self.vocabulary.ends

    def read(self, path: Path) -> Document:
        return self.document(path.read_bytes())

    def document(self, data: bytes) -> Document:
        """A text as it is in a store, to be scored."""
        tokens = np.append(self._after_bos(data, final=True), np.full(int(self.ends), EOS))
        return Document(tokens, 1, len(tokens))

    def prompt(self, text: str) -> Tokens:
        return self._after_bos(as_utf8(text), final=False)

    def prompt_file(self, path: Path, keep: int | None = None) -> Tokens:
        return beginning(self._after_bos(path.read_bytes(), final=False), keep)

    def _after_bos(self, data: bytes, final: bool) -> Tokens:
        return np.concatenate(([BOS], self.vocabulary.encode(data, final))).astype(np.int64)

    def speller(self) -> Callable[[int], str]:
        return self.vocabulary.speller()

    def save(self, tokens: Tokens, path: Path) -> None:
        path.write_bytes(self.vocabulary.decode(tokens))

    def report(self, nats: float, tokens: int, counts: Mapping[str, int]) -> dict[str, float]:
        """Perplexity a token; where they were counted, bits a byte and perplexity a word."""
        found = {"perplexity": _exp(nats / tokens)}
        if counts.get("bytes") and self.tokenizer != "words":  # which do not give the text back
            found["bits_per_byte"] = nats / math.log(2) / counts["bytes"]
        if counts.get("words"):
            found["word_perplexity"] = _exp(nats / counts["words"])
        return found

    def show(self, truth: Tokens, predicted: Tokens) -> str:
        lines = (("true      ", truth), ("predicted ", predicted))
        return "\n".join(
            name + repr(self.vocabulary.decode(tokens).decode(errors="replace")) for name, tokens in lines
        )


def _exp(x: float) -> float:
    return math.exp(min(x, 700.0))


def prepare(
    source: str,
    /,
    out: Path,
    tokenizer: Literal["bytes", "unigram", "bpe", "words"] = "bytes",
    vocab_size: int | None = None,
    tokenizer_file: Path | None = None,
    validation: float = 0.05,
    test: float = 0.0,
    pattern: str = "*",
    key: str = "text",
    workers: int | None = None,
) -> Store:
    """Turn text into a token store. If interrupted, run the same command again to continue.

    Args:
        source: A file, a folder, - for standard input, or a dataset of the Hugging Face hub. Each text file
            is a document, as is each line of .jsonl and each row of .parquet. Folders named train, validation
            and test, and files such as train.txt, are the splits; missing ones are drawn from the rest.
        out: New folder for the store.
        tokenizer: bytes; unigram or bpe: subword pieces learned from the text; words: split at white space.
        vocab_size: Number of tokens, special ones included. Default: 32,000 for unigram, bpe; all words.
        tokenizer_file: Use this tokenizer instead: a sentencepiece .model, a tokenizer.json, a words.txt, or
            a store with one of them.
        validation: Fraction of the documents to hold out for validation; of a single document, its end.
        test: Fraction of the documents to hold out for testing; of a single document, its end.
        pattern: Which files of a folder to read, such as *.txt.
        key: Name of the text field in .jsonl objects, .parquet files and datasets.
        workers: Number of processes. Default: one per core.
    """
    check_new(out)
    crew = processes(workers)
    kind, given = _given(tokenizer_file) if tokenizer_file is not None else (tokenizer, None)
    if vocab_size is not None and (given is not None or kind == "bytes"):
        raise ValueError("--vocab-size is for tokenizers that are made here: unigram, bpe or words.")
    if vocab_size is not None and vocab_size < FIRST + 2:
        raise ValueError(f"--vocab-size must be at least {FIRST + 2}, but is {vocab_size}.")
    asked = Shares(validation, test)
    files = find_files(_fetch(source, out, key), pattern)
    shares = left(files.values(), asked)
    corpus = Corpus(parts_of(files, shares, to_the_byte=kind == "bytes"), key, shares)
    size = 32_000 if vocab_size is None and kind in ("unigram", "bpe") else vocab_size
    store = make_store(corpus, out, kind, size, given, crew, _bar)
    shutil.rmtree(_spool(out), ignore_errors=True)
    return store


def _bar(what: str) -> AbstractContextManager[Callable[[int, int], None]]:
    return progress_bar(True, what)


def _given(path: Path) -> tuple[Kind, bytes]:
    """Kind and content of a tokenizer that the user has, as a file or in a store."""
    if path.is_dir():
        found = [path / name for name in vocabulary.FILES.values() if (path / name).is_file()]
        if not found:
            raise ValueError(f"{path} has no {', '.join(sorted(set(vocabulary.FILES.values())))}.")
        path = found[0]
    if not path.is_file():
        raise ValueError(f"{path} does not exist.")
    content = path.read_bytes()
    try:
        kind = _KINDS.get(path.suffix) or Pieces(content).kind
        known = vocabulary.load(kind, content)
    except RuntimeError:
        raise ValueError(f"{path} is neither a sentencepiece model nor a tokenizer.json.") from None
    if kind != "words":  # which lose some text, as is known
        check_exact(known, str(path))
    return kind, content


_KINDS: dict[str, Kind] = {".json": "tokenizers", ".txt": "words"}


def _fetch(source: str, out: Path, key: str) -> Path:
    """Where the text lies; standard input and datasets are first written beside the store."""
    path = Path(source)
    if source != "-" and (path.exists() or source.startswith((".", "/", "~")) or path.suffix in _SUFFIXES):
        return path
    spool = _spool(out)
    spool.mkdir(parents=True, exist_ok=True)
    if source == "-":
        with (spool / "stdin.txt").open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        return spool / "stdin.txt"
    _download(source, spool, key)
    return spool


_SUFFIXES = (".txt", ".jsonl", ".ndjson", ".json", ".parquet", ".gz", ".xz", ".zip", ".md", ".tokens", ".csv")
"""What has one of these is meant as a file, not as a dataset."""


def _spool(out: Path) -> Path:
    return out.with_name(f".{out.name}.source")


def _download(name: str, spool: Path, key: str) -> None:
    """The splits of a dataset as .jsonl files; those that are there already stay."""
    datasets = need("datasets", "text")
    about = {"name": name, "key": key}
    if not (spool / ".about.json").exists() or read_sealed(spool / ".about.json") != about:
        shutil.rmtree(spool)
        spool.mkdir()
        write_sealed(spool / ".about.json", about)
    print(f"{name} is no file or folder here: looking for it on the Hugging Face hub.", file=sys.stderr)
    try:
        _write_splits(datasets.load_dataset(*name.split(":"), streaming=True), spool, key)
    except KeyError as error:
        raise ValueError(f"{name} has no {error}: choose another --key.") from None
    except Exception as error:  # of the network, of the hub, of the dataset's own code
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{name} is no file or folder here, nor a dataset that can be read: {reason}"
        ) from None


def _write_splits(splits: Mapping[str, Iterable[Mapping[str, str]]], spool: Path, key: str) -> None:
    for split, rows in splits.items():
        path = spool / f"{split}.jsonl"
        if not path.exists():
            beside = path.with_suffix(".partial")
            with beside.open("w") as file:
                for row in rows:
                    file.write(json.dumps(row[key]) + "\n")
            beside.rename(path)
