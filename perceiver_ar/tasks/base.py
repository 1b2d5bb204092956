"""What a task is: what its tokens mean, and nothing else. Training and evaluation know no task."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from perceiver_ar.config import AnyModelConfig
from perceiver_ar.special import BOS, EOS, PAD
from perceiver_ar.strict import Config
from perceiver_ar.windows import Examples, Tokens


@dataclass(frozen=True)
class Document:
    """Tokens of which those from `first` to before `stop` are predicted and scored."""

    tokens: Tokens
    first: int
    stop: int


@dataclass(frozen=True)
class Task(Config):
    """Settings of a task, and what its tokens mean."""

    name: ClassVar[str]
    accuracy: ClassVar[bool] = False
    """Whether the share of tokens that are predicted right is worth reporting."""
    synthetic: ClassVar[bool] = False
    """Whether it makes its own tokens; others read them from a store."""
    lasting: ClassVar[float | None] = None
    """Seconds to generate where neither tokens nor seconds are asked for; None: tokens, see `count`."""
    suffix: ClassVar[str] = ""
    """Suffix of the file that is written where none is named, by tasks whose tokens are no text."""
    reported_by: ClassVar[str] = "position"
    """What its losses are reported by; see `along`."""

    @property
    def ends(self) -> bool:
        """Whether its documents end with EOS, which then ends what is generated too."""
        return True

    def at(self, folder: Path) -> Self:
        """The task with the files that lie in a folder, if it needs any."""
        return self

    def files(self) -> dict[str, bytes]:
        """The files that the task needs, which go wherever a model of it goes."""
        return {}

    def report(self, nats: float, tokens: int, counts: Mapping[str, int]) -> dict[str, float]:
        """What else is told of so many nats, given what a store counted besides its tokens."""
        return {}

    def along(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where targets lie along what losses are reported by: their places in the document, or else."""
        return places

    def reach(self, context: int) -> dict[str, float]:
        """What so many inputs are in the task's own measure, if it has one."""
        return {}

    def check(self, model: AnyModelConfig) -> None:
        """Refuses a model that cannot learn the task."""

    def examples(self) -> Examples:
        """The examples of training, where the task is synthetic."""
        raise NotImplementedError

    def documents(self, split: str) -> Sequence[Document]:
        """The documents to evaluate, where the task is synthetic."""
        raise NotImplementedError

    def read(self, path: Path) -> Document:
        """A file as one document, to be scored."""
        raise ValueError(f"the task {self.name} has no files that could be scored.")

    def augment(self, tokens: Tokens, random: np.random.Generator) -> Tokens:
        """A variation of a document's stretch, for training."""
        return tokens

    def positions(self, places: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Positions (..., A) of places in a document; None where each window counts from 0."""
        return None

    def prompt(self, text: str) -> Tokens:
        """What was typed as a prompt."""
        raise ValueError(f"the task {self.name} takes no prompt.")

    def prompt_file(self, path: Path, keep: int | None = None) -> Tokens:
        """A file as a prompt, or its beginning: so many tokens, or what else the task counts in."""
        return beginning(self.prompt(path.read_text()), keep)

    def start(self, seed: int) -> Tokens:
        """The prompt where none is given."""
        return np.array([BOS])

    def count(self, prompt: Tokens) -> int:
        """How many tokens to draw after a prompt where that is not said."""
        return 500

    def count_for(self, seconds: float) -> int:
        """How many tokens last so long, at most."""
        raise ValueError(f"what the task {self.name} draws does not sound: give --tokens, not --seconds.")

    def seconds(self, tokens: Tokens) -> NDArray[np.float64] | None:
        """How long each token lasts; None where all last as long, so that counting them is enough."""
        return None

    def allowed(self, place: int, vocab_size: int) -> NDArray[np.bool_]:
        """Which tokens may be drawn for a place in a document."""
        allowed = np.ones(vocab_size, dtype=bool)
        allowed[[PAD, BOS] if self.ends else [PAD, BOS, EOS]] = False
        return allowed

    def speller(self) -> Callable[[int], str] | None:
        """Turns one token after another into text; None where they are no text."""
        return None

    def suited(self, model: AnyModelConfig) -> AnyModelConfig:
        """The model, or one with the positions that this task needs, where a preset is for something else."""
        return model

    def check_file(self, path: Path) -> None:
        """Refuses a file that what is drawn could not be written to."""
        if path.suffix in (".png", ".mid", ".wav"):
            raise ValueError(f"what the task {self.name} draws is text, which is not written to {path}.")

    def files_of(self, path: Path) -> list[Path]:
        """What is written where that is asked for: several files, where it has no suffix to say which."""
        return [path]

    def save(self, tokens: Tokens, path: Path) -> None:
        """Writes what was drawn to a file: as text, if it is."""
        spell = self.speller()
        assert spell is not None
        path.write_text("".join(map(spell, tokens.tolist())).strip() + "\n")

    def save_all(self, samples: list[Tokens], path: Path) -> bool:
        """Writes several samples to one file, beside a file for each, if the task has such a thing."""
        return False

    def show(self, truth: Tokens, predicted: Tokens) -> str | None:
        """A few predicted tokens beside the true ones, for a person to see; None if that says nothing."""
        return None


def beginning(tokens: Tokens, keep: int | None) -> Tokens:
    """The BOS of a prompt and so many tokens; all of it where that is not said."""
    if keep is None:
        return tokens
    if keep < 1:
        raise ValueError(f"--keep must be at least 1, but is {keep}.")
    return tokens[: keep + 1]
