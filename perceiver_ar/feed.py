"""Batches prefetched by a thread."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from perceiver_ar.data import Batch


class Feed:
    """Makes batches ahead of time in a thread, and measures the seconds spent waiting for them."""

    def __init__(self, make: Callable[[int], Batch], start: int, stop: int, ahead: int = 3) -> None:
        self.make, self.stop, self.ahead, self.waited = make, stop, ahead, 0.0
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.pending: dict[int, Future[Batch]] = {}
        self._order(start)

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.shutdown(cancel_futures=True)

    def take(self, step: int) -> Batch:
        start = time.perf_counter()
        batch = self.pending.pop(step).result()
        self.waited += time.perf_counter() - start
        self._order(step + 1)
        return batch

    def take_waited(self) -> float:
        """Seconds spent waiting since the last call."""
        waited, self.waited = self.waited, 0.0
        return waited

    def restart(self, step: int) -> None:
        """Makes the batches from this step on anew, after the examples have changed."""
        for future in self.pending.values():
            if not future.cancel():
                future.exception()  # waits for the one being made
        self.pending.clear()
        self._order(step)

    def _order(self, step: int) -> None:
        for wanted in range(step, min(step + self.ahead, self.stop)):
            if wanted not in self.pending:
                self.pending[wanted] = self.pool.submit(self.make, wanted)
