"""Pickles followed, not run: they give numbers, text, arrays, lists, tuples and dicts, and nothing else.

pickletools takes the file apart; the few opcodes that data need are done here. A name in the file is looked
up in NAMES, whose functions are all in this file, and never imported.
"""

import math
import mmap
import reprlib
from collections.abc import Callable
from pathlib import Path
from pickletools import genops
from typing import Any, Literal

import numpy as np

MOST_OPCODES = 5_000_000
"""More than any checkpoint has, and few enough that what they build fits in memory."""


class Refused(ValueError):
    """What a file holds that is not data."""


def read_pickle(path: Path) -> Any:
    """The plain values of a pickle, its arrays as Array; refuses by name what is more than data."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file: give the checkpoint itself.")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty: fetch it again.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        binary = content[:1] == b"\x80"
        try:
            return _Stack().follow(content)
        except Refused as error:
            raise ValueError(f"{path} is refused, and nothing of it was run: it holds {error}.") from None
        except (ValueError, TypeError, LookupError, OverflowError, MemoryError) as error:
            what = "a whole pickle: fetch it again" if binary else "a pickle of protocol 2 or later"
            raise ValueError(f"{path} is not {what} ({error!s:.200}).") from None


class Dtype:
    """The kind of numbers in an array, and the order of their bytes."""

    def __init__(self, code: Any, align: Any = False, copy: Any = True) -> None:
        if code is bfloat16:
            code = "bfloat16"
        if not isinstance(code, str) or code not in _CODES:
            raise Refused(f"an array of {_short(code)}, not of numbers")
        self.code, self.order = code, "<"

    def fill(self, state: Any) -> None:
        _, self.order, *fields = state[:5]
        if self.order not in ("<", ">", "|", "=") or fields != [None] * 3:
            raise Refused("an array of records, not of numbers")


class Array:
    """An array's bytes as they stand in the file, which are not copied until its values are asked for."""

    def __init__(self) -> None:
        self.dtype, self.shape, self.content = Dtype("u1"), (0,), b""
        self.order: Literal["C", "F"] = "C"

    def fill(self, state: Any) -> None:
        """What numpy keeps of an array: version, shape, dtype, whether Fortran's order, bytes."""
        _, shape, dtype, fortran, content = state
        self._set(content, dtype, shape, "F" if fortran else "C")

    def _set(self, content: Any, dtype: Any, shape: Any, order: Any) -> None:
        if not (isinstance(content, bytes | bytearray) and isinstance(dtype, Dtype) and order in ("C", "F")):
            raise Refused("an array that is not made of bytes")
        if (
            not isinstance(shape, tuple)
            or len(shape) > 32
            or not all(type(n) is int and n >= 0 for n in shape)
        ):
            raise Refused("an array without a shape")
        if math.prod(shape) * _CODES[dtype.code] != len(content):
            raise Refused(f"an array of {_short(shape)} numbers in {len(content):,} bytes, which do not fit")
        self.dtype, self.shape, self.order, self.content = dtype, shape, order, content

    @property
    def values(self) -> np.ndarray:
        code, order = self.dtype.code, self.dtype.order
        if code == "bfloat16":  # the upper half of a float32
            halves = np.frombuffer(self.content, f"{order}u2").astype(np.uint32)
            flat = (halves << 16).view(np.float32)
        else:
            flat = np.frombuffer(self.content, order + code)
        return flat.reshape(self.shape, order=self.order)


class Ignored:
    """Stands for what is not needed, such as the optimizer's state; keeps nothing."""

    def __init__(self, *content: Any) -> None:
        pass

    def fill(self, state: Any) -> None:
        pass


_CODES = {f"{kind}{size}": size for kind in "fiu" for size in (1, 2, 4, 8) if kind + str(size) != "f1"}
_CODES |= {"b1": 1, "bfloat16": 2}


def bfloat16() -> None:
    """Stands for the dtype of that name."""
    raise Refused("a call of bfloat16")


def ndarray() -> None:
    """Stands for the class of that name."""
    raise Refused("a call of numpy.ndarray")


def empty_array(kind: Any, shape: Any, code: Any) -> Array:
    """An array before its bytes are told; what kind and shape say is told again with these."""
    if kind is not ndarray:
        raise Refused("an array of a class of its own")
    return Array()


def whole_array(make: Any, arguments: Any, state: Any, more: Any = None) -> Array:
    """An array as dill and JAX write it: what numpy calls, and the bytes."""
    if make is not empty_array:
        raise Refused("an array that is not numpy's")
    array = empty_array(*arguments)
    array.fill(state)
    return array


