"""Work distributed over processes: one that crashes or hangs costs only its own item."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, NamedTuple


class Done(NamedTuple):
    """An item with its result or its error."""

    item: Any
    value: Any
    error: Exception | None


class Lost(Exception):
    """The process that had the item crashed or took too long."""


class _Worker:
    """A process that works on one item at a time."""

    def __init__(self, work: Callable[[Any], Any], threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, work, threads), daemon=True)
        with _without_main(work):
            self.process.start()
        other.close()
        self.item, self.deadline = None, float("inf")

    def give(self, item: Any, seconds: float) -> None:
        self.item, self.deadline = item, time.monotonic() + seconds
        with suppress(BrokenPipeError):  # that it is dead is noticed when its result is read
            self.pipe.send(item)

    def result(self) -> Done:
        """The outcome of the item. Call it after a reply, the end of the process, or the deadline."""
        if self.pipe.poll():
            with suppress(EOFError, ConnectionResetError):
                return Done(self.item, *self.pipe.recv())
            return Done(self.item, None, Lost("it crashed the process that read it"))
        return Done(self.item, None, Lost("it took too long"))

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


@contextmanager
def _without_main(work: Callable[..., Any]) -> Generator[None]:
    """Keeps a spawned process from running the user's script again, unless the work is defined there."""
    main = sys.modules["__main__"]
    if getattr(getattr(work, "func", work), "__module__", None) != "__main__":
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _serve(pipe: Connection, work: Callable[[Any], Any], threads: int) -> None:
    """Works on items from the pipe; exits with the parent, even in the middle of one, and ignores Ctrl-C."""
    if "torch" in sys.modules:  # which would use all cores in every process
        sys.modules["torch"].set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow, daemon=True).start()
    with suppress(EOFError, OSError):
        while True:
            item = pipe.recv()
            try:
                pipe.send((work(item), None))
            except Exception as error:
                pipe.send((None, error))


def _follow() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def processes(asked: int | None) -> int:
    """The number of processes: as asked, or one per core."""
    if asked is not None and asked < 1:
        raise ValueError(f"there must be at least 1 process, not {asked}: set --workers.")
    return asked or os.cpu_count() or 1


def each(
    work: Callable[[Any], Any], items: Iterable[Any], workers: int, seconds: float = float("inf")
) -> Iterator[Done]:
    """Yields the outcome of each item, in any order; an item may take at most `seconds`."""
    waiting, threads = iter(items), max(1, (os.cpu_count() or 1) // workers)
    crew: list[_Worker] = []
    try:
        for _, item in zip(range(workers), waiting, strict=False):  # zip in this order does not drop an item
            crew.append(_Worker(work, threads))
            crew[-1].give(item, seconds)
        while crew:
            soonest = min(worker.deadline for worker in crew) - time.monotonic()
            timeout = None if soonest == float("inf") else max(0.0, soonest)
            ready = wait([worker.pipe for worker in crew], timeout)
            for worker in [w for w in crew if w.pipe in ready or w.deadline <= time.monotonic()]:
                done = worker.result()
                crew.remove(worker)
                more = list(islice(waiting, 1))
                if isinstance(done.error, Lost) or not more:
                    worker.stop()
                    worker = _Worker(work, threads) if more else worker
                for item in more:
                    worker.give(item, seconds)
                    crew.append(worker)
                yield done
    finally:
        for worker in crew:
            worker.stop()
