"""Generation for a person: text as it is drawn, a bar for anything else, files, and the rate."""

import itertools
import os
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perceiver_ar.decoder import Decoder
from perceiver_ar.distributed import Ranks
from perceiver_ar.generation import stream
from perceiver_ar.report import progress_bar
from perceiver_ar.special import EOS, PAD
from perceiver_ar.tasks.base import Task
from perceiver_ar.windows import Tokens

LONGEST = 3600
"""Seconds that are drawn at once."""
MANY = 10_000
"""Samples that are drawn at once."""


def draw(
    model: Decoder,
    task: Task,
    prompt: Tokens,
    count: int | None,
    lasting: float | None,
    samples: int,
    out: Path | None,
    quiet: bool,
    ranks: Ranks,
    beat: Callable[[], None],
    overwrite: bool = False,
    name: str = "sample",
    **settings: Any,
) -> dict[str, Any]:
    """Draws so many samples at once, shows or writes them, and reports them with the rate.

    lasting: so many seconds of what sounds, instead of so many tokens; without either, what the task
    usually draws. name: what a new file is called, if what is drawn is no text and there is no out. Several
    ranks share the samples; the first shows and writes them. beat is called for every token.
    """
    _check(count, lasting, samples)
    lasting = task.lasting if count is None and lasting is None else lasting
    place = ranks.first(lambda: _place(task, out, name, samples, overwrite))
    lasts = None if lasting is None or task.seconds(prompt) is None else Lasting(task, lasting)
    usual = task.count(prompt) if lasting is None else task.count_for(lasting)
    count = most(model, prompt, usual) if count is None else count
    began = time.perf_counter()
    here, quiet = ranks.rows(samples), quiet or not ranks.leads
    drawing = map(_heard(beat), follow(model, task, prompt, count, here, **settings))
    if samples == 1 and place is None and not quiet:
        rows = [_typed(drawing, task, prompt)]
    else:
        rows = _counted(drawing, count, lasts, quiet)
    rows = [row for found in ranks.gather(rows) for row in found]
    seconds = time.perf_counter() - began
    texts = [_text(task, prompt, row) for row in rows]
    files: list[list[str]] = [[] for _ in rows]
    together = None
    if place is not None:
        files, together = ranks.first(lambda: _save(task, prompt, rows, place))
    if lasts is not None and ranks.leads:
        lasts.complain(rows)
    if not quiet:
        written = [*itertools.chain(*files), *([together] if together else [])]
        _tell(texts, written, seconds, sum(map(len, rows)))
    return {
        "prompt": prompt.tolist(),
        "samples": [
            {"tokens": row.tolist(), "text": text, "file": next(iter(places), None), "files": places}
            for row, text, places in zip(rows, texts, files, strict=True)
        ],
        "together": together,
        "tokens": sum(map(len, rows)),
        "seconds": seconds,
        "tokens_per_second": sum(map(len, rows)) / seconds,
    }


def _check(count: int | None, lasting: float | None, samples: int) -> None:
    """Refuses what could not be drawn, before anything is."""
    if not 1 <= samples <= MANY:
        raise ValueError(f"samples must be from 1 to {MANY:,}, but is {samples:,}.")
    if lasting is not None and count is not None:
        raise ValueError("give --tokens or --seconds, not both.")
    if lasting is not None and not 0 < lasting <= LONGEST:
        raise ValueError(f"--seconds must be above 0 and at most {LONGEST:,}, but is {lasting:g}.")


def _place(task: Task, out: Path | None, name: str, samples: int, overwrite: bool) -> Path | None:
    """The file to write to, if there is one; refuses one that could not be written, or is there already."""
    if out is None and task.speller() is not None:
        return None
    taken = out is not None and out.is_dir()
    out = _new_file(task, name, samples, overwrite) if out is None else out
    there = [] if taken else _there(task, out, samples)
    usable = out.parent.is_dir() and os.access(out.parent, os.W_OK)
    if taken or not usable or any(map(Path.is_dir, there)):
        raise ValueError(f"{out} cannot be written: give a file in a folder that exists.")
    task.check_file(out)
    if there and not overwrite:
        raise ValueError(f"{there[0]} exists already: add --overwrite, or choose another --out.")
    return out


def _new_file(task: Task, name: str, samples: int, overwrite: bool) -> Path:
    """A file of that name in the working folder, with a number if it is taken."""
    numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    files = (Path(f"{name.replace('.', '-')}{number}{task.suffix}") for number in numbers)
    return next(file for file in files if overwrite or not _there(task, file, samples))


def _there(task: Task, out: Path, samples: int) -> list[Path]:
    """Which of the files to be written are there already."""
    written = [place for path in _numbered(out, samples) for place in task.files_of(path)]
    together = [out] if task.files_of(out) == [out] else []
    return [path for path in (*together, *written) if os.path.lexists(path)]


