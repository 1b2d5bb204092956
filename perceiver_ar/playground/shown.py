"""A run in the playground: its model, reloaded whenever training has written it."""

from pathlib import Path

import numpy as np

from perceiver_ar import tasks
from perceiver_ar.config import Experiment, ModelConfig
from perceiver_ar.decoder import Decoder
from perceiver_ar.device import best_dtype, pick_device
from perceiver_ar.run import load, model_folder, named
from perceiver_ar.sealed import read_sealed
from perceiver_ar.source import open_source
from perceiver_ar.tasks.base import Document, Task
from perceiver_ar.windows import Tokens

SCORED = 256
"""Scored tokens of a reference."""


class Shown:
    """A run, finished or not."""

    def __init__(self, run: Path, device: str) -> None:
        self.run, self.device = named(run), pick_device(device)
        self.name = self.run.absolute().name
        begun = self.run / "config.json"
        about = begun if (self.run / "metrics.jsonl").exists() else model_folder(run) / "experiment.json"
        self.experiment = Experiment.from_dict(read_sealed(about)["experiment"])
        self._held: tuple[int, Decoder, Task, Document | None] | None = None

    @property
    def written(self) -> int | None:
        """When its model was last written; None if there is none yet."""
        try:
            return (model_folder(self.run) / "experiment.json").stat().st_mtime_ns
        except (ValueError, FileNotFoundError):
            return None

    @property
    def task(self) -> Task:
        """The task of the run; with its files, such as a vocabulary, once a model is loaded."""
        return self._held[2] if self._held else tasks.get(self.experiment.task, self.experiment.options)

    @property
    def perceives(self) -> bool:
        """Whether it is a Perceiver AR, whose number of latents can be chosen."""
        return isinstance(self.experiment.model, ModelConfig)

    @property
    def most_latents(self) -> int:
        """Twice as many as in training, as far as the model can."""
        config = self.experiment.model
        return min(2 * config.latents, config.most_latents, config.context)

    def get(self) -> tuple[Decoder, Task]:
        """The newest model and its task."""
        written = self.written
        if written is None:
            raise ValueError(f"{self.name} has no model yet: it is written with the first checkpoint.")
        if self._held is None or self._held[0] != written:
            model, task, data = load(self.run, str(self.device))
            self._held = written, model.to(best_dtype(self.device)).eval(), task, _reference(task, data)
        return self._held[1], self._held[2]

    def reference(self, prompt: Tokens) -> Document | None:
        """The first validation document, or else the prompt if it is long enough; only its end is scored."""
        self.get()
        assert self._held is not None
        document, context = self._held[3], self.experiment.model.context
        if document is None and len(prompt) > 2 * SCORED:
            document = Document(prompt, 1, len(prompt))
        if document is None:
            return None
        stop = min(document.stop, document.first + context)
        return Document(np.asarray(document.tokens[:stop]), max(document.first, stop - SCORED), stop)


def _reference(task: Task, data: object) -> Document | None:
    """The first validation document, if the data is available."""
    try:
        return open_source(task.name, task.to_dict(), data).documents("validation")[0]  # ty: ignore
    except (ValueError, OSError, IndexError):  # the data is elsewhere
        return None
