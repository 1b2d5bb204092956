"""Ranks for tests: under torchrun, or forked from a process with all slow imports done."""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.forked import SERVER


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def on_ranks(
    size: int, work: Callable[..., Any], *args: Any, seconds: float = 60, **settings: object
) -> list[Any]:
    """Runs `work` on `size` ranks; returns each one's result, its exception as text, or None without answer.

    Once a rank has died, the others get two more seconds. No process is left behind.
    """
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", **settings}
    shared |= {"MASTER_PORT": free_port()}
    ends: dict[Connection, int] = {}
    processes, found = [], [None] * size
    try:
        for rank in range(size):
            here, there = SERVER.Pipe(duplex=False)
            given = {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
            process = SERVER.Process(target=_rank, args=(given, there, work, args))
            process.start()
            processes.append(process)
            there.close()
            ends[here] = rank
        deadline = time.monotonic() + seconds
        while ends and time.monotonic() < deadline:
            for end in wait(list(ends), max(0, deadline - time.monotonic())):
                rank = ends.pop(end)
                try:
                    found[rank] = end.recv()
                except EOFError:
                    deadline = min(deadline, time.monotonic() + 2)
        return found
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(settings: dict[str, str], end: Any, work: Callable[..., Any], args: Sequence[Any]) -> None:
    import torch

    os.environ.update(settings)
    torch.set_num_threads(1)
    try:
        end.send(work(*args))
    except BaseException as error:
        end.send(f"{type(error).__name__}: {error}")
        raise


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "perceiver_ar", *map(str, args)]


@contextmanager
def under_torchrun(
    wanted: list[str], restarts: int = 0, processes: int = 2, reached: Sequence[str] = ("--standalone",)
) -> Generator[subprocess.Popen[str]]:
    """Runs a command under torchrun; on exit, kills all processes that this started."""
    mark = f"MARK={uuid.uuid4()}"
    launcher = ["torch.distributed.run", *reached, "--nproc-per-node", str(processes), "--no-python"]
    process = subprocess.Popen(
        [sys.executable, "-m", *launcher, "--max-restarts", str(restarts), *wanted],
        env=os.environ | {"OMP_NUM_THREADS": "1", "MARK": mark.removeprefix("MARK=")},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for found in Path("/proc").glob("[0-9]*/environ"):  # including orphans
            with suppress(OSError):
                if mark.encode() in found.read_bytes():
                    os.kill(int(found.parent.name), signal.SIGKILL)
        process.communicate(timeout=60)


def workers(process: subprocess.Popen[str]) -> list[int]:
    """Ids of the processes that torchrun started, by rank."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    with suppress(OSError):
        return [int(x) for x in found.read_text().split()]
    return []


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Waits for success; returns standard output and standard error."""
    printed, said = process.communicate(timeout=120)
    assert process.returncode == 0, said[-3000:]
    return printed, said


def wait_until(happened: Callable[[], Any], seconds: float = 100) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Whether a process has ended, perhaps as a zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True
