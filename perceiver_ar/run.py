"""A run folder: config.json, metrics.jsonl, checkpoints/, and model/, which alone is enough to use.

Where tokens come from is settled here too: a store says what its tokens mean, and without a store
the task makes them itself.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from perceiver_ar import tasks
from perceiver_ar.architectures import load_model
from perceiver_ar.checkpoint import checkpoints, write_folder
from perceiver_ar.config import AnyModelConfig, Experiment
from perceiver_ar.data import Crops, Mixture
from perceiver_ar.decoder import Decoder
from perceiver_ar.evaluation import Documents
from perceiver_ar.pretrained import WEIGHTS, Pretrained, save_packed
from perceiver_ar.sealed import Damaged, check_version, digest, file_digest, read_sealed, write_sealed
from perceiver_ar.store import Store, check_new
from perceiver_ar.tasks.base import Document, Task
from perceiver_ar.windows import Examples

FORMAT_VERSION = 1
FREE = {
    *("checkpoint_every", "keep", "log_every", "evaluate_every", "patience", "logger"),
    *("parallel", "context_parallel", "timeout_minutes"),
}
"""Settings of training that a resumed run may change: they alter the weights by rounding at most."""


Data = str | Path | Mapping[str, float] | Mapping[Path, float] | None
"""Where tokens are: nowhere, in a store, or in several, each with how much is drawn from it."""


@dataclass(frozen=True)
class Source:
    """A task and, where it needs them, the stores of its tokens."""

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
        """What changes when the tokens do."""
        if len(self.stores) < 2:
            return digest(self.stores[0].meta) if self.stores else None
        return digest({"stores": [store.meta for store in self.stores], "weights": list(self.weights)})


def as_mixture(data: Data) -> dict[str, float]:
    """Each store's folder and weight."""
    if not isinstance(data, Mapping):
        return {} if data is None else {str(Path(data).resolve()): 1.0}
    for folder, weight in data.items():
        if not 0 < weight < float("inf"):
            raise ValueError(f"the weight of {folder} must be above 0, but is {weight}.")
    return {str(Path(folder).resolve()): float(weight) for folder, weight in data.items()}


def open_source(task: str, options: dict[str, Any], data: Data) -> Source:
    """The stores of a task, if their tokens mean what it says; without any, what it makes itself."""
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
    """What the tokens of a task depend on; those of a tokenizer on its file, whatever made that."""
    kind = tasks.get(task, options) if tasks.is_known(task) else None
    beside = {field.name for field in fields(kind) if not field.compare} if kind else set()
    found = {"task": task, **{key: value for key, value in options.items() if key not in beside}}
    if "tokenizer" in found:
        found["tokenizer"] = found.pop("sha256", "") or found["tokenizer"]
    return found


def stored_meaning(store: Store) -> dict[str, Any]:
    """What a store says of its tokens."""
    return {**meaning(store.meta["task"], store.meta["options"]), "vocab_size": store.vocab_size}


def check_tokens(stores: Sequence[Store], wanted: dict[str, Any], whose: str) -> None:
    """Refuses stores whose tokens mean something else; what only training makes use of, they do not say."""
    for store in stores:
        for key, value in stored_meaning(store).items():
            if wanted.get(key, value) != value:
                raise ValueError(
                    f"{store.folder} has tokens of another {key} than {whose}: prepare it with the same "
                    "settings, text with --tokenizer-file."
                )


def as_stored(experiment: Experiment, data: Data, say: Callable[[str], None]) -> Experiment:
    """The experiment with the task of its store; what that does not settle, as augmentation, is as asked."""
    mixture = as_mixture(data)
    if not mixture:
        return experiment
    meta = Store.open(next(iter(mixture))).meta
    if meta["task"] == experiment.task:
        return replace(experiment, options=experiment.options | meta["options"])
    if experiment.options:  # else nothing is lost, as with the task `tokens`
        say(f"The store's task, {meta['task']}, is taken instead of the preset's, {experiment.task}.")
    return replace(experiment, task=meta["task"], options=meta["options"])


def settle(experiment: Experiment, source: Source, say: Callable[[str], None]) -> Experiment:
    """The experiment with the vocabulary of what it is trained on, and all settings of its task."""
    task, vocabulary = source.task, experiment.model.vocab_size
    if source.stores and source.stores[0].vocab_size != vocabulary:
        vocabulary = source.stores[0].vocab_size
        say(f"The store's vocabulary of {vocabulary:,} is taken instead of the preset's.")
    changes: dict[str, Any] = {"vocab_size": vocabulary}
    if cutoffs := getattr(experiment.model, "cutoffs", ()):
        changes["cutoffs"] = tuple(cutoff for cutoff in cutoffs if cutoff < vocabulary)
    model = replace(experiment.model, **changes)
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
    """Refuses to evaluate a model on tokens that it does not know."""
    known = model.config.vocab_size
    for store in source.stores:
        if store.vocab_size != known:
            raise ValueError(
                f"{store.folder} has a vocabulary of {store.vocab_size}, but the model one of {known}."
            )


@dataclass(frozen=True)
class Origin:
    """Where a run's data and first weights came from."""

    data: dict[str, float]
    init: str | None
    begun: AnyModelConfig | None = None
    """The model of a run with a checkpoint, whose weights are there: the first are not needed any more."""

    @classmethod
    def of(cls, folder: Path, data: Data, init: str | Path | None, resume: bool) -> Self:
        """As given; on resuming, as recorded where nothing is given."""
        given = cls(as_mixture(data), None if init is None else str(Path(init).resolve()))
        if not (folder / "config.json").exists():
            return given
        if not resume:
            raise ValueError(f"{folder} exists already: add --resume to go on, or choose another --out.")
        recorded = read_sealed(folder / "config.json")
        data = given.data or as_mixture(recorded["data"])
        if recorded["init"] is None or not checkpoints(folder / "checkpoints"):
            return cls(data, given.init or recorded["init"])
        return cls(data, recorded["init"], Experiment.from_dict(recorded["experiment"]).model)


