"""Bridges to other people's code and weights; nothing in the core imports these."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("official", "lm_eval"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
