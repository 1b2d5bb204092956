"""What visitors can ask of a model: drawing samples, comparing numbers of latents, showing its attention."""

import html as escaping
import re
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
import torch

from perceiver_ar.caching import grow, half
from perceiver_ar.decoder import Decoder
from perceiver_ar.drawing import follow
from perceiver_ar.evaluation import evaluate
from perceiver_ar.model import PerceiverAR
from perceiver_ar.playground import html
from perceiver_ar.playground.gaze import explained, gaze
from perceiver_ar.playground.pace import tokens_per_second
from perceiver_ar.playground.shown import Shown
from perceiver_ar.playground.views import Sample, View
from perceiver_ar.special import PAD
from perceiver_ar.tasks.base import Task
from perceiver_ar.tasks.copy import CopyTask
from perceiver_ar.tasks.image import ImageTask
from perceiver_ar.windows import Tokens

LONGEST = 16_384
"""Most tokens of a request, unless the task fixes their number."""
SHOWN_EVERY = 0.15
"""Seconds between updates of the page while a sample is drawn."""
NOT_YET: Any = gr.update(value=None, visible=False)
"""Hidden until the sample is complete."""

ONE_BY_ONE: dict[str, Any] = {
    "concurrency_limit": 1,
    "concurrency_id": "models",
    "show_progress": "minimal",
}
"""For everything that runs a model, whichever it is: visitors wait for each other."""


class Stopped(Exception):
    """The visitor asked to stop."""


@contextmanager
def told() -> Generator[None]:
    """Shows a visitor's mistake to that visitor only, with paths cut to file names, and does not log it."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, OSError) as error:
        words = re.sub(r"/(?:[^\s/:]+/)+([^\s/:]+)", r"\1", str(error))
        raise gr.Error(escaping.escape(words, quote=False), duration=None, print_exception=False) from None


@dataclass(frozen=True)
class Wish:
    """The settings of a request."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    count: int
    samples: int
    latents: int

    @classmethod
    def of(cls, temperature: Any, top_k: Any, top_p: Any, seed: Any, *whole: Any) -> "Wish":
        """From values of the page, where any number may be fractional or missing."""
        if any(value is None for value in (temperature, top_k, top_p, seed, *whole)):
            raise ValueError("a setting is empty: give a number for each.")
        return cls(float(temperature), int(top_k), float(top_p), int(seed), *map(int, whole))

    def settings(self) -> dict[str, Any]:
        """As arguments of `stream`."""
        return {
            "temperature": self.temperature,
            "top_k": self.top_k or None,
            "top_p": None if self.top_p >= 1 else self.top_p,
            "seed": self.seed,
            "latents": self.latents,
            "log_probs": True,
        }


@dataclass(frozen=True)
class Drawn:
    """What the page keeps of the last sample."""

    tokens: list[int]
    given: int
    """How many of them are the prompt."""
    latents: int


