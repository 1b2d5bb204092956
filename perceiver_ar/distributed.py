"""Ranks: the processes that torchrun starts for one run, and what they do together.

Models know nothing of this. Every rank makes the whole batch of a step and takes its rows of it; as
what is dropped of an example follows from the example alone, any number of ranks computes the same.
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
    """The processes of a run, of which this is one; by default the only one."""

    rank: int = 0
    size: int = 1
    group: Any = None
    """By which they talk; by default all processes do."""
    patience: timedelta | None = None
    """How long one waits for the others."""

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes and reports."""
        return self.rank == 0

    def rows(self, count: int) -> slice:
        """This rank's of so many rows, which a few ranks may have one more of."""
        each, more = divmod(count, self.size)
        first = self.rank * each + min(self.rank, more)
        return slice(first, first + each + (self.rank < more))

    def sum(self, x: Tensor) -> Tensor:
        """Over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def max(self, x: Tensor) -> Tensor:
        """Over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def any(self, here: bool) -> bool:
        """Whether it is so on some rank; all must ask."""
        return bool(self.sum(torch.tensor(int(here))))

    def gather(self, here: Result) -> list[Result]:
        """What each rank has, to all of them."""
        if self.size == 1:
            return [here]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, here, group=self.group)
        return found

    def aside(self) -> Any:
        """Another way to talk, for a thread beside the training."""
        return dist.new_group(backend="gloo", timeout=self.patience) if self.size > 1 else None

    def split(self, each: int) -> tuple["Ranks", "Ranks"]:
        """Those with other rows of a batch, and those, in a row, that share the rows of this one."""
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
        """What the first rank finds, while the others wait; where it fails, all do."""
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
    """The same, or the same words where it cannot be told to other processes."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def spread(
    model: Decoder, device: torch.device, ranks: Ranks, mode: Parallel, sent: torch.dtype | None
) -> nn.Module:
    """Puts a model on this rank's device, or its part of it; what is then called in training.

    The gradients of all ranks are averaged. sent: how precise the blocks' weights and gradients are when
    parts are put together; by default as they are.
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
    """Leaves each rank its part of the weights. shape: of all ranks, by machines if there are two numbers."""
    # These take a second to import.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("machines", "within")[-len(shape) :])
    # Latents stay as precise as they are: only weights, and what is sent, are rounded.
    policy = MixedPrecisionPolicy(sent, sent, cast_forward_inputs=False)
    # Block by block, so that no device ever holds all of it. What is outside of the blocks is given back
    # after each pass too, or an evaluation would leave it whole.
    for module in model.modules():
        if isinstance(module, Block | RelativeBlock):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    if isinstance(model, TransformerXL):
        register_fsdp_forward_method(model, "score_on")
    return model


@contextmanager
def alone(module: nn.Module, wanted: bool) -> Generator[None]:
    """While gradients of one batch are summed up, ranks need not talk before the last piece."""
    set_sync: Any = getattr(module, "set_requires_gradient_sync", None)  # of fully_shard
    if set_sync is not None:
        set_sync(not wanted)
    with module.no_sync() if wanted and isinstance(module, DistributedDataParallel) else nullcontext():
        yield


def whole_here(x: Tensor) -> bool:
    """Whether a tensor is no rank's part of one."""
    return not hasattr(x, "full_tensor")


def whole(x: Any) -> Tensor:
    """All of a tensor of which each rank may have a part; all ranks must ask."""
    return x if whole_here(x) else x.full_tensor()


def as_parts(x: Tensor, like: Any) -> Tensor:
    """The reverse of whole: this rank's part, where another tensor is in parts; all ranks must ask."""
    if whole_here(like):
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x.to(like.device), like.device_mesh, like.placements)


def launch() -> str | None:
    """What tells one start of torchrun from every other; it stays the same when processes start again."""
    above = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parents  # LAUNCH/attempt_0/RANK/error.json
    return above[2].name if len(above) > 2 else None


def restarts() -> tuple[int, int]:
    """How often torchrun started this again, after some process died, and how often it would."""
    done, most = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return int(done), int(most)


def join(device: str, minutes: float = 10) -> tuple[Ranks, torch.device]:
    """The ranks, and this one's device. minutes: how long to wait for one that does not answer.

    It may be called again: processes that have joined stay so until they `leave`.
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
        # Torchrun's store is there before any rank is; others' comes with the first rank.
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
    """When what started a process dies, Linux sends it SIGTERM: one that trains saves and leaves."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def meet(store: Any, rank: int, size: int, longest: timedelta) -> str:
    """A name that only the ranks of this attempt know, for what they tell each other.

    In torchrun's store the addresses of those that died still stand, and how often it began again is not
    the same on all machines. So each rank says hello by a number of its own, and the first answers that
    one, not those of the dead, until all have heard it.
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
    """Whether this is one of several processes that talk."""
    return dist.is_available() and dist.is_initialized()


def leave() -> None:
    """Ends what `join` began, once all went well: after a failure, others may wait for each other."""
    if joined():
        dist.destroy_process_group()
