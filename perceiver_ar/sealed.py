"""JSON files that carry their own checksum, written beside and renamed, so never half or altered."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


class Damaged(ValueError):
    """A file that is not what was written."""


def write_sealed(path: Path, data: dict[str, Any]) -> None:
    sealed = {"sha256": _digest(data), "data": data}
    write_whole(path, json.dumps(sealed, indent=1).encode())


def read_sealed(path: Path) -> dict[str, Any]:
    try:
        sealed = json.loads(path.read_bytes())
        if sealed.keys() == {"sha256", "data"} and sealed["sha256"] == _digest(sealed["data"]):
            return sealed["data"]
    except (ValueError, AttributeError, FileNotFoundError):
        pass
    raise Damaged(f"{path} is missing or damaged.")


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file so that it is either as before or whole, even if the machine dies."""
    beside = path.with_name(f".{path.name}.partial")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
