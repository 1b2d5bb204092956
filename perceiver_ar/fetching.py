"""Files from the web: resumed where they broke off, checked, and never taken for whole before that."""

import hashlib
import http.client
import shutil
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CHUNK = 1 << 20
TIMEOUT = 60.0
"""Seconds without a single byte after which a connection is given up."""
TRIES = 5
"""Attempts in a row that bring nothing."""
PAUSE = 1.0
"""Seconds before the second attempt; each further one waits twice as long."""

Progress = Callable[[int], None]
"""Told of so many more bytes."""


@dataclass(frozen=True)
class File:
    """Something to fetch."""

    url: str
    name: str
    """Path in the folder that it goes to."""
    size: int
    """Bytes, roughly: what is there is told by the server, and checked by the digest."""
    digest: str
    """Kind and hexadecimal value, such as sha256:70470e..."""


def fetch(file: File, folder: Path, progress: Progress = lambda count: None) -> Path:
    """The file in the folder; what a broken attempt left there is gone on from."""
    path = folder / file.name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{file.url} would be written to {path}, which is not where it belongs.")
    if path.exists():  # only what was checked has that name
        progress(file.size)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    progress(_size(part))
    _complete(file.url, part, progress)
    if _digest(part, file.digest.partition(":")[0]) != file.digest:
        part.unlink()
        raise ValueError(f"{file.url} does not have the bytes that it should, so it was removed: try again.")
    part.rename(path)
    return path


def _complete(url: str, part: Path, progress: Progress) -> None:
    """Asks for what is missing until it is there."""
    failed, reason = 0, "it ends too early"
    while failed < TRIES:
        had = _size(part)
        try:
            if _append(url, part, progress):
                return
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code not in (408, 429):
                raise ValueError(f"{url} cannot be had: {error.code} {error.reason}.") from None
            reason = f"{error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        failed = 0 if _size(part) > had else failed + 1
        time.sleep(PAUSE * 2 ** max(0, failed - 1))
    raise ValueError(f"{url} cannot be fetched ({reason}). What came is kept: start again to go on.")


def _append(url: str, part: Path, progress: Progress) -> bool:
    """One request for the rest, or for all of it if the server knows no other; whether all is there."""
    start = _size(part)
    asked = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        answer = urllib.request.urlopen(asked, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # there is no more
            raise
        if (error.headers.get("Content-Range") or "").rpartition("/")[2] == str(start):
            return True
        part.unlink()
        progress(-start)
        return False
    with answer:
        if answer.status != 206 or not answer.headers["Content-Range"].startswith(f"bytes {start}-"):
            progress(-start)
            start = 0
        length = answer.headers["Content-Length"]
        with part.open("ab" if start else "wb") as out:
            while chunk := answer.read(CHUNK):
                out.write(chunk)
                progress(len(chunk))
    return length is None or _size(part) == start + int(length)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _digest(path: Path, kind: str) -> str:
    with path.open("rb") as file:
        return f"{kind}:{hashlib.file_digest(file, kind).hexdigest()}"


def unpack(archive: Path, folder: Path) -> None:
    """What a .zip or .tar holds; one with paths that lead out of the folder is refused."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:
                for name in opened.namelist():
                    if not (folder / name).resolve().is_relative_to(folder.resolve()):
                        raise ValueError(f"it would write to {name}")
                opened.extractall(folder)
        else:
            shutil.unpack_archive(archive, folder, filter="data")
    except Exception as error:  # of every kind, on damaged archives
        raise ValueError(f"{archive} is not an archive that can be unpacked: {error}") from None
