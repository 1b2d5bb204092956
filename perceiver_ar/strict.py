"""Frozen dataclasses that check their values, with strict conversion from plain dicts."""

import difflib
import numbers
import types
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Config:
    """Settings whose types are checked, with strict conversion to and from plain dicts."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for f in fields(self):
            object.__setattr__(self, f.name, _read(getattr(self, f.name), hints[f.name], f.name))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Builds the config; raises on unknown settings, missing ones and values of the wrong type."""
        known = {f.name: f for f in fields(cls)}
        for key in data:
            if key not in known:
                raise ValueError(unknown(f"setting of {cls.__name__}", key, known))
        for key, f in known.items():
            if key not in data and f.default is MISSING and f.default_factory is MISSING:
                raise ValueError(f"{cls.__name__} needs the setting '{key}'.")
        return cls(**data)


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The error message for an unknown name, with the closest known one."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"choose from {', '.join(known)}."
    article = "an" if kind[0] in "aeiou" else "a"
    return f"'{name}' is not {article} {kind}; {hint}"


def _read(value: Any, expected: Any, name: str) -> Any:
    """Converts a value to its type hint (lists to tuples, dicts to configs), or raises if it does not fit."""
    origin, arguments = get_origin(expected), get_args(expected)
    if origin is Literal:
        if value in arguments:
            return value
        raise ValueError(unknown(f"choice for {name}", value, map(str, arguments)))
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _read(value, _fitting(value, [a for a in arguments if a is not type(None)]), name)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_read(item, arguments[0], name) for item in value)
    if isinstance(value, dict) and isinstance(expected, type) and issubclass(expected, Config):
        return expected.from_dict(value)
    kinds = {int: numbers.Integral, float: numbers.Real}
    fits = isinstance(value, kinds.get(expected, origin or expected))
    if fits and isinstance(value, bool) == (expected is bool):
        return expected(value) if expected in kinds else value
    wanted = getattr(expected, "__name__", str(expected))
    raise ValueError(f"{name} must be of type {wanted}, but is {value!r}.")


def _fitting(value: Any, kinds: list[Any]) -> Any:
    """The type of a union that a value has, or else the first.

    A dict counts as a config if its keys differ from the config's settings in at most three names.
    """
    for kind in kinds:
        names = {f.name for f in fields(kind)} if is_dataclass(kind) else set()
        if isinstance(value, dict) and names and len(value.keys() ^ names) <= 3:
            return kind
        if isinstance(kind, type) and isinstance(value, kind):
            return kind
    return kinds[0]


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)
