"""Reads checkpoints without a model."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from perceiver_ar.checkpoint import check, checkpoints, plain_reader, read_into
from perceiver_ar.sealed import file_digest, write_sealed


def state(place: Path) -> dict[str, Any]:
    """The plain values of an intact checkpoint."""
    return check(place)


def tensors(place: Path) -> dict[str, torch.Tensor]:
    """All tensors of an intact checkpoint, unsharded."""
    check(place)
    about = plain_reader(place).read_metadata().state_dict_metadata
    found = {
        name: torch.empty(x.size, dtype=x.properties.dtype)
        for name, x in about.items()
        if isinstance(x, TensorStorageMetadata)
    }
    assert read_into(found, place) == about.keys()
    return found


def newest(run: Path) -> Path:
    return checkpoints(run / "checkpoints")[-1]


def as_first_format(place: Path) -> None:
    """Rewrites a checkpoint in format version 1: all tensors in one safetensors file."""
    found, about = tensors(place), state(place)
    for path in place.iterdir():
        path.unlink()
    save_file(found, place / "tensors.safetensors")
    digest = file_digest(place / "tensors.safetensors")
    write_sealed(place / "state.json", about | {"format_version": 1, "tensors_sha256": digest})