def _numbered(out: Path, samples: int) -> list[Path]:
    """A file for each sample: out itself, or out-1, out-2 ..."""
    return [out] if samples == 1 else [out.with_stem(f"{out.stem}-{n}") for n in range(1, samples + 1)]


def most(model: Decoder, prompt: Tokens, count: int) -> int:
    """So many, or as many as the model can."""
    config = model.config
    return count if config.unbounded else max(1, min(count, config.context - len(prompt) + 1))


class Lasting:
    """Samples until each lasts so many seconds."""

    def __init__(self, task: Task, seconds: float) -> None:
        self.task, self.wanted, self.passed = task, seconds, np.zeros(1)

    def add(self, token: Tokens) -> float:
        """One more token of each sample; the seconds of the shortest."""
        self.passed = self.passed + self._of(token)
        return float(self.passed.min())

    def cut(self, row: Tokens) -> Tokens:
        """A sample without what came after its end."""
        enough = np.cumsum(self._of(row)) >= self.wanted
        return row[: int(enough.argmax()) + 1] if enough.any() else row

    def complain(self, rows: list[Tokens]) -> None:
        """Where some sample is shorter."""
        shortest = min(float(self._of(row).sum()) for row in rows)
        if shortest < self.wanted:
            print(
                f"Only {shortest:.1f} seconds were generated: the limit on tokens was reached.",
                file=sys.stderr,
            )

    def _of(self, tokens: Tokens) -> NDArray[np.float64]:
        found = self.task.seconds(tokens)
        assert found is not None
        return found


def _text(task: Task, prompt: Tokens, row: Tokens) -> str | None:
    """What follows the prompt, whose last character may go on in it."""
    spell = task.speller()
    if spell is None:
        return None
    for token in prompt.tolist():
        spell(token)
    return "".join(map(spell, row.tolist()))


def follow(
    model: Decoder, task: Task, prompt: Tokens, count: int, rows: slice, **settings: Any
) -> Iterator[Any]:
    """What `stream` gives for samples of a task, each after the same prompt; rows: which of all samples."""
    if rows.start == rows.stop:
        return iter(())
    positions = task.positions(np.arange(len(prompt) + count)[None])
    return stream(
        model,
        torch.from_numpy(prompt).long().expand(rows.stop - rows.start, -1),
        count,
        positions=None if positions is None else torch.from_numpy(positions),
        allowed=lambda t: task.allowed(len(prompt) + t, model.config.vocab_size),
        stop=EOS if task.ends else None,
        above=rows.start,
        **settings,
    )


def _heard(beat: Callable[[], None]) -> Callable[[Tensor], Tokens]:
    def heard(token: Tensor) -> Tokens:
        beat()
        return token.cpu().numpy()

    return heard


def _harmless(text: str) -> str:
    """For a terminal, without what would steer it."""
    if not sys.stdout.isatty():
        return text
    return "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def _typed(drawing: Iterator[Tokens], task: Task, prompt: Tokens) -> Tokens:
    """Prints the prompt, and each token of the only sample as it comes."""
    spell = task.speller()
    assert spell is not None
    print(_harmless("".join(map(spell, prompt.tolist()))), end="", flush=True)
    row = []
    for (token,) in drawing:
        print(_harmless(spell(int(token))), end="", flush=True)
        row.append(int(token))
    print()
    return np.array(row)


def _counted(drawing: Iterator[Tokens], count: int, lasts: Lasting | None, quiet: bool) -> list[Tokens]:
    """Moves a bar, and gives each sample up to its end."""
    steps = []
    with progress_bar(not quiet, "generating") as progress:
        for token in drawing:
            steps.append(token)
            if lasts is None:
                progress(len(steps), count)
                continue
            passed = min(lasts.wanted, lasts.add(token))
            progress(int(1000 * passed), int(1000 * lasts.wanted))
            if passed == lasts.wanted:
                break
    rows = [row[row != PAD] for row in np.stack(steps, axis=1)] if steps else []
    return rows if lasts is None else list(map(lasts.cut, rows))


def _save(task: Task, prompt: Tokens, rows: list[Tokens], out: Path) -> tuple[list[list[str]], str | None]:
    """Prompt and sample, one file each; then perhaps all in out."""
    samples = [np.concatenate((prompt, row)) for row in rows]
    files = [task.files_of(path) for path in _numbered(out, len(rows))]
    for sample, places in zip(samples, files, strict=True):
        for place in places:
            task.save(sample, place)
    together = len(rows) > 1 and task.save_all(samples, out)
    return [list(map(str, places)) for places in files], str(out) if together else None


def _tell(texts: list[str | None], files: list[str], seconds: float, tokens: int) -> None:
    """Where the samples are, or the samples themselves, unless they have been shown; then the rate."""
    for file in files:
        print(file)
    if not files and len(texts) > 1:
        for index, text in enumerate(texts, 1):
            print(f"[{index}] {_harmless(text or '')}")
    print(f"{tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.0f} per second", file=sys.stderr)
