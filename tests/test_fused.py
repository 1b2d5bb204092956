"""A step by kernels of our own equals the plain one: on a GPU, or interpreted where triton is installed."""

import itertools
import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
pytest.importorskip("triton")

from perceiver_ar import fused, quantized  # noqa: E402
from perceiver_ar.attention import rotation  # noqa: E402
from perceiver_ar.caching import through  # noqa: E402
from perceiver_ar.model import Block  # noqa: E402
from perceiver_ar.quantized import quantize  # noqa: E402

CASES = [(*c, False) for c in itertools.product((1, 2, 5), (False, True), (False, True), (False, True))]
CASES += [(70, False, True, True, False), (1, True, False, True, True), (3, True, True, False, True)]


@pytest.mark.parametrize(("rows", "cross", "padded", "rotary", "int8"), CASES)
def test_a_fused_block_equals_the_plain_one(
    rows: int, cross: bool, padded: bool, rotary: bool, int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "_FEW", 0)  # a CPU would round to bf16
    torch.manual_seed(0)
    channels, width, heads, room, place = (96, 64, 4, 150, 101) if cross else (64, 64, 4, 150, 101)
    block = Block(channels, heads, 0.0, width if cross else None).to(DEVICE).eval()
    for parameter in block.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    if int8:
        quantize(block)
    z = torch.randn(rows, 1, channels, device=DEVICE)
    inputs = torch.randn(rows, 1, width, device=DEVICE) if cross else None
    keys, values = torch.randn(2, rows, heads, room, 16, device=DEVICE)
    fast_keys, fast_values = keys.clone(), values.clone()
    turn = rotation(torch.full((rows, 1), place, device=DEVICE), 16, 0.5, 200.0) if rotary else None
    at, columns = torch.tensor([place], device=DEVICE), torch.arange(room, device=DEVICE)
    first = torch.tensor([0, 5, 90, 101, 3], device=DEVICE).repeat(14)[:rows, None]
    visible = (columns <= place) & (columns >= first) if padded else None
    held = room if padded else place + 1
    with torch.no_grad():
        wanted = through(block, z, inputs, (turn, turn), keys[:, :, :held], values[:, :, :held], at, visible)
        found = fused.through(block, z, inputs, (turn, turn), fast_keys, fast_values, at, visible)
    for a, b in ((found, wanted), (fast_keys, keys), (fast_values, values)):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
