"""What tokens mean. A task is one file here, and one line below."""

import importlib
from typing import Any

from perceiver_ar.config import unknown
from perceiver_ar.tasks.base import Task

_TASKS = {"copy": "CopyTask", "tokens": "TokensTask"}


def get(name: str, options: dict[str, Any] | None = None) -> Task:
    """The task of that name with these settings."""
    if name not in _TASKS:
        raise ValueError(unknown("task", name, sorted(_TASKS)))
    module = importlib.import_module(f"perceiver_ar.tasks.{name}")
    return getattr(module, _TASKS[name]).from_dict(options or {})


def is_known(name: str) -> bool:
    return name in _TASKS
