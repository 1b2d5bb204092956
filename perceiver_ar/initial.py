"""Starting from a trained model instead of random weights."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from perceiver_ar.config import Experiment, ModelConfig
from perceiver_ar.model import PerceiverAR

FREE = ("context", "latents", "residual_dropout", "latent_dropout", "cross_dropout", "cross_dropout_scope")


def start_from(
    folder: str | Path | None, experiment: Experiment
) -> tuple[Experiment, dict[str, Tensor] | None]:
    """The experiment with what the trained model fixes, and that model's weights."""
    if folder is None:
        return experiment, None
    path = Path(folder)
    trained = PerceiverAR.from_pretrained(path / "model" if (path / "model").is_dir() else path)
    model = fit(trained.config, experiment.model, str(folder))
    return replace(experiment, model=model), trained.state_dict()


def fit(trained: ModelConfig, wanted: ModelConfig, name: str) -> ModelConfig:
    """The wanted config, if the trained weights can serve it; a longer context keeps their wavelengths."""
    for key, value in trained.to_dict().items():
        if key in (*FREE, "checkpoint_activations", "max_wavelength") or getattr(wanted, key) == value:
            continue
        asked = getattr(wanted, key)
        if key == "vocab_size":
            raise ValueError(f"{name} knows {value} tokens, but the data have {asked}: prepare them alike.")
        raise ValueError(
            f"{name} has {key} {value}, but {asked} is asked for: set --model.{key.replace('_', '-')}."
        )
    if trained.positions == "learned" and trained.context != wanted.context:
        raise ValueError(
            f"{name} learned {trained.context} positions, so its context cannot become {wanted.context}."
        )
    if trained.queries == "learned" and trained.latents != wanted.latents:
        raise ValueError(
            f"{name} learned {trained.latents} queries, so it cannot have {wanted.latents} latents."
        )
    rotary = trained.positions == "rotary"
    longest = trained.max_wavelength or (float(trained.context) if rotary else None)
    return replace(wanted, max_wavelength=longest)
