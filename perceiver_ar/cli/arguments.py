"""Arguments that several commands have."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro

Json = Annotated[bool, tyro.conf.arg(name="json", help="Print one JSON object instead.")]
Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help="Folder of a run.")]
Device = Annotated[str, tyro.conf.arg(help="auto, cpu, cuda, cuda:1, mps ...")]

PATIENCE = 10.0
"""Minutes after which processes of which none goes on are ended."""


def first_of(arguments: list[str], usage: Callable[[], str]) -> str:
    """The name that a command's options follow from; without one, says how it is used, and ends."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0]
    asked = "--help" in arguments or "-h" in arguments
    print(usage(), file=sys.stdout if asked else sys.stderr)
    sys.exit(0 if asked else 2)
