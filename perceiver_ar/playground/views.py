"""How prompts are entered and samples shown, by kind of task: as text, pictures or sound."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import gradio as gr
import numpy as np
from PIL import Image

from perceiver_ar import midi
from perceiver_ar.playground import html
from perceiver_ar.special import FIRST
from perceiver_ar.tasks.audio import AudioTask
from perceiver_ar.tasks.base import Task
from perceiver_ar.tasks.copy import CopyTask
from perceiver_ar.tasks.image import PICTURES, ImageTask
from perceiver_ar.tasks.tokens import TokensTask
from perceiver_ar.windows import Tokens

LONGEST_TEXT = 200_000
"""Most characters of a prompt."""
SHOWN = 2000
"""Tokens of a prompt that are shown, from its end."""
MOST_PIXELS = 16_000_000
"""Most pixels of an uploaded picture."""


@dataclass(frozen=True)
class Sample:
    """A prompt, and what has been drawn after it so far."""

    task: Task
    prompt: Tokens
    rows: list[Tokens]
    """The drawn tokens of each sample, (T,)."""
    probabilities: list[float]
    """Of the first row's tokens."""

    def whole(self, row: int = 0) -> Tokens:
        return np.concatenate((self.prompt, self.rows[row]))


class View:
    """Prompts and samples of one kind of task."""

    unit: ClassVar[str] = "tokens"
    most_samples: ClassVar[int] = 1
    files: ClassVar[tuple[str, ...]] = ()
    """The files that the first sample is written to at the end; sound comes first."""

    def inputs(self, task: Task) -> list[Any]:
        """Components of the page that ask for a prompt."""
        raise NotImplementedError

    def prompt(self, task: Task, seed: int, *given: Any) -> Tokens:
        """The prompt from their values: a file, if there is one, and how much of it to keep."""
        path, keep = given
        return task.start(seed) if path is None else task.prompt_file(Path(path), int(keep))

    def show(self, sample: Sample) -> str:
        raise NotImplementedError

    def write(self, sample: Sample, folder: Path) -> list[Path]:
        paths = [folder / name for name in self.files]
        for path in paths:
            sample.task.save(sample.whole(), path)
        return paths

    @property
    def sounds(self) -> bool:
        return self.files[0].endswith(".wav")


class Words(View):
    """Text, or anything else that can be spelled token by token."""

    files = ("sample.txt", "sample.jsonl")

    def inputs(self, task: Task) -> list[Any]:
        hint = "Go on from ..."
        if isinstance(task, CopyTask):
            hint = f"{task.length // 2 - 1} hexadecimal bytes, such as 0a ff 31; empty: random ones"
        return [
            gr.Textbox(
                label="Prompt",
                placeholder=hint,
                lines=4,
                max_lines=12,
                max_length=LONGEST_TEXT,
                elem_classes="prompt",
            )
        ]

    def prompt(self, task: Task, seed: int, *given: Any) -> Tokens:
        (text,) = given
        if len(text) > LONGEST_TEXT:
            raise ValueError(f"a prompt may have {LONGEST_TEXT:,} characters here.")
        return task.prompt(text) if text.strip() else task.start(seed)

    def show(self, sample: Sample) -> str:
        spell = sample.task.speller()
        assert spell is not None
        given = "".join(map(spell, sample.prompt[-SHOWN:].tolist()))
        words = [spell(token) for token in sample.rows[0].tolist()]
        if isinstance(sample.task, CopyTask):
            right = sample.rows[0] == sample.task.answer(sample.prompt)[: len(words)]
            parts = [
                html.span(word, "right" if ok else "wrong") for word, ok in zip(words, right, strict=True)
            ]
        else:
            parts = [html.shade(word, chance) for word, chance in _spelled(words, sample.probabilities)]
        return html.drawn([html.span(given, "given"), *parts])

    def write(self, sample: Sample, folder: Path) -> list[Path]:
        path = folder / self.files[isinstance(sample.task, TokensTask)]
        sample.task.save(sample.whole(), path)
        return [path]


