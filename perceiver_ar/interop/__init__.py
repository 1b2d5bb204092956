"""Bridges to other people's code and weights; nothing in the core imports these."""

import importlib
import sys
from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("official", "lm_eval"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def announce() -> None:
    """Tells lm-eval, where it runs, of our model; torch calls this while it is imported (pyproject.toml)."""
    registry = getattr(sys.modules.get("lm_eval.api.registry"), "model_registry", None)
    if registry is not None:
        importlib.import_module("lm_eval.models")  # which adds lm-eval's own only while there are none
        if "perceiver-ar" not in registry:
            registry.register("perceiver-ar", target="perceiver_ar.interop.lm_eval:PerceiverARLM")
