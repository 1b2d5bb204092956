"""Data sets by command, from a server that breaks off, lies, redirects and is slow."""

import base64
import hashlib
import io
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

from perceiver_ar import cli, datasets, fetching
from perceiver_ar.datasets import DATASETS, download
from perceiver_ar.fetching import File, fetch, unpack
from perceiver_ar.sealed import locked
from perceiver_ar.store import Store
from perceiver_ar.tasks import image, music, text

CONTENT = np.random.default_rng(0).bytes(300_000)


class Server(ThreadingHTTPServer):
    """Serves what is in `files`, unless `fault(handler, path, body)` has answered."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.fault: Any = None
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        wanted, ranged = urlsplit(self.path).path, self.headers["Range"]
        self.server.asked.append((self.path, ranged))
        body = self.server.files.get(wanted)
        if self.server.fault is not None and self.server.fault(self, wanted, body):
            return
        if body is None:
            self.send_error(404)
        else:
            self.give(body, ranged)

    def begin(self, status: int, **headers: Any) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def give(self, body: bytes, ranged: str | None, most: int | None = None) -> None:
        start = int(ranged.removeprefix("bytes=").removesuffix("-")) if ranged else 0
        if ranged and start >= len(body):
            self.begin(416, Content_Range=f"bytes */{len(body)}", Content_Length=0)
            return
        part = {"Content_Range": f"bytes {start}-{len(body) - 1}/{len(body)}"} if ranged else {}
        self.begin(206 if ranged else 200, Content_Length=len(body) - start, **part)
        self.wfile.write(body[start:][:most])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(fetching, "PAUSE", 0.01)
    monkeypatch.setattr(fetching, "CHUNK", 10_000)
    with Server() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        made.files["/a.bin"] = CONTENT
        yield made
        made.shutdown()


def file_of(server: Server, path: str = "/a.bin", content: bytes = CONTENT) -> File:
    return File(server.url + path, path[1:], len(content), f"sha256:{hashlib.sha256(content).hexdigest()}")


def test_a_file_comes_whole_and_is_not_fetched_twice(tmp_path: Path, server: Server) -> None:
    counted: list[int] = []
    assert fetch(file_of(server), tmp_path, counted.append).read_bytes() == CONTENT
    assert sum(counted) == len(CONTENT)
    fetch(file_of(server), tmp_path)
    assert len(server.asked) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


def test_what_breaks_off_is_gone_on_from(tmp_path: Path, server: Server) -> None:
    def breaks_off(handler: Handler, path: str, body: bytes) -> bool:
        handler.give(body, handler.headers["Range"], most=70_000)
        return True

    server.fault = breaks_off
    counted: list[int] = []
    assert fetch(file_of(server), tmp_path, counted.append).read_bytes() == CONTENT
    later = [f"bytes={start}-" for start in range(70_000, 300_000, 70_000)]
    assert [ranged for _, ranged in server.asked] == [None, *later]
    assert sum(counted) == len(CONTENT)


@pytest.mark.parametrize("chunk", [10_000, 1 << 20])
def test_connections_that_are_reset_or_fall_silent_keep_what_came(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(fetching, "CHUNK", chunk)
    monkeypatch.setattr(fetching, "TIMEOUT", 0.5)

    def resets(handler: Handler, path: str, body: bytes) -> bool:
        handler.give(body, handler.headers["Range"], most=90_000)
        handler.wfile.flush()
        if len(server.asked) % 2:
            time.sleep(0.1)
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            handler.connection.close()
        else:
            time.sleep(1)
        return True

    server.fault = resets
    assert fetch(file_of(server), tmp_path).read_bytes() == CONTENT
    assert len(server.asked) == 4


def test_what_came_is_not_given_up_for_an_odd_answer(tmp_path: Path, server: Server) -> None:
    part = tmp_path / "a.bin.part"
    answers: dict[str, Any] = {
        "a page instead": lambda handler: handler.give(b"<html>please log in</html>", None),
        "another part": lambda handler: handler.begin(206, Content_Range="bytes 7-9/10", Content_Length=0),
        "no range": lambda handler: handler.begin(206, Content_Length=0),
    }
    for name, answer in answers.items():
        part.write_bytes(CONTENT[:290_000])
        server.fault = lambda handler, path, body, answer=answer: answer(handler) or True
        with pytest.raises(ValueError, match="What came is kept"):
            fetch(file_of(server), tmp_path)
        assert part.read_bytes() == CONTENT[:290_000], name
        assert [path.name for path in tmp_path.iterdir()] == ["a.bin.part"]
    server.fault = None
    assert fetch(file_of(server), tmp_path).read_bytes() == CONTENT


def test_a_server_without_ranges_that_breaks_off_is_given_up(tmp_path: Path, server: Server) -> None:
    def now_and_then(handler: Handler, path: str, body: bytes) -> bool:
        handler.give(body, None, most=(50_000, 90_000)[len(server.asked) % 2])
        return True

    server.fault = now_and_then
    counted: list[int] = []
    with pytest.raises(ValueError, match="it ends too early"):
        fetch(file_of(server), tmp_path, counted.append)
    assert len(server.asked) < 12
    assert sum(counted) == 90_000 == (tmp_path / "a.bin.part").stat().st_size


def test_two_downloads_do_not_work_in_one_place(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(server, monkeypatch, "enwik8", {"enwik8": b"x" * 100})
    (tmp_path / ".wiki.enwik8.partial").mkdir()
    with (
        locked(tmp_path / ".wiki.enwik8.partial/lock", ""),
        pytest.raises(ValueError, match="another download works in"),
    ):
        download("enwik8", tmp_path / "wiki")
    download("enwik8", tmp_path / "wiki")


def test_servers_that_know_no_ranges_start_again(tmp_path: Path, server: Server) -> None:
    (tmp_path / "a.bin.part").write_bytes(b"x" * 1000)

    def whole(handler: Handler, path: str, body: bytes) -> bool:
        handler.give(body, None)
        return True

    server.fault = whole
    counted: list[int] = []
    assert fetch(file_of(server), tmp_path, counted.append).read_bytes() == CONTENT
    assert sum(counted) == len(CONTENT)


def test_an_attempt_that_was_killed_before_the_check_is_checked(tmp_path: Path, server: Server) -> None:
    for left in (CONTENT, CONTENT + b"more"):
        (tmp_path / "a.bin.part").write_bytes(left)
        assert fetch(file_of(server), tmp_path).read_bytes() == CONTENT
        (tmp_path / "a.bin").unlink()


@pytest.mark.parametrize("served", [CONTENT[:-1] + b"?", CONTENT[:-5], CONTENT + b"!"])
def test_wrong_bytes_are_refused_and_removed(tmp_path: Path, server: Server, served: bytes) -> None:
    server.files["/a.bin"] = served
    with pytest.raises(ValueError, match="does not have the bytes that it should, so it was removed"):
        fetch(file_of(server), tmp_path)
    assert not list(tmp_path.iterdir())
    server.files["/a.bin"] = CONTENT
    fetch(file_of(server), tmp_path)


def test_redirections_and_passing_faults_are_followed(tmp_path: Path, server: Server) -> None:
    def redirects(handler: Handler, path: str, body: bytes | None) -> bool:
        if path == "/old":
            handler.begin(302, Location="/a.bin", Content_Length=0)
        elif len(server.asked) < 6:
            handler.send_error(503)
        else:
            return False
        return True

    server.fault = redirects
    assert fetch(file_of(server, "/old"), tmp_path).read_bytes() == CONTENT


def test_what_is_gone_is_told_at_once_and_what_never_comes_in_the_end(tmp_path: Path, server: Server) -> None:
    with pytest.raises(ValueError, match=r"nothing\.bin cannot be had: 404 Not Found"):
        fetch(file_of(server, "/nothing.bin"), tmp_path)
    assert len(server.asked) == 1
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:500])
    server.fault = lambda handler, path, body: handler.send_error(500) or True
    with pytest.raises(ValueError, match=r"cannot be fetched \(500 .*What came is kept: start again"):
        fetch(file_of(server), tmp_path)
    assert (tmp_path / "a.bin.part").stat().st_size == 500
    server.fault = None
    fetch(file_of(server), tmp_path)
    server.shutdown()
    server.server_close()
    with pytest.raises(ValueError, match="Connection refused"):
        fetch(file_of(server, "/b.bin"), tmp_path)


def test_slow_servers_are_waited_for_and_silent_ones_asked_again(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "TIMEOUT", 0.5)
    stuck: list[int] = []

    def slow(handler: Handler, path: str, body: bytes) -> bool:
        start = int((handler.headers["Range"] or "bytes=0-")[6:-1])
        length = len(body) - start
        handler.begin(206 if start else 200, Content_Range=f"bytes {start}-", Content_Length=length)
        for place in range(start, len(body), 50_000):
            handler.wfile.write(body[place : place + 50_000])
            handler.wfile.flush()
            if place == 100_000:
                stuck.append(place)
                time.sleep(2)  # longer than is waited
                return True
            time.sleep(0.1)
        return True

    server.fault = slow
    assert fetch(file_of(server), tmp_path).read_bytes() == CONTENT
    assert stuck == [100_000]


def zipped(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "a/../../out"])
def test_archives_that_lead_out_of_their_folder_are_refused(tmp_path: Path, name: str) -> None:
    import tarfile

    (tmp_path / "a.zip").write_bytes(zipped({"good": b"1", name: b"2"}))
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "a.zip", "../out")
    (tmp_path / "cut.zip").write_bytes((tmp_path / "a.zip").read_bytes()[:60])
    for archive, words in (("a.zip", "it would write to"), ("a.tar", ""), ("cut.zip", "")):
        with pytest.raises(ValueError, match=f"{archive} is not an archive that can be unpacked: {words}"):
            unpack(tmp_path / archive, tmp_path / "inner/folder")
        assert not list(tmp_path.rglob("out"))


def serve(server: Server, monkeypatch: pytest.MonkeyPatch, name: str, *archives: dict[str, bytes]) -> None:
    """Lets the data set of that name come from here."""
    files = []
    for index, content in enumerate(map(zipped, archives)):
        server.files[f"/{index}.zip"] = content
        files.append(file_of(server, f"/{index}.zip", content))
    monkeypatch.setitem(DATASETS, name, replace(DATASETS[name], files=lambda scratch: files))


def documents(store: Store) -> dict[str, int]:
    return {name: split["documents"] for name, split in store.meta["splits"].items()}


def test_enwik8_is_downloaded_and_prepared_90_5_5(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(server, monkeypatch, "enwik8", {"enwik8": b"some wiki text " * 1000})
    monkeypatch.setattr(sys, "argv", ["perceiver-ar", "download", "enwik8", str(tmp_path / "wiki")])
    cli.main()
    told = capsys.readouterr()
    assert "Licence: CC BY-SA" in told.err
    assert f"prepare text {tmp_path / 'wiki'} --out store --validation 0.05 --test 0.05" in told.out
    assert [path.name for path in tmp_path.iterdir()] == ["wiki"]
    store = text.prepare(str(tmp_path / "wiki"), tmp_path / "s", validation=0.05, test=0.05, workers=1)
    bytes_of = {name: split["counts"]["bytes"] for name, split in store.meta["splits"].items()}
    assert bytes_of == {"train": 13_500, "validation": 750, "test": 750}
    with pytest.raises(ValueError, match="exists already"):
        download("enwik8", tmp_path / "wiki")


def test_wikitext_comes_with_its_splits(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("train", "valid", "test")
    parts = {f"wikitext-103/wiki.{name}.tokens": f"the {name} \n".encode() * len(name) for name in names}
    serve(server, monkeypatch, "wikitext103", parts)
    download("wikitext103", tmp_path / "wiki")
    store = text.prepare(str(tmp_path / "wiki"), tmp_path / "s", tokenizer="words", workers=1)
    words = {name: split["counts"]["words"] for name, split in store.meta["splits"].items()}
    assert words == {"train": 15, "validation": 15, "test": 12}


def test_imagenet_comes_with_its_splits(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def part(count: int) -> bytes:
        out = io.BytesIO()
        np.savez(out, data=np.full((count, 192), count, np.uint8), labels=np.arange(count))
        return out.getvalue()

    trained = [{f"Imagenet64_train_part{i}_npz/train_data_batch_{i}.npz": part(3)} for i in (1, 2)]
    serve(server, monkeypatch, "imagenet64", *trained, {"Imagenet64_val_npz/val_data.npz": part(2)})
    download("imagenet64", tmp_path / "images")
    assert documents(image.prepare(tmp_path / "images", tmp_path / "s", size=8)) == {
        "train": 6,
        "validation": 2,
    }


def test_maestro_comes_with_its_table(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perceiver_ar import midi
    from tests.test_music import piece

    midi.write_midi(piece(), tmp_path / "a.mid")
    splits = {"2004/a.midi": "train", "2006/b.midi": "validation", "2006/c.midi": "test"}
    parts = {f"maestro-v3.0.0/{name}": (tmp_path / "a.mid").read_bytes() for name in splits}
    table = "\n".join(["midi_filename,split", *(f"{name},{split}" for name, split in splits.items())])
    serve(server, monkeypatch, "maestro-v3", parts | {"maestro-v3.0.0/maestro-v3.0.0.csv": table.encode()})
    download("maestro-v3", tmp_path / "maestro")
    store = music.prepare(tmp_path / "maestro", tmp_path / "s", workers=1)
    assert documents(store) == {"train": 1, "validation": 1, "test": 1}


def test_books_are_listed_page_by_page_and_fetched_at_once(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    books = {f"{s}/{n}.txt": f"Book {n} of {s}. ".encode() * 50 for s in datasets.SPLITS for n in range(30)}

    def about(name: str) -> dict[str, str]:
        md5 = base64.b64encode(hashlib.md5(books[name]).digest()).decode()
        link = f"{server.url}/{name}"
        return {"name": name, "size": str(len(books[name])), "md5Hash": md5, "mediaLink": link}

    def bucket(handler: Handler, path: str, body: bytes | None) -> bool:
        if path != "/list":
            return False
        query = parse_qs(urlsplit(handler.path).query)
        names = [name for name in books if name.startswith(query["prefix"][0])]
        first = int(query.get("pageToken", ["0"])[0])
        more = {"nextPageToken": str(first + 20)} if first + 20 < len(names) else {}
        handler.give(json.dumps({"items": [*map(about, names[first : first + 20])], **more}).encode(), None)
        return True

    monkeypatch.setattr(datasets, "BOOKS", f"{server.url}/list")
    for answer in (b"<html>", b"{}", b'{"items": [{"name": "train/1.txt"}]}'):
        server.files["/list"] = answer
        with pytest.raises(ValueError, match="does not answer with a list of books"):
            download("pg19", tmp_path / "pg19")
    server.fault = bucket
    server.files = {f"/{name}": content for name, content in books.items()}
    server.files["/train/7.txt"] = b"something else"
    with pytest.raises(ValueError, match=r"train/7\.txt does not have the bytes"):
        download("pg19", tmp_path / "pg19")
    assert not (tmp_path / "pg19").exists()
    server.files["/train/7.txt"] = books["train/7.txt"]
    before = len(server.asked)
    download("pg19", tmp_path / "pg19")
    assert len(server.asked) - before < len(books) + 6  # those that were there are not fetched again
    found = {
        str(p.relative_to(tmp_path / "pg19")): p.read_bytes() for p in (tmp_path / "pg19").rglob("*.txt")
    }
    assert found == books
    server.shutdown()
    server.server_close()
    with pytest.raises(ValueError, match=r"list\?prefix=train.* cannot be fetched \(.*Connection refused"):
        download("pg19", tmp_path / "again")


def test_an_interrupted_download_leaves_nothing_that_looks_whole_and_goes_on(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(server, monkeypatch, "enwik8", {"enwik8": CONTENT * 3})
    (file,) = DATASETS["enwik8"].files(tmp_path)

    def trickle(handler: Handler, path: str, body: bytes) -> bool:
        handler.begin(200, Content_Length=len(body))
        for place in range(0, len(body), 20_000):
            handler.wfile.write(body[place : place + 20_000])
            time.sleep(0.1)
        return True

    server.fault = trickle
    code = f"""