def _spelled(words: list[str], chances: list[float]) -> Iterator[tuple[str, float]]:
    """Words with probabilities; a character of several tokens has the product of theirs."""
    whole = 1.0
    for word, chance in zip(words, chances, strict=True):
        whole *= chance
        if word:
            yield word, whole
            whole = 1.0


class Pictures(View):
    """Images, drawn row by row."""

    unit = "bytes"
    most_samples = 9
    files = ("image.png",)

    def inputs(self, task: Task) -> list[Any]:
        assert isinstance(task, ImageTask)
        return [
            gr.File(label="Complete this picture", file_types=list(PICTURES), elem_classes="upload"),
            gr.Slider(0, task.size - 1, task.size // 2, step=1, label="Rows of it to keep"),
        ]

    def prompt(self, task: Task, seed: int, *given: Any) -> Tokens:
        path, _ = given
        if path is not None:
            _check_picture(Path(path))
        return super().prompt(task, seed, *given)

    def show(self, sample: Sample) -> str:
        assert isinstance(sample.task, ImageTask)
        images = [sample.whole(row) for row in range(len(sample.rows))]
        return html.picture(sample.task.sheet(images, border=0), "images drawn so far")

    def write(self, sample: Sample, folder: Path) -> list[Path]:
        paths = [folder / f"image-{row + 1}.png" for row in range(len(sample.rows))]
        for row, path in enumerate(paths):
            sample.task.save(sample.whole(row), path)
        return paths


def _check_picture(path: Path) -> None:
    """Refuses a picture that would take much memory, before decoding it."""
    try:
        with Image.open(path, formats=("png", "jpeg", "webp", "bmp", "gif")) as picture:
            pixels = picture.width * picture.height
    except Exception as error:  # of any kind, on damaged files
        raise ValueError(f"{path.name} is not a picture that can be read: {error}") from None
    if pixels > MOST_PIXELS:
        raise ValueError(f"{path.name} has {pixels:,} pixels: take one of at most {MOST_PIXELS:,}.")


class Music(View):
    """Piano rolls that grow, and can then be played."""

    unit = "events"
    files = ("piece.wav", "piece.mid", "piece.png")

    def inputs(self, task: Task) -> list[Any]:
        return [
            gr.File(label="Go on from this MIDI file", file_types=[".mid", ".midi"], elem_classes="upload"),
            gr.Slider(1, 120, 10, step=1, label="Seconds of it to keep"),
        ]

    def show(self, sample: Sample) -> str:
        tokens = sample.whole()
        notes = midi.decode(tokens[tokens >= FIRST] - FIRST)
        return html.picture(midi.roll(notes), "piano roll of what is drawn so far", "roll")


class Sound(View):
    """Codes, which become sound once they are complete."""

    unit = "codes"
    files = ("sound.wav", "sound.png")

    def inputs(self, task: Task) -> list[Any]:
        return [
            gr.Audio(label="Go on from this recording", type="filepath", elem_classes="upload"),
            gr.Slider(1, 60, 5, step=1, label="Seconds of it to keep"),
        ]

    def prompt(self, task: Task, seed: int, *given: Any) -> Tokens:
        task.check_file(Path(self.files[0]))  # its codec may be missing: better to fail now than at the end
        return super().prompt(task, seed, *given)

    def show(self, sample: Sample) -> str:
        assert isinstance(sample.task, AudioTask)
        codes = sample.task.decode(sample.whole())
        if not len(codes):
            return ""
        pixels = (255 * (1 - codes.T / max(1, sample.task.codes - 1))).astype(np.uint8)
        return html.picture(pixels, "codes drawn so far, a column a frame", "roll")


VIEWS: dict[str, type[View]] = {"image": Pictures, "music": Music, "audio": Sound}


def view_of(task: Task) -> View:
    return VIEWS.get(task.name, Words)()
