"""Attention alone, by kernel and shape."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Figure
from perceiver_ar import attention, flash4, flex, parts
from perceiver_ar.device import best_dtype
from perceiver_ar.flops import attention_flops
from perceiver_ar.timing import forget_peak, peak_gib, time_repeatedly

GPU_SHAPES = [
    (4, 16, 1024, 131_072, 64),
    (32, 16, 1024, 12_288, 64),
    (64, 16, 1024, 4096, 64),
    (32, 16, 1024, 1024, 64),
    (4, 8, 1024, 131_072, 128),
    (1, 16, 1024, 1_048_576, 64),
]
CPU_SHAPES = [(4, 8, 512, 4096, 32), (4, 8, 512, 512, 32), (1, 4, 1024, 16_384, 64)]
"""Each is B, H, N, M, K."""

Kernel = Callable[..., Tensor]


def time_attention(device: torch.device, repeats: int) -> Iterator[Figure]:
    """TFLOP/s of every kernel available on the device: forward, and forward and backward."""
    for shape in GPU_SHAPES if device.type == "cuda" else CPU_SHAPES:
        for name, kernel in kernels(device, square=shape[2] == shape[3]).items():
            yield from time_kernel(name, kernel, shape, device, repeats)


def kernels(device: torch.device, square: bool) -> dict[str, Kernel]:
    """The kernels by name; flex attention requires a mask."""
    found: dict[str, Kernel] = {"chosen": attention.attend}
    if square:
        found["square"] = _open(attention._attend_square)
    if device.type == "cuda" and attention._has_flash(device):
        found["flash"] = _open(attention._attend_flash)
        found["flex"] = _all_shown(flex.attend)
    if device.type == "cuda" and flash4.INSTALLED:
        found["flash 4"] = _open(flash4.attend)
    if device.type == "cpu":
        found |= {"in two": _open(parts.attend_in_two), "reference": attention.reference}
    return found | {"rows": _open(attention._attend_by_rows)}


def _open(kernel: Kernel) -> Kernel:
    return lambda q, k, v: kernel(q, k, v, None, False)


def _all_shown(kernel: Kernel) -> Kernel:
    """With a mask that hides nothing, as for the full rows of a batch that has padded ones."""
    return lambda q, k, v: kernel(
        q, k, v, torch.ones(len(k), k.shape[2], dtype=torch.bool, device=k.device), False
    )


def time_kernel(
    name: str, kernel: Kernel, shape: tuple[int, int, int, int, int], device: torch.device, repeats: int
) -> Iterator[Figure]:
    batch, heads, queries, keys, width = shape
    forget_peak(device)
    q, k, v = (
        torch.randn(batch, heads, length, width, dtype=best_dtype(device), device=device, requires_grad=True)
        for length in (queries, keys, keys)
    )
    grad = torch.randn_like(q)

    def forwards() -> None:
        with torch.no_grad():
            kernel(q, k, v)

    def both() -> None:
        torch.autograd.grad(kernel(q, k, v), (q, k, v), grad)

    flops = batch * attention_flops(queries, keys, heads * width)
    runs: tuple[tuple[str, Callable[[], Any], float], ...] = (
        ("forward", forwards, flops),
        ("forward and backward", both, 3.5 * flops),
    )
    for what, run, work in runs:
        rates = [work / seconds / 1e12 for seconds in time_repeatedly(run, device, repeats)]
        case = f"{', '.join(f'{x:,}' for x in shape)}: {name}, {what}"
        yield Figure("attention", case, "TFLOP/s", rates, device, {"peak_gib": peak_gib(device)})
