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
    with pytest.raises(ValueError, match="mask_style"):
        from_params(params, kwargs | {"mask_style": "other"})
