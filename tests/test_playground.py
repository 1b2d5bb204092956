"""The playground, in a real browser and under a crowd."""

import io
import os
import re
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from perceiver_ar import ModelConfig, PerceiverAR, midi, tasks
from perceiver_ar import model as model_module
from perceiver_ar.attention import attend
from perceiver_ar.caching import prefill, step
from perceiver_ar.playground import pace, serve
from perceiver_ar.playground.acts import Acts, held
from perceiver_ar.playground.gaze import explained, gaze
from perceiver_ar.playground.shown import Shown
from perceiver_ar.playground.views import Sound, _spelled, view_of
from perceiver_ar.tasks.audio import AudioTask
from perceiver_ar.tasks.copy import CopyTask
from tests.forked import run
from tests.test_music import piece
from tests.visited import CHROMIUM, WATCHED, Server, log, make_runs, served

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def server(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("server"), *map(str, runs.values())) as found:
        yield found


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    """A visitor's, which notes where its requests go."""
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    opened.set_default_timeout(20_000)
    asked: list[str] = []
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(server.url)
    opened.wait_for_selector(".go:visible")
    yield opened
    opened.close()
    assert asked
    assert [url for url in asked if not url.startswith((server.url, "data:", "blob:"))] == []
    assert not server.outside.exists(), server.outside.read_text()


def choose(page: Any, tab: str) -> None:
    if not page.get_by_role("tab", name=tab, exact=True).is_visible():
        page.locator(".overflow-menu > button:visible").first.click()
        page.locator(f".overflow-dropdown button:has-text('{tab}')").click()
    else:
        page.get_by_role("tab", name=tab, exact=True).click()
    page.wait_for_timeout(200)


def draw(page: Any) -> None:
    """Until it is done, which the files tell."""
    page.locator(".go:visible").click()
    page.wait_for_selector(".files a:visible", timeout=30_000)


def downloads(page: Any, server: Server) -> dict[str, bytes]:
    links = page.locator(".files a:visible")
    found = {}
    for index in range(links.count()):
        address = links.nth(index).get_attribute("href")
        name = address.rpartition("/")[2]
        found[name] = page.request.get(address).body()
    return found


@needs_chromium
def test_text_streams_and_is_shaded_by_probability(page: Any, server: Server, runs: dict[str, Path]) -> None:
    assert server.seconds < 10
    choose(page, "text")
    waited = []
    for prompt in ("<b>A</b> prompt", "Another prompt", "One more prompt"):  # other tests run beside it
        page.locator(".prompt textarea:visible").fill(prompt)
        began = time.perf_counter()
        page.locator(".go:visible").click()
        page.wait_for_function(
            "prompt => document.querySelector('.drawn:not(:empty)')?.innerText.startsWith(prompt)", arg=prompt
        )
        waited.append(time.perf_counter() - began)
        page.wait_for_selector(".files a:visible")
    assert min(waited) < 1
    page.wait_for_selector(".files a:visible")
    tokens = page.locator(".drawn b:not(.given):visible")
    titles = tokens.evaluate_all("all => all.map(one => one.title)")
    assert len(titles) > 20
    assert all(re.fullmatch(r"\d+\.\d%", title) for title in titles)
    kinds = set(tokens.evaluate_all("all => all.map(one => one.className)"))
    assert kinds <= {f"p{n}" for n in range(10)}
    (written,) = downloads(page, server).values()
    shown = page.locator(".drawn:visible").text_content()
    assert printable(shown) == printable(written.decode(errors="replace"))
    assert "tokens in" in page.locator(".block.status:visible").inner_text()
    # Where it looks, and how it does with other numbers of latents.
    assert page.locator(".attention img.strip:visible").count() == 1
    assert "of what this token takes in" in page.locator(".block.attention:visible").inner_text()
    page.locator(".compare:visible").click()
    page.wait_for_function("document.querySelectorAll('.latents-table tr').length == 4")
    rows = page.locator(".latents-table tr:visible").all_inner_texts()[1:]
    cells = [row.split() for row in rows]
    assert [row[0] for row in cells] == ["16", "64", "128"]
    assert all(float(row[1].replace(",", "")) > 0 and 4 < float(row[2]) < 7 for row in cells)
    # With an empty setting nothing is drawn, and it is said why.
    page.get_by_label("Seed").and_(page.locator(":visible")).fill("")
    page.locator(".go:visible").click()
    page.wait_for_selector("text=a setting is empty")


