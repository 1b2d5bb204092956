"""A run that stands still: which of its ranks is to blame, said before all of them end."""

import itertools
import json
import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any, Self

import torch.distributed as dist
from torch.distributed import distributed_c10d

from perceiver_ar.distributed import Ranks


class Watch:
    """Use as a context; `beat` says that this rank goes on, at the same places on every rank.

    A thread of each rank tells the others how far it is. Where nothing moves for too long, the rank that
    tells nothing any more is to blame; where all do, the one that is behind.
    """

    def __init__(self, ranks: Ranks, minutes: float) -> None:
        self.ranks, self.minutes = ranks, minutes
        self.every = min(5.0, 60 * minutes / 4)
        self.beats = self.step = 0
        self.still = False
        self.told: dict[int, list[Any]] = {}
        """Of each rank, read while all stand still: a count of what it told, its beats, step and machine."""
        self.over = threading.Event()

    def __enter__(self) -> Self:
        if self.ranks.size > 1:
            store: Any = distributed_c10d._get_default_store()
            self.store = dist.PrefixStore("watch", store.clone())
            # Apart, since the one that talks may never get an answer.
            for work in (self._talk, self._judge):
                threading.Thread(target=work, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()

    def beat(self, step: int) -> None:
        self.beats, self.step = self.beats + 1, step

    def _talk(self) -> None:
        with suppress(dist.DistError):  # torchrun, which may keep what is told, is gone
            for count in itertools.count(1):
                if self.over.wait(self.every):
                    return
                entry = [count, self.beats, self.step, os.uname().nodename]
                self.store.set(str(self.ranks.rank), json.dumps(entry))
                for rank in range(self.ranks.size) if self.still else ():
                    if self.store.check([str(rank)]):
                        self.told[rank] = json.loads(self.store.get(str(rank)))

    def _judge(self) -> None:
        last, since = -1, 0.0
        while not self.over.wait(self.every):
            if self.beats != last:
                last, since, self.still = self.beats, time.monotonic(), False
            elif time.monotonic() - since > 60 * self.minutes:
                self.still = True
                before = {}
                for _ in range(2):  # long enough for all to tell something twice
                    before = dict(self.told)
                    if self.over.wait(3 * self.every):
                        return
                if self.beats == last:
                    self._end(before, dict(self.told))

    def _end(self, before: dict[int, list[Any]], now: dict[int, list[Any]]) -> None:
        """Says who is to blame, by one of those who are not, and ends this process."""
        ranks = range(self.ranks.size)
        blamed = [rank for rank in ranks if before.get(rank) == now.get(rank)]
        if self.ranks.rank in blamed:  # nothing is heard at all: the first keeps what is told
            blamed = [0]
        elif not blamed:
            least = min(beats for _, beats, *_ in now.values())
            blamed = [rank for rank in ranks if now[rank][1] == least]
        if self.ranks.rank == min(set(ranks) - set(blamed), default=0):
            *_, machine = now.get(blamed[0], ["a machine that told nothing"])
            names = " and ".join(map(str, blamed))
            print(
                f"perceiver-ar: rank {names} of {self.ranks.size}, on {machine}, has not gone on for "
                f"{self.minutes:g} minutes, at step {self.step:,}: the run is ended. Go on with --resume.",
                file=sys.stderr,
                flush=True,
            )
        os._exit(1)
