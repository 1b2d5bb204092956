"""Text to a token store, part by part on all cores; after an interruption, finished parts are reused.

Parts are kept in a folder beside the store until all are complete, each written atomically. The same
command finds them again, and the store is the same however often it was interrupted.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from perceiver_ar import vocabulary
from perceiver_ar.corpus import Span, read
from perceiver_ar.sealed import digest, write_whole
from perceiver_ar.special import BOS, EOS
from perceiver_ar.splits import SPLITS, Shares
from perceiver_ar.store import Store, smallest_dtype, write_store
from perceiver_ar.vocabulary import FILES, Kind, Pieces, Vocabulary, Words
from perceiver_ar.windows import Tokens
from perceiver_ar.workers import Done, Lost, each

FORMAT_VERSION = 1
"""Format of the parts."""
_LONGEST = 8192
"""Most characters of a line that pieces are learned from; in UTF-8, below sentencepiece's limit."""
SAMPLE = 20 << 20
"""Bytes of text that pieces are learned from, sampled across the corpus."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Corpus:
    """The text to be encoded, in parts."""

    parts: list[list[Span]]
    key: str
    shares: Shares

    def read(self, index: int) -> Iterator[Any]:
        return read(self.parts[index], self.key, self.shares)

    def size(self, index: int) -> int:
        return sum(span.size for span in self.parts[index])


def make_store(
    corpus: Corpus,
    out: Path,
    kind: Kind,
    size: int | None,
    given: bytes | None,
    workers: int,
    progress: Callable[[str], Any],
) -> Store:
    """Encodes all parts and joins them into a store."""
    about = {
        "format_version": FORMAT_VERSION,
        "corpus": asdict(corpus),
        "stamps": _stamps(corpus),
        "kind": kind,
        "size": size,
        "given": None if given is None else sha256(given).hexdigest(),
    }
    work = _open(out.with_name(f".{out.name}.parts"), about)
    words = _vocabulary(corpus, work, kind, size, given, workers, progress)
    missing = [index for index in range(len(corpus.parts)) if not _path(work, index).exists()]
    encode = partial(_encode, corpus, words.save(), kind, work)
    with progress("encoding") as moved:
        _each(encode, missing, corpus, workers, moved)
    store = _join(corpus, work, out, words, kind)
    shutil.rmtree(work.parent)
    return store


def _stamps(corpus: Corpus) -> list[list[Any]]:
    """Size and times of each file; if any changes, everything starts over."""
    paths = sorted({span.path for part in corpus.parts for span in part})
    stats = [(path, Path(path).stat()) for path in paths]
    return [[path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for path, stat in stats]


def _open(place: Path, about: dict[str, Any]) -> Path:
    """The folder for the parts of exactly this store; removes parts of any other."""
    work = place / digest(about)[:16]
    if place.exists():
        for other in place.iterdir():
            if other != work:
                shutil.rmtree(other, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    return work


def _path(work: Path, index: int) -> Path:
    return work / f"part-{index:06}.npz"


def _vocabulary(
    corpus: Corpus,
    work: Path,
    kind: Kind,
    size: int | None,
    given: bytes | None,
    workers: int,
    progress: Callable[[str], Any],
) -> Vocabulary:
    """The vocabulary as given, as made before an interruption, or newly made."""
    if given is not None or kind == "bytes":
        return vocabulary.load(kind, given or b"")
    path = work / FILES[kind]
    if path.exists():
        return vocabulary.load(kind, path.read_bytes())
    if kind == "words":
        counts: Counter[str] = Counter()
        with progress("counting words") as moved:
            _each(
                partial(_count, corpus), list(range(len(corpus.parts))), corpus, workers, moved, counts.update
            )
        made: Vocabulary = Words.choose(counts, size)
    else:
        assert size is not None
        with progress(f"training a tokenizer of {size:,} pieces"):
            made = Pieces.train(_sample(corpus), kind, size)
    write_whole(path, made.save())
    return made


def _sample(corpus: Corpus) -> Iterator[str]:
    """Lines of training text, up to as many bytes from each part."""
    quota = -(-SAMPLE // len(corpus.parts))
    for index in range(len(corpus.parts)):
        left = quota
        for stretch in corpus.read(index):
            if left <= 0:
                break
            if stretch.split == "train":
                text = stretch.data[:left].decode("utf-8", "ignore")
                left -= len(stretch.data)
                yield from (piece for line in text.split("\n") for piece in _short(line))


def _short(line: str) -> Iterator[str]:
    """Cuts a line into lengths that sentencepiece accepts, before a space if there is one."""
    while len(line) > _LONGEST:
        cut = line.rfind(" ", 1, _LONGEST)
        cut = _LONGEST if cut < 0 else cut
        yield line[:cut]
        line = line[cut:]
    if line:
        yield line


def _count(corpus: Corpus, index: int) -> dict[str, int]:
    """Counts the words, and ends of lines, in the training text of a part."""
    counts: Counter[str] = Counter()
    for stretch in corpus.read(index):
        if stretch.split == "train":
            counts.update(vocabulary.split_words(stretch.data, stretch.final))
    return counts


def _encode(corpus: Corpus, content: bytes, kind: Kind, work: Path, index: int) -> None:
    """Encodes one part and writes, by split, tokens, the ends of stretches and documents, and counts."""
    words = _loaded(kind, content)
    dtype = smallest_dtype(words.size)
    tokens: dict[str, list[Tokens]] = {split: [] for split in SPLITS}
    ends: dict[str, list[bool]] = {split: [] for split in SPLITS}
    counts = {split: np.zeros(2, dtype=np.int64) for split in SPLITS}
    for stretch in corpus.read(index):
        try:
            body = words.encode(stretch.data, stretch.final)
        except ValueError as error:
            raise ValueError(f"{corpus.parts[index][0].path}: {error}") from None
        assert not len(body) or int(body.max()) < words.size
        counts[stretch.split] += (len(stretch.data), words.count_words(stretch.data, body))
        start, stop = int(stretch.begins), int(stretch.begins) + len(body)
        framed = np.empty(stop + (stretch.final and words.ends), dtype)
        framed[:start], framed[start:stop], framed[stop:] = BOS, body, EOS
        tokens[stretch.split].append(framed)
        ends[stretch.split].append(stretch.ends)
    arrays: dict[str, Any] = {}
    for split in SPLITS:
        arrays[f"{split}-tokens"] = np.concatenate((*tokens[split], np.zeros(0, dtype)))
        arrays[f"{split}-lengths"] = np.array([len(x) for x in tokens[split]], dtype=np.int64)
        arrays[f"{split}-ends"] = np.array(ends[split], dtype=bool)
        arrays[f"{split}-counts"] = counts[split]
    packed = BytesIO()
    np.savez(packed, **arrays)
    write_whole(_path(work, index), packed.getbuffer())


_cached: list[Any] = []


def _loaded(kind: Kind, content: bytes) -> Vocabulary:
    """The vocabulary, loaded once per process."""
    if not _cached or _cached[0] != (kind, content):
        _cached[:] = [(kind, content), vocabulary.load(kind, content)]
    return _cached[1]


def _each(
    work: Callable[[int], Any],
    indices: Sequence[int],
    corpus: Corpus,
    workers: int,
    moved: Progress,
    take: Callable[[Any], object] = lambda result: None,
) -> None:
    """Processes parts on all cores, in any order."""
    whole = sum(map(corpus.size, range(len(corpus.parts))))
    done = whole - sum(map(corpus.size, indices))
    moved(done, whole)
    if min(workers, len(indices)) <= 1:
        results: Iterator[Any] = (Done(index, work(index), None) for index in indices)
    else:
        results = each(work, indices, workers)
    for index, value, error in results:
        if isinstance(error, Lost):
            raise ValueError("a process was killed, for want of memory perhaps: try again with --workers 1.")
        if error is not None:
            raise error
        take(value)
        moved(done := done + corpus.size(index), whole)


def _join(corpus: Corpus, work: Path, out: Path, words: Vocabulary, kind: Kind) -> Store:
    """Joins all parts into the store."""
    paths = [_path(work, index) for index in range(len(corpus.parts))]
    counts = {split: np.zeros(2, dtype=np.int64) for split in SPLITS}
    for path in paths:
        with np.load(path) as part:
            for split in SPLITS:
                counts[split] += part[f"{split}-counts"]
    held = [split for split in SPLITS if counts[split][0]]
    if "train" not in held:
        raise ValueError("there is no text to train on: all of it is empty, or went to other splits.")
    name = FILES.get(kind)
    return write_store(
        out,
        {split: _documents(paths, split) for split in held},
        words.size,
        "text",
        {"tokenizer": kind, "sha256": sha256(words.save()).hexdigest() if name else ""},
        files={} if name is None else {name: words.save()},
        counts={s: dict(zip(("bytes", "words"), counts[s].tolist(), strict=True)) for s in held},
    )


def _documents(paths: list[Path], split: str) -> Iterator[Iterator[Tokens]]:
    """Each document as an iterator over its stretches, with one part in memory at a time."""
    stretches = ((tokens, end) for path in paths for tokens, end in _stretches(path, split))
    for tokens, end in stretches:
        yield _one(tokens, end, stretches)


def _stretches(path: Path, split: str) -> Iterator[tuple[Tokens, bool]]:
    with np.load(path) as part:
        tokens, lengths, ends = (part[f"{split}-{name}"] for name in ("tokens", "lengths", "ends"))
    cuts = np.cumsum(lengths)[:-1]
    yield from zip(np.split(tokens, cuts) if len(lengths) else [], ends.tolist(), strict=True)


def _one(tokens: Tokens, end: bool, more: Iterator[tuple[Tokens, bool]]) -> Iterator[Tokens]:
    yield tokens
    while not end:
        tokens, end = next(more)
        yield tokens
