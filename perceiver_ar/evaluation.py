"""Strided evaluation: every token of every document is scored exactly once.

Windows of up to M inputs end S targets apart, and each scores the S targets that no earlier window
did (appendix G). Losses are kept as sums and counts until the very end.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from perceiver_ar.baselines import TransformerXL
from perceiver_ar.data import collate
from perceiver_ar.decoder import real
from perceiver_ar.device import autocast
from perceiver_ar.distributed import Ranks, joined
from perceiver_ar.embedding import Scores
from perceiver_ar.store import Split
from perceiver_ar.tasks.base import Document, Task
from perceiver_ar.windows import Tokens, Window, generator

LATENTS, INPUTS, LOGITS = 2**14, 2**20, 2**28
"""The most of each in a batch whose size is not given: enough to keep a GPU busy."""
_BOUNDS = 512 << np.arange(40)
Item = TypeVar("Item")


class Part(NamedTuple):
    """Places in a document that are scored together."""

    document: int
    """Index of the document among those that are scored."""
    places: range


@dataclass
class Totals:
    """Sums over all scored tokens, by what the task reports losses by."""

    task: Task
    parts: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    """Nats, number and hits of targets; keys are upper bounds: 512, 1,024, 2,048 ..."""
    hits_known: bool = True

    @property
    def tokens(self) -> int:
        return int(sum(part[1] for part in self.parts.values()))

    def add(self, nats: Tensor, right: Tensor | None, places: Sequence[range]) -> None:
        """Adds a batch: nats and hits (B, N), where the last columns of each row are those of its places."""
        self.hits_known &= right is not None
        hits = torch.zeros_like(nats) if right is None else right
        sums = torch.stack((nats.double(), torch.ones_like(nats).double(), hits.double()), dim=1)
        for row, where in zip(sums.cpu().numpy(), places, strict=True):
            scored = row[:, row.shape[1] - len(where) :]
            which = np.searchsorted(_BOUNDS, self.task.along(np.array(where)), side="right")
            for bound in np.unique(which):
                self._put(int(_BOUNDS[bound]), scored[:, which == bound].sum(axis=1))

    def _put(self, bound: int, sums: NDArray[np.float64]) -> None:
        self.parts[bound] = self.parts.get(bound, 0) + sums

    def join(self, parts: Mapping[int, NDArray[np.float64]], hits_known: bool) -> None:
        """Adds the sums of another rank."""
        self.hits_known &= hits_known
        for bound, sums in parts.items():
            self._put(bound, sums)

    def report(self, counts: Mapping[str, int]) -> dict[str, Any]:
        """Mean nats and bits per token, the task's own measures, and the means of each part."""
        parts = dict(sorted(self.parts.items()))
        whole = self._means(sum(parts.values()))
        tokens, nats = whole["tokens"], whole["nats"]
        report = {"tokens": tokens, "nats": nats, "bits": nats / math.log(2)}
        report |= self.task.report(nats * tokens, tokens, counts) | whole
        report[f"by_{self.task.reported_by}"] = {
            str(bound): self._means(sums) for bound, sums in parts.items()
        }
        return report

    def _means(self, sums: Any) -> dict[str, Any]:
        nats, tokens, hits = (float(total) for total in sums)
        means: dict[str, Any] = {"tokens": int(tokens), "nats": nats / tokens}
        if self.task.accuracy and self.hits_known:
            means["accuracy"] = hits / tokens
        return means


