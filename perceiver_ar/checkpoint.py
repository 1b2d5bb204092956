"""Checkpoints: written under a temporary name, checksummed, renamed; the newest intact one is loaded."""

import errno
import functools
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from perceiver_ar.distributed import Ranks, as_parts, whole_here
from perceiver_ar.optim import begin_state, local_part
from perceiver_ar.sealed import Damaged, check_version, file_digest, read_sealed, write_sealed

FORMAT_VERSION = 2
STATE = "state.json"
_FIRST = "tensors.safetensors"
"""The file of all tensors in a checkpoint of format version 1."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything needed to resume a run: tensors by name, possibly sharded, and plain values."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


class Keeper:
    """Writes checkpoints/step-… in a thread while training continues, from a copy of the tensors.

    Use as a context manager, which waits for the last write when it exits.
    """

    def __init__(self, folder: Path, keep: int, ranks: Ranks) -> None:
        self.folder, self.keep, self.ranks, self.group = folder, keep, ranks, ranks.aside()
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self.pending: Future[None] | None = None
        self.writing = 0
        """Step of the checkpoint being written; 0 if there is none."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.shutdown()

    def save(self, step: int, checkpoint: Checkpoint) -> None:
        """Starts writing a checkpoint, after the previous one is complete."""
        self.wait()
        place = self.folder / f"step-{step:08d}"
        beside = self.ranks.first(lambda: _make(_beside(place, f"{os.getpid()}.")))
        tensors = share(checkpoint.tensors, self.ranks)
        written = _dcp().async_save(tensors, checkpoint_id=beside, process_group=self.group)
        self.pending = self.pool.submit(self._seal, written, beside, place, checkpoint.state)
        self.writing = step

    def wait(self) -> None:
        """Waits for the pending write; if it failed on any rank, all ranks raise the error."""
        pending, self.pending, self.writing = self.pending, None, 0
        if pending is None:
            return
        failure = None
        try:
            pending.result()
        except OSError as error:
            failure = error
        failures = [error for error in self.ranks.gather(failure) if error is not None]
        if failures:
            raise failures[0]

    def _seal(self, written: Any, beside: Path, place: Path, state: dict[str, Any]) -> None:
        """Once all ranks have written: adds checksums, renames the folder, and removes old checkpoints."""
        try:
            written.result()
            if self.ranks.leads:
                digests = {path.name: file_digest(path) for path in sorted(beside.iterdir())}
                write_sealed(beside / STATE, {"format_version": FORMAT_VERSION, "files": digests, **state})
                _settle(beside, place)
                for old in checkpoints(self.folder)[: -self.keep]:
                    shutil.rmtree(old)
        except BaseException as error:  # torch's CheckpointException is a BaseException
            shutil.rmtree(beside, ignore_errors=True)
            raise OSError(
                errno.ENOSPC if disk_is_full(error) else errno.EIO, str(error), str(place)
            ) from error


