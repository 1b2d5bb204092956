"""The command line; no other package imports tyro. What a command needs is imported when it runs."""

import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import tyro

from perceiver_ar import __version__
from perceiver_ar.cli.drawing import generate, playground
from perceiver_ar.cli.scoring import evaluate, plot, score
from perceiver_ar.cli.sharing import convert, export, pack
from perceiver_ar.cli.stores import download, prepare
from perceiver_ar.cli.studies import reproduce
from perceiver_ar.cli.training import plan, show_presets, train

COMMANDS: dict[str, Callable[..., None]] = {
    "presets": show_presets,
    "download": download,
    "prepare": prepare,
    "train": train,
    "plan": plan,
    "evaluate": evaluate,
    "plot": plot,
    "export": export,
    "pack": pack,
    "score": score,
    "generate": generate,
    "playground": playground,
    "reproduce": reproduce,
    "convert": convert,
}
OWN = {"prepare", "train", "plan"}
"""Those whose options follow from their first argument, and which read their arguments themselves."""


def main() -> None:
    """Runs a command; a user's mistake ends with one sentence and status 2."""
    # Before torch is imported: its threads spin while they wait, which takes a CPU from all else on it.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        if sys.argv[1:] == ["--version"]:
            print(f"perceiver-ar {__version__}")
        elif sys.argv[1:2] and sys.argv[1] in OWN:
            COMMANDS[sys.argv[1]](sys.argv[2:])
        else:
            tyro.extras.subcommand_cli_from_dict(
                COMMANDS,
                prog="perceiver-ar",
                description="Perceiver AR: long-context autoregressive models.",
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except KeyboardInterrupt:
        print("perceiver-ar: interrupted.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # what reads this, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed
        sys.exit(141)
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        if os.environ.get("PERCEIVER_AR_TRACEBACK"):
            raise
        if isinstance(error, RuntimeError) and is_lost(error):
            end(f"another process of this run died, or does not answer ({str(error).splitlines()[0]}).", 1)
        if isinstance(error, RuntimeError) and not is_full(error):
            raise
        end(sentence(error), 2)


def sentence(error: Exception) -> str:
    """What a person is told of a mistake."""
    if isinstance(error, MemoryError | RuntimeError):
        return "there is not enough memory for this: ask for less, or for less at a time."
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename} cannot be used: {error.strerror[0].lower()}{error.strerror[1:]}."
    return str(error)


def end(why: str, status: int) -> NoReturn:
    """Ends with one sentence. Under torchrun the first process of a machine says it, and all are ended."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)  # by then it is over, unless this one alone is wrong
    print(f"perceiver-ar: {why}", file=sys.stderr, flush=True)
    if ranks_talk():
        os._exit(status)  # else torch would wait, or abort
    sys.exit(status)


def ranks_talk() -> bool:
    """Whether this is one of several processes; without importing torch to find out."""
    module = sys.modules.get("perceiver_ar.distributed")
    return module is not None and module.joined()


def is_full(error: RuntimeError) -> bool:
    """Whether it says that there is not enough memory."""
    from perceiver_ar.device import memory_is_full

    return memory_is_full(error)


def is_lost(error: RuntimeError) -> bool:
    """Whether it says that another process cannot be reached."""
    from torch.distributed import DistError

    return ranks_talk() and (isinstance(error, DistError) or "gloo" in str(error))