class Acts:
    """Requests to one run. Each has a ticket, by which it can be stopped, even before it begins."""

    def __init__(self, shown: Shown, view: View) -> None:
        self.shown, self.view = shown, view
        self.stopped: deque[str] = deque(maxlen=256)
        self.running: set[str] = set()

    def begin(self) -> str:
        return uuid.uuid4().hex

    def stop(self, ticket: str) -> None:
        """Stops a request, and returns once it has ended; if it has not begun, it never will."""
        if ticket:  # programs, and visitors who have drawn nothing yet, have none
            self.stopped.append(ticket)
            while ticket in self.running:
                time.sleep(0.05)

    @contextmanager
    def _at_work(self, ticket: str) -> Generator[Callable[[], bool]]:
        """Yields a function that tells whether the request was stopped."""
        self.running.add(ticket)
        try:
            with told():
                yield lambda: ticket in self.stopped
        finally:
            self.running.discard(ticket)

    def draw(self, ticket: str, numbers: tuple[Any, ...], given: tuple[Any, ...]) -> Iterator[Any]:
        """Yields canvas, status, attention, sound, files and the kept sample, repeatedly while it grows."""
        with self._at_work(ticket) as stopped:
            if stopped():
                return
            wish, began = Wish.of(*numbers), time.perf_counter()
            look, sample = _Seldom(lambda sample: self.look(_kept(sample, wish), 0)), None
            for sample in self.samples(wish, given, stopped):
                rate = self._rate(sample, time.perf_counter() - began, wish)
                yield self.view.show(sample), rate, look(sample), NOT_YET, NOT_YET, None
            assert sample is not None
            kept, rate = _kept(sample, wish), self._rate(sample, time.perf_counter() - began, wish)
            with tempfile.TemporaryDirectory() as folder:  # the page keeps copies
                files = [str(path) for path in self.view.write(sample, Path(folder))]
                sound = gr.update(value=files[0], visible=True) if self.view.sounds else NOT_YET
                done = gr.update(value=files, visible=True)
                yield self.view.show(sample), rate, self.look(kept, 0), sound, done, kept

    def samples(
        self, wish: Wish, given: tuple[Any, ...] | None, stopped: Callable[[], bool]
    ) -> Iterator[Sample]:
        """Yields the samples so far, a few times per second and at the end; given=None: the task's prompt."""
        if wish.count < 1 or not 1 <= wish.samples <= self.view.most_samples:
            raise ValueError(f"draw from 1 token on, and from 1 to {self.view.most_samples} samples.")
        model, task = self.shown.get()
        prompt = task.start(wish.seed) if given is None else self.view.prompt(task, wish.seed, *given)
        drawing = follow(
            model, task, prompt, _count(model, task, prompt, wish), slice(0, wish.samples), **wish.settings()
        )
        steps, chances, told_at = [], [], 0.0
        for tokens, scores in drawing:
            steps.append(tokens.cpu().numpy())
            chances.append(float(scores[0].exp()))
            if stopped():
                break
            if time.perf_counter() - told_at > SHOWN_EVERY:
                yield _so_far(task, prompt, steps, chances)
                told_at = time.perf_counter()
        yield _so_far(task, prompt, steps, chances)

    def look(self, drawn: Drawn | None, back: int) -> str:
        """Where the cross-attention looks from the token `back` before the last, over inputs held then."""
        with told():
            model, task = self.shown.get()
            if not isinstance(model, PerceiverAR):
                return ""
            if drawn is None:
                raise ValueError("there is nothing to look at yet: draw something.")
            stop = max(1, len(drawn.tokens) - int(back))
            inputs, latents = held(min(drawn.given, stop), stop, model.config.context, drawn.latents)
            places = task.positions(np.arange(stop - inputs, stop)[None])
            device = model.norm.weight.device
            weights = gaze(
                model,
                torch.tensor([drawn.tokens[stop - inputs : stop]], device=device),
                None if places is None else torch.from_numpy(places).to(device),
                latents - 1,
            )
            return explained(weights.float().cpu().numpy())

    def compare(self, ticket: str, chosen: Any, given: tuple[Any, ...]) -> Iterator[str]:
        """Yields a growing table by number of latents: tokens per second and, given a reference, nats."""

        def go_on(*_: int) -> None:
            if stopped():
                raise Stopped

        with self._at_work(ticket) as stopped:
            model, task = self.shown.get()
            assert isinstance(model, PerceiverAR)
            prompt, rows = self.view.prompt(task, 0, *given), []
            reference, total = self.shown.reference(prompt), _span(model, task)
            unit = self.view.unit
            try:
                for latents in latents_to_try(self.shown):
                    rate, nats = tokens_per_second(model, task, prompt, total, latents, go_on), "not known"
                    if reference is not None:
                        report = evaluate(
                            model, task, [reference], latents=latents, batch_size=1, progress=go_on
                        )
                        nats = f"{report['nats']:.4f}"
                    rows.append((f"{latents:,}", f"{rate:,.0f}", nats))
                    yield html.figures(("latents", f"{unit}/s", f"nats/{unit[:-1]}"), rows, f"{chosen:,}")
            except Stopped:
                return

    def _rate(self, sample: Sample, seconds: float, wish: Wish) -> str:
        count = sum(map(len, sample.rows))
        pace = f"{count:,} {self.view.unit} in {seconds:.1f} s, {count / seconds:,.0f} a second"
        return f"{pace}, with up to {wish.latents:,} latents." if self.shown.perceives else f"{pace}."


def latents_to_try(shown: Shown) -> list[int]:
    """16, 64, 256 ... below N, then N and up to 2 N."""
    usual = shown.experiment.model.latents
    fewer = [16 * 4**i for i in range(8) if 16 * 4**i < usual]
    return sorted({*fewer, usual, shown.most_latents})


def held(given: int, total: int, context: int, latents: int) -> tuple[int, int]:
    """Inputs and latents that the cache holds after `total` tokens, of which `given` were the prompt."""
    inputs = given if given <= context else context - latents // 2
    now = half(inputs, latents)
    for _ in range(total - given):
        inputs, now = grow(inputs, now, context, latents)
    return inputs, now


def _settled(task: Task) -> bool:
    """Whether all documents of the task have the same length."""
    return isinstance(task, CopyTask | ImageTask)


def _span(model: Decoder, task: Task) -> int:
    """Tokens that can be read: the whole context, unless documents are shorter."""
    start, context = task.start(0), model.config.context
    return min(context, len(start) + task.count(start)) if _settled(task) else context


def _count(model: Decoder, task: Task, prompt: Tokens, wish: Wish) -> int:
    """How many tokens to draw: as asked or, if fixed, as the task has; no more than the model can."""
    count = task.count(prompt) if _settled(task) else min(wish.count, LONGEST)
    return count if model.config.unbounded else max(1, min(count, model.config.context - len(prompt) + 1))


def _so_far(task: Task, prompt: Tokens, steps: list[Tokens], chances: list[float]) -> Sample:
    rows = [row[row != PAD] for row in np.stack(steps, axis=1)]
    return Sample(task, prompt, rows, chances[: len(rows[0])])


def _kept(sample: Sample, wish: Wish) -> Drawn:
    return Drawn(sample.whole().tolist(), len(sample.prompt), wish.latents)


class _Seldom:
    """Limits a slow action to about a tenth of the time; in between, returns its last result."""

    def __init__(self, act: Callable[[Sample], str]) -> None:
        self.act, self.due, self.last = act, 0.0, ""

    def __call__(self, sample: Sample) -> str:
        began = time.perf_counter()
        if began >= self.due:
            self.last = self.act(sample)
            self.due = time.perf_counter() + 10 * (time.perf_counter() - began)
        return self.last
