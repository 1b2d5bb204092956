"""Which part of a document a model sees. A document of T tokens has targets 1 ... T - 1."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Window:
    """Tokens of a document, of which the last ones are predicted."""

    tokens: Tokens
    offset: int
    """Place of the first token in the document."""
    scored: int
    """Number of tokens at the end that are scored."""
    apart: NDArray[np.int64] | None = None
    """Places of the inputs, if they are not consecutive."""

    @property
    def places(self) -> NDArray[np.int64]:
        """Places of the inputs, which are all tokens but the last."""
        return self.offset + np.arange(len(self.tokens) - 1) if self.apart is None else self.apart


class Examples(Protocol):
    """A source of training windows."""

    def windows(self, seed: int, step: int, size: int, latents: int) -> list[Window]:
        """The windows of one step, determined by the arguments and the state."""
        ...

    def learned(self, nats: float) -> str | None:
        """Called with the mean loss of every step; returns a message if the examples change because of it."""
        ...

    @property
    def state(self) -> dict[str, int]:
        """What a checkpoint must save."""
        ...

    def restore(self, state: dict[str, int]) -> None: ...


def generator(seed: int, step: int) -> np.random.Generator:
    """The random generator of one step, the same in a resumed run as in an uninterrupted one."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be from 0 to 2**63 - 1, but is {seed}.")
    return np.random.Generator(np.random.Philox(key=np.array([seed, step], np.uint64)))


def crop_weight(targets: Any, latents: int) -> Any:
    """Sampling weight of a document: its targets, but at least N, so that short ones are seen as often."""
    return np.where(np.asarray(targets) < 1, 0, np.maximum(targets, latents))


def crop_end(drawn: int, targets: int, latents: int) -> int:
    """The last target of a crop, for a number drawn uniformly below crop_weight.

    Crops that would overhang the document, by up to N / 2 targets at each end, are moved inside. So every
    crop has N targets if the document does; those near its ends are seen 0.5 to 1.5 times as often.
    """
    return min(max(drawn + 1 + latents // 2, latents), targets)