def share(tensors: dict[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """The tensors that this rank writes: those only it has, and a share of those that all ranks have."""
    alike = [name for name, x in tensors.items() if whole_here(x)]
    common = set.intersection(*map(set, ranks.gather(alike)))
    others = common.difference(sorted(common)[ranks.rank :: ranks.size])
    return {name: x.detach() for name, x in tensors.items() if name not in others}


def write_folder(place: Path, write: Callable[[Path], None]) -> None:
    """Fills a folder under a temporary name and renames it; on failure, the previous folder stays."""
    beside = _beside(place)
    try:
        write(_make(beside))
        _settle(beside, place)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _beside(place: Path, writer: str = "") -> Path:
    return place.with_name(f".{place.name}.{writer}partial")


def _make(beside: Path) -> Path:
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside


def _settle(beside: Path, place: Path) -> None:
    """Flushes a complete folder to disk and renames it, replacing the previous one."""
    old = place.with_name(f".{place.name}.old")
    for path in beside.iterdir():
        _flush(path)
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


def checkpoints(folder: Path) -> list[Path]:
    """All complete checkpoints, oldest first."""
    return sorted(folder.glob("step-*")) if folder.exists() else []


def check(place: Path) -> dict[str, Any]:
    """Verifies the checksums of a checkpoint and returns its plain values; raises Damaged if one differs."""
    state = read_sealed(place / STATE)
    first = state["format_version"] == 1
    if not first:
        check_version(state["format_version"], FORMAT_VERSION, place)
    files = {_FIRST: state["tensors_sha256"]} if first else state["files"]
    for name, wanted in files.items():
        if not (place / name).exists() or file_digest(place / name) != wanted:
            raise Damaged(f"{place / name} is missing or damaged.")
    return state


def read_into(tensors: dict[str, Tensor], place: Path) -> set[str]:
    """Loads tensors in place, on each rank its own shards; returns the names that the checkpoint holds."""
    if (place / _FIRST).exists():
        saved = load_file(place / _FIRST)
        for name in tensors.keys() & saved:
            tensors[name].copy_(as_parts(saved[name], tensors[name]))
        return tensors.keys() & saved
    reader = plain_reader(place)
    held = tensors.keys() & reader.read_metadata().state_dict_metadata.keys()
    _dcp().load({name: tensors[name] for name in held}, storage_reader=reader)
    return held


def plain_reader(place: Path) -> Any:
    """Torch's reader, but unpickling only the types that the metadata of a checkpoint consists of."""
    from torch.distributed.checkpoint.metadata import StorageMeta

    class Plain(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) in _CONTENTS or (module == "torch" and name in _KINDS):
                return super().find_class(module, name)
            raise Damaged(f"{place / '.metadata'} holds {module}.{name}, which is none of a checkpoint's.")

    class Reader(_dcp().FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with (place / ".metadata").open("rb") as file:
                found = Plain(file).load()
            found.storage_meta = found.storage_meta or StorageMeta()
            found.storage_meta.load_id = self.load_id
            return found

    return Reader(place)


_KINDS = {"Size", "float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"}
_CONTENTS = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"),
            *("ChunkStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}


@functools.cache
def _dcp() -> Any:
    """torch.distributed.checkpoint, which is slow to import, without its warning about a single process."""
    import torch.distributed.checkpoint as dcp

    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    return dcp


def newest(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest intact checkpoint, or None if there are none; renames damaged ones that are newer."""
    damaged: list[Path] = []
    for place in reversed(checkpoints(folder)):
        try:
            check(place)
        except Damaged as error:
            warn(f"{error} Trying the one before.")
            damaged.append(place)
            continue
        for bad in damaged:
            aside = bad.with_name(f"damaged-{bad.name}")
            shutil.rmtree(aside, ignore_errors=True)  # an earlier damaged one of the same step
            bad.rename(aside)
        return place
    if damaged:
        raise ValueError(f"no checkpoint in {folder} is whole: remove that folder to start anew.")
    return None


def recover(folder: Path) -> None:
    """Cleans up after a crash in write_folder: restores a replaced folder, removes a partial one."""
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
    """Whether a write failed for lack of space, which safetensors and torch report only in the message."""
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    words = "No space left on device", "os error 28", "unexpected pos"
    return full or any(said in str(error) for said in words)


def named_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: list[Tensor]
) -> dict[str, Tensor]:
    """Weights, their average, and the optimizer state, by parameter name."""
    tensors: dict[str, Tensor] = {}
    state = local_part(optimizer).state
    # An abandoned step of FSDP leaves the model with parameters that the optimizer does not know.
    assert sum(parameter in state for parameter in model.parameters()) == len(state)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        tensors[f"model.{name}"] = parameter
        if average:
            tensors[f"average.{name}"] = average[index]
        for key, value in state.get(parameter, {}).items():
            tensors[f"optimizer.{key}.{name}"] = value
    return tensors


@torch.no_grad()
def fill(place: Path, model: nn.Module, optimizer: torch.optim.Optimizer, average: list[Tensor]) -> None:
    """The inverse of named_tensors: loads a checkpoint in place."""
    begin_state(optimizer)
    wanted = {name: x.detach() for name, x in named_tensors(model, optimizer, average).items()}
    missing = wanted.keys() - read_into(wanted, place)
    if missing:
        raise Damaged(f"{place} lacks {min(missing)}.")
