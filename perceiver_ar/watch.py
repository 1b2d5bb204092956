"""Detects that a run hangs, and names the rank to blame before all of them exit."""

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
    """Use as a context manager, and call `beat` at the same points of the program on every rank.

    A thread of each rank reports its number of beats to a shared store. When no rank advances for too
    long, the one that has stopped reporting is to blame or, if all report, the one with the fewest beats.
    """

    def __init__(self, ranks: Ranks, minutes: float) -> None:
        self.ranks, self.minutes = ranks, minutes
        self.every = min(5.0, 60 * minutes / 4)
        self.beats = self.step = 0
        self.still = False
        self.told: dict[int, list[int]] = {}
        """By rank: number of its reports, and its beats. Read only while this rank does not advance."""
        self.over = threading.Event()

    def __enter__(self) -> Self:
        self.machines = self.ranks.gather(os.uname().nodename)
        if self.ranks.size > 1:
            store: Any = distributed_c10d._get_default_store()
            self.store = dist.PrefixStore("watch", store.clone())
            # Two threads, since the one that uses the store may never get an answer.
            for work in (self._talk, self._judge):
                threading.Thread(target=work, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()

    def beat(self, step: int = 0) -> None:
        self.beats, self.step = self.beats + 1, step

    def _talk(self) -> None:
        with suppress(dist.DistError):  # torchrun, which may host the store, is gone
            for count in itertools.count(1):
                if self.over.wait(self.every):
                    return
                self.store.set(str(self.ranks.rank), json.dumps([count, self.beats]))
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
                for _ in range(2):  # long enough for every rank to report twice
                    before = dict(self.told)
                    if self.over.wait(3 * self.every):
                        return
                now = dict(self.told)
                if any(before[rank][1] != now[rank][1] for rank in before):
                    since, self.still = time.monotonic(), False  # others still work; this one waits for them
                elif self.beats == last:
                    self._end(before, now)

    def _end(self, before: dict[int, list[int]], now: dict[int, list[int]]) -> None:
        """Ends this process; one of the ranks that are not to blame first names those that are."""
        ranks = range(self.ranks.size)
        blamed = [rank for rank in ranks if before.get(rank) == now.get(rank)]
        if self.ranks.rank in blamed:  # no reports at all: rank 0 may host the store
            blamed = [0]
        elif not blamed:
            least = min(beats for _, beats in now.values())
            blamed = [rank for rank in ranks if now[rank][1] == least]
        if self.ranks.rank == min(set(ranks) - set(blamed), default=0):
            names, machine = " and ".join(map(str, blamed)), self.machines[blamed[0]]
            step = f", at step {self.step:,}" if self.step else ""
            print(
                f"perceiver-ar: rank {names} of {self.ranks.size}, on {machine}, has not gone on for "
                f"{self.minutes:g} minutes{step}: all are ended. Start them again, training with --resume.",
                file=sys.stderr,
                flush=True,
            )
        else:  # wait for the message: ranks that lose their connection to this one name nobody
            time.sleep(4 * self.every)
        os._exit(1)