def printable(text: str) -> str:
    """Without what a browser makes other spaces of."""
    return re.sub(r"[\s\x00-\x1f\x7f-\x9f\ufffd]", "", text)


@needs_chromium
def test_stop_works_at_once_and_keeps_what_there_is(page: Any, server: Server) -> None:
    choose(page, "music")
    page.locator(".length:visible input[type=number]").fill("4096")
    page.locator(".go:visible").click()
    page.wait_for_selector("img.roll:visible")
    page.locator(".halt:visible").click()
    began = time.perf_counter()
    page.wait_for_selector(".files a:visible")
    assert time.perf_counter() - began < 1.5
    count = int(re.match(r"[\d,]+", page.locator(".block.status:visible").inner_text())[0].replace(",", ""))
    assert 1 <= count < 4096
    check_idle(server)


def ask_for_much(browser: Any, server: Server) -> Any:
    """A visitor's page, on which only the button is to be pressed."""
    page = browser.new_page()
    page.goto(server.url)
    page.wait_for_selector(".go:visible")
    choose(page, "music")
    page.locator(".length:visible input[type=number]").fill("4096")
    return page


@needs_chromium
def test_what_waits_can_be_stopped(browser: Any, server: Server) -> None:
    """Somebody else draws meanwhile, and goes on."""
    first, second = (ask_for_much(browser, server) for _ in range(2))
    first.locator(".go:visible").click()
    first.wait_for_selector("img.roll:visible")
    second.locator(".go:visible").click()
    second.wait_for_selector("text=/queue/")
    second.locator(".halt:visible").click()
    second.wait_for_selector("text=/queue/", state="detached", timeout=3000)
    second.locator(".length:visible input[type=number]").fill("5")
    second.locator(".go:visible").click()
    first.locator(".halt:visible").click()
    first.wait_for_selector(".files a:visible")
    second.wait_for_selector(".files a:visible")
    assert re.match(r"5 events", second.locator(".block.status:visible").inner_text())
    first.close()
    second.close()
    check_idle(server)


def test_stop_before_anything_is_drawn_stops_nobody_else(runs: dict[str, Path]) -> None:
    shown = Shown(runs["copy"], "cpu")
    acts = Acts(shown, view_of(shown.task))
    acts.stop("")
    numbers = (1.0, 0, 1.0, 0, 10, 1, 16)
    assert list(acts.draw("", numbers, ("",)))
    stopped = acts.begin()
    acts.stop(stopped)
    assert not list(acts.draw(stopped, numbers, ("",)))
    assert list(acts.draw(acts.begin(), numbers, ("",)))


def test_comparing_stops_too(runs: dict[str, Path]) -> None:
    shown = Shown(runs["copy"], "cpu")
    acts = Acts(shown, view_of(shown.task))
    assert len(list(acts.compare(acts.begin(), 16, ("",)))) == 2
    ticket = acts.begin()
    comparing = acts.compare(ticket, 16, ("",))
    next(comparing)
    acts.stopped.append(ticket)
    assert not list(comparing)
    assert not acts.running


@needs_chromium
def test_a_transformer_has_no_latents_to_choose(page: Any) -> None:
    choose(page, "transformer")
    for part in (".latents", ".compare", ".attention"):
        assert page.locator(f"{part}:visible").count() == 0
    draw(page)
    assert "latents" not in page.locator(".block.status:visible").inner_text()


def check_idle(server: Server) -> None:
    """Nothing is computed any more, but for what the page asks by itself."""
    time.sleep(0.5)
    before = server.worked()
    time.sleep(1)
    assert server.worked() - before < 0.5


@needs_chromium
def test_one_who_leaves_is_not_computed_for(browser: Any, server: Server) -> None:
    page = ask_for_much(browser, server)
    page.locator(".go:visible").click()
    page.wait_for_selector("img.roll:visible")
    page.close()
    time.sleep(1)
    check_idle(server)


@needs_chromium
def test_music_grows_sounds_and_goes_on_from_a_file(page: Any, server: Server, tmp_path: Path) -> None:
    choose(page, "music")
    midi.write_midi(piece(), tmp_path / "given.mid")
    page.locator(".upload:visible input[type=file]").set_input_files(tmp_path / "given.mid")
    page.wait_for_selector(".upload:visible .file-preview")
    draw(page)
    assert page.locator("img.roll:visible").count() == 1
    page.wait_for_selector("[aria-label='Play']:visible, button.play-pause-button:visible")
    found = downloads(page, server)
    assert set(found) == {"piece.wav", "piece.mid", "piece.png"}
    (tmp_path / "back.mid").write_bytes(found["piece.mid"])
    begun, drawn = midi.encode_midi(tmp_path / "given.mid"), midi.encode_midi(tmp_path / "back.mid")
    assert drawn[:20].tolist() == begun[:20].tolist()
    sound, rate = soundfile.read(io.BytesIO(found["piece.wav"]))
    assert len(sound) > rate
    assert np.abs(sound).max() > 0.01


