"""Killed runs: `python -m tests.kills 20` kills training at 20 random moments; no bit may differ."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from perceiver_ar.checkpoint import checkpoints
from tests import reading
from tests.ranks import command, gone, under_torchrun, wait_until, workers

SETTINGS = [
    *("copy-32", "--device", "cpu", "--model.channels", "32", "--model.heads", "2", "--train.ema", "0.9"),
    *("--train.batch-size", "12", "--train.warmup-steps", "2", "--train.log-every", "1"),
    *("--train.steps", "500", "--train.checkpoint-every", "5"),
]
KINDS = ("one rank", "all", "the launcher")


def train(run: Path, kinds: list[str], rng: random.Random) -> None:
    """Trains to the end, with kills of these kinds at random moments; removes those done from the list."""
    while True:
        left = len(kinds)
        with under_torchrun(command("train", *SETTINGS, "--out", run, "--resume"), restarts=1) as process:
            while kinds and not ends_within(process, rng.uniform(0, 12)):
                kill(process, kinds[-1], rng)
                steps = [place.name for place in checkpoints(run / "checkpoints")]
                print(f"{kinds.pop()} killed, with {steps[-1:]} kept", flush=True)
            process.communicate(timeout=120)
        if process.returncode == 0:
            return
        assert len(kinds) < left, "it ended though nothing was killed"


def ends_within(process: subprocess.Popen[str], seconds: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.poll() is not None


def kill(process: subprocess.Popen[str], kind: str, rng: random.Random) -> None:
    """Kills one rank, everything, or only the launcher. At the very start there may be no rank yet."""
    ranks = workers(process)
    victims = {"one rank": rng.sample(ranks, min(1, len(ranks))), "all": [*ranks, process.pid]}
    for victim in victims.get(kind, [process.pid]):
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    if kind != "one rank":
        process.wait()
        wait_until(lambda: all(map(gone, ranks)), 60)  # orphaned ranks notice it


def same(run: Path, other: Path) -> bool:
    """Whether weights, average, optimizer state and losses are equal, bit for bit."""
    found, wanted = (reading.tensors(reading.newest(x)) for x in (run, other))
    told = [[json.loads(line)["loss"] for line in (x / "metrics.jsonl").open()] for x in (run, other)]
    return (
        found.keys() == wanted.keys()
        and all(found[name].equal(x) for name, x in wanted.items())
        and told[0] == told[1]
    )


def main(count: int, seed: int = 0) -> None:
    began, rng = time.monotonic(), random.Random(seed)
    kinds = [KINDS[index % len(KINDS)] for index in range(count)]
    rng.shuffle(kinds)
    with tempfile.TemporaryDirectory() as place:
        whole, runs = Path(place) / "whole", 0
        train(whole, [], rng)
        while kinds:
            runs += 1
            train(Path(place) / str(runs), kinds, rng)
            assert same(Path(place) / str(runs), whole)
            print("the same as undisturbed", flush=True)
    print(f"{count} kills of {runs} runs, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]), *map(int, sys.argv[2:]))
