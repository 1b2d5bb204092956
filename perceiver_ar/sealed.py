"""JSON files that are written atomically and contain their own checksum; file digests; locks."""

import hashlib
import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Damaged(ValueError):
    """A file is missing, or not what was written."""


def write_sealed(path: Path, data: dict[str, Any]) -> None:
    write_whole(path, _bytes({"sha256": digest(data), "data": data}))


def read_sealed(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
        sealed = json.loads(raw)
        # Byte for byte: 1e-08 and 1E-08 differ in one bit, and are the same number.
        if raw == _bytes(sealed) and sealed["sha256"] == digest(sealed["data"]):
            return sealed["data"]
    except (ValueError, TypeError, KeyError, FileNotFoundError):
        pass
    raise Damaged(f"{path} is missing or damaged.")


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Writes a file atomically: even if the machine crashes, it is either as before or complete."""
    beside = path.with_name(f".{path.name}.partial")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


@contextmanager
def locked(path: Path, refusal: str) -> Generator[None]:
    """Holds a lock, or fails if another process holds it; without effect where locks are not supported."""
    with path.open("w") as lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(refusal) from None
        except (ImportError, OSError):  # Windows, or a file system without locks
            pass
        yield


def digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_version(found: int, known: int, path: Path) -> None:
    if found != known:
        raise ValueError(f"{path} has format version {found}, but this perceiver-ar reads {known}.")


def _bytes(data: dict[str, Any]) -> bytes:
    return json.dumps(data, indent=1).encode()
