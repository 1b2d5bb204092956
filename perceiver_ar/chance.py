"""Random numbers that follow from a seed and a place alone: who draws them, and beside what, is the same.

So a batch that is split, over processes or in time, drops what it drops when it is whole. Torch's own
generators go on from one number to the next, whatever shares the batch.

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
    """One for each example, (B,), by torch's generator."""
    return torch.randint(_MOST, (count,), dtype=torch.int32, device=device)


@overload
def branch(seeds: Tensor, number: int) -> Tensor: ...
@overload
def branch(seeds: None, number: int) -> None: ...
def branch(seeds: Tensor | None, number: int) -> Tensor | None:
    """Other seeds, (B,), for another use, if there are seeds."""
    return None if seeds is None else _mixed(seeds + _signed(number * _GOLDEN))


def branches(seeds: Tensor | None, count: int) -> Sequence[Tensor | None]:
    """So many others, such as one for each layer."""
    if seeds is None:
        return [None] * count
    numbers = torch.arange(count, dtype=torch.int32, device=seeds.device)
    return _mixed(seeds + numbers[:, None] * _signed(_GOLDEN)).unbind()


def draws(seeds: Tensor, *shape: int) -> Tensor:
    """Whole numbers from 0 to 2**31 - 1, (B, ...), each by its example's seed and its place."""
    places = _mixed(torch.arange(math.prod(shape), dtype=torch.int32, device=seeds.device)).view(shape)
    return _mixed(places ^ seeds.view(-1, *(1 for _ in shape))) & _MOST


def kept(seeds: Tensor, share: float, *shape: int) -> Tensor:
    """What is left when a share is dropped, (B, ...)."""
    return draws(seeds, *shape) >= min(round(share * 2**31), _MOST)


def drop(x: Tensor, share: float, seeds: Tensor | None) -> Tensor:
    """Dropout of (B, ...), if there are seeds."""
    if seeds is None or share == 0:
        return x
    return torch.where(kept(seeds, share, *x.shape[1:]), x, 0) * (1 / (1 - share))


def _mixed(x: Tensor) -> Tensor:
    """Every bit of 32 depends on every other (the end of MurmurHash3)."""
    x = (x ^ _shifted(x, 16)) * _signed(0x85EBCA6B)
    x = (x ^ _shifted(x, 13)) * _signed(0xC2B2AE35)
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, by: int) -> Tensor:
    """To the right, with zeros coming in."""
    return (x >> by) & ((1 << (32 - by)) - 1)


def _signed(number: int) -> int:
    """The same 32 bits, as torch has them."""
    return (number + 2**31) % 2**32 - 2**31