@needs_chromium
def test_images_are_completed_and_drawn_side_by_side(page: Any, server: Server, tmp_path: Path) -> None:
    choose(page, "image")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "given.png")
    page.locator(".upload:visible input[type=file]").set_input_files(tmp_path / "given.png")
    page.wait_for_selector(".upload:visible .file-preview")
    page.locator(".several:visible input[type=number]").fill("4")
    draw(page)
    found = [np.asarray(Image.open(io.BytesIO(data))) for data in downloads(page, server).values()]
    assert len(found) == 4
    assert all((image[:4] == pixels[:4]).all() for image in found)
    assert not (found[0][4:] == found[1][4:]).all()
    assert page.locator("img.canvas:visible").evaluate("image => image.naturalWidth") == 16


@needs_chromium
def test_sound_goes_on_from_a_recording(page: Any, server: Server, tmp_path: Path) -> None:
    choose(page, "audio")
    soundfile.write(tmp_path / "given.wav", np.sin(np.arange(6400) / 9) * 0.5, 3200)
    page.locator(".upload:visible input[type=file]").set_input_files(tmp_path / "given.wav")
    page.wait_for_timeout(500)
    page.locator(".length:visible input[type=number]").fill("300")
    draw(page)
    found = downloads(page, server)
    sound, rate = soundfile.read(io.BytesIO(found["sound.wav"]))
    assert len(sound) / rate == pytest.approx(2 + 1, abs=0.1)


@needs_chromium
def test_a_copy_is_marked_right_and_wrong(page: Any, server: Server) -> None:
    choose(page, "copy")
    draw(page)
    kinds = page.locator(".drawn b:not(.given):visible").evaluate_all("all => all.map(one => one.className)")
    assert len(kinds) == 16
    assert "wrong" in kinds  # of an untrained model
    page.locator(".prompt textarea:visible").fill("not bytes")
    page.locator(".go:visible").click()
    page.wait_for_selector("text=is not a row of hexadecimal bytes")


def test_what_a_copy_should_be() -> None:
    task = CopyTask(length=12)
    (document, *_) = task.documents("validation")
    assert task.answer(document.tokens[:6]).tolist() == document.tokens[6:].tolist()


@needs_chromium
def test_the_training_page_moves_by_itself(page: Any, server: Server, runs: dict[str, Path]) -> None:
    choose(page, "text")
    page.locator("button[role=tab]:visible", has_text="Training").click()
    words = page.locator(".block.summary:visible")
    page.wait_for_selector("text=/Step \\d+ of/")
    step = int(words.inner_text().split()[1]) + 10
    log(runs["text"], step)
    page.wait_for_selector(f"text=Step {step} of", timeout=8000)
    page.wait_for_selector(".samples .drawn", timeout=20_000)
    assert page.locator(".samples h4").count() >= 1


@needs_chromium
@pytest.mark.parametrize("name", ["not a midi", "half a gigapixel", "many pixels", "an injection", "a path"])
def test_bad_uploads_get_a_sentence(page: Any, tmp_path: Path, name: str) -> None:
    bad, said = tmp_path / "x.mid", "cannot be used"
    if name == "not a midi":
        bad.write_bytes(b"MThd, but nothing else" * 9)
    elif name == "half a gigapixel":
        bad, said = tmp_path / "bomb.png", "is not a picture that can be read"
        bad.write_bytes(bomb(22_000))
    elif name == "many pixels":
        bad, said = tmp_path / "large.png", "take one of at most 16,000,000"
        bad.write_bytes(bomb(5_000))
    elif name == "an injection":
        bad = tmp_path / "<img src=x>.mid"
        bad.write_bytes(b"nothing")
    else:
        bad = tmp_path / "..\\..\\etc:passwd.mid"
        bad.write_bytes(b"nothing")
    choose(page, "image" if bad.suffix == ".png" else "music")
    page.locator(".upload:visible input[type=file]").set_input_files(bad)
    page.wait_for_selector(".upload:visible .file-preview")
    page.locator(".go:visible").click()
    page.wait_for_selector(f"text={said}")
    words = page.locator(".toast-body").first
    assert "/" not in words.inner_text()
    assert words.locator("img").count() == 0


