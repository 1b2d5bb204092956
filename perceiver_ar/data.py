"""Batches made from windows, and windows drawn from token stores.

Letters: B batch, M inputs (context), N latents, A position axes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perceiver_ar.store import Split
from perceiver_ar.tasks.base import Task
from perceiver_ar.windows import Window, crop_end, crop_weight, generator

UNSCORED = -1
"""The value of targets that are not scored."""


@dataclass(frozen=True)
class Batch:
    """Inputs, padded on the left, and the tokens that follow the last N of them."""

    inputs: Tensor  # (B, M)
    targets: Tensor  # (B, N), UNSCORED where not scored
    positions: Tensor | None  # (B or 1, M, A); None: from 0 at the first real input
    lengths: Tensor | None  # (B,); None: nothing is padded
    seeds: Tensor | None = None  # (B,), for dropout

    def each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """Applies a function to every tensor."""
        parts: list[Any] = [self.inputs, self.targets, self.positions, self.lengths, self.seeds]
        return Batch(*(x if x is None else change(x) for x in parts))

    def to(self, device: torch.device) -> "Batch":
        """Moves all but the lengths, which the model reads on the CPU."""
        ahead = device.type == "cuda"  # elsewhere, the source may be freed before the copy is done
        moved = replace(self, lengths=None).each(lambda x: x.to(device, non_blocking=ahead))
        return replace(moved, lengths=self.lengths)

    def rows(self, start: int, stop: int) -> "Batch":
        """A slice of the examples; positions that all of them share stay as they are."""
        shared = len(self) > 1
        return self.each(lambda x: x if shared and len(x) == 1 else x[start:stop])

    def __len__(self) -> int:
        return len(self.inputs)


def collate(windows: Sequence[Window], latents: int, task: Task) -> Batch:
    """Stacks windows into a batch, padding the shorter ones on the left."""
    lengths = np.array([len(w.tokens) - 1 for w in windows])
    longest = int(lengths.max())
    count = min(latents, longest)
    inputs = np.zeros((len(windows), longest), dtype=np.int64)
    places = np.zeros((len(windows), longest), dtype=np.int64)
    targets = np.full((len(windows), count), UNSCORED, dtype=np.int64)
    for row, w in enumerate(windows):
        first = longest - lengths[row]
        inputs[row, first:] = w.tokens[:-1]
        places[row, first:] = w.places
        assert 1 <= w.scored <= min(count, lengths[row])
        targets[row, count - w.scored :] = w.tokens[-w.scored :]
    # If all rows cover the same places, positions are computed once for all.
    positions = task.positions(places[:1] if (places == places[0]).all() else places)
    return Batch(
        torch.from_numpy(inputs),
        torch.from_numpy(targets),
        None if positions is None else torch.from_numpy(positions),
        torch.from_numpy(lengths) if (lengths < longest).any() else None,
    )


class Crops:
    """Random windows of the documents of a split, with every target about equally likely."""

    def __init__(self, split: Split, context: int, task: Task) -> None:
        self.split, self.context, self.task = split, context, task
        self.weights: dict[int, NDArray[np.int64]] = {}
        """Cumulative sampling weights of the documents, by number of latents."""
        if not (split.lengths() > 1).any():
            raise ValueError(f"{split.folder} holds no document of two tokens or more: nothing to train on.")

    def windows(self, seed: int, step: int, size: int, latents: int) -> list[Window]:
        if latents not in self.weights:
            self.weights[latents] = np.cumsum(crop_weight(self.split.lengths() - 1, latents))
        cumulative, random = self.weights[latents], generator(seed, step)
        drawn = random.integers(cumulative[-1], size=size)
        indices = np.searchsorted(cumulative, drawn, side="right")
        return [
            self._window(index, value - (cumulative[index - 1] if index else 0), latents, random)
            for index, value in zip(indices.tolist(), drawn.tolist(), strict=True)
        ]

    def _window(self, index: int, drawn: int, latents: int, random: np.random.Generator) -> Window:
        end = 1 + crop_end(int(drawn), self.split.length(index) - 1, latents)
        start = max(0, end - 1 - self.context)
        read = self.split.read(index, start, end)
        tokens = self.task.augment(read, random)[-(self.context + 1) :]
        if len(tokens) < 2:  # augmentation left nothing to predict
            tokens = read
        return Window(tokens, start, min(latents, len(tokens) - 1))


class Mixture:
    """Examples from one or several stores, drawn in proportion to their weights."""

    def __init__(self, parts: Sequence[Crops], weights: Sequence[float]) -> None:
        self.parts, self.shares = parts, np.array(weights) / sum(weights)

    def windows(self, seed: int, step: int, size: int, latents: int) -> list[Window]:
        if len(self.parts) == 1:
            return self.parts[0].windows(seed, step, size, latents)
        chosen = generator(seed, step).choice(len(self.parts), size, p=self.shares)
        # Each store draws with a seed of its own.
        drawn = [
            iter(part.windows(seed ^ (index + 1) << 40, step, int((chosen == index).sum()), latents))
            for index, part in enumerate(self.parts)
        ]
        return [next(drawn[index]) for index in chosen]

    def learned(self, nats: float) -> str | None:
        return None

    @property
    def state(self) -> dict[str, int]:
        return {}

    def restore(self, state: dict[str, int]) -> None:
        pass
