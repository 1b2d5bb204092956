"""A run folder: config.json, metrics.jsonl, checkpoints/, and model/, which can be used on its own."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from perceiver_ar import tasks
from perceiver_ar.architectures import load_model
from perceiver_ar.checkpoint import checkpoints, write_folder
from perceiver_ar.config import AnyModelConfig, Experiment
from perceiver_ar.decoder import Decoder
from perceiver_ar.pretrained import WEIGHTS, Pretrained, save_packed
from perceiver_ar.sealed import Damaged, check_version, file_digest, locked, read_sealed, write_sealed
from perceiver_ar.source import Data, Source, as_mixture
from perceiver_ar.store import check_new
from perceiver_ar.tasks.base import Task

FORMAT_VERSION = 1
MAY_CHANGE_ON_RESUME = {
    *("checkpoint_every", "keep", "log_every", "evaluate_every", "patience", "logger"),
    *("parallel", "context_parallel", "timeout_minutes"),
}
"""Training settings that affect the weights by rounding at most."""
BOX = Path(__file__).parent / "box"
"""Holds the models that come with this package, each in a folder of its name."""
LICENSE = "LICENSE"
"""Stays with weights that have a licence of their own."""


@dataclass(frozen=True)
class Origin:
    """Where the data and the initial weights of a run come from."""

    data: dict[str, float]
    init: str | None
    begun: AnyModelConfig | None = None
    """The model config of a run with a checkpoint, which no longer needs its initial weights."""

    @classmethod
    def of(cls, folder: Path, data: Data, init: str | Path | None, resume: bool) -> Self:
        """The origin as given; on resuming, what is not given is taken from config.json."""
        given = cls(as_mixture(data), None if init is None else str(named(init).resolve()))
        if not (folder / "config.json").exists():
            return given
        check_resumed(folder, resume)
        recorded = read_sealed(folder / "config.json")
        data = given.data or as_mixture(recorded["data"])
        if recorded["init"] is None or not checkpoints(folder / "checkpoints"):
            return cls(data, given.init or recorded["init"])
        return cls(data, recorded["init"], Experiment.from_dict(recorded["experiment"]).model)


def check_resumed(folder: Path, resume: bool) -> None:
    """Refuses a folder that is in use, unless its run is to be resumed."""
    if resume:
        return
    known = (folder / "config.json").exists() or (folder / "checkpoints").exists()
    how = "exists already: add --resume to go on, or" if known else "is no run, and not empty:"
    raise ValueError(f"{folder} {how} choose another --out.")


def begun_by(launch: str | None, folder: Path) -> bool:
    """Whether this launch of torchrun, before restarting its processes, made the folder."""
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
    """Makes the folder of a new run, or checks that an existing one has the same settings and data."""
    config, seal = folder / "config.json", source.seal()
    if folder.exists() and any(folder.iterdir()):
        check_resumed(folder, resume)
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
        say(f"Nothing to resume in {folder}: starting a new run.")
    folder.mkdir(parents=True, exist_ok=True)
    about = {"format_version": FORMAT_VERSION, "experiment": experiment.record(), "store": seal}
    write_sealed(config, {**about, "data": origin.data, "init": origin.init, "launch": launch})


def kept_from_others(folder: Path) -> AbstractContextManager[None]:
    """Locks a run folder, so that no other process trains into it."""
    return locked(folder / ".lock", f"{folder} is being trained by another process: wait for it, or end it.")


def check_same(before: Experiment, now: Experiment, folder: Path) -> None:
    """Refuses to resume with changed settings, except those that may change."""
    before = replace(before, options=tasks.get(before.task, before.options).to_dict())  # adds newer options
    old, new = _flat(before.to_dict()), _flat(now.to_dict())
    free = {f"train.{name}" for name in MAY_CHANGE_ON_RESUME} | {"name"}
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
    """Writes a model folder: weights, config, the experiment, and the files of its task.

    bits: bits per weight, if the weights are to be packed.
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
    """The model of a run folder, or of its model/ alone; its task; and where its data was."""
    inner = model_folder(run)
    about = read_sealed(inner / "experiment.json")
    if file_digest(inner / WEIGHTS) != about["sha256"]:
        raise Damaged(f"{inner / WEIGHTS} is damaged, or was changed.")
    model = load_model(inner, device)
    experiment = Experiment.from_dict(about["experiment"])
    return model, tasks.get(experiment.task, experiment.options).at(inner), about["data"]


def export_packed(run: str | Path, folder: Path, bits: int) -> None:
    """Writes a run's model alone, packed into `bits` per weight, without recording where its data was."""
    check_new(folder)
    model, task, _ = load(run, "cpu")
    about = read_sealed(model_folder(run) / "experiment.json")
    export(folder, model, Experiment.from_dict(about["experiment"]), task, None, bits)
    copy_license(run, folder)


def copy_license(run: str | Path, folder: Path) -> None:
    """Puts the licence of a model's weights beside a copy of them, if it has one."""
    if (found := model_folder(run) / LICENSE).exists():
        shutil.copy(found, folder)


def boxed() -> list[str]:
    """The names of the models in the box."""
    return sorted(path.parent.name for path in BOX.glob("*/experiment.json"))


def named(run: str | Path) -> Path:
    """The folder of a run or, where nothing has that name, of the model in the box."""
    return BOX / run if str(run) in boxed() and not Path(run).exists() else Path(run)


def inner_folder(run: Path) -> Path:
    """The folder that a run's model would be in: its model/ if there is one, else the folder itself."""
    return run / "model" if (run / "model").is_dir() else run


def model_folder(run: str | Path) -> Path:
    """The folder of a run's model; refuses one that lacks a model with its task."""
    folder = named(run)
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {what}: give the folder of a run, or {', '.join(boxed())}.")
    inner = inner_folder(folder)
    if not (inner / "experiment.json").exists():
        begun, model = (folder / "config.json").exists(), (inner / WEIGHTS).exists()
        hint = "it was begun but has no model yet" if begun else "it holds no model"
        if model:
            hint = "its model has no task beside it, experiment.json: use PerceiverAR.from_pretrained"
        raise ValueError(f"{folder} is not a run that can be used: {hint}.")
    return inner
