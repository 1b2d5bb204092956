"""Compiled flex attention: keys are masked inside the kernel, and fully hidden blocks are skipped.

Letters: B batch, M keys, N queries, H heads, K head width, W keys that can be hidden.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

Blocks = tuple[Tensor, Tensor, Tensor, Tensor]
"""Per block of queries: the number of partly visible key blocks and their indices, then the same for
fully visible ones. Each list of indices ends with those of the other blocks."""

BLOCK = 128


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, own: bool, blocks: Blocks | None = None
) -> Tensor:
    """Causal attention, queries aligned to the last keys; visible (B, W): mask of the last W keys."""
    flex = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    out = flex(q, k, v, block_mask=_block_mask(q, k, visible, own, blocks))
    assert isinstance(out, Tensor)
    return out


def _block_mask(q: Tensor, k: Tensor, visible: Tensor, own: bool, blocks: Blocks | None = None) -> BlockMask:
    """The mask in flex attention's format."""
    queries, keys = q.shape[2], k.shape[2]
    # A kernel cannot hold numbers that change between compiled calls (pytorch 182606); tensors can change.
    skipped, shown_to_all = (torch.full((), keys - x, device=q.device) for x in (queries, visible.shape[1]))

    def may_see(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        standing = i + skipped
        shown = (j < shown_to_all) | visible[b, (j - shown_to_all).clamp(min=0)]
        return (j <= standing) & (shown | (j == standing) if own else shown)

    counts, order, full_counts, full_order = blocks or blocks_shown(visible, queries, keys, own)
    return BlockMask.from_kv_blocks(
        kv_num_blocks=counts,
        kv_indices=order,
        full_kv_num_blocks=full_counts,
        full_kv_indices=full_order,
        BLOCK_SIZE=BLOCK,
        mask_mod=may_see,
        seq_lengths=(queries, keys),
    )


def blocks_shown(visible: Tensor, queries: int, keys: int, own: bool = False) -> Blocks:
    """The key blocks that each block of queries reads: partly visible ones, and fully visible ones.

    Computed once for all layers. Not compiled: compiling it is suspected of a crash of flex attention
    with 40,000 keys (torch 2.11; benchmarks/RESULTS.md).
    """
    return _never_compiled()(visible, queries, keys, own)


@functools.cache
def _never_compiled() -> Callable[..., Blocks]:
    return torch.compiler.disable(_blocks_shown)  # lazily, since this imports much


def _blocks_shown(visible: Tensor, queries: int, keys: int, own: bool) -> Blocks:
    before, always = keys - queries, keys - visible.shape[1]
    some, all_ = _some_and_all(visible, always)  # (B, key blocks)
    first = torch.arange(0, queries, BLOCK, device=visible.device)[:, None] + before  # of each block
    last = (first + BLOCK - 1).clamp(max=keys - 1)
    starts = torch.arange(0, keys, BLOCK, device=visible.device)
    open_ = all_[:, None] & (starts + BLOCK - 1 <= first)  # (B, query blocks, key blocks)
    own_block = (starts <= last) & (starts + BLOCK > first)
    checked = (some[:, None] | own_block if own else some[:, None]) & (starts <= last) & ~open_
    return *_listed(checked), *_listed(open_)


def _some_and_all(visible: Tensor, always: int) -> tuple[Tensor, Tensor]:
    """Which key blocks have some visible keys, and which are fully visible: (B, key blocks) each."""
    shown = F.pad(visible, (always, 0), value=True)
    rest = -shown.shape[1] % BLOCK
    some, all_ = (F.pad(shown, (0, rest), value=x).unflatten(1, (-1, BLOCK)) for x in (False, True))
    return some.any(-1), all_.all(-1)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of set columns in each row, (B, rows, columns), and all column indices, set ones first."""
    order = (~blocks).to(torch.int8).argsort(dim=-1, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]
