"""Optional libraries that only some tasks need."""

import importlib
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


def need(module: str, extra: str | None = None) -> Any:
    """Imports a module, or raises an error that says how to install it, with an extra or by itself."""
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.split(".")[0]
        source = name if extra is None else f"'perceiver-ar[{extra}]'"
        raise ValueError(f"this needs {name}: pip install {source}") from None


@contextmanager
def hushed() -> Generator[None]:
    """Silences standard error, C libraries included."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
