"""The authors' weights give the authors' logits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perceiver_ar.interop.official import from_params

FIXTURES = Path(__file__).resolve().parents[2] / "shared/data/fixtures/official"
FORWARD = [
    "a_absolute_sinusoidal",
    "b2_rotary_half_positions",
    "c_images_axial",
    "d_wide_inputs",
    "e_query_mlp",
]


def load(name: str) -> Any:
    path = FIXTURES / f"{name}.npz"
    if not path.exists():
        pytest.skip("needs ../shared/data/fixtures/official")
    return np.load(path)


def params_of(fixture: Any) -> dict[str, np.ndarray]:
    return {key.removeprefix("param/"): fixture[key] for key in fixture if key.startswith("param/")}


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("kwargs", ["config", "explicit_kwargs"])
def test_logits_equal_the_authors_own(name: str, kwargs: str) -> None:
    fixture = load(name)
    model = from_params(params_of(fixture), json.loads(str(fixture[kwargs])))
    tokens, positions = (torch.from_numpy(fixture[key]).long() for key in ("inputs", "input_idxs"))
    logits = model(tokens, positions=positions)
    torch.testing.assert_close(logits, torch.from_numpy(fixture["logits"]), atol=1e-5, rtol=0)


def test_short_sequences_give_the_authors_logits_once_padded_on_the_left() -> None:
    fixture = load("h_short_sequence")
    model = from_params(params_of(fixture), json.loads(str(fixture["config"])))
    tokens, positions = (torch.from_numpy(fixture[key]).long() for key in ("inputs", "input_idxs"))
    lengths = (tokens > 0).sum(1)
    moved = [
        (tokens[row].roll(int(tokens.shape[1] - n), 0), positions[row].roll(int(tokens.shape[1] - n), 0))
        for row, n in enumerate(lengths)
    ]
    tokens, positions = (torch.stack(parts) for parts in zip(*moved, strict=True))
    logits = model(tokens, positions=positions, lengths=lengths)
    torch.testing.assert_close(logits, torch.from_numpy(fixture["logits"]), atol=1e-5, rtol=0)


def test_parameters_that_do_not_fit_are_named() -> None:
    fixture = load("a_absolute_sinusoidal")
    params, kwargs = params_of(fixture), json.loads(str(fixture["config"]))
    with pytest.raises(ValueError, match="perceiver_ar/~/embed/embeddings"):
        from_params({k: v for k, v in params.items() if k != "perceiver_ar/~/embed/embeddings"}, kwargs)
    with pytest.raises(ValueError, match="no place for the parameters perceiver_ar/~/extra/w"):
        from_params(params | {"perceiver_ar/~/extra/w": np.zeros(3)}, kwargs)
    with pytest.raises(ValueError, match="not that of the sinusoids"):
        from_params(params | {"perceiver_ar/~/embed_1/embeddings": np.zeros((51, 64))}, kwargs)


def test_arguments_that_cannot_be_met_are_named() -> None:
    fixture = load("a_absolute_sinusoidal")
    params, kwargs = params_of(fixture), json.loads(str(fixture["config"]))
    for wrong, sentence in (
        ({"mask_style": "other"}, "mask_style='other' is not supported: it must be 'final_block'"),
        ({"position_encoding_type": "foo"}, "position_encoding_type='foo' is not supported"),
        ({"num_clases": 3}, "did you mean 'num_classes'"),
        ({"initial_query_embed_style": "mlp"}, "query style 'mlp' with 2 layers"),
    ):
        with pytest.raises(ValueError, match=sentence):
            from_params(params, kwargs | wrong)
    with pytest.raises(ValueError, match="the argument num_classes is missing"):
        from_params(params, {k: v for k, v in kwargs.items() if k != "num_classes"})


@pytest.mark.parametrize("shared", [False, True])
def test_learned_queries_are_taken_over(shared: bool) -> None:
    fixture = load("a_absolute_sinusoidal")
    params, kwargs = params_of(fixture), json.loads(str(fixture["config"]))
    learned = np.random.default_rng(0).normal(size=(1 if shared else 16, 64)).astype(np.float32)
    params = {k: v for k, v in params.items() if not k.startswith("perceiver_ar/~/linear/")}
    style = {"initial_query_embed_style": "learned", "share_learned_initial_query": shared}
    model = from_params(params | {"perceiver_ar/q_embed_learned": learned}, kwargs | style)
    assert model.config.queries == ("learned-shared" if shared else "learned")
    assert np.array_equal(model.queries.learned.weight.detach().numpy(), learned)