def buffer_array(content: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> Array:
    """An array as numpy writes it in protocol 5."""
    array = Array()
    array._set(content, dtype, shape, order)
    return array


def scalar(dtype: Any, content: Any) -> Any:
    """One of numpy's numbers as Python's own."""
    return buffer_array(content, dtype, (), "C").values.item()


def mapping(content: Any = None) -> dict[Any, Any]:
    """A dict for what behaves like one."""
    if content is None:
        return {}
    if type(content) is not dict:
        raise Refused("a mapping made of something else than a dict")
    return content


def namedtuple(name: Any, fields: Any, module: Any, defaults: Any = None) -> type[Ignored]:
    """A class that dill describes rather than names: of the optimizer's, or refused."""
    if not _is_optax(module):
        raise Refused(f"the class {_short(f'{module}.{name}')}")
    return Ignored


NAMES: dict[str, Callable[..., Any]] = {
    "numpy.ndarray": ndarray,
    "numpy.dtype": Dtype,
    **{f"numpy.{core}.multiarray._reconstruct": empty_array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": scalar for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": buffer_array for core in ("core", "_core")},
    "ml_dtypes.bfloat16": bfloat16,
    "jaxlib.xla_extension.bfloat16": bfloat16,
    "jax._src.array._reconstruct_array": whole_array,
    "jax._src.device_array.reconstruct_device_array": whole_array,
    "jax.interpreters.xla.reconstruct_device_array": whole_array,
    "dill._dill._create_array": whole_array,
    "dill._dill._create_namedtuple": namedtuple,
    **{f"haiku._src.data_structures.{name}": mapping for name in ("FlatMap", "FlatMapping", "frozendict")},
    "collections.OrderedDict": mapping,
}
"""All that a pickle may call, and what is done in its place."""


def _is_optax(module: Any) -> bool:
    return isinstance(module, str) and module.startswith("optax.")


def _short(value: Any) -> str:
    """Short, not deep and without control characters, as it comes from a stranger."""
    if isinstance(value, str):
        return repr(value[:100])
    return reprlib.repr(value) if isinstance(value, tuple) else type(value).__name__


class _Stack:
    """What pickle's opcodes work on."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def follow(self, content: Any) -> Any:
        for count, (opcode, argument, _) in enumerate(genops(content)):
            if count == MOST_OPCODES:
                raise Refused(f"more than {MOST_OPCODES:,} opcodes")
            if opcode.name == "STOP":
                break
            self._do(opcode.name, argument)
        (result,) = self.items
        return result

    def _do(self, name: str, argument: Any) -> None:
        items = self.items
        match name:
            case "PROTO" | "FRAME":
                pass
            case "NONE":
                items.append(None)
            case "NEWTRUE" | "NEWFALSE":
                items.append(name == "NEWTRUE")
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "LONG4" | "BINFLOAT":
                items.append(argument)
            case "SHORT_BINUNICODE" | "BINUNICODE" | "BINUNICODE8":
                items.append(argument)
            case "SHORT_BINBYTES" | "BINBYTES" | "BINBYTES8" | "BYTEARRAY8":
                items.append(argument)
            case "EMPTY_DICT":
                items.append({})
            case "EMPTY_LIST":
                items.append([])
            case "EMPTY_TUPLE":
                items.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                items.append(tuple(self._pop(int(name[-1]))))
            case "MARK":
                self.marks.append(len(items))
            case "TUPLE":
                items.append(tuple(self._since_mark()))
            case "APPEND" | "APPENDS":
                added = self._pop(1) if name == "APPEND" else self._since_mark()
                self._top(list).extend(added)
            case "SETITEM" | "SETITEMS":
                added = self._pop(2) if name == "SETITEM" else self._since_mark()
                if not all(isinstance(key, str | int) for key in added[::2]):
                    raise Refused("a dict whose keys are neither text nor integers")
                self._top(dict).update(zip(added[::2], added[1::2], strict=True))
            case "MEMOIZE":
                self.memo[len(self.memo)] = items[-1]
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = items[-1]
            case "BINGET" | "LONG_BINGET":
                items.append(self.memo[argument])
            case "GLOBAL":
                items.append(_known(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                items.append(_known(*self._pop(2)))
            case "REDUCE" | "NEWOBJ":
                make, arguments = self._pop(2)
                called = any(make is known for known in (*NAMES.values(), Ignored))
                if not called or type(arguments) is not tuple:
                    raise Refused(f"a call of {_short(make)}")
                items.append(make(*arguments))
            case "BUILD":
                (state,) = self._pop(1)
                if type(items[-1]) not in (Array, Dtype, Ignored):
                    raise Refused(f"a state for {_short(items[-1])}")
                items[-1].fill(state)
            case _:
                raise Refused(f"the opcode {name}")

    def _pop(self, count: int) -> list[Any]:
        if len(self.items) < count:
            raise IndexError("too few items")
        taken = self.items[-count:]
        del self.items[-count:]
        return taken

    def _since_mark(self) -> list[Any]:
        start = self.marks.pop()
        taken = self.items[start:]
        del self.items[start:]
        return taken

    def _top(self, kind: type) -> Any:
        if type(self.items[-1]) is not kind:
            raise Refused(f"items for {_short(self.items[-1])}")
        return self.items[-1]


def _known(module: Any, name: Any) -> Callable[..., Any]:
    """What is done in the place of a name; the optimizer's state is passed over."""
    if _is_optax(module):
        return Ignored
    wanted = f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else ""
    if wanted not in NAMES:
        raise Refused(f"{_short(wanted)}, which is no array and no container of a checkpoint")
    return NAMES[wanted]
