"""A run folder: config.json, metrics.jsonl, checkpoints/, and model/, which alone is enough to use.

Where tokens come from is settled here too: a store says what its tokens mean, and without a store
the task makes them itself.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perceiver_ar import tasks
from perceiver_ar.checkpoint import checkpoints, write_folder
from perceiver_ar.config import Experiment
from perceiver_ar.data import Crops
from perceiver_ar.evaluation import Documents
from perceiver_ar.model import PerceiverAR
from perceiver_ar.pretrained import Pretrained
from perceiver_ar.sealed import read_sealed, write_sealed
from perceiver_ar.store import Store
from perceiver_ar.tasks.base import Document, Task
from perceiver_ar.windows import Examples

FORMAT_VERSION = 1
FREE = {"checkpoint_every", "keep", "log_every", "evaluate_every", "patience", "logger"}
"""Settings of training that a resumed run may change: they do not alter the weights."""


@dataclass(frozen=True)
class Source:
    """A task and, where it needs one, the store of its tokens."""

    task: Task
    store: Store | None

    def examples(self, context: int, latents: int) -> Examples:
        if self.store is None:
            return self.task.examples()
        return Crops(self.store.split("train"), context, latents)

    def documents(self, split: str) -> Sequence[Document]:
        return self.task.documents(split) if self.store is None else Documents(self.store.split(split))

    def has(self, split: str) -> bool:
        return self.store is None or split in self.store.meta["splits"]


def open_source(task: str, options: dict[str, Any], data: str | Path | None) -> Source:
    """The store's task if there is a store, which knows what its tokens mean; else the one named."""
    if data is None:
        found = tasks.get(task, options) if tasks.is_known(task) else None
        if found is None or not found.synthetic:
            raise ValueError(f"the task '{task}' needs data: --data with a store that `prepare` made.")
        return Source(found, None)
    store = Store.open(data)
    return Source(tasks.get(store.meta["task"], store.meta["options"]), store)


def settle(experiment: Experiment, source: Source, say: Callable[[str], None]) -> Experiment:
    """The experiment with the task, and the vocabulary, of what it is trained on."""
    task, vocabulary = source.task, experiment.model.vocab_size
    if source.store is not None and source.store.vocab_size != vocabulary:
        vocabulary = source.store.vocab_size
        say(f"The store's vocabulary of {vocabulary:,} is taken instead of the preset's.")
    model = replace(experiment.model, vocab_size=vocabulary)
    task.check(model)
    return replace(experiment, task=task.name, options=task.to_dict(), model=model)


def check_vocabulary(source: Source, model: PerceiverAR) -> None:
    """Refuses to evaluate a model on tokens that it does not know."""
    store, known = source.store, model.config.vocab_size
    if store is not None and store.vocab_size != known:
        raise ValueError(
            f"{store.folder} has a vocabulary of {store.vocab_size}, but the model one of {known}."
        )


def begin(folder: Path, experiment: Experiment, data: str | Path | None, resume: bool) -> None:
    """Makes the folder of a new run, or checks that an old one is the same."""
    config = folder / "config.json"
    if folder.exists() and any(folder.iterdir()) and not resume:
        raise ValueError(f"{folder} exists already: add --resume to go on, or choose another --out.")
    if config.exists():
        check_same(Experiment.from_dict(read_sealed(config)["experiment"]), experiment, folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    where = None if data is None else str(Path(data).resolve())
    write_sealed(
        config, {"format_version": FORMAT_VERSION, "experiment": experiment.to_dict(), "data": where}
    )


def check_same(before: Experiment, now: Experiment, folder: Path) -> None:
    """Refuses to resume with other settings than the run began with."""
    old, new = _flat(before.to_dict()), _flat(now.to_dict())
    free = {f"train.{name}" for name in FREE} | {"name"}
    if now.train.schedule == "constant":
        free.add("train.steps")
    changed = [key for key in old.keys() | new.keys() if key not in free and old.get(key) != new.get(key)]
    if changed:
        words = ", ".join(f"{key} was {old.get(key)} and is {new.get(key)}" for key in sorted(changed))
        raise ValueError(f"{folder} was begun with other settings: {words}. Use those, or another --out.")


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def export(folder: Path, model: Pretrained, experiment: Experiment, data: str | Path | None) -> None:
    """Writes model/: weights and config, and beside them the experiment, which names the task."""

    def write(beside: Path) -> None:
        model.save_pretrained(beside)
        about = {
            "experiment": experiment.to_dict(),
            "data": None if data is None else str(Path(data).resolve()),
        }
        (beside / "experiment.json").write_text(json.dumps(about, indent=1))

    write_folder(folder / "model", write)


def load(run: str | Path, device: str) -> tuple[PerceiverAR, Experiment, str | None]:
    """The model of a run folder, or of its model/ alone; its experiment; and where its data were."""
    folder = Path(run)
    if not folder.is_dir():
        raise ValueError(f"{folder} does not exist: give the folder of a run.")
    inner = folder / "model" if (folder / "model").is_dir() else folder
    if not (inner / "experiment.json").exists():
        begun = (folder / "config.json").exists() and not checkpoints(folder / "checkpoints")
        hint = "it was begun but holds no model yet" if begun else "it holds no model"
        raise ValueError(f"{folder} is not a run that can be used: {hint}.")
    about = json.loads((inner / "experiment.json").read_text())
    model = PerceiverAR.from_pretrained(inner, map_location=device)
    return model, Experiment.from_dict(about["experiment"]), about["data"]
