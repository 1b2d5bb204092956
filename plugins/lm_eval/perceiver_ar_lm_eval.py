"""Registers the model perceiver-ar with lm-eval, in processes where lm-eval runs."""

import sys
from contextlib import suppress


def announce() -> None:
    """Called by `import torch`, so no failure here may propagate."""
    registry = getattr(sys.modules.get("lm_eval.api.registry"), "model_registry", None)
    if registry is not None:
        with suppress(Exception):
            import lm_eval.models  # noqa: F401  # first: its own are added only to an empty registry

            registry.register("perceiver-ar", target="perceiver_ar.interop.lm_eval:PerceiverARLM")