def evaluate(
    model: nn.Module,
    task: Task,
    documents: Sequence[Document],
    *,
    latents: int | None = None,
    stride: int | None = None,
    context: int | None = None,
    batch_size: int | None = None,
    every: int = 1,
    progress: Callable[[int, int], None] | None = None,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Scores documents and reports the means.

    latents and context (the most inputs of a window) default to the model's, stride to half the latents,
    and batch_size to as many windows as LATENTS, INPUTS and LOGITS allow, or to 8 documents in segments.
    With every, only one window in so many is scored, as an estimate. Windows are distributed over the ranks,
    which all return the same report; progress, called with the number of scored tokens and their total, is
    called equally often on every rank.
    """
    ranks, totals = ranks or Ranks(), Totals(task)
    windowing = Windowing.of(
        model, latents=latents, stride=stride, context=context, batch_size=batch_size, every=every
    )
    known = isinstance(documents, Documents)
    wanted = documents.targets if known else sum(document.stop - document.first for document in documents)
    wanted = math.ceil(wanted / every)
    for nats, right, parts in score(model, task, documents, windowing, ranks):
        if parts:
            totals.add(nats, right, [part.places for part in parts])
        if progress is not None:
            progress(min(wanted, totals.tokens * ranks.size), wanted)
    whole = Totals(task)
    for found in ranks.gather((totals.parts, totals.hits_known)):
        whole.join(*found)
    if not whole.tokens:
        raise ValueError("there is nothing to evaluate: the documents hold no token that is scored.")
    if every > 1:  # what the store counted is of the whole
        return whole.report({}) | task.reach(windowing.context) | {"every": every}
    return whole.report(getattr(documents, "counts", {})) | task.reach(windowing.context)


@dataclass(frozen=True)
class Windowing:
    """How documents are cut into windows, and how many windows are scored at once."""

    latents: int
    stride: int
    context: int
    batch_size: int
    reads_on: bool
    """Read documents in consecutive segments with memory: Transformer-XL without stride and context."""
    every: int = 1
    """Score one window in so many."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        latents: int | None = None,
        stride: int | None = None,
        context: int | None = None,
        batch_size: int | None = None,
        every: int = 1,
    ) -> Self:
        """The settings as given, checked against the model, with the defaults of `evaluate`."""
        config: Any = model.config
        reads_on = isinstance(model, TransformerXL) and stride is context is None
        latents = config.check_latents(latents)
        if context is not None:  # which may be shorter than the latents
            latents = min(latents, max(1, context))
        stride = max(1, latents // 2) if stride is None else stride
        if not 1 <= stride <= latents:
            raise ValueError(f"stride must be from 1 to the {latents} latents, but is {stride}.")
        context = config.context if context is None else context
        if not 1 <= context <= config.context:
            raise ValueError(f"context must be from 1 to {config.context}, but is {context}.")
        if batch_size is None:
            most = LATENTS // latents, INPUTS // context, LOGITS // (latents * config.vocab_size)
            batch_size = 8 if reads_on else max(1, min(most))
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, but is {batch_size}.")
        if not 1 <= every <= 10**9:
            raise ValueError(f"every must be from 1 to a billion, but is {every}.")
        if reads_on and every > 1:
            raise ValueError("Transformer-XL reads on from window to window: with every, set a stride.")
        return cls(latents, stride, context, batch_size, reads_on, every)


def score(
    model: nn.Module,
    task: Task,
    documents: Iterable[Document],
    windowing: Windowing,
    ranks: Ranks | None = None,
) -> Iterator[tuple[Tensor, Tensor | None, list[Part]]]:
    """Yields batches of nats and hits (B, N), 0 except in their last columns, and the part of each row.

    Ranks have different batches, but equally many: some have no parts, and must not be counted.
    """
    batches = _in_segments if windowing.reads_on else _in_windows
    training, before = model.training, None
    model.eval()
    try:
        for scores, parts in batches(model, task, documents, windowing, ranks or Ranks()):
            fetched = _Fetched(scores.nats, scores.right), parts
            if before is not None:
                yield *before[0].wait(), before[1]
            before = fetched
        if before is not None:
            yield *before[0].wait(), before[1]
    finally:
        model.train(training)


Scored = Iterator[tuple[Scores, list[Part]]]
"""Batches, and for each row the part of a document that its last columns score."""


def _in_windows(
    model: nn.Module, task: Task, documents: Iterable[Document], windowing: Windowing, ranks: Ranks
) -> Scored:
    """Scores windows independently of one another."""
    device = next(model.parameters()).device
    found = (
        (window, Part(number, places))
        for number, document in enumerate(documents)
        for window, places in windows(document, windowing.context, windowing.stride)
    )
    for chunk, here in _dealt(_one_in(windowing.every, found), windowing.batch_size, ranks):
        batch = collate([w for w, _ in here or chunk[:1]], windowing.latents, task).to(device)
        with _quietly(), autocast(device):
            scores = model(
                batch.inputs, positions=batch.positions, lengths=batch.lengths, targets=batch.targets
            )
        yield scores, [part for _, part in here]


def _in_segments(
    model: nn.Module, task: Task, documents: Iterable[Document], windowing: Windowing, ranks: Ranks
) -> Scored:
    """Scores a batch of documents, aligned at their ends, in consecutive segments with memory."""
    assert isinstance(model, TransformerXL)
    device, segment = next(model.parameters()).device, windowing.latents
    scored = (pair for pair in enumerate(documents) if pair[1].first < pair[1].stop)
    for chunk, here in _dealt(scored, windowing.batch_size, ranks):
        wholes = [Window(d.tokens[: d.stop], 0, d.stop - d.first) for _, d in here or chunk[:1]]
        batch = collate(wholes, max(len(w.tokens) for w in wholes), task)
        inputs, longest = batch.inputs.shape[1], max(d.stop for _, d in chunk) - 1  # here, and on any rank
        shown = None if batch.lengths is None else real(batch.inputs, batch.lengths)
        past, begin = None, 0
        for end in range(inputs % segment or segment, inputs + 1, segment):
            part = slice(begin, end)
            visible = None if shown is None else shown[:, part].to(device)
            with _quietly(), autocast(device):
                scores, past = model.score_on(
                    batch.inputs[:, part].to(device), batch.targets[:, part].to(device), past, visible
                )
            ends = [d.stop - inputs + end for _, d in here]
            first = [max(d.first, d.stop - inputs + begin) for _, d in here]
            places = (range(a, max(a, b)) for a, b in zip(first, ends, strict=True))
            yield scores, [Part(number, where) for (number, _), where in zip(here, places, strict=True)]
            begin = end
        for _ in range(math.ceil(longest / segment) - math.ceil(inputs / segment)):
            with _quietly(), autocast(device):
                scores, _ = model.score_on(
                    batch.inputs[:, :1].to(device), batch.targets[:, :1].to(device), None, None
                )
            yield scores, []


def _one_in(every: int, items: Iterator[Item]) -> Iterator[Item]:
    """One of so many, always the same; drawn, as documents may have as many windows as one another."""
    random = generator(0, every)
    while group := list(islice(items, every)):
        yield group[random.integers(len(group))]


def _dealt(items: Iterator[Item], each: int, ranks: Ranks) -> Iterator[tuple[list[Item], list[Item]]]:
    """The next items of all ranks together, and those of this rank, which at the end may be none.

    Even then it must call the model as often as the others, which may need its shard of the weights.
    """
    while chunk := list(islice(items, each * ranks.size)):
        yield chunk, chunk[ranks.rank * each : (ranks.rank + 1) * each]


def _quietly() -> Any:
    """Disables gradients; not by inference mode where ranks gather weights, which must remain trainable."""
    return torch.no_grad() if joined() else torch.inference_mode()


class _Fetched:
    """Results on their way from a GPU, which computes the next batch while these are processed."""

    def __init__(self, nats: Tensor, right: Tensor | None) -> None:
        ahead = nats.is_cuda
        self.nats = nats.to("cpu", non_blocking=ahead)
        self.right = None if right is None else right.to("cpu", non_blocking=ahead)
        self.done = torch.cuda.Event() if ahead else None
        if self.done is not None:
            self.done.record()

    def wait(self) -> tuple[Tensor, Tensor | None]:
        if self.done is not None:
            self.done.synchronize()
        return self.nats, self.right


def windows(document: Document, context: int, stride: int) -> Iterator[tuple[Window, range]]:
    """The windows of a document, with the places that each scores."""
    for start in range(document.first, document.stop, stride):
        end = min(start + stride, document.stop)
        begin = max(0, end - 1 - context)
        yield Window(document.tokens[begin:end], begin, end - start), range(start, end)


def predict(model: nn.Module, task: Task, document: Document, count: int) -> tuple[Tokens, Tokens]:
    """The last scored tokens of a document, and the most likely ones in their places."""
    config: Any = model.config
    count = min(count, config.latents, document.stop - document.first)
    begin = max(0, document.stop - 1 - config.context)
    window = Window(document.tokens[begin : document.stop], begin, count)
    batch = collate([window], count, task).to(next(model.parameters()).device)
    training = model.training
    with torch.no_grad(), autocast(batch.inputs.device):
        logits = model.eval()(batch.inputs, positions=batch.positions, latents=count)
    model.train(training)
    return window.tokens[-count:], logits[0].argmax(-1).cpu().numpy()


class Documents(Sequence[Document]):
    """The documents of a split of one or several stores, scored from their second token on."""

    def __init__(self, splits: Sequence[Split]) -> None:
        self.splits = splits
        self.counts = sum((Counter(split.meta.get("counts", {})) for split in splits), Counter())

    @property
    def targets(self) -> int:
        """Number of scored tokens, found without reading them."""
        return sum(int((split.lengths() - 1).clip(min=0).sum()) for split in self.splits)

    def __len__(self) -> int:
        return sum(map(len, self.splits))

    def __getitem__(self, index: Any) -> Any:
        for split in self.splits:
            if index < len(split):
                tokens = split.read(index)
                return Document(tokens, 1, len(tokens))
            index -= len(split)
        raise IndexError(index)
