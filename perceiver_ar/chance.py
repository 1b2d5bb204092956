"""Random numbers determined by a seed and an index alone, on any process and in any order.

A batch split over processes or micro-batches thus gets the same dropout as a whole one. Torch's own
generators are sequential, so that a number depends on how many were drawn before it.

Letters: B batch.
"""

import math
from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B9
_MOST = 2**31 - 1


def new_seeds(count: int, device: torch.device) -> Tensor:
    """A seed for each example, (B,), from torch's generator."""
    return torch.randint(_MOST, (count,), dtype=torch.int32, device=device)


@overload
def branch(seeds: Tensor, number: int) -> Tensor: ...
@overload
def branch(seeds: None, number: int) -> None: ...
def branch(seeds: Tensor | None, number: int) -> Tensor | None:
    """Derives other seeds (B,) for another use; None stays None."""
    return None if seeds is None else _mixed(seeds + _signed(number * _GOLDEN))


def branches(seeds: Tensor | None, count: int) -> Sequence[Tensor | None]:
    """Derives `count` other seeds per example, such as one for each layer."""
    if seeds is None:
        return [None] * count
    numbers = torch.arange(count, dtype=torch.int32, device=seeds.device)
    return _mixed(seeds + numbers[:, None] * _signed(_GOLDEN)).unbind()


def draws(seeds: Tensor, *shape: int) -> Tensor:
    """Random integers from 0 to 2**31 - 1, (B, ...), each determined by its example's seed and its index."""
    places = _mixed(torch.arange(math.prod(shape), dtype=torch.int32, device=seeds.device)).view(shape)
    return _mixed(places ^ seeds.view(-1, *(1 for _ in shape))) & _MOST


def kept(seeds: Tensor, share: float, *shape: int) -> Tensor:
    """Mask of the entries that are kept when a share is dropped, (B, ...)."""
    return draws(seeds, *shape) >= min(round(share * 2**31), _MOST)


def drop(x: Tensor, share: float, seeds: Tensor | None) -> Tensor:
    """Dropout on x (B, ...), or x itself if there are no seeds."""
    if seeds is None or share == 0:
        return x
    return torch.where(kept(seeds, share, *x.shape[1:]), x, 0) * (1 / (1 - share))


def _mixed(x: Tensor) -> Tensor:
    """Hashes 32 bits (MurmurHash3's finalizer): every output bit depends on every input bit."""
    x = (x ^ _shifted(x, 16)) * _signed(0x85EBCA6B)
    x = (x ^ _shifted(x, 13)) * _signed(0xC2B2AE35)
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> by) & ((1 << (32 - by)) - 1)


def _signed(number: int) -> int:
    """The same 32 bits as a signed integer, such as torch's int32."""
    return (number + 2**31) % 2**32 - 2**31
