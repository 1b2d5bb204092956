"""Libraries that only some tasks need."""

import importlib
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


def need(module: str, extra: str | None = None) -> Any:
    """The module, or a sentence that says how to get it: with an extra of ours, or by itself."""
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.split(".")[0]
        source = name if extra is None else f"'perceiver-ar[{extra}]'"
        raise ValueError(f"this needs {name}: pip install {source}") from None


@contextmanager
def hushed() -> Generator[None]:
    """Hides what libraries in C write to standard error."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
