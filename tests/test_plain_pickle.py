"""Pickles give data, or are refused without anything being run."""

import builtins
import codecs
import collections
import copyreg
import ctypes
import functools
import importlib
import io
import logging
import operator
import os
import pickle
import random
import runpy
import shutil
import struct
import subprocess
import sys
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter as timer
from typing import Any

import numpy as np
import pytest

from perceiver_ar.interop.plain_pickle import NAMES, Array, Ignored, read_pickle

TOUCH = "touch ran"
OPEN = "open('ran', 'w').close()"


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.parts = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.parts


class Setter:
    """Runs code when its state is set."""

    def __setstate__(self, state: Any) -> None:
        Path("ran").touch()


class Maker:
    """Runs code when it is made."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Maker":
        Path("ran").touch()
        return super().__new__(cls)

    def __getnewargs__(self) -> Any:
        return (1,)


class KeywordMaker(Maker):
    def __getnewargs_ex__(self) -> Any:
        return (), {"x": 1}


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


def by_dill(make: Callable[[Any], Any]) -> bytes:
    dill = pytest.importorskip("dill")
    return dill.dumps(make(dill))


def raw(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


OS = call(name("importlib", "import_module"), text("os"))
ARRAY = np.arange(2).__reduce__()

LIVE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "os.system": ("posix.system", lambda: pickle.dumps(Call(os.system, TOUCH))),
    "protocol 0": ("posix.system", lambda: pickle.dumps(Call(os.system, TOUCH), 0)),
    "protocol 5": ("posix.system", lambda: pickle.dumps(Call(os.system, TOUCH), 5)),
    "os.mkdir": ("posix.mkdir", lambda: pickle.dumps(Call(os.mkdir, "ran"))),
    "subprocess": ("subprocess.call", lambda: pickle.dumps(Call(subprocess.call, ["touch", "ran"]))),
    "check_output": (
        "subprocess.check_output",
        lambda: pickle.dumps(Call(subprocess.check_output, TOUCH.split())),
    ),
    "eval": ("builtins.eval", lambda: pickle.dumps(Call(eval, OPEN))),
    "exec": ("builtins.exec", lambda: pickle.dumps(Call(exec, OPEN))),
    "open": ("'(_io|io).open'", lambda: pickle.dumps(Call(open, "ran", "w"))),
    "import": ("builtins.__import__", lambda: pickle.dumps(Call(__import__, "script"))),
    "importlib": ("importlib.import_module", lambda: pickle.dumps(Call(importlib.import_module, "script"))),
    "getattr": (
        "builtins.getattr",
        lambda: raw(call(call(name("builtins", "getattr"), OS, text("system")), text(TOUCH))),
    ),
    "attrgetter": (
        "operator.attrgetter",
        lambda: raw(call(call(call(name("operator", "attrgetter"), text("system")), OS), text(TOUCH))),
    ),
    "methodcaller": (
        "operator.methodcaller",
        lambda: pickle.dumps(Call(operator.methodcaller("touch"), Path("ran"))),
    ),
    "partial": ("functools.partial", lambda: pickle.dumps(Call(functools.partial(os.system, TOUCH)))),
    "map in a list": (
        "builtins.list",
        lambda: raw(
            call(
                name("builtins", "list"),
                call(name("builtins", "map"), name("os", "system"), b"(" + text(TOUCH) + b"t"),
            )
        ),
    ),
    "timeit": ("timeit.repeat", lambda: pickle.dumps(Call(timeit.repeat, OPEN, "pass", timer, 1, 1))),
    "run_path": ("runpy.run_path", lambda: pickle.dumps(Call(runpy.run_path, "script.py"))),
    "pickle.loads": (
        "_pickle.loads",
        lambda: pickle.dumps(Call(pickle.loads, pickle.dumps(Call(os.system, TOUCH)))),
    ),
    "logging": ("logging.FileHandler", lambda: pickle.dumps(Call(logging.FileHandler, "ran"))),
    "sqlite3": ("sqlite3", lambda: raw(call(name("sqlite3", "connect"), text("ran")))),
    "copyfile": ("shutil.copyfile", lambda: pickle.dumps(Call(shutil.copyfile, "script.py", "ran"))),
    "numpy.savetxt": ("numpy.savetxt", lambda: pickle.dumps(Call(np.savetxt, "ran", [1]))),
    "tofile": ("numpy.ndarray.tofile", lambda: _tofile()),
    "GLOBAL": ("os.system", lambda: raw(call(name("os", "system"), text(TOUCH)))),
    "STACK_GLOBAL": ("os.system", lambda: raw(call(text("os") + text("system") + b"\x93", text(TOUCH)))),
    "INST": ("the opcode INST", lambda: raw(b"(" + text(TOUCH) + b"ios\nsystem\n")),
    "OBJ": ("os.system", lambda: raw(b"(" + name("os", "system") + text(TOUCH) + b"o")),
    "NEWOBJ": ("Maker", lambda: pickle.dumps(Maker())),
    "NEWOBJ_EX": ("KeywordMaker", lambda: pickle.dumps(KeywordMaker(), 4)),
    "BUILD": ("Setter", lambda: raw(name(__name__, "Setter") + b")\x81}b")),
    "EXT1": ("the opcode EXT1", lambda: raw(call(b"\x82\xf0", text(TOUCH)))),
    "EXT2": ("the opcode EXT2", lambda: raw(call(b"\x83\xf0\x00", text(TOUCH)))),
    "EXT4": ("the opcode EXT4", lambda: raw(call(b"\x84\xf0\x00\x00\x00", text(TOUCH)))),
    "in a parameter": (
        "posix.system",
        lambda: pickle.dumps({"params": {"perceiver_ar/x": {"w": [1, (2, Call(os.system, TOUCH))]}}}),
    ),
    "as a key": ("posix.system", lambda: pickle.dumps({Call(os.system, TOUCH): 1})),
    "in an ordered dict": (
        "posix.system",
        lambda: pickle.dumps(collections.OrderedDict(x=Call(os.system, TOUCH))),
    ),
    "thrown away": ("os.system", lambda: raw(call(name("os", "system"), text(TOUCH)) + b"0}")),
    "in an array": (
        "an array of 'O8', not of numbers",
        lambda: pickle.dumps(np.array([Call(os.system, TOUCH)], dtype=object)),
    ),
    "as a dtype": (
        "posix.system",
        lambda: pickle.dumps(Call(np.dtype, Call(os.system, TOUCH))),
    ),
    "as an array's state": (
        "posix.system",
        lambda: pickle.dumps(Call(*ARRAY[:1], *ARRAY[1], state=Call(os.system, TOUCH))),
    ),
    "dill's array": (
        "posix.system",
        lambda: by_dill(lambda dill: Call(dill._dill._create_array, os.system, (TOUCH,), ARRAY[2])),
    ),
    "dill's named tuple": (
        "package.Pair",
        lambda: raw(call(name("dill._dill", "_create_namedtuple"), text("Pair"), b")", text("package"))),
    ),
    "dill's import": (
        "dill._dill._import_module",
        lambda: raw(call(name("dill._dill", "_import_module"), text("package"))),
    ),
    "dill's function": (
        "dill._dill._create_function",
        lambda: by_dill(lambda dill: Call(eval("lambda: __import__('os').system('touch ran')", {}))),
    ),
}  # fmt: skip


def _tofile() -> bytes:
    array = pickle.dumps(np.arange(3), 2)[2:-1]
    return raw(call(text("numpy") + text("ndarray.tofile") + b"\x93", array, text("ran"))).replace(
        b"\x80\x02", b"\x80\x04", 1
    )


QUIET: dict[str, tuple[str, bytes]] = {
    "only named": ("os.system", raw(name("os", "system"))),
    "a class": ("subprocess.Popen", raw(name("subprocess", "Popen") + b")\x81")),
    "PERSID": ("the opcode PERSID", raw(b"Pmalice\n")),
    "BINPERSID": ("the opcode BINPERSID", raw(text("malice") + b"Q")),
    "ctypes": ("ctypes.CDLL", pickle.dumps(Call(ctypes.CDLL, None))),
    "codecs": ("_codecs.decode", pickle.dumps(Call(codecs.decode, b"00", "hex"))),
    "numpy.load": ("numpy.load", pickle.dumps(Call(np.load, io.BytesIO()))),
    "dill's type": ("dill._dill._create_type", raw(name("dill._dill", "_create_type"))),
    "dill's types": ("dill._dill._load_type", raw(name("dill._dill", "_load_type"))),
    "dotted name": ("numpy.ndarray.__class__", raw(text("numpy") + text("ndarray.__class__") + b"\x93")),
    "no text as a name": ("no container", raw(b"))\x93")),
    "JAX's array": (
        "os.system",
        raw(call(name("jax._src.array", "_reconstruct_array"), name("os", "system"))),
    ),
    "JAX's array of something": (
        "an array that is not numpy's",
        raw(call(name("jax._src.array", "_reconstruct_array"), name("numpy", "ndarray"), b")", b")")),
    ),
    "Haiku's map": (
        "os.system",
        raw(call(name("haiku._src.data_structures", "FlatMapping"), name("os", "system"))),
    ),
    "in the optimizer's state": ("os.system", raw(call(name("optax._src.base", "X"), name("os", "system")))),
    "a state for a function of ours": ("a state for function", raw(name("numpy", "ndarray") + b"}b")),
    "a state for a class of ours": ("a state for type", raw(name("numpy", "dtype") + b"}b")),
    "a state for a dict": ("a state for dict", raw(b"}}b")),
    "a call of data": ("a call of dict", raw(b"})R")),
    "a call with no tuple": ("a call of function", raw(name("collections", "OrderedDict") + b"}R")),
    "an array of a class of its own": (
        "a class of its own",
        raw(call(name("numpy.core.multiarray", "_reconstruct"), b"N", b"N", b"N")),
    ),
    "an array of records": (
        "an array of records",
        pickle.dumps(np.zeros(2, [("a", "f4")])).replace(b"V4", b"f4"),
    ),
    "an array of text": ("an array of 'U3'", pickle.dumps(np.array(["abc"]))),
    "a set": ("the opcode EMPTY_SET", pickle.dumps({1})),
    "keys": ("neither text nor integers", pickle.dumps({(1, 2): 3})),
    "items for text": ("items for 'abc'", raw(text("abc") + b"Na")),
    "control characters": (r"'os\.\\x1b\[2Jsystem'", raw(name("os", "\x1b[2Jsystem"))),
}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(OPEN)
    Path("package").mkdir()
    Path("package/__init__.py").write_text(OPEN)
    monkeypatch.syspath_prepend(tmp_path)
    copyreg.add_extension("os", "system", 240)
    yield
    copyreg.remove_extension("os", "system", 240)
    for imported in ("script", "package"):
        sys.modules.pop(imported, None)


def read(content: bytes) -> Any:
    Path("checkpoint.dill").write_bytes(content)
    return read_pickle(Path("checkpoint.dill"))


@pytest.mark.parametrize("case", LIVE)
def test_what_would_run_is_refused_by_name_and_not_run(case: str) -> None:
    refused, make = LIVE[case]
    content = make()
    Path("ran").unlink(missing_ok=True)  # some run when they are made, too
    with pytest.raises(ValueError, match=f"refused, and nothing of it was run: it holds .*{refused}"):
        read(content)
    assert not Path("ran").exists()

    dill = pytest.importorskip("dill")
    try:
        dill.loads(content)
    except Exception as error:
        print(error)  # after what it ran
    assert Path("ran").exists(), "this case proves nothing"


@pytest.mark.parametrize("case", QUIET)
def test_all_that_is_not_data_is_refused_by_name(case: str) -> None:
    refused, content = QUIET[case]
    with pytest.raises(ValueError, match=f"refused, and nothing of it was run: it holds .*{refused}"):
        read(content)
    assert not Path("ran").exists()


def test_the_optimizers_state_is_passed_over() -> None:
    found = read(raw(call(name("optax.os", "system"), text(TOUCH)) + b"}b"))
    assert type(found) is Ignored
    assert vars(found) == {}


def test_no_name_leads_out_of_the_reader() -> None:
    assert {make.__module__ for make in NAMES.values()} == {"perceiver_ar.interop.plain_pickle"}
    assert not any(hasattr(builtins, make.__name__) for make in NAMES.values())


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_data_are_read_as_they_were_written(protocol: int) -> None:
    data = {
        "numbers": [0, -1, 255, 65_536, 2**40, -(2**70), 1.5, True, False, None],
        "text": ("", "a", "ü" * 300, (1, 2), (1, 2, 3), (1, 2, 3, 4), ()),
        "ordered": collections.OrderedDict(b=1, a=2),
        7: [[], {}],
    }
    data["again"] = data["numbers"]
    assert read(pickle.dumps(data, protocol)) == data


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("dtype", ["f2", "<f4", ">f4", "f8", "i1", "i4", ">i8", "u2", "?"])
def test_arrays_are_read_as_they_were_written(protocol: int, dtype: str) -> None:
    square = np.arange(6).reshape(2, 3).astype(dtype)
    for array in (square, np.asfortranarray(square), square[:, ::2], square[:0], square[0, 0, None][0, ...]):
        content = pickle.dumps([array, array], protocol)
        found = read(content)
        assert np.array_equal(found[1].values, array)
        assert found[1].values.dtype == array.dtype
        if protocol == 3:
            assert np.array_equal(read(content.replace(b"numpy._core", b"numpy.core"))[0].values, array)
    assert read(pickle.dumps(square[1, 2], protocol)) == square[1, 2]


def test_bfloat16_is_read_as_float32() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.linspace(-3, 3, 8).astype(ml_dtypes.bfloat16).reshape(2, 4)
    for protocol in (3, 4, 5):
        found = read(pickle.dumps(array, protocol)).values
        assert found.dtype == np.float32
        assert np.array_equal(found, array.astype(np.float32))


def claims(shape: tuple[int, ...], content: bytes = b"1234") -> bytes:
    array = Call(*ARRAY[:1], *ARRAY[1], state=(1, shape, np.dtype("f4"), False, content))
    return pickle.dumps(array)


@pytest.mark.parametrize(
    "content",
    [
        claims((10**6, 10**6)),
        claims((2**62, 4)),
        claims((-1,)),
        claims((1,) * 10_000),
        raw(b"\x8e" + struct.pack("<Q", 2**50) + b"x"),
        raw(b"\x8e" + struct.pack("<Q", 2**63 - 1) + b"x"),
        raw(b"\x96" + struct.pack("<Q", 2**50) + b"x"),
        raw(b"\x8d" + struct.pack("<Q", 2**50) + b"x"),
        raw(b"\x8b" + struct.pack("<I", 2**31 - 1) + b"x"),
        raw(b"\x95" + struct.pack("<Q", 2**50) + b"Nr\xff\xff\xff\xff0"),
        raw(b"(" * 5_000_001),
    ],
    ids=lambda content: content[:11].hex(),
)  # fmt: skip
def test_more_than_the_file_holds_is_not_believed(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"checkpoint\.dill is (refused|not a whole pickle)"):
        read(content)


@pytest.mark.parametrize("tuples", [b"\x85" * 200_000, b"q\x00h\x00\x86" * 34], ids=["deep", "doubled"])
def test_tuples_in_tuples_are_refused_at_once(tuples: bytes) -> None:
    for content in (b")" + tuples + b")R", name("numpy", "dtype") + b")" + tuples + b"\x85R"):
        with pytest.raises(ValueError, match="is refused"):
            read(raw(content))


def test_files_that_are_no_pickles_get_one_sentence() -> None:
    whole = pickle.dumps({"params": {"x": np.arange(100.0)}})
    for content, sentence in (
        (b"", "is empty: fetch it again"),
        (b"hello, world", "is not a pickle of protocol 2 or later"),
        (b"PK\x03\x04" + bytes(100), "is not a pickle of protocol 2 or later"),
        (bytes(100), "is not a pickle of protocol 2 or later"),
        (whole[:-1], "is not a whole pickle"),
        (whole[:200], "is not a whole pickle"),
        (b"\x80", "is not a whole pickle"),
        (raw(b""), "is not a whole pickle"),
        (raw(b"h\x05"), "is not a whole pickle"),
        (raw(b"t"), "is not a whole pickle"),
        (raw(b"NN"), "is not a whole pickle"),
        (raw(call(name("collections", "OrderedDict"), b"N", b"N")), "is not a whole pickle"),
    ):
        with pytest.raises(ValueError, match=f"^checkpoint.dill {sentence}") as raised:
            read(content)
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="missing is not a file"):
        read_pickle(Path("missing"))


def test_damage_gives_data_or_a_sentence() -> None:
    whole = pickle.dumps({"params": {"x": np.arange(4.0)}, "o": collections.OrderedDict(a=[1, (2, "3")])})
    chance = random.Random(0)
    for _ in range(3000):
        content = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        try:
            found = read(bytes(content))
        except ValueError:
            continue
        kinds = dict | list | tuple | str | bytes | int | float | Array | Ignored | None
        assert isinstance(found, kinds) or found in NAMES.values()
