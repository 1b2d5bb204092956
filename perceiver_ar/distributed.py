"""Ranks: the processes that torchrun starts for one run, and how they communicate.

Every rank makes the whole batch of a step and takes its own rows. The dropout of an example depends
only on the seed of that example, so any number of ranks computes the same.
"""

import ctypes
import os
import pickle
import signal
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from perceiver_ar.baselines import RelativeBlock, TransformerXL
from perceiver_ar.config import Parallel
from perceiver_ar.decoder import Decoder
from perceiver_ar.device import pick_device
from perceiver_ar.model import Block

Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """A process group as seen from this process; by default, this process alone."""

    rank: int = 0
    size: int = 1
    group: Any = None
    """The torch process group; None: the default group of all processes."""
    patience: timedelta | None = None
    """Timeout of process groups that are made from this one."""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes and reports."""
        return self.rank == 0

    def rows(self, count: int) -> slice:
        """This rank's slice of `count` rows; if they do not divide evenly, the first ranks have one more."""
        each, more = divmod(count, self.size)
        first = self.rank * each + min(self.rank, more)
        return slice(first, first + each + (self.rank < more))

    def sum(self, x: Tensor) -> Tensor:
        """Sums over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def max(self, x: Tensor) -> Tensor:
        """Takes the maximum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def any(self, here: bool) -> bool:
        """Whether `here` is true on any rank; a collective call."""
        return bool(self.sum(torch.tensor(int(here))))

    def gather(self, here: Result) -> list[Result]:
        """Collects the value of every rank, on every rank."""
        if self.size == 1:
            return [here]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, here, group=self.group)
        return found

    def aside(self) -> Any:
        """Another group of the same processes, for a thread that runs alongside training."""
        return dist.new_group(backend="gloo", timeout=self.patience) if self.size > 1 else None

    def split(self, each: int) -> tuple["Ranks", "Ranks"]:
        """Groups of ranks: those with different rows of a batch, and the `each` that share the same rows."""
        if self.size % each:
            raise ValueError(f"context_parallel, {each}, must divide the number of processes, {self.size}.")
        if each == 1:
            return self, Ranks()
        across = [list(range(start, self.size, each)) for start in range(each)]
        within = [list(range(start, start + each)) for start in range(0, self.size, each)]
        groups = [dist.new_subgroups_by_enumeration(x, self.patience)[0] for x in (across, within)]
        number, place = divmod(self.rank, each)
        return (
            Ranks(number, self.size // each, groups[0], self.patience),
            Ranks(place, each, groups[1], self.patience),
        )

    def first(self, work: Callable[[], Result]) -> Result:
        """Runs `work` on rank 0 only; every rank returns its result, or raises its error."""
        if self.size == 1:
            return work()
        found: list[Any] = [None, None]
        if self.leads:
            try:
                found[0] = work()
            except Exception as error:
                found[1] = _sendable(error)
        dist.broadcast_object_list(found, group=self.group, group_src=0)
        if found[1] is not None:
            raise found[1]
        return found[0]


def _sendable(error: Exception) -> Exception:
    """The error itself if it can be pickled, otherwise a RuntimeError with its message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def spread(
    model: Decoder, device: torch.device, ranks: Ranks, mode: Parallel, sent: torch.dtype | None
) -> nn.Module:
    """Puts a model, or this rank's shard of it, on the device; returns the module to call in training.

    Gradients are averaged over the ranks. sent: dtype in which FSDP sends the blocks' weights and
    gradients; None: their own.
    """
    if ranks.size == 1:
        return model.to(device)
    if mode in ("ddp", "zero1"):
        return DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)
    shape = (ranks.size,)
    if mode == "hybrid":
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        if len({*ranks.gather(local)}) > 1:
            raise ValueError("hybrid needs as many processes on every machine: set parallel to fsdp.")
        shape = (ranks.size // local, local)
    return shard(model, device, shape, sent)


def shard(
    model: Decoder, device: torch.device, shape: tuple[int, ...], sent: torch.dtype | None
) -> nn.Module:
    """Shards a model by FSDP. shape: of the mesh, (ranks,) or (machines, ranks of each)."""
    # These take a second to import.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("machines", "within")[-len(shape) :])
    # Latents keep their precision: only weights, and what is sent, are rounded.
    policy = MixedPrecisionPolicy(sent, sent, cast_forward_inputs=False)
    # Block by block, so that no device ever holds the whole model. Parameters outside the blocks are
    # resharded after each forward pass too, or an evaluation would leave them gathered.
    for module in model.modules():
        if isinstance(module, Block | RelativeBlock):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    if isinstance(model, TransformerXL):
        register_fsdp_forward_method(model, "score_on")
    return model


@contextmanager
def alone(module: nn.Module, wanted: bool) -> Generator[None]:
    """Skips gradient synchronisation if wanted: only the last micro-batch of a step needs it."""
    set_sync: Any = getattr(module, "set_requires_gradient_sync", None)  # of fully_shard
    if set_sync is not None:
        set_sync(not wanted)
    with module.no_sync() if wanted and isinstance(module, DistributedDataParallel) else nullcontext():
        yield


def whole_here(x: Tensor) -> bool:
    """Whether a tensor is complete on this rank, not sharded."""
    return not hasattr(x, "full_tensor")


def whole(x: Any) -> Tensor:
    """Gathers a tensor if it is sharded; a collective call."""
    return x if whole_here(x) else x.full_tensor()


def as_parts(x: Tensor, like: Any) -> Tensor:
    """The inverse of whole: shards x as `like` is sharded; a collective call."""
    if whole_here(like):
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x.to(like.device), like.device_mesh, like.placements)


def launch() -> str | None:
    """An id of this launch of torchrun, which stays the same when it restarts its processes."""
    above = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parents  # LAUNCH/attempt_0/RANK/error.json
    return above[2].name if len(above) > 2 else None


def restarts() -> tuple[int, int]:
    """How often torchrun has restarted the processes after a failure, and how often it may."""
    done, most = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return int(done), int(most)


def join(device: str, minutes: float = 10) -> tuple[Ranks, torch.device]:
    """Joins the process group, if there is one; returns the ranks and this one's device.

    minutes: timeout of communication. May be called again: a process stays joined until it calls `leave`.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "RANK" not in os.environ:
        return Ranks(), pick_device(device)
    if device in ("auto", "cuda") and torch.cuda.is_available():
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    where = pick_device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if not joined():
        die_with_launcher()
        backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
        longest = timedelta(minutes=minutes)
        # torchrun's store exists before any rank does; with other launchers, rank 0 creates it.
        first = longest if launch() is None else timedelta(seconds=5)
        try:
            store, rank, size = next(dist.rendezvous("env://", timeout=first))
        except dist.DistNetworkError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"what started this process cannot be reached: {reason}") from None
        store.set_timeout(longest)
        store = dist.PrefixStore(meet(store, rank, size, longest), store)
        dist.init_process_group(backend, timeout=longest, rank=rank, world_size=size, store=store)
    return Ranks(dist.get_rank(), size, patience=timedelta(minutes=minutes)), where


