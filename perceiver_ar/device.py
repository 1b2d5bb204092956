"""Which device to run on, and in which precision."""

import ctypes
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Precision = Literal["auto", "float32", "bf16"]


def pick_device(name: str = "auto") -> torch.device:
    """The device of that name, such as cpu, mps or cuda:1; auto chooses the fastest available one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"device '{name}' cannot be used here: {reason}") from None
    return device


def describe(device: torch.device) -> str:
    """The name of a GPU, or the type of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def best_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the device supports it natively; float32 on older GPUs, on MPS and on the CPU.

    Not float16: its range is too small for training without loss scaling.
    """
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float32


def dtype_for(precision: Precision, device: torch.device) -> torch.dtype:
    """The dtype to compute in: the requested one or, for auto, the best for the device."""
    if precision == "auto":
        return best_dtype(device)
    return torch.bfloat16 if precision == "bf16" else torch.float32


def autocast(device: torch.device, precision: Precision = "auto") -> AbstractContextManager[object]:
    """Autocasts computations to that precision; weights stay in float32."""
    dtype = dtype_for(precision, device)
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def keep_freed_memory() -> bool:
    """From now on glibc reuses what is freed, rather than have the system clear new pages for each tensor.

    Where that works, in about half of all processes, training in bf16 on a CPU is a sixth faster
    (benchmarks/RESULTS.md). Returns whether glibc accepts it.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is None:
        return False
    mmap_threshold, trim_threshold, top_pad = -3, -1, -2  # as malloc.h numbers them
    options = ((mmap_threshold, 2**30), (trim_threshold, 2**31 - 1), (top_pad, 2**28))
    done = [set_option(number, value) for number, value in options]
    return all(done)


def memory_is_full(error: RuntimeError) -> bool:
    """Whether an error means out of memory, which torch reports for a CPU only in the message."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
