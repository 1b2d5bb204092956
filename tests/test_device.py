"""The device is chosen, or refused with the reason."""

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from perceiver_ar.device import autocast, pick_device


def test_auto_takes_the_fastest_device_there_is() -> None:
    kinds = [torch.cuda.is_available(), torch.backends.mps.is_available(), True]
    assert pick_device().type == ("cuda", "mps", "cpu")[kinds.index(True)]


@pytest.mark.parametrize(("cuda", "mps", "kind"), [(True, True, "cuda"), (False, True, "mps")])
def test_auto_prefers_cuda_then_mps(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool, kind: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setattr(torch, "empty", lambda *size, device: None)
    assert pick_device().type == kind


def test_a_named_device_is_taken_or_refused_in_one_sentence() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    for name in ("gpu", "cuda:99", "xla"):
        with pytest.raises(ValueError, match=f"device '{name}' cannot be used here: "):
            pick_device(name)


def test_bf16_is_used_only_where_the_hardware_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda kind, dtype: (kind, dtype))
    for supported, wanted in ((False, None), (True, ("cuda", torch.bfloat16))):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has=supported: has)
        chosen = autocast(torch.device("cuda"))
        assert isinstance(chosen, nullcontext) if wanted is None else chosen == wanted
    assert isinstance(autocast(torch.device("cpu")), nullcontext)
    assert autocast(torch.device("cpu"), "bf16") == ("cpu", torch.bfloat16)
    assert isinstance(autocast(torch.device("cuda"), "float32"), nullcontext)


FAULTS = """
import resource, sys, torch
from perceiver_ar.device import keep_freed_memory
if sys.argv[1] == "kept" and not keep_freed_memory():
    sys.exit("this is no glibc that can")
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**25)  # 128 MiB: 32,768 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(faults() for _ in range(5)))
"""


def faults(how: str) -> int:
    """The fewest pages that making a large tensor again takes, in a process of its own."""
    command = [sys.executable, "-c", FAULTS, how]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if "no glibc" in result.stderr:
        pytest.skip(result.stderr)
    return int(result.stdout)


def test_freed_memory_is_used_again() -> None:
    assert faults("freed") > 10_000
    assert any(faults("kept") < 10 for _ in range(20))  # it works in about half of all processes