def die_with_launcher() -> None:
    """Has Linux send this process SIGTERM when its parent dies; training then saves and exits."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def meet(store: Any, rank: int, size: int, longest: timedelta) -> str:
    """Agrees on a prefix for keys in the store that only the ranks of this attempt know.

    torchrun's store still holds the addresses of ranks that died, and the restart count differs between
    machines. So each rank registers under a fresh id, and rank 0 replies to the registered ids until
    every rank has confirmed that it got the prefix.
    """
    me = uuid.uuid4().hex
    if rank > 0:
        store.set(f"hello-{rank}", me)
        name = store.get(f"welcome-{me}").decode()
        store.set(f"heard-{name}-{rank}", "")
        return name
    end = time.monotonic() + longest.total_seconds()
    heard = [f"heard-{me}-{other}" for other in range(1, size)]
    while not store.check(heard):
        if time.monotonic() > end:
            raise TimeoutError(f"not all of the {size} processes came within {longest}.")
        for other in range(1, size):
            if store.check([f"hello-{other}"]):
                store.set(f"welcome-{store.get(f'hello-{other}').decode()}", me)
        time.sleep(0.02)
    return me


def joined() -> bool:
    """Whether this process has joined a process group."""
    return dist.is_available() and dist.is_initialized()


def leave() -> None:
    """Destroys the process group. Only for success: after a failure, ranks may still wait for each other."""
    if joined():
        dist.destroy_process_group()
