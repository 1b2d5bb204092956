"""Which stretch of a document a model sees. A document of T tokens has targets 1 ... T - 1."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Window:
    """A stretch of a document, ending with the last token that is predicted from it."""

    tokens: Tokens
    offset: int
    """Place of its first token in the document."""
    scored: int
    """How many of its last tokens are scored."""


class Examples(Protocol):
    """Where the windows of training come from."""

    def windows(self, seed: int, step: int, size: int, latents: int) -> list[Window]:
        """The windows of one step, the same whenever they are asked for."""
        ...

    def learned(self, nats: float) -> str | None:
        """Called with the mean loss of every step; says so when the examples change because of it."""
        ...

    @property
    def state(self) -> dict[str, int]:
        """What a checkpoint has to keep."""
        ...

    def restore(self, state: dict[str, int]) -> None: ...


def generator(seed: int, step: int) -> np.random.Generator:
    """The random numbers of one step: the same in a resumed run as in an uninterrupted one."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be from 0 to 2**63 - 1, but is {seed}.")
    return np.random.Generator(np.random.Philox(key=np.array([seed, step], np.uint64)))


def crop_weight(targets: Any, latents: int) -> Any:
    """How often a document is drawn: by its targets; a short one as often as shows each alike."""
    return np.where(np.asarray(targets) < 1, 0, np.maximum(targets, latents))


def crop_end(drawn: int, targets: int, latents: int) -> int:
    """How many of a document's targets come up to the end of a crop, for a number below crop_weight.

    A crop holds at least the first N targets, so that these are not seen more often than others.
    Half of its overhang at each end is cut off, so that they are not seen much less often either.
    """
    return min(max(drawn + 1 + latents // 2, latents), targets)
