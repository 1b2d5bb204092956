"""Training with matrix products of eight-bit floats, as an experiment: not part of the library.

Each tensor has one scale, computed anew every time: e4m3 forwards, e5m2 for gradients.

    python -m benchmarks.fp8 STORE OUT

trains on the bytes of a store twice from one seed, without and with them, and prints both losses.
"""

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.sizes import SIZES
from perceiver_ar import Experiment, TrainConfig, train

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
plain_linear = F.linear


@contextmanager
def eight_bits(wanted: bool) -> Generator[None]:
    """Computes linear maps in eight-bit floats, where their sizes allow it."""
    if not wanted:
        yield
        return
    with patch.object(F, "linear", linear):
        yield


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear in eight-bit floats; plain F.linear for sizes that are not multiples of 16."""
    rows = x.numel() // x.shape[-1]
    if any(size % 16 for size in (rows, *weight.shape)):
        return plain_linear(x.to(weight.dtype), weight, bias)
    y = _Product.apply(x.flatten(0, -2).bfloat16(), weight.bfloat16()).unflatten(0, x.shape[:-1])
    y = y if torch.is_autocast_enabled(x.device.type) else y.to(x.dtype)
    return y if bias is None else y + bias.to(y.dtype)


class _Product(torch.autograd.Function):
    """x (T, I) times the transpose of weight (O, I)."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return _multiply(_rounded(x, FORWARD), _rounded(weight, FORWARD))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        of_x = _multiply(_rounded(grad, BACKWARD), _rounded(weight.t(), FORWARD))
        return of_x, _multiply(_rounded(grad.t(), BACKWARD), _rounded(x.t(), FORWARD))


def _rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A contiguous tensor of eight-bit floats, and the scale that restores it."""
    scale = (x.abs().amax().float() / torch.finfo(dtype).max).clamp(min=1e-12)
    return (x.float() / scale).to(dtype).contiguous(), scale


def _multiply(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """(T, I) times the transpose of (O, I)."""
    return torch._scaled_mm(a[0], b[0].t(), scale_a=a[1], scale_b=b[1], out_dtype=torch.bfloat16)


def compare(
    data: tyro.conf.Positional[Path],
    out: tyro.conf.Positional[Path],
    size: str = "8k",
    steps: int = 200,
    batch: int = 8,
    device: str = "auto",
) -> None:
    """Trains twice from one seed, without and with fp8; prints both losses, by tenths, as JSON lines."""
    compiled = not device.startswith("cpu")
    settings = TrainConfig(
        steps=steps,
        batch_size=batch,
        learning_rate=3e-4,
        warmup_steps=steps // 4,
        log_every=1,
        compile=compiled,
    )
    losses = {}
    for fp8 in (False, True):
        with eight_bits(fp8):
            experiment = Experiment("fp8", "text", SIZES[size].model, settings)
            run = train(experiment, data, out / f"fp8-{fp8}", show=False, device=device)
        lines = (Path(run["run"]) / "metrics.jsonl").read_text().splitlines()
        losses[fp8] = [json.loads(line)["loss"] for line in lines]
    each = steps // 10
    for first in range(0, steps, each):
        plain, eight = (sum(losses[fp8][first : first + each]) / each for fp8 in (False, True))
        print(json.dumps({"step": first + each, "plain": round(plain, 4), "fp8": round(eight, 4)}))


if __name__ == "__main__":
    tyro.cli(compare, prog="python -m benchmarks.fp8")
