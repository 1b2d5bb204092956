"""Generation for a person: text as it is drawn, a bar for anything else, files, and the rate."""

import sys
import time
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perceiver_ar.decoder import Decoder
from perceiver_ar.distributed import Ranks
from perceiver_ar.generation import stream
from perceiver_ar.report import progress_bar
from perceiver_ar.tasks.base import EOS, PAD, Task
from perceiver_ar.windows import Tokens


def draw(
    model: Decoder,
    task: Task,
    prompt: Tokens,
    count: int | None,
    samples: int,
    out: Path | None,
    quiet: bool,
    ranks: Ranks,
    beat: Callable[[], None],
    **settings: Any,
) -> dict[str, Any]:
    """Draws so many samples at once, shows or writes them, and reports them with the rate.

    Several ranks share the samples; the first shows and writes them. beat is called for every token.
    """
    if samples < 1:
        raise ValueError(f"samples must be at least 1, but is {samples}.")
    if out is not None:
        if not out.parent.is_dir() or out.is_dir():
            raise ValueError(f"{out} cannot be written: give a file in a folder that exists.")
        task.check_file(out)
    elif task.speller() is None:
        raise ValueError(f"what the task {task.name} draws is no text: give --out FILE.")
    count = usual_count(model, task, prompt) if count is None else count
    began = time.perf_counter()
    here, quiet = ranks.rows(samples), quiet or not ranks.leads
    drawing = map(_heard(beat), follow(model, task, prompt, count, here, **settings))
    if samples == 1 and out is None and not quiet:
        rows = [_typed(drawing, task, prompt)]
    else:
        rows = _counted(drawing, count, quiet)
    rows = [row for found in ranks.gather(rows) for row in found]
    seconds = time.perf_counter() - began
    texts = [_text(task, prompt, row) for row in rows]
    if out is None:
        files, together = [None] * samples, None
    else:
        files, together = ranks.first(lambda: _save(task, prompt, rows, out))
    if not quiet:
        _tell(texts, [*files, *([together] if together else [])], seconds, sum(map(len, rows)))
    return {
        "prompt": prompt.tolist(),
        "samples": [
            {"tokens": row.tolist(), "text": text, "file": file}
            for row, text, file in zip(rows, texts, files, strict=True)
        ],
        "together": together,
        "tokens": sum(map(len, rows)),
        "seconds": seconds,
        "tokens_per_second": sum(map(len, rows)) / seconds,
    }


def usual_count(model: Decoder, task: Task, prompt: Tokens) -> int:
    """As many as the task likes, and the model can."""
    count, config = task.count(prompt), model.config
    if config.has_no_end:
        return count
    return max(1, min(count, config.context - len(prompt) + 1))


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


def _typed(drawing: Iterator[Tokens], task: Task, prompt: Tokens) -> Tokens:
    """Prints the prompt, and each token of the only sample as it comes."""
    spell = task.speller()
    assert spell is not None
    print("".join(map(spell, prompt.tolist())), end="", flush=True)
    row = []
    for (token,) in drawing:
        print(spell(int(token)), end="", flush=True)
        row.append(int(token))
    print()
    return np.array(row)


def _counted(drawing: Iterator[Tokens], count: int, quiet: bool) -> list[Tokens]:
    """Moves a bar, and gives each sample up to its end."""
    steps = []
    with progress_bar(not quiet, "drawing") as progress:
        for token in drawing:
            steps.append(token)
            progress(len(steps), count)
    return [row[row != PAD] for row in np.stack(steps, axis=1)] if steps else []


def _save(task: Task, prompt: Tokens, rows: list[Tokens], out: Path) -> tuple[list[str], str | None]:
    """Prompt and sample, one file each: out itself, or out-1, out-2 ...; then perhaps all in out."""
    numbered = [out.with_stem(f"{out.stem}-{index + 1}") for index in range(len(rows))]
    paths = [out] if len(rows) == 1 else numbered
    samples = [np.concatenate((prompt, row)) for row in rows]
    for sample, path in zip(samples, paths, strict=True):
        task.save(sample, path)
    together = len(rows) > 1 and task.save_all(samples, out)
    return [str(path) for path in paths], str(out) if together else None


def _tell(texts: list[str | None], files: list[Any], seconds: float, tokens: int) -> None:
    """Where the samples are, or the samples themselves, unless they have been shown; then the rate."""
    for index, (text, file) in enumerate(zip_longest(texts, files), 1):
        if file is not None:
            print(file)
        elif len(texts) > 1:
            print(f"[{index}] {text}")
    print(f"{tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.0f} a second", file=sys.stderr)
