"""Perceiver AR: long-context autoregressive models of text, bytes, images, music and audio."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perceiver_ar.architectures import build as build
    from perceiver_ar.baselines import Transformer as Transformer
    from perceiver_ar.baselines import TransformerXL as TransformerXL
    from perceiver_ar.config import Experiment as Experiment
    from perceiver_ar.config import ModelConfig as ModelConfig
    from perceiver_ar.config import TrainConfig as TrainConfig
    from perceiver_ar.config import TransformerConfig as TransformerConfig
    from perceiver_ar.config import TransformerXLConfig as TransformerXLConfig
    from perceiver_ar.evaluation import evaluate as evaluate
    from perceiver_ar.generation import generate as generate
    from perceiver_ar.generation import stream as stream
    from perceiver_ar.model import PerceiverAR as PerceiverAR
    from perceiver_ar.training import train as train

__version__ = "0.1.0"

_HOME = {
    "Experiment": "config",
    "ModelConfig": "config",
    "TrainConfig": "config",
    "Transformer": "baselines",
    "TransformerConfig": "config",
    "TransformerXL": "baselines",
    "TransformerXLConfig": "config",
    "PerceiverAR": "model",
    "build": "architectures",
    "evaluate": "evaluation",
    "generate": "generation",
    "stream": "generation",
    "train": "training",
    "interop": None,
    "presets": None,
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Imports a name on first use: torch alone takes over a second to import, and `--help` does without."""
    if name not in _HOME:
        raise AttributeError(f"module 'perceiver_ar' has no attribute '{name}'")
    if _HOME[name] is None:
        return importlib.import_module(f"perceiver_ar.{name}")
    return getattr(importlib.import_module(f"perceiver_ar.{_HOME[name]}"), name)