import signal, sys
from dataclasses import replace
from perceiver_ar import cli, datasets, fetching
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs are without
fetching.CHUNK = 10_000
file = fetching.{file!r}
datasets.DATASETS["enwik8"] = replace(datasets.DATASETS["enwik8"], files=lambda scratch: [file])
sys.argv = ["perceiver-ar", "download", "enwik8", {str(tmp_path / "wiki")!r}]
cli.main()
"""
    part = tmp_path / f".wiki.enwik8.partial/files/{file.name}.part"
    for how in (signal.SIGINT, signal.SIGKILL):
        process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
        part.unlink(missing_ok=True)
        while not (part.exists() and part.stat().st_size > 50_000):
            time.sleep(0.05)
            assert process.poll() is None
        os.kill(process.pid, how)
        _, told = process.communicate(timeout=10)
        assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
        assert "Traceback" not in told
        assert not (tmp_path / "wiki").exists()
        assert part.exists()
    server.fault = None
    download("enwik8", tmp_path / "wiki")
    assert (tmp_path / "wiki/enwik8").read_bytes() == CONTENT * 3
    assert server.asked[-1][1] is not None  # from where it was


def test_every_data_set_has_a_place_a_licence_and_checksums() -> None:
    for name, dataset in DATASETS.items():
        assert dataset.licence
        assert "DIR" in dataset.prepare
        for file in dataset.files(Path()) if name != "pg19" else []:
            assert file.url.startswith("https://")
            assert len(file.digest.removeprefix("sha256:")) == 64
            assert file.size > 1e6


def test_too_little_room_is_told_before_anything_is_fetched(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(server, monkeypatch, "enwik8", {"enwik8": b"x" * 100})
    monkeypatch.setattr(datasets.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(ValueError, match="too little room"):
        download("enwik8", tmp_path / "wiki")
    assert not server.asked
