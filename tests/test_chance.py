"""What is dropped is a fair share, by example and place alone."""

from collections.abc import Callable

import pytest
import torch

from perceiver_ar import ModelConfig, build
from perceiver_ar.chance import branch, branches, draws, drop, kept, new_seeds
from perceiver_ar.config import TransformerConfig, TransformerXLConfig
from perceiver_ar.decoder import Decoder

V = 11
MODELS: dict[str, Callable[[], Decoder]] = {
    "perceiver-ar": lambda: build(
        ModelConfig(
            V,
            24,
            8,
            channels=16,
            heads=2,
            layers=2,
            residual_dropout=0.3,
            cross_dropout=0.4,
            latent_dropout=0.2,
        )
    ),
    "transformer": lambda: build(
        TransformerConfig(V, 24, channels=16, heads=2, layers=2, residual_dropout=0.3)
    ),
    "transformer-xl": lambda: build(
        TransformerXLConfig(
            V, 8, channels=16, heads=2, layers=2, memory=12, residual_dropout=0.3, memory_dropout=0.4
        )
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_dropped_of_an_example_does_not_depend_on_what_is_beside_it(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double().train()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    tokens, seeds = torch.randint(V, (5, 20)), new_seeds(5, torch.device("cpu"))
    lengths = torch.tensor([20, 9, 14, 20, 17])
    whole = model(tokens, lengths=lengths, seeds=seeds)
    for rows in (slice(0, 1), slice(1, 3), slice(2, 5)):
        part = model(tokens[rows], lengths=lengths[rows], seeds=seeds[rows])
        torch.testing.assert_close(part[:, -8:], whole[rows, -8:], atol=1e-12, rtol=1e-12)
    assert not torch.allclose(whole, model(tokens, lengths=lengths, seeds=seeds + 1), atol=1e-3)
    torch.manual_seed(5)
    drawn = model(tokens)
    assert not torch.allclose(drawn, model(tokens), atol=1e-3)  # each call drops anew
    torch.manual_seed(5)
    assert model(tokens).equal(drawn)


def test_draws_are_even_and_have_nothing_to_do_with_one_another() -> None:
    seeds = torch.arange(8, dtype=torch.int32)  # as alike as can be
    found = torch.stack([draws(s, 64, 256).double() / 2**31 for s in (seeds, branch(seeds, 1), seeds + 8)])
    flat = found.flatten(2).flatten(0, 1)  # 24 streams of 16,384
    assert 0 <= flat.min() < 0.001
    assert 0.999 < flat.max() < 1
    assert (flat.mean(1) - 0.5).abs().max() < 5 * (1 / 12 / 16_384) ** 0.5
    histogram = torch.histc(flat.float(), 64, 0, 1)
    assert ((histogram - flat.numel() / 64) ** 2 / (flat.numel() / 64)).sum() < 63 + 5 * (2 * 63) ** 0.5
    apart = torch.corrcoef(torch.cat((flat, flat.roll(1, 1), flat.roll(256, 1)))) - torch.eye(72)
    assert apart.abs().max() < 6 / 16_384**0.5


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.9999999999])
def test_dropout_drops_its_share_and_keeps_the_mean(share: float) -> None:
    x, seeds = torch.full((4, 100, 250), 2.0), new_seeds(4, torch.device("cpu"))
    left = kept(seeds, share, 100, 250)
    assert left.double().mean().item() == pytest.approx(
        1 - share, abs=5 * (share * (1 - share) / x.numel()) ** 0.5
    )
    out = drop(x, share, seeds)
    assert out[~left].eq(0).all()
    torch.testing.assert_close(out[left], torch.full_like(out[left], 2 / (1 - share)))
    assert drop(x, share, None) is x
    assert drop(x.bfloat16(), share, seeds).dtype == torch.bfloat16


def test_layers_have_seeds_of_their_own() -> None:
    seeds = new_seeds(3, torch.device("cpu"))
    found = branches(seeds, 40)
    assert len({tuple(x.tolist()) for x in found if x is not None}) == 40
    assert all(x is not None and x.equal(branch(seeds, n)) for n, x in enumerate(found))
    assert branches(None, 2) == [None, None]


def test_seeds_are_checked_and_taken_as_32_bits() -> None:
    model = MODELS["perceiver-ar"]().train()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    tokens, seeds = torch.randint(V, (3, 20)), torch.tensor([1, -2, 2**31 - 1], dtype=torch.int32)
    wanted = model(tokens, seeds=seeds)
    for kind in (torch.int64, torch.uint32):
        torch.testing.assert_close(model(tokens, seeds=seeds.to(kind)), wanted)
    for bad in (seeds[:1], seeds[None], seeds.float()):
        with pytest.raises(ValueError, match=r"seeds must be whole numbers of shape \(3,\), not "):
            model(tokens, seeds=bad)
    assert branch(None, 1) is None
