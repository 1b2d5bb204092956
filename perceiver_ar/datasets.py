"""The paper's data sets by name: where they are hosted, their licences, and how they are fetched."""

import base64
import json
import shutil
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from perceiver_ar.fetching import File, fetch, read, unpack
from perceiver_ar.report import progress_bar
from perceiver_ar.sealed import locked
from perceiver_ar.splits import SPLITS
from perceiver_ar.store import check_new
from perceiver_ar.strict import unknown

AT_ONCE = 8
"""Files fetched at the same time."""


@dataclass(frozen=True)
class Dataset:
    """A data set: archives to be unpacked, or a list of files."""

    about: str
    licence: str
    prepare: str
    """The command that makes a store of it."""
    files: Callable[[Path], list[File]]
    """Lists the files to fetch, given a scratch folder."""
    archives: bool = True
    flat: bool = False
    """Whether all files of the archives go into one folder."""
    renamed: dict[str, str] = field(default_factory=dict)
    """New names of files, which tell their splits."""


def _archive(url: str, size: int, sha256: str) -> File:
    return File(url, url.rsplit("/", 1)[1], size, f"sha256:{sha256}")


def _maestro(version: int, kind: str, size: int, sha256: str) -> Dataset:
    place = f"https://storage.googleapis.com/magentadata/datasets/maestro/v{version}.0.0"
    url = f"{place}/maestro-v{version}.0.0{'-midi' if kind == 'music' else ''}.zip"
    what = "MIDI" if kind == "music" else "recordings and MIDI"
    return Dataset(
        f"MAESTRO v{version}.0.0, {what} of piano competitions (Google Magenta)",
        "CC BY-NC-SA 4.0: not for commercial use",
        f"perceiver-ar prepare {kind} DIR --out store{'' if kind == 'music' else ' --codec encodec'}",
        lambda scratch: [_archive(url, size, sha256)],
    )


BOOKS = "https://storage.googleapis.com/storage/v1/b/deepmind-gutenberg/o"


def _books(scratch: Path) -> list[File]:
    """All books of PG-19, with the checksums that the bucket reports."""
    try:
        found = [file for split in SPLITS for file in _listed(f"{split}/", scratch)]
    except (KeyError, TypeError, json.JSONDecodeError):
        found = []
    if not found:
        raise ValueError(f"{BOOKS} does not answer with a list of books: try again later.")
    return found


def _listed(prefix: str, scratch: Path) -> Iterator[File]:
    """The files with this prefix, from the bucket's paginated listing."""
    page: str | None = ""
    while page is not None:
        query = urllib.parse.urlencode({"prefix": prefix, "pageToken": page} if page else {"prefix": prefix})
        found = json.loads(read(f"{BOOKS}?{query}", scratch / "list.json"))
        for item in found.get("items", []):
            md5 = base64.b64decode(item["md5Hash"]).hex()
            if not item["name"].endswith("/"):
                yield File(item["mediaLink"], item["name"], int(item["size"]), f"md5:{md5}")
        page = found.get("nextPageToken")