def begun_by(launch: str | None, folder: Path) -> bool:
    """Whether this start of torchrun, of which some process died since, made the folder."""
    config = folder / "config.json"
    return launch is not None and config.exists() and read_sealed(config).get("launch") == launch


def begin(
    folder: Path,
    experiment: Experiment,
    source: Source,
    origin: Origin,
    resume: bool,
    launch: str | None,
    say: Callable[[str], None],
) -> None:
    """Makes the folder of a new run, or checks that an old one is the same."""
    config, seal = folder / "config.json", source.seal()
    if folder.exists() and any(folder.iterdir()) and not resume:
        raise ValueError(f"{folder} exists already: add --resume to go on, or choose another --out.")
    if config.exists():
        recorded = read_sealed(config)
        check_version(recorded["format_version"], FORMAT_VERSION, config)
        check_same(Experiment.from_dict(recorded["experiment"]), experiment, folder)
        if recorded["store"] != seal:
            raise ValueError(
                f"{folder} was begun on other data, {', '.join(as_mixture(recorded['data'])) or 'its own'}: "
                "use those, or another --out."
            )
        return
    if resume and folder.exists() and not all(path.name.startswith(".") for path in folder.iterdir()):
        raise ValueError(f"{folder} is not empty, but holds no run (config.json): choose another --out.")
    if resume:
        say(f"Nothing to resume in {folder}: begun anew.")
    folder.mkdir(parents=True, exist_ok=True)
    about = {"format_version": FORMAT_VERSION, "experiment": experiment.record(), "store": seal}
    write_sealed(config, {**about, "data": origin.data, "init": origin.init, "launch": launch})


@contextmanager
def kept_from_others(folder: Path) -> Generator[None]:
    """While this process trains into a folder, no other does; where the system can tell."""
    with (folder / ".lock").open("w") as lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{folder} is being trained by another process: wait for it, or end it."
            ) from None
        except (ImportError, OSError):  # Windows, or a file system without locks
            pass
        yield


def check_same(before: Experiment, now: Experiment, folder: Path) -> None:
    """Refuses to resume with other settings than the run began with."""
    before = replace(before, options=tasks.get(before.task, before.options).to_dict())  # with newer ones
    old, new = _flat(before.to_dict()), _flat(now.to_dict())
    free = {f"train.{name}" for name in FREE} | {"name"}
    if now.train.schedule == "constant":
        free.add("train.steps")
    changed = [key for key in old.keys() | new.keys() if key not in free and old.get(key) != new.get(key)]
    if changed:
        words = ", ".join(f"{key} was {old.get(key)} and is {new.get(key)}" for key in sorted(changed))
        raise ValueError(
            f"{folder} was begun with other settings: {words}. Use those, or another --out; "
            f"there, --init {folder} goes on from its weights."
        )


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def export(
    folder: Path, model: Pretrained, experiment: Experiment, task: Task, data: Data, bits: int | None = None
) -> None:
    """Writes a model folder: weights and config, and beside them the experiment and the files of its task.

    bits: of each weight, if they are packed.
    """

    def write(beside: Path) -> None:
        if bits is None:
            model.save_pretrained(beside)
        else:
            save_packed(model, beside, bits)
        for name, content in task.files().items():
            (beside / name).write_bytes(content)
        about = {"experiment": experiment.record(), "data": data, "sha256": file_digest(beside / WEIGHTS)}
        write_sealed(beside / "experiment.json", about)

    write_folder(folder, write)


def load(run: str | Path, device: str) -> tuple[Decoder, Task, Data]:
    """The model of a run folder, or of its model/ alone; its task; and where its data were."""
    inner = model_folder(run)
    about = read_sealed(inner / "experiment.json")
    if file_digest(inner / WEIGHTS) != about["sha256"]:
        raise Damaged(f"{inner / WEIGHTS} is damaged, or was changed.")
    model = load_model(inner, device)
    experiment = Experiment.from_dict(about["experiment"])
    return model, tasks.get(experiment.task, experiment.options).at(inner), about["data"]


def pack(run: str | Path, folder: Path, bits: int) -> None:
    """Writes a run's model alone, of so many bits a weight, and without saying where its data were."""
    check_new(folder)
    model, task, _ = load(run, "cpu")
    about = read_sealed(model_folder(run) / "experiment.json")
    export(folder, model, Experiment.from_dict(about["experiment"]), task, None, bits)


def model_folder(run: str | Path) -> Path:
    """Where the model of a run lies: in its model/, or in the folder itself."""
    folder = Path(run)
    if not folder.is_dir():
        raise ValueError(f"{folder} does not exist: give the folder of a run.")
    inner = folder / "model" if (folder / "model").is_dir() else folder
    if not (inner / "experiment.json").exists():
        begun, model = (folder / "config.json").exists(), (inner / WEIGHTS).exists()
        hint = "it was begun but has no model yet" if begun else "it holds no model"
        if model:
            hint = "its model has no task beside it, experiment.json: use PerceiverAR.from_pretrained"
        raise ValueError(f"{folder} is not a run that can be used: {hint}.")
    return inner
