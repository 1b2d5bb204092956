"""What tokens mean. A task is one file here, and one line below."""

import importlib
from collections.abc import Callable
from typing import Any

from perceiver_ar.store import Store
from perceiver_ar.strict import unknown
from perceiver_ar.tasks.base import Task

_TASKS = {
    "audio": "AudioTask",
    "copy": "CopyTask",
    "image": "ImageTask",
    "music": "MusicTask",
    "text": "TextTask",
    "tokens": "TokensTask",
}


def get(name: str, options: dict[str, Any] | None = None) -> Task:
    """The task of that name with these settings."""
    if name not in _TASKS:
        raise ValueError(unknown("task", name, sorted(_TASKS)))
    return getattr(_module(name), _TASKS[name]).from_dict(options or {})


def preparer(name: str) -> Callable[..., Store]:
    """What makes a store for the task of that name."""
    if name not in _TASKS or not hasattr(_module(name), "prepare"):
        raise ValueError(unknown("task that needs preparing", name, prepared()))
    return _module(name).prepare


def prepared() -> list[str]:
    """The tasks whose tokens are made from files."""
    return [task for task in sorted(_TASKS) if hasattr(_module(task), "prepare")]


def _module(name: str) -> Any:
    return importlib.import_module(f"perceiver_ar.tasks.{name}")


def is_known(name: str) -> bool:
    return name in _TASKS
