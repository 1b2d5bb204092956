"""What a run is trained on: token stores, which record their task, or a task that makes its own tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from perceiver_ar import tasks
from perceiver_ar.config import Experiment
from perceiver_ar.data import Crops, Mixture
from perceiver_ar.decoder import Decoder
from perceiver_ar.evaluation import Documents
from perceiver_ar.sealed import digest
from perceiver_ar.store import Store
from perceiver_ar.tasks.base import Document, Task
from perceiver_ar.windows import Examples

Data = str | Path | Mapping[str, float] | Mapping[Path, float] | None
"""Where tokens come from: the task itself (None), a store, or several stores with sampling weights."""


@dataclass(frozen=True)
class Source:
    """A task and, unless it is synthetic, the stores of its tokens."""

    task: Task
    stores: tuple[Store, ...] = ()
    weights: tuple[float, ...] = ()

    def examples(self, context: int) -> Examples:
        crops = [Crops(store.split("train"), context, self.task) for store in self.stores]
        return Mixture(crops, self.weights) if crops else self.task.examples()

    def documents(self, split: str) -> Sequence[Document]:
        if not self.stores:
            return self.task.documents(split)
        having = [store for store in self.stores if split in store.meta["splits"]] or self.stores
        return Documents([store.split(split) for store in having])

    def has(self, split: str) -> bool:
        tokens = (store.meta["splits"].get(split, {"tokens": 0})["tokens"] for store in self.stores)
        return not self.stores or any(tokens)

    def seal(self) -> str | None:
        """A digest of the stores and, if there are several, of their weights; None without stores."""
        if len(self.stores) < 2:
            return digest(self.stores[0].meta) if self.stores else None
        return digest({"stores": [store.meta for store in self.stores], "weights": list(self.weights)})


def as_mixture(data: Data) -> dict[str, float]:
    """The data as absolute folders with sampling weights."""
    if not isinstance(data, Mapping):
        return {} if data is None else {str(Path(data).resolve()): 1.0}
    for folder, weight in data.items():
        if not 0 < weight < float("inf"):
            raise ValueError(f"the weight of {folder} must be above 0, but is {weight}.")
    return {str(Path(folder).resolve()): float(weight) for folder, weight in data.items()}


def open_source(task: str, options: dict[str, Any], data: Data) -> Source:
    """Opens the stores, checking that their tokens fit the task; without any, the task must be synthetic."""
    mixture = as_mixture(data)
    if not mixture:
        found = tasks.get(task, options) if tasks.is_known(task) else None
        if found is None or not found.synthetic:
            raise ValueError(f"the task '{task}' needs data: --data with a store that `prepare` made.")
        return Source(found)
    first, *others = stores = [Store.open(folder) for folder in mixture]
    check_tokens([first], meaning(task, options), "the model")
    check_tokens(others, stored_meaning(first), str(first.folder))
    kind = tasks.get(task, options | first.meta["options"]).at(first.folder)
    return Source(kind, tuple(stores), tuple(mixture.values()))


def meaning(task: str, options: dict[str, Any]) -> dict[str, Any]:
    """The settings that define what token ids mean; of a tokenizer, the digest of its file, not its kind."""
    kind = tasks.get(task, options) if tasks.is_known(task) else None
    beside = {field.name for field in fields(kind) if not field.compare} if kind else set()
    found = {"task": task, **{key: value for key, value in options.items() if key not in beside}}
    if "tokenizer" in found:
        found["tokenizer"] = found.pop("sha256", "") or found["tokenizer"]
    return found


def stored_meaning(store: Store) -> dict[str, Any]:
    """The same for a store, as it records them, with the size of its vocabulary."""
    return {**meaning(store.meta["task"], store.meta["options"]), "vocab_size": store.vocab_size}


def check_tokens(stores: Sequence[Store], wanted: dict[str, Any], whose: str) -> None:
    """Refuses stores whose tokens mean something else; settings used only in training are not compared."""
    for store in stores:
        for key, value in stored_meaning(store).items():
            if wanted.get(key, value) == value:
                continue
            if key == "task":
                raise ValueError(f"{store.folder} is for the task {value}, but {whose} for {wanted[key]}.")
            raise ValueError(
                f"{store.folder} has tokens of another {key} than {whose}: prepare it with the same "
                "settings, text with --tokenizer-file."
            )


def as_stored(experiment: Experiment, data: Data, say: Callable[[str], None]) -> Experiment:
    """The experiment with its store's task; options that it leaves open, such as augmentation, stay."""
    mixture = as_mixture(data)
    if not mixture:
        return experiment
    meta = Store.open(next(iter(mixture))).meta
    if meta["task"] == experiment.task:
        return replace(experiment, options=experiment.options | meta["options"])
    if experiment.options:  # else nothing is lost, as for the task `tokens`
        say(f"Using the store's task, {meta['task']}, instead of the preset's, {experiment.task}.")
    return replace(experiment, task=meta["task"], options=meta["options"])


def settle(experiment: Experiment, source: Source, say: Callable[[str], None]) -> Experiment:
    """The experiment with the store's vocabulary, positions that suit the task, and all its options."""
    task, vocabulary = source.task, experiment.model.vocab_size
    if source.stores and source.stores[0].vocab_size != vocabulary:
        vocabulary = source.stores[0].vocab_size
        say(f"Using the store's vocabulary of {vocabulary:,} tokens instead of the preset's.")
    changes: dict[str, Any] = {"vocab_size": vocabulary}
    if cutoffs := getattr(experiment.model, "cutoffs", ()):
        changes["cutoffs"] = tuple(cutoff for cutoff in cutoffs if cutoff < vocabulary)
    model = replace(experiment.model, **changes)
    suited = task.suited(model)
    if suited != model:
        say(f"Using {suited.positions} positions, as the task {task.name} needs, not {model.positions}.")
        model = suited
    task.check(model)
    if getattr(model, "axes", ()) and task.positions(np.arange(2)[None]) is None:
        raise ValueError(
            f"axial positions are for tasks that give them, as images do, not for {task.name}: "
            "choose another preset."
        )
    if experiment.train.evaluate_every and not source.has("validation"):
        raise ValueError(
            "evaluate_every needs a validation split, which the store does not have: set it to 0."
        )
    return replace(experiment, task=task.name, options=task.to_dict(), model=model)


def check_vocabulary(source: Source, model: Decoder) -> None:
    """Refuses stores whose vocabulary is not as large as the model's."""
    known = model.config.vocab_size
    for store in source.stores:
        if store.vocab_size != known:
            raise ValueError(
                f"{store.folder} has a vocabulary of {store.vocab_size}, but the model one of {known}."
            )
