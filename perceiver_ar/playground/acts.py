"""What visitors can ask of a model: to draw, to compare numbers of latents, to show where it looks."""

import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
import torch

from perceiver_ar.decoder import Decoder
from perceiver_ar.drawing import follow, usual_count
from perceiver_ar.evaluation import evaluate
from perceiver_ar.model import PerceiverAR
from perceiver_ar.playground import html
from perceiver_ar.playground.gaze import explained, gaze
from perceiver_ar.playground.shown import Shown
from perceiver_ar.playground.views import Sample, View
from perceiver_ar.tasks.base import PAD, Task
from perceiver_ar.windows import Tokens

LONGEST = 16_384
"""Tokens that one visitor may ask for."""
TIMED = 48
"""Tokens that are drawn to see how fast that is."""
SHOWN_EVERY = 0.15
"""Seconds, while something is drawn."""
NOT_YET: Any = gr.update(value=None, visible=False)
"""What is there once all is drawn."""


@contextmanager
def told() -> Generator[None]:
    """A visitor's mistake is told to that visitor, with no name of a folder; nobody else is troubled."""
    try:
        yield
    except (ValueError, OSError) as error:
        words = str(error)
        for part in words.split():
            if part.startswith(tempfile.gettempdir()):
                words = words.replace(part, Path(part).name)
        raise gr.Error(words, duration=None, print_exception=False) from None


@dataclass(frozen=True)
class Wish:
    """How to draw."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    count: int
    samples: int
    latents: int

    def settings(self) -> dict[str, Any]:
        """Of `stream`."""
        return {
            "temperature": self.temperature,
            "top_k": self.top_k or None,
            "top_p": None if self.top_p >= 1 else self.top_p,
            "seed": self.seed,
            "latents": self.latents,
            "log_probs": True,
        }


class Acts:
    """Of one run; those who ask to stop are noted by their session."""

    def __init__(self, shown: Shown, view: View) -> None:
        self.shown, self.view = shown, view
        self.stopped: set[str] = set()

    def begin(self, request: gr.Request) -> None:
        self.stopped.discard(str(request.session_hash))

    def stop(self, request: gr.Request) -> None:
        self.stopped.add(str(request.session_hash))

    def draw(self, wish: Wish, given: tuple[Any, ...], session: str) -> Iterator[tuple[Any, ...]]:
        """Canvas, status, attention, sound, files and tokens, again and again while they grow."""
        with told():
            began = time.perf_counter()
            look = _Seldom(lambda sample: self.look(sample.whole().tolist(), 0))
            sample = None
            for sample in self.samples(wish, given, session):
                rate = _rate(sample, time.perf_counter() - began, wish)
                yield self.view.show(sample), rate, look(sample), NOT_YET, NOT_YET, None
            assert sample is not None
            tokens, rate = sample.whole().tolist(), _rate(sample, time.perf_counter() - began, wish)
            with tempfile.TemporaryDirectory() as folder:  # the page keeps copies
                files = [str(path) for path in self.view.write(sample, Path(folder))]
                sound = gr.update(value=files[0], visible=True) if self.view.sounds else NOT_YET
                done = gr.update(value=files, visible=True)
                yield self.view.show(sample), rate, self.look(tokens, 0), sound, done, tokens

    def samples(self, wish: Wish, given: tuple[Any, ...] | None, session: str) -> Iterator[Sample]:
        """What is drawn, a few times a second and at the end; given nothing, from the task's beginning."""
        if not 1 <= wish.count <= LONGEST or not 1 <= wish.samples <= self.view.most_samples:
            raise ValueError(f"at most {LONGEST:,} tokens and {self.view.most_samples} samples are drawn.")
        model, task = self.shown.get()
        prompt = task.start(wish.seed) if given is None else self.view.prompt(task, wish.seed, *given)
        count = min(wish.count, _room(model, task, prompt))
        drawing = follow(model, task, prompt, count, slice(0, wish.samples), **wish.settings())
        steps, chances, told_at = [], [], 0.0
        for tokens, scores in drawing:
            steps.append(tokens.cpu().numpy())
            chances.append(float(scores[0].exp()))
            if session in self.stopped:
                break
            if time.perf_counter() - told_at > SHOWN_EVERY:
                yield _so_far(task, prompt, steps, chances)
                told_at = time.perf_counter()
        yield _so_far(task, prompt, steps, chances)

    def look(self, tokens: list[int] | None, back: int) -> str:
        """Where the cross-attend looks from the token that stands so far back."""
        with told():
            model, task = self.shown.get()
            if not isinstance(model, PerceiverAR):
                return "Only Perceiver AR has a cross-attend."
            if not tokens:
                raise ValueError("there is nothing to look at yet: draw something.")
            stop = max(1, len(tokens) - int(back))
            start = max(0, stop - model.config.context)
            places = task.positions(np.arange(start, stop)[None])
            device = model.norm.weight.device
            weights = gaze(
                model,
                torch.tensor([tokens[start:stop]], device=device),
                None if places is None else torch.from_numpy(places).to(device),
            )
            return explained(weights.float().cpu().numpy())

    def compare(self, chosen: int, given: tuple[Any, ...], session: str) -> Iterator[str]:
        """A table that grows: tokens a second and, where there is a reference, nats, by latents."""
        with told():
            model, task = self.shown.get()
            prompt, rows = self.view.prompt(task, 0, *given), []
            reference = self.shown.reference(prompt)
            for latents in latents_to_try(self.shown):
                if session in self.stopped:
                    return
                rate, nats = _timed(model, task, prompt, latents), "not known"
                if reference is not None:
                    nats = f"{evaluate(model, task, [reference], latents=latents, batch_size=4)['nats']:.4f}"
                rows.append((f"{latents:,}", f"{rate:,.0f}", nats))
                heads = "latents", f"{self.view.unit}/s", f"nats/{self.view.unit[:-1]}"
                yield html.figures(heads, rows, f"{chosen:,}")


