"""Starting from a trained model instead of random weights."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from perceiver_ar.architectures import load_model
from perceiver_ar.config import AnyModelConfig, Experiment, ModelConfig, TransformerXLConfig
from perceiver_ar.run import Origin, inner_folder, load
from perceiver_ar.source import Source, check_tokens, meaning

MAY_DIFFER_FROM_INIT = {
    *("context", "latents", "residual_dropout", "latent_dropout", "cross_dropout", "cross_dropout_scope"),
    *("segment", "memory", "evaluation_memory", "memory_dropout", "checkpoint_activations", "max_wavelength"),
}
"""Model settings that may differ from those of the initial model."""


def start_from(
    origin: Origin, experiment: Experiment, source: Source
) -> tuple[Experiment, dict[str, Tensor] | None]:
    """The experiment with what the initial model fixes, and the initial weights, if they are needed."""
    if origin.init is None:
        return experiment, None
    if origin.begun is not None:
        return replace(experiment, model=fit(origin.begun, experiment.model, "the run")), None
    path = Path(origin.init)
    inner = inner_folder(path)
    if (inner / "experiment.json").exists():
        trained, task, _ = load(inner, "cpu")
        check_tokens(source.stores, meaning(task.name, task.to_dict()), str(path))
    else:
        trained = load_model(inner)
    model = fit(trained.config, experiment.model, str(path))
    return replace(experiment, model=model), trained.state_dict()


def fit(trained: AnyModelConfig, wanted: AnyModelConfig, name: str) -> AnyModelConfig:
    """The wanted config, if the trained weights fit it; by default it keeps their wavelengths."""
    if type(trained) is not type(wanted):
        raise ValueError(f"{name} is a model of another kind than the preset's: choose a preset of its kind.")
    for key, value in trained.to_dict().items():
        if key in MAY_DIFFER_FROM_INIT or getattr(wanted, key) == value:
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
    queries = trained.queries if isinstance(trained, ModelConfig) else None
    if queries == "learned" and trained.latents != wanted.latents:
        raise ValueError(
            f"{name} learned {trained.latents} queries, so it cannot have {wanted.latents} latents."
        )
    either = isinstance(trained, TransformerXLConfig) or isinstance(wanted, TransformerXLConfig)
    if either or wanted.max_wavelength is not None:
        return wanted
    rotary = trained.positions == "rotary"
    longest = trained.max_wavelength or (float(trained.context) if rotary else None)
    return replace(wanted, max_wavelength=longest)