_SMALL = "https://image-net.org/data/downsample"
DATASETS = {
    "enwik8": Dataset(
        "enwik8, the first 100 MB of Wikipedia in 2006 (Matt Mahoney)",
        "CC BY-SA and GFDL, like Wikipedia's text",
        "perceiver-ar prepare text DIR --out store --validation 0.05 --test 0.05",
        lambda scratch: [
            _archive(
                "https://mattmahoney.net/dc/enwik8.zip",
                36_445_475,
                "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
            )
        ],
    ),
    "imagenet64": Dataset(
        "Downsampled ImageNet, 64 x 64, as arrays (Chrabaszcz et al.; easier than the paper's version)",
        "ImageNet's terms of access: for research and education, not for commercial use",
        "perceiver-ar prepare image DIR --out store --size 64",
        lambda scratch: [
            _archive(
                f"{_SMALL}/Imagenet64_train_part1_npz.zip",
                6_783_426_789,
                "9422dc1dc5d092e9814a70a1cb7fc74880d2db5d88a0cb8a34ee363b12bde3f1",
            ),
            _archive(
                f"{_SMALL}/Imagenet64_train_part2_npz.zip",
                6_780_506_068,
                "9fafc115afb7e6c301e66dc16b2d737152b427bd5dab26e1293487a6819c7f30",
            ),
            _archive(
                f"{_SMALL}/Imagenet64_val_npz.zip",
                529_522_927,
                "e1e75133158a1924135a9c6f97a80d2d237b158945e0b34074e58e6c8430eeb8",
            ),
        ],
        flat=True,
    ),
    "maestro-v1": _maestro(
        1, "music", 46_579_421, "f620f9e1eceaab8beea10617599add2e9c83234199b550382a2f603098ae7135"
    ),
    "maestro-v1-audio": _maestro(
        1, "audio", 87_000_000_000, "97471232457147d5bffa72db8c4897166ba52afd4a64197004b806c2ec85ad27"
    ),
    "maestro-v3": _maestro(
        3, "music", 58_416_533, "70470ee253295c8d2c71e6d9d4a815189e35c89624b76d22fce5a019d5dde12c"
    ),
    "maestro-v3-audio": _maestro(
        3, "audio", 108_445_099_632, "6680fea5be2339ea15091a249fbd70e49551246ddbd5ca50f1b2352c08c95291"
    ),
    "pg19": Dataset(
        "PG-19, 28,752 books of Project Gutenberg from before 1919 (DeepMind)",
        "Apache-2.0; the books are in the public domain in the United States",
        "perceiver-ar prepare text DIR --out store --tokenizer unigram --vocab-size 32077",
        _books,
        archives=False,
    ),
    "wikitext103": Dataset(
        "Wikitext-103, Wikipedia articles split into words (Merity et al.)",
        "CC BY-SA 3.0",
        "perceiver-ar prepare text DIR --out store --tokenizer words",
        lambda scratch: [
            _archive(
                "https://wikitext.smerity.com/wikitext-103-v1.zip",
                190_000_000,
                "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
            )
        ],
        flat=True,
        renamed={
            "wiki.train.tokens": "train.tokens",
            "wiki.valid.tokens": "validation.tokens",
            "wiki.test.tokens": "test.tokens",
        },
    ),
}


def download(name: str, folder: Path) -> Path:
    """Fetches a data set into a new folder, which exists once it is complete."""
    if name not in DATASETS:
        raise ValueError(unknown("data set", name, sorted(DATASETS)))
    check_new(folder)
    dataset = DATASETS[name]
    print(f"{dataset.about}. Licence: {dataset.licence}.", file=sys.stderr)
    work = folder.with_name(f".{folder.name}.{name}.partial")
    work.mkdir(parents=True, exist_ok=True)
    with locked(work / "lock", f"another download works in {work} already."):
        files = dataset.files(work)
        size = sum(file.size for file in files)
        _check_room(work, size * (2.2 if dataset.archives else 1))  # archives stay while they are unpacked
        print(f"Downloading {size / 1e6:,.0f} MB in {len(files):,} files for {folder}", file=sys.stderr)
        _fetch_all(files, work / "files", size)
        whole = _unpack_all(files, work, dataset) if dataset.archives else work / "files"
        whole.rename(folder)
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _check_room(work: Path, size: float) -> None:
    here = sum(path.stat().st_size for path in work.rglob("*") if path.is_file())
    if shutil.disk_usage(work).free < size - here:
        raise ValueError(
            f"there is too little room in {work.parent}: {(size - here) / 1e9:.1f} GB are needed."
        )


class _Stop(Exception):
    """Raised in a thread to end its download."""


def _fetch_all(files: list[File], folder: Path, size: int) -> None:
    """Fetches several files at a time; the first failure, or Ctrl-C, ends all downloads."""
    done, lock, stopping = 0, threading.Lock(), threading.Event()

    def progress(count: int) -> None:
        nonlocal done
        if stopping.is_set():
            raise _Stop
        with lock:
            done += count
            moved(done, size)

    with progress_bar(True, "downloading") as moved, ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            for waiting in [pool.submit(fetch, file, folder, progress) for file in files]:
                waiting.result()
        except BaseException:
            stopping.set()
            pool.shutdown(cancel_futures=True)
            raise


def _unpack_all(files: list[File], work: Path, dataset: Dataset) -> Path:
    """Unpacks all archives into a folder, after removing what an earlier attempt left."""
    unpacked = work / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    for file in files:
        unpack(work / "files" / file.name, unpacked)
    if not dataset.flat:
        return unpacked
    flat = work / "flat"
    shutil.rmtree(flat, ignore_errors=True)
    flat.mkdir()
    for path in unpacked.rglob("*"):
        if path.is_file():
            path.rename(flat / dataset.renamed.get(path.name, path.name))
    return flat
