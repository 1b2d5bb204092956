"""The copy task (section 5.1): random bytes, then the same bytes mirrored.

BOS, T/2 - 1 bytes, the same in reverse, EOS: T tokens. Only the second half is scored.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from perceiver_ar.config import AnyModelConfig
from perceiver_ar.special import BOS, EOS, FIRST
from perceiver_ar.tasks.base import Document, Task
from perceiver_ar.windows import Tokens, Window, crop_end, crop_weight, generator

VALIDATION_SEED = 2**31
"""Far from the seeds and steps of training, so that what is evaluated was not trained on."""


@dataclass(frozen=True)
class CopyTask(Task):
    """Random bytes, then the same bytes in reverse."""

    name: ClassVar[str] = "copy"
    accuracy: ClassVar[bool] = True
    synthetic: ClassVar[bool] = True
    reported_by: ClassVar[str] = "distance"

    length: int = 32
    """T: tokens per sequence, an even number."""
    centred: bool = False
    """Train by a curriculum: windows centred on the mirror, doubled whenever they are learned."""
    first_half: int = 8
    """Tokens on each side of the mirror in the first of these windows, or of spaced ones; short windows are
    more in number, for as many targets."""
    doubled_below: float = 0.1
    """Loss in nats below which the windows double: with a lower one, more is learned while they are cheap."""
    sequences: int = 12
    """Number of sequences in the validation split."""
    digits: int = 0
    """Write positions as this many digits, for axial positions, so that the digits of a copy mirror those of
    the original. 0: plain positions."""
    spaced: int = 0
    """Train on windows of up to this many places, near and far, and their copies, which show all digits
    however long the sequence is. 0: on all places."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 4 or self.length % 2:
            raise ValueError(f"a copy task's length must be an even number from 4, but is {self.length}.")
        if self.first_half < 1 or self.sequences < 1 or not 0 <= self.digits <= 24:
            raise ValueError(
                "first_half and sequences of a copy task must be at least 1, digits from 0 to 24."
            )
        if self.spaced and (self.centred or not self.digits or not 2 <= self.spaced < self.length // 2):
            raise ValueError(
                "spaced places need digits, no centred windows, and must be from 2 to "
                f"{self.length // 2 - 1}."
            )
        if self.spaced and self.base ** (self.digits - 1) >= self.length:
            raise ValueError(
                f"{self.digits} digits are more than {self.length} spaced places need: use fewer."
            )

    @functools.cached_property
    def base(self) -> int:
        """Base of the digits: the smallest that suffices; odd, so that the mirror is one of the places."""
        base = 1
        while base**self.digits < self.length:
            base += 2
        return base

    @property
    def shift(self) -> int:
        """The number that the digits of the first place write."""
        return (self.base**self.digits - self.length + 1) // 2

    @property
    def powers(self) -> NDArray[np.int64]:
        """What a one is worth in each digit."""
        return self.base ** np.arange(self.digits)

    def check(self, model: AnyModelConfig) -> None:
        if self.length > model.context:
            raise ValueError(
                f"a copy of {self.length} tokens is longer than the context of {model.context}: "
                "set --model.context."
            )
        if self.spaced > model.latents:
            raise ValueError(
                f"{self.spaced} spaced places need as many latents, but there are {model.latents}: "
                "set --model.latents or --task.spaced."
            )
        if self.digits and (len(model.axes) != self.digits or min(model.axes) < self.base):
            raise ValueError(
                f"{self.digits} digits of {self.length} places need --model.positions axial "
                f"--model.axes{f' {self.base}' * self.digits}."
            )
        if model.axes and not self.digits:
            raise ValueError("axial positions of a copy are its digits: set --task.digits.")

    def along(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """How far each target is from the token that it copies."""
        return 2 * places - self.length + 1

    def positions(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self.digits:
            return places[..., None]
        # What is copied to p + 1 has base - 1 less each digit of p.
        return (places[..., None] + self.shift) // self.powers % self.base

    def examples(self) -> "CopyExamples":
        return SpacedExamples(self) if self.spaced else CopyExamples(self)

    def documents(self, split: str) -> list[Document]:
        """The sequences that are evaluated; scored from the middle on."""
        if split != "validation":
            raise ValueError(f"the copy task has no split '{split}'; it has validation.")
        half = self.length // 2
        return [
            Document(mirrored(generator(VALIDATION_SEED, index), half), half, self.length)
            for index in range(self.sequences)
        ]

    def prompt(self, text: str) -> Tokens:
        """Hexadecimal bytes: the first half of a sequence."""
        try:
            typed = bytes.fromhex(text)
        except ValueError:
            raise ValueError(f"'{text}' is not a row of hexadecimal bytes such as 0a ff 31.") from None
        if len(typed) != self.length // 2 - 1:
            raise ValueError(
                f"the prompt has {len(typed)} bytes, but {self.length // 2 - 1} are to be copied."
            )
        return np.concatenate(([BOS], np.frombuffer(typed, np.uint8).astype(np.int64) + FIRST))

    def start(self, seed: int) -> Tokens:
        """The first half of a sequence that was not trained on."""
        half = self.length // 2
        return mirrored(generator(seed, VALIDATION_SEED), half)[:half]

    def count(self, prompt: Tokens) -> int:
        return self.length - len(prompt)

    def answer(self, prompt: Tokens) -> Tokens:
        """What is right after the first half of a sequence."""
        return np.append(prompt[:0:-1], EOS)

    def speller(self) -> Callable[[int], str]:
        return lambda token: _word(token) + " "

    def show(self, truth: Tokens, predicted: Tokens) -> str:
        """As hexadecimal bytes, with the wrong ones marked."""
        words = [_word(token) for token in truth]
        marks = ["  " if a == b else "^^" for a, b in zip(truth, predicted, strict=True)]
        lines = ["true      " + " ".join(words), "predicted " + " ".join(_word(token) for token in predicted)]
        return "\n".join([*lines, *(["          " + " ".join(marks)] if "^^" in marks else [])])


def _word(token: int) -> str:
    return "··" if token < FIRST else f"{token - FIRST:02x}"


def mirrored(random: np.random.Generator, half: int) -> Tokens:
    """A sequence of two halves: BOS and random bytes, then the mirror image of these and EOS."""
    first = random.integers(FIRST, FIRST + 256, size=half)
    tokens = np.concatenate((first, first[::-1]))
    tokens[0], tokens[-1] = BOS, EOS
    return tokens


class CopyExamples:
    """Windows on the mirror, of the whole sequence or growing with what was learned."""

    def __init__(self, task: CopyTask) -> None:
        self.task = task
        self.most = task.spaced or task.length // 2
        self.half = min(task.first_half, self.most) if task.centred or task.spaced else self.most

    def windows(self, seed: int, step: int, size: int, latents: int) -> list[Window]:
        """The windows of a step; all end at the same place, so that none needs padding.

        While they are shorter than the latents there are more of them, for as many targets.
        """
        random, middle = generator(seed, step), self.task.length // 2
        scored = min(latents, self.half)
        targets = crop_end(int(random.integers(crop_weight(self.half, scored))), self.half, scored)
        count = size * (latents // scored)
        rows = (mirrored(random, self.half) for _ in range(count))
        return [Window(row[: self.half + targets], middle - self.half, scored) for row in rows]

    def learned(self, nats: float) -> str | None:
        """Doubles the window once a step's loss is low enough."""
        if nats >= self.task.doubled_below or self.half == self.most:
            return None
        self.half = min(2 * self.half, self.most)
        return f"windows grow to {self.half:,} tokens on each side of the mirror"

    @property
    def state(self) -> dict[str, int]:
        return {"half": self.half}

    def restore(self, state: dict[str, int]) -> None:
        self.half = state["half"]


class SpacedExamples(CopyExamples):
    """Windows of some places of the first half, near and far, and of their copies.

    They are short however long the sequence is, but show all digits. Hardest to tell apart are keys that
    differ in one digit alone. In the whole sequence each has many such keys, and so it has in a window, where
    only a few digits vary. Places before the sequence serve too, so that the highest digit varies as freely.
    """

    def windows(self, seed: int, step: int, size: int, latents: int) -> list[Window]:
        random, count = generator(seed, step), min(self.half, latents)
        return [self._window(random, count) for _ in range(size * (latents // count))]

    def _window(self, random: np.random.Generator, count: int) -> Window:
        places = self._places(random, count)
        tokens = random.integers(FIRST, FIRST + 256, size=2 * count + 1)
        tokens[:count][places == 0] = BOS
        tokens[count + 1 :] = np.where(places == 0, EOS, tokens[:count])[::-1]
        copies = self.task.length - 2 - places[::-1]  # they follow these places
        return Window(tokens, 0, count, np.concatenate((places, copies)))

    def _places(self, random: np.random.Generator, count: int) -> NDArray[np.int64]:
        """The first place, all that differ from one of them in a few digits alone, and others."""
        base, powers, shift = self.task.base, self.task.powers, self.task.shift
        end = shift + self.task.length // 2 - 1  # the copy of the last place of a half is like any other
        anywhere = random.choice(end, size=count, replace=False)
        few = int((base * powers <= count).sum())
        varied = random.permutation(powers)[:few]
        kept = anywhere[0] - (anywhere[0] // varied % base) @ varied
        near = kept + (np.arange(base**few)[:, None] // powers[:few] % base) @ varied
        drawn = np.concatenate(([shift], near[near < end], anywhere))
        _, first = np.unique(drawn, return_index=True)
        return np.sort(drawn[np.sort(first)[:count]]) - shift
