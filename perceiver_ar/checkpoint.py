"""Checkpoints: written beside and renamed, with checksums; the newest good one is read back."""

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from perceiver_ar.sealed import Damaged, check_version, file_digest, read_sealed, write_sealed

FORMAT_VERSION = 1
TENSORS, STATE = "tensors.safetensors", "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to go on: tensors by name, and plain values."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


def save_checkpoint(folder: Path, step: int, checkpoint: Checkpoint, keep: int) -> Path:
    """Writes checkpoints/step-…, then removes all but the newest few."""
    place = folder / f"step-{step:08d}"
    write_folder(place, lambda beside: _write(beside, checkpoint))
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return place


def write_folder(place: Path, write: Callable[[Path], None]) -> None:
    """Fills a folder beside its place and renames it; on failure, what was there before stays."""
    beside, old = place.with_name(f".{place.name}.partial"), place.with_name(f".{place.name}.old")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        write(beside)
        for path in beside.iterdir():
            _flush(path)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    if place.exists():
        shutil.rmtree(old, ignore_errors=True)
        place.rename(old)
    beside.rename(place)
    _flush(place.parent)
    shutil.rmtree(old, ignore_errors=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    save_file({name: x.detach().contiguous() for name, x in checkpoint.tensors.items()}, folder / TENSORS)
    state = {"format_version": FORMAT_VERSION, "tensors_sha256": file_digest(folder / TENSORS)}
    write_sealed(folder / STATE, state | checkpoint.state)


def checkpoints(folder: Path) -> list[Path]:
    """All that were written, oldest first."""
    return sorted(folder.glob("step-*")) if folder.exists() else []


def load_checkpoint(place: Path, device: torch.device) -> Checkpoint:
    """Reads one, or raises Damaged."""
    state = read_sealed(place / STATE)
    check_version(state["format_version"], FORMAT_VERSION, place)
    if not (place / TENSORS).exists() or file_digest(place / TENSORS) != state["tensors_sha256"]:
        raise Damaged(f"{place / TENSORS} is missing or damaged.")
    return Checkpoint(load_file(place / TENSORS, device=str(device)), state)


def load_newest(folder: Path, device: torch.device, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest that is good; None where there is none at all. Damaged ones after it are set aside."""
    damaged: list[Path] = []
    for place in reversed(checkpoints(folder)):
        try:
            found = load_checkpoint(place, device)
        except Damaged as error:
            warn(f"{error} Trying the one before.")
            damaged.append(place)
            continue
        for bad in damaged:
            bad.rename(bad.with_name(f"damaged-{bad.name}"))
        return found
    if damaged:
        raise ValueError(f"no checkpoint in {folder} is whole: remove that folder to start anew.")
    return None


def recover(folder: Path) -> None:
    """Puts right what a crash in write_folder left: the folder before, or one half written."""
    for old in folder.glob(".*.old"):
        place = folder / old.name.removeprefix(".").removesuffix(".old")
        if place.exists():
            shutil.rmtree(old)
        else:
            old.rename(place)
    for partial in folder.glob(".*.partial"):
        if partial.is_dir():
            shutil.rmtree(partial)


def disk_is_full(error: BaseException) -> bool:
    """Whether a write failed for want of space (safetensors says so only in words)."""
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    return full or "No space left on device" in str(error) or "os error 28" in str(error)


def pack(model: nn.Module, optimizer: torch.optim.Optimizer, average: list[Tensor]) -> dict[str, Tensor]:
    """Weights, their average, and the optimizer's state, by parameter name."""
    tensors: dict[str, Tensor] = {}
    for index, (name, parameter) in enumerate(model.named_parameters()):
        tensors[f"model.{name}"] = parameter
        if average:
            tensors[f"average.{name}"] = average[index]
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{key}.{name}"] = value
    return tensors


@torch.no_grad()
def unpack(
    tensors: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer, average: list[Tensor]
) -> None:
    """The reverse of pack, in place."""
    kinds = {name.split(".", 2)[1] for name in tensors if name.startswith("optimizer.")}
    for index, (name, parameter) in enumerate(model.named_parameters()):
        parameter.copy_(tensors[f"model.{name}"])
        if average:
            average[index].copy_(tensors[f"average.{name}"])
        for key in kinds:
            optimizer.state[parameter][key] = tensors[f"optimizer.{key}.{name}"].clone()