def latents_to_try(shown: Shown) -> list[int]:
    """16, 64, 256 ... below N, then N and 2 N."""
    usual = shown.experiment.model.latents
    fewer = [16 * 4**i for i in range(8) if 16 * 4**i < usual]
    return sorted({*fewer, usual, shown.most_latents})


def _room(model: Decoder, task: Task, prompt: Tokens) -> int:
    """How many tokens may follow: as many as the task has, where it ends, and as the model can."""
    bounded = task.name in ("image", "copy")
    return usual_count(model, task, prompt) if bounded or not model.config.has_no_end else LONGEST


def _so_far(task: Task, prompt: Tokens, steps: list[Tokens], chances: list[float]) -> Sample:
    rows = [row[row != PAD] for row in np.stack(steps, axis=1)]
    return Sample(task, prompt, rows, chances[: len(rows[0])])


class _Seldom:
    """Does something that takes time, but for a tenth of the time at most; otherwise it stays as it was."""

    def __init__(self, act: Callable[[Sample], str]) -> None:
        self.act, self.due, self.last = act, 0.0, ""

    def __call__(self, sample: Sample) -> str:
        began = time.perf_counter()
        if began >= self.due:
            self.last = self.act(sample)
            self.due = time.perf_counter() + 10 * (time.perf_counter() - began)
        return self.last


def _rate(sample: Sample, seconds: float, wish: Wish) -> str:
    count = sum(map(len, sample.rows))
    pace = f"{count:,} tokens in {seconds:.1f} s, {count / seconds:,.0f} a second"
    return f"{pace}, with up to {wish.latents:,} latents."


def _timed(model: Decoder, task: Task, prompt: Tokens, latents: int) -> float:
    """Tokens a second, after the first, which reads the prompt."""
    count = min(TIMED, max(2, _room(model, task, prompt)))
    drawing = follow(model, task, prompt, count, slice(0, 1), latents=latents)
    next(drawing)
    began, drawn = time.perf_counter(), sum(1 for _ in drawing)
    return drawn / max(time.perf_counter() - began, 1e-9)
