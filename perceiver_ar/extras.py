"""Libraries that only some tasks need."""

import importlib
from typing import Any


def need(module: str, extra: str) -> Any:
    """The module, or a sentence that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.split(".")[0]
        raise ValueError(f"this needs {name}: pip install 'perceiver-ar[{extra}]'") from None
