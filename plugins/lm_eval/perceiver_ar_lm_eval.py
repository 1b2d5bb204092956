"""Tells lm-eval, where it runs, of the model perceiver-ar."""

import sys
from contextlib import suppress


def announce() -> None:
    """Called by `import torch`, which nothing that goes wrong here may disturb."""
    registry = getattr(sys.modules.get("lm_eval.api.registry"), "model_registry", None)
    if registry is not None:
        with suppress(Exception):
            import lm_eval.models  # noqa: F401  # which adds lm-eval's own only while there are none

            registry.register("perceiver-ar", target="perceiver_ar.interop.lm_eval:PerceiverARLM")
