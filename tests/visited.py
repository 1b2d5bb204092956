"""A playground as visitors find it: small models of every task, a server of its own, a browser."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perceiver_ar import ModelConfig, build, presets, tasks
from perceiver_ar.config import TransformerConfig
from perceiver_ar.run import export
from perceiver_ar.sealed import write_sealed
from perceiver_ar.special import BOS
from perceiver_ar.store import write_store
from tests.test_audio import save_codec

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SIZES: dict[str, Any] = {"channels": 16, "heads": 2, "layers": 2}
WATCHED = """
import os, sys, tempfile
LOCAL = ("127.0.0.1", "::1", "localhost", "0.0.0.0", None, "")
OURS = (tempfile.gettempdir(), "/dev/")
def outside(event, args):
    if event == "socket.getaddrinfo":
        return args[0] not in LOCAL
    if event == "socket.connect":
        return isinstance(args[1], tuple) and args[1][0] not in LOCAL
    if event == "open" and isinstance(args[0], str) and args[2] & (os.O_WRONLY | os.O_RDWR):
        return not os.path.abspath(args[0]).startswith(OURS)
    return False
def watch(event, args):
    if outside(event, args):
        with open(os.environ["OUTSIDE"], "a") as file:
            print(event, args, file=file)
sys.addaudithook(watch)
from perceiver_ar.cli import main
main()
"""


def make_runs(folder: Path) -> dict[str, Path]:
    """Untrained models; that of text is a run in progress."""
    save_codec("dac", folder / "codec")
    kinds: dict[str, tuple[dict[str, Any], Any]] = {
        "text": ({}, ModelConfig(259, 512, 64, **SIZES)),
        "copy": ({"length": 32}, ModelConfig(259, 32, 16, **SIZES)),
        "image": (
            {"size": 8},
            ModelConfig(259, 193, 32, positions="axial", axes=(10, 10, 5), **SIZES),
        ),
        "music": ({}, ModelConfig(391, 512, 64, **SIZES)),
        "transformer": ({}, TransformerConfig(391, 128, **SIZES)),
        "audio": (
            {"levels": 3, "codes": 32, "frame_rate": 100.0, "codec": "dac", "weights": str(folder / "codec")},
            ModelConfig(99, 512, 64, **SIZES),
        ),
    }
    return {
        name: make_run(folder / name, "music" if name == "transformer" else name, options, model)
        for name, (options, model) in kinds.items()
    }


def make_run(run: Path, name: str, options: dict[str, Any], config: Any) -> Path:
    torch.manual_seed(0)
    task = tasks.get(name, options)
    data: Any = {}
    if name == "text":
        tokens = np.concatenate(([BOS], np.frombuffer(b"A reference that was written. " * 30, np.uint8) + 3))
        write_store(run.with_name("store"), {"train": [tokens], "validation": [tokens]}, 259, "text")
        task, data = task.at(run), {str(run.with_name("store")): 1.0}
    experiment = replace(presets.get("tiny"), name=name, task=name, model=config, options=options)
    run.mkdir()
    export(run / "model", build(config), experiment, task, data)
    if name == "text":
        write_sealed(run / "config.json", {"experiment": experiment.to_dict(), "data": data})
        log(run, 10)
    return run


def log(run: Path, step: int) -> None:
    """As training does."""
    line = {"step": step, "loss": 5 - step / 100, "lr": 1e-3, "targets_per_second": 1000.0}
    with (run / "metrics.jsonl").open("a") as file:
        print(json.dumps(line), file=file)


@dataclass(frozen=True)
class Server:
    url: str
    process: subprocess.Popen[str]
    outside: Path
    """Notes each connection to another machine, and each file written outside of temporary folders."""
    seconds: float
    """Of a processor until it was ready, so that what runs beside it does not count."""
    said: str
    """Until then."""

    def memory(self) -> int:
        """Bytes."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )

    def worked(self) -> float:
        """Seconds of a processor so far."""
        return worked(self.process)


def worked(process: subprocess.Popen[str]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def served(folder: Path, *args: str) -> Iterator[Server]:
    outside = folder / "outside"
    settings = {"OUTSIDE": str(outside), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", WATCHED, "playground", *args, "--no-browser", "--device", "cpu"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | settings,
        cwd=folder,
        # What runs in the background may be told to ignore it, and all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    try:
        said = [""]
        for line in process.stdout:
            said.append(line)
            if "is ready" in line:
                break
        assert "is ready" in said[-1], "".join(said)
        yield Server(said[-1].split()[0], process, outside, worked(process), "".join(said))
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        finally:
            process.kill()
