"""Settings: strict, complete, and refused in one sentence where they cannot work."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

import perceiver_ar.config as config_module
from perceiver_ar.config import Experiment, ModelConfig, TrainConfig, TransformerConfig, TransformerXLConfig

SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "context": 64,
    "latents": 16,
    "channels": 32,
    "heads": 4,
    "layers": 2,
}


def test_configs_survive_json() -> None:
    model = ModelConfig(**SMALL, positions="axial", axes=(6, 6, 5), cross_heads=2, max_wavelength=100.0)
    experiment = Experiment("mine", "image", model, TrainConfig(steps=5), {"order": "rgb"})
    assert ModelConfig.from_dict(json.loads(json.dumps(model.to_dict()))) == model
    assert Experiment.from_dict(json.loads(json.dumps(experiment.to_dict()))) == experiment


@pytest.mark.parametrize(
    "model", [ModelConfig(**SMALL), TransformerConfig(259, 64), TransformerXLConfig(259, layers=2)]
)
def test_the_kind_of_a_model_is_recorded_and_read_even_if_settings_are_left_to_their_defaults(
    model: Any,
) -> None:
    experiment = Experiment("mine", "copy", model, TrainConfig())
    record = json.loads(json.dumps(experiment.record()))
    assert Experiment.from_dict(record) == experiment
    defaults = {f.name: f.default for f in dataclasses.fields(model)}
    record["model"] = {k: v for k, v in record["model"].items() if k not in defaults or v != defaults[k]}
    assert Experiment.from_dict(record) == experiment
    record["model"]["model_type"] = "transformer_xxl"
    with pytest.raises(ValueError, match="not a type of model; did you mean 'transformer_xl'"):
        Experiment.from_dict(record)


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelConfig(**SMALL).latents = 3  # ty: ignore[invalid-assignment]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"latent": 16}, "'latent' is not a setting of ModelConfig; did you mean 'latents'?"),
        ({"zzz": 1}, "'zzz' is not a setting of ModelConfig; choose from vocab_size, context"),
        ({"latents": "16"}, "latents must be of type int, but is '16'."),
        ({"latents": True}, "latents must be of type int, but is True."),
        ({"latents": 1.5}, "latents must be of type int, but is 1.5."),
        ({"tied": 1}, "tied must be of type bool, but is 1."),
        ({"axes": [6, "6"]}, "axes must be of type int, but is '6'."),
        ({"axes": 6}, "axes must be of type tuple, but is 6."),
        ({"positions": "rotray"}, "'rotray' is not a choice for positions; did you mean 'rotary'?"),
    ],
)
def test_misspelt_and_mistyped_settings_are_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        ModelConfig.from_dict(SMALL | wrong)


def test_missing_settings_are_named() -> None:
    with pytest.raises(ValueError, match="ModelConfig needs the setting 'context'"):
        ModelConfig.from_dict({"vocab_size": 259})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
        ({"layers": -1}, "layers cannot be negative"),
        ({"heads": 5}, r"channels \(32\) must be divisible by heads \(5\)"),
        (
            {"input_channels": 36, "cross_heads": 5},
            r"input_channels \(36\) must be divisible by cross_heads \(5\)",
        ),
        ({"latents": 65}, r"latents \(65\) cannot exceed the context \(64\)"),
        ({"rotary_fraction": 0.0}, "rotary_fraction must be above 0 and at most 1"),
        ({"rotary_fraction": 1.5}, "rotary_fraction must be above 0 and at most 1"),
        ({"heads": 16}, "leaves no pair"),
        ({"positions": "axial"}, "axial positions and axes go together"),
        ({"axes": (4, 4)}, "axial positions and axes go together"),
        ({"positions": "axial", "axes": (4, 0)}, "at least 1 row"),
        ({"positions": "sinusoidal", "input_channels": 33, "cross_heads": 3}, "even input width"),
        ({"max_wavelength": 0.5}, "max_wavelength must be at least 1"),
        ({"tied": True, "input_channels": 64}, "tied needs input_channels"),
        ({"queries": "inputs", "input_channels": 64}, "queries='inputs' needs input_channels"),
        ({"cutoffs": (100, 50)}, "must grow"),
        ({"cutoffs": (300,)}, "below vocab_size"),
        ({"cutoffs": (50, 100, 200)}, "no channels: use fewer cutoffs"),
        ({"cutoffs": (50,), "tied": True}, "cannot be tied"),
        ({"cross_dropout": 1.0}, "cross_dropout must be at least 0 and below 1"),
        ({"positions": "rotray"}, "did you mean 'rotary'"),
    ],
)
def test_impossible_combinations_are_refused_at_once(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ModelConfig(**SMALL | settings)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"warmup_steps": -1}, "warmup_steps cannot be negative"),
        ({"ema": 1.0}, "ema must be at least 0 and below 1"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"patience": 2}, "patience needs evaluations"),
        ({"latents_drawn": (16, 65)}, "latents_drawn must be numbers from 1 to 64"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
    ],
)
def test_impossible_training_is_refused_at_once(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Experiment("mine", "copy", ModelConfig(**SMALL), TrainConfig(**settings))


def test_every_field_is_documented_where_it_stands() -> None:
    lines = Path(config_module.__file__).read_text().splitlines()
    for config in (ModelConfig, TrainConfig):
        start = next(i for i, line in enumerate(lines) if line.startswith(f"class {config.__name__}("))
        for field in dataclasses.fields(config):
            at = next(i for i in range(start, len(lines)) if lines[i].startswith(f"    {field.name}:"))
            assert lines[at + 1].startswith('    """'), field.name
    assert len(dataclasses.fields(ModelConfig)) <= 24
