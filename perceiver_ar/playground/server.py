"""Starts the page: for this machine only or, if asked, for others behind a password."""

import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import gradio as gr
import huggingface_hub.constants
from starlette.middleware import Middleware

from perceiver_ar.playground.guard import Guard
from perceiver_ar.playground.html import STYLE
from perceiver_ar.playground.page import build
from perceiver_ar.playground.shown import Shown

LARGEST = "64mb"
"""Largest upload."""
WAITING = 200
"""Most requests in the queue; further ones are turned away."""
LOCAL = ("127.0.0.1", "localhost", "::1")
FONT = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "monospace"]


def serve(
    runs: list[Path],
    host: str = "127.0.0.1",
    port: int | None = None,
    share: bool = False,
    password: str | None = None,
    browser: bool = True,
    device: str = "auto",
) -> None:
    """Serves the page until interrupted."""
    huggingface_hub.constants.HF_HUB_OFFLINE = True  # codecs must be local too
    shown = [Shown(run, device) for run in runs]
    if len({one.name for one in shown}) < len(shown):
        raise ValueError("two of these runs have the same name: rename the folder of one.")
    for one in shown:
        if one.written is not None:
            one.get()
    if password is None and (share or host not in LOCAL):
        password = secrets.token_urlsafe(9)
        print(f"Password: {password}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="perceiver-ar-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that files of visitors are removed
        page = build(shown)
        theme = gr.themes.Soft(primary_hue="indigo", font=FONT, font_mono=MONO)
        page.queue(max_size=WAITING, default_concurrency_limit=4)
        try:
            page.launch(
                server_name=host,
                server_port=port,
                share=share,
                auth=None if password is None else _checks(password),
                auth_message=None if password is None else "Any name, and the password.",
                inbrowser=browser,
                max_file_size=LARGEST,
                blocked_paths=[str(one.run.resolve()) for one in shown],
                quiet=True,
                footer_links=[],
                ssr_mode=False,
                theme=theme,
                app_kwargs={"middleware": [Middleware(Guard)]},
                css=STYLE,
                prevent_thread_lock=True,
            )
        except OSError:
            raise ValueError(f"port {port or 7860} cannot be listened on: give another --port.") from None
        print(f"http://{host}:{page.server_port} is ready; press Ctrl-C to stop.", flush=True)
        page.block_thread()


def _checks(password: str) -> Callable[[str, str], bool]:
    return lambda _, given: secrets.compare_digest(given.encode(), password.encode())
