"""Downloads: resumed where they broke off, and given their name only once they are verified."""

import hashlib
import http.client
import shutil
import ssl
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CHUNK = 1 << 20
TIMEOUT = 60.0
"""Seconds without any data after which a connection is abandoned."""
TRIES = 5
"""Consecutive attempts without progress before giving up."""
PAUSE = 1.0
"""Seconds before a retry; doubled with each further attempt without progress."""

Progress = Callable[[int], None]
"""Called with the number of additional bytes; negative if some are discarded."""


@dataclass(frozen=True)
class File:
    """A file to fetch."""

    url: str
    name: str
    """Path relative to the target folder."""
    size: int
    """Approximate bytes, for progress and disk space; completeness is verified by the digest."""
    digest: str
    """Algorithm and hexadecimal value, such as sha256:70470e..."""


def fetch(file: File, folder: Path, progress: Progress = lambda count: None) -> Path:
    """Fetches and verifies a file, resuming an earlier attempt; returns its path."""
    path = folder / file.name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{file.url} would be written to {path}, which is not where it belongs.")
    if path.exists():  # only verified files have that name
        progress(file.size)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    progress(_size(part))
    for _ in range(2 if part.exists() else 1):  # a resumed part may be of another version
        _complete(file.url, part, progress)
        if _digest(part, file.digest.partition(":")[0]) == file.digest:
            part.rename(path)
            return path
        progress(-_size(part))
        part.unlink()
    raise ValueError(f"{file.url} does not have the bytes that it should, so it was removed: try again.")


def read(url: str, scratch: Path) -> bytes:
    """Returns the content of a URL, by way of a scratch file."""
    scratch.unlink(missing_ok=True)
    _complete(url, scratch, lambda count: None)
    content = scratch.read_bytes()
    scratch.unlink()
    return content


def _complete(url: str, part: Path, progress: Progress) -> None:
    """Sends requests until the file is complete."""
    failed, most, reason = 0, _size(part), "it ends too early"
    while failed < TRIES:
        try:
            if _append(url, part, progress):
                return
        except urllib.error.HTTPError as error:
            told = str(error.reason).splitlines()[0]
            if error.code < 500 and error.code not in (408, 429):
                raise ValueError(f"{url} cannot be had: {error.code} {told}.") from None
            reason = f"{error.code} {told}"
        except _BROKEN as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        failed = 0 if _size(part) > most else failed + 1
        most = max(most, _size(part))
        time.sleep(PAUSE * 2 ** max(0, failed - 1))
    raise ValueError(f"{url} cannot be fetched ({reason}). What came is kept: start again to go on.")


_BROKEN = urllib.error.URLError, ConnectionError, TimeoutError, ssl.SSLError, http.client.HTTPException


def _append(url: str, part: Path, progress: Progress) -> bool:
    """Requests the missing rest; returns whether the file is complete. The part never gets shorter."""
    start = _size(part)
    asked = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        answer = urllib.request.urlopen(asked, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if start and error.code == 416:  # nothing is missing
            return True
        raise
    with answer:
        if not start:
            return _save(answer, part, progress)
        if answer.status != 206:
            return _begin_again(answer, part, progress)
        if not (answer.headers["Content-Range"] or "").startswith(f"bytes {start}-"):
            raise http.client.HTTPException("the server sends another part than was asked for")
        return _save(answer, part, progress)


def _begin_again(answer: http.client.HTTPResponse, part: Path, progress: Progress) -> bool:
    """For a server without range requests: the new download replaces the old once it is as long."""
    had, fresh = _size(part), part.with_name(f"{part.name}.new")
    fresh.unlink(missing_ok=True)
    progress(-had)
    try:
        return _save(answer, fresh, progress) and _size(fresh) >= had
    finally:
        if _size(fresh) >= had:
            fresh.replace(part)
        else:
            progress(had - _size(fresh))
            fresh.unlink(missing_ok=True)


def _save(answer: http.client.HTTPResponse, path: Path, progress: Progress) -> bool:
    """Appends the body to a file as it arrives; returns whether all of it did."""
    had, length = _size(path), answer.headers["Content-Length"]
    with path.open("ab") as out:
        while chunk := answer.read1(CHUNK):
            out.write(chunk)
            progress(len(chunk))
    return length is None or _size(path) == had + int(length)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _digest(path: Path, kind: str) -> str:
    with path.open("rb") as file:
        return f"{kind}:{hashlib.file_digest(file, kind).hexdigest()}"


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks a .zip or .tar file; refuses one with paths that lead out of the folder."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:
                for name in opened.namelist():
                    if not (folder / name).resolve().is_relative_to(folder.resolve()):
                        raise ValueError(f"it would write to {name}")
                opened.extractall(folder)
        else:
            shutil.unpack_archive(archive, folder, filter="data")
    except Exception as error:  # of any kind, on damaged archives
        raise ValueError(f"{archive} is not an archive that can be unpacked: {error}") from None