def bomb(side: int) -> bytes:
    """A small PNG file of many black pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer, rows = zlib.compressobj(9), []
    for _ in range(side):
        rows.append(packer.compress(bytes(side + 1)))
    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    data = b"".join(rows) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def test_what_goes_outside_is_noticed(tmp_path: Path) -> None:
    watch, _ = WATCHED.split("from perceiver_ar")
    connect = (
        "import socket\ntry: socket.create_connection(('192.0.2.1', 9), timeout=0.1)\nexcept OSError: pass\n"
    )
    write = "try: open('/nowhere/x', 'w')\nexcept OSError: pass\n"
    settings = os.environ | {"OUTSIDE": str(tmp_path / "outside")}
    subprocess.run([sys.executable, "-c", watch + connect + write], env=settings, check=True)
    assert {line.split()[0] for line in (tmp_path / "outside").read_text().splitlines()} == {
        "socket.getaddrinfo",
        "socket.connect",
        "open",
    }


def test_large_files_and_other_folders_are_refused(server: Server, tmp_path: Path) -> None:
    import httpx

    def gigabyte() -> Iterator[bytes]:
        head = 'Content-Disposition: form-data; name="files"; filename="x.mid"'
        yield f"--x\r\n{head}\r\nContent-Type: application/octet-stream\r\n\r\n".encode()
        for _ in range(1024):
            yield bytes(2**20)
        yield b"\r\n--x--\r\n"

    before = server.memory()
    try:
        answer = httpx.post(
            f"{server.url}/gradio_api/upload",
            content=gigabyte(),
            headers={"Content-Type": "multipart/form-data; boundary=x"},
            timeout=60,
        )
        assert answer.status_code == 413
    except httpx.WriteError:  # it did not wait for the end
        pass
    assert server.memory() < before + 2**28
    secret = tmp_path / "secret.mid"
    midi.write_midi(piece(), secret)
    for path in (str(secret), "/etc/passwd", "../../etc/passwd", "http://192.0.2.1/x.mid"):
        given = [1.0, 0, 1.0, 0, 10, 1, 64, {"path": path, "meta": {"_type": "gradio.FileData"}}, 5]
        call = f"{server.url}/gradio_api/call/draw_music"
        asked = httpx.post(call, json={"data": given})
        if "://" in path:
            assert asked.status_code == 403
            continue
        event = asked.json()["event_id"]
        answer = httpx.get(f"{call}/{event}", timeout=30).text
        assert "event: error" in answer
        assert "complete" not in answer
    assert httpx.get(f"{server.url}/gradio_api/file={secret}").status_code in (403, 404)
    assert httpx.get(f"{server.url}/gradio_api/file=/etc/passwd").status_code in (403, 404)
    assert httpx.get(f"{server.url}/gradio_api/file=http://192.0.2.1/x").status_code == 403
    long = {"data": [1.0, 0, 1.0, 0, 10, 1, 64, "x" * 2**21]}
    assert httpx.post(f"{server.url}/gradio_api/call/draw_text", json=long).status_code == 413
    assert not server.outside.exists(), server.outside.read_text()


def test_the_example_in_the_docs_runs(server: Server) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "playground.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block.replace("http://127.0.0.1:7860", server.url), "playground.md", "exec"), names)
    assert "It was " in names["canvas"]
    assert "tokens in" in names["status"]


def test_fifty_visitors_at_once(server: Server) -> None:
    """They wait for each other; some stop, some ask for what cannot be; nobody else notices."""
    import httpx
    from gradio_client import Client

    def visit(number: int) -> None:
        latents = 10_000 if number % 10 == 3 else 64
        asked = [1.0, 0, 1.0, number, 40, 1, latents, f"Visitor {number}:"]
        if number % 10 == 7:
            job = Client(server.url, verbose=False).submit(*asked, api_name="/draw_text")
            job.cancel()
            found[number] = ""
            return
        call = f"{server.url}/gradio_api/call/draw_text"
        event = httpx.post(call, json={"data": asked}, timeout=120).json()["event_id"]
        found[number] = httpx.get(f"{call}/{event}", timeout=120).text

    def crowd(count: int) -> None:
        visitors = [threading.Thread(target=visit, args=(number,)) for number in range(count)]
        for visitor in visitors:
            visitor.start()
        for visitor in visitors:
            visitor.join()

    found: dict[int, str] = {}
    crowd(10)
    before = server.memory()
    crowd(50)
    assert len(found) == 50
    for number, answer in found.items():
        if number % 10 == 3:
            assert "event: error" in answer
        elif number % 10 != 7:
            assert "event: complete" in answer
            assert f"Visitor {number}:" in answer
    assert server.memory() < before + 2**26
    check_idle(server)


@needs_chromium
def test_it_fits_a_phone(browser: Any, server: Server) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(server.url)
    page.wait_for_selector(".go:visible")
    choose(page, "music")
    draw(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()


def test_others_need_a_password(runs: dict[str, Path], tmp_path: Path) -> None:
    import httpx

    with served(tmp_path, str(runs["copy"]), "--host", "0.0.0.0") as found:
        (password,) = re.findall(r"Password: (\S+)", found.said)
        url = found.url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/config").status_code == 401
        wrong = httpx.post(f"{url}/login", data={"username": "me", "password": "wrong"})
        assert wrong.status_code == 400
        right = httpx.post(f"{url}/login", data={"username": "me", "password": password})
        assert right.status_code == 200
        assert httpx.get(f"{url}/config", cookies=right.cookies).status_code == 200


def test_mistakes_are_told_in_a_sentence(
    tmp_path: Path, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # and back again
    with pytest.raises(ValueError, match="is not a run that can be used"):
        serve([tmp_path])
    with pytest.raises(ValueError, match="have the same name"):
        serve([runs["copy"], runs["copy"]])
    with pytest.raises(ValueError, match="nobody/nothing"):  # at once, since nobody is asked for it
        Sound().prompt(AudioTask(codec="dac", weights="nobody/nothing"), 0, None, 1)
    result = run("playground")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("queries", ["linear", "learned", "mlp"])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_where_it_looks_is_where_the_forward_looks(
    queries: Any, positions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(50, 40, 8, channels=16, heads=2, layers=1, queries=queries, positions=positions)
    model = PerceiverAR(config).eval()
    seen: list[Any] = []

    def spy(q: Any, k: Any, *rest: Any) -> Any:
        seen.append((q, k))
        return attend(q, k, *rest)

    monkeypatch.setattr(model_module, "attend", spy)
    tokens = torch.randint(50, (1, 30))
    with torch.no_grad():
        model(tokens)
    q, k = seen[0]
    plain = (q[0, :, -1:] @ k[0].transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1)[:, 0]
    torch.testing.assert_close(gaze(model, tokens, None, 7), plain)


def test_the_window_that_was_held_is_the_one_that_is_shown() -> None:
    for given, total in ((3, 3), (3, 50), (40, 60), (90, 90), (90, 120)):
        model = PerceiverAR(ModelConfig(9, 64, 16, channels=16, heads=2, layers=1)).eval()
        places, tokens = torch.arange(total)[None, :, None], torch.randint(9, (1, total))
        start = 0 if given <= 64 else given - 56
        _, cache = prefill(model, tokens[:, start:given], places[:, start:given], (64, 16))
        for place in range(given, total):
            _, cache = step(model, cache, tokens[:, place], places[:, place : place + 1])
        assert held(given, total, 64, 16) == (cache.inputs, cache.latents)


def test_the_pace_counts_steps_and_refreshes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, spent = [0.0], {"refresh": 0.5, "step": 0.01}

    def spending(name: str) -> Any:
        real = getattr(pace, name)

        def act(*args: Any) -> Any:
            clock[0] += spent[name]
            return real(*args)

        return act

    for name in spent:
        monkeypatch.setattr(pace, name, spending(name))
    monkeypatch.setattr(pace.time, "perf_counter", lambda: clock[0])
    model = PerceiverAR(ModelConfig(9, 64, 32, channels=16, heads=2, layers=1)).eval()
    found = pace.tokens_per_second(model, tasks.get("tokens"), np.array([2]), 64, 32, lambda: None)
    assert found == pytest.approx(17 / (16 * 0.01 + 0.5))


def test_a_character_is_as_likely_as_all_its_bytes() -> None:
    assert list(_spelled(["", "é", "x"], [0.5, 0.5, 0.1])) == [("é", 0.25), ("x", 0.1)]


def test_where_it_looks_in_words() -> None:
    weights = np.zeros((2, 1000), np.float32)
    weights[:, 100] = 0.6
    weights[:, 999] = 0.4
    words = explained(weights)
    assert "within the last 900 inputs, nine tenths within 900 of 1,000" in words
