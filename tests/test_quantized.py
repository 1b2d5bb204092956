"""Weights in eight bits: close to those that they stand for, in every call."""

import copy

import pytest
import torch

from perceiver_ar import ModelConfig, PerceiverAR, TransformerXL, TransformerXLConfig, generate
from perceiver_ar.decoder import Decoder
from perceiver_ar.layers import Linear
from perceiver_ar.quantized import Int8Linear, quantize

V = 30


def models() -> list[Decoder]:
    torch.manual_seed(0)
    made: list[Decoder] = [
        PerceiverAR(ModelConfig(V, 64, 16, channels=32, heads=2, layers=2)),
        TransformerXL(TransformerXLConfig(V, 16, 8, 8, channels=32, heads=2, layers=2)),
    ]
    for model in made:
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.05)
    return [model.eval() for model in made]


def test_a_weight_is_off_by_half_a_step_at_most() -> None:
    linear = Linear(64, 48)
    rough, x = Int8Linear(linear), torch.randn(17, 64)
    steps = linear.weight.abs().amax(dim=1, keepdim=True) / 127
    meant = rough.weight * rough.scale[:, None]
    assert ((meant - linear.weight).abs() <= steps * 0.5001).all()
    torch.testing.assert_close(rough(x), torch.nn.functional.linear(x, meant, linear.bias))
    assert rough.weight.element_size() == 1


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (32, 1), (96, 391), (1024, 512), (20, 7)])
def test_few_rows_give_what_many_give(inputs: int, outputs: int) -> None:
    rough, x = Int8Linear(Linear(inputs, outputs)), torch.randn(2, 9, inputs)
    many = rough(x)
    for rows in (1, 5, 8):
        few = rough(x[:, :rows])
        assert few.dtype == torch.float32
        assert (few - many[:, :rows]).norm() < 0.004 * many[:, :rows].norm()


def test_only_blocks_are_rounded() -> None:
    for model in (
        PerceiverAR(ModelConfig(V, 64, 16, channels=32, heads=2, layers=1, cutoffs=(8, 16))),
        TransformerXL(TransformerXLConfig(V, 16, 8, 8, channels=32, heads=2, layers=1, cutoffs=(8, 16))),
    ):
        exact = copy.deepcopy(model).eval()
        rounded = [name for name, part in quantize(model).named_modules() if isinstance(part, Int8Linear)]
        assert rounded
        assert all(name.startswith(("cross_attend.", "self_attends.")) for name in rounded)
        tokens = torch.randint(V, (2, 17))
        nats = [m.nats(tokens[:, :-1], tokens[:, -8:]).mean() for m in (model, exact)]
        torch.testing.assert_close(*nats, atol=0.05, rtol=0)


def test_zeros_stay_zeros() -> None:
    linear = Linear(8, 3)
    linear.weight.data.zero_()
    assert torch.equal(Int8Linear(linear)(torch.randn(2, 8)), torch.zeros(2, 3))


@pytest.mark.parametrize("index", [0, 1])
def test_a_model_in_eight_bits_says_nearly_the_same(index: int) -> None:
    model = models()[index]
    rough, tokens = quantize(copy.deepcopy(model)), torch.randint(V, (2, 24))
    assert not any(isinstance(module, Linear) for module in rough.self_attends.modules())
    with torch.no_grad():
        wanted, found = model(tokens, latents=8), rough(tokens, latents=8)
    off = (found - wanted).norm() / wanted.norm()
    assert 0 < off < 0.03


def test_drawing_in_eight_bits_is_the_same_with_and_without_a_cache() -> None:
    rough, prompt = quantize(models()[0]).double(), torch.randint(V, (2, 9))
    ids = generate(rough, prompt, 60, temperature=0)
    assert torch.equal(ids, generate(rough, prompt, 60, temperature=0, cache=False))
