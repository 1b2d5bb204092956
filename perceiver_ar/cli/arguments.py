"""Arguments that several commands have."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro

Json = Annotated[bool, tyro.conf.arg(name="json", help="Print the result as one JSON object.")]
Run = Annotated[
    Path,
    tyro.conf.Positional,
    tyro.conf.arg(metavar="RUN", help="Folder of a run or model; or piano, a model in the box."),
]
Device = Annotated[str, tyro.conf.arg(help="Where to compute: auto, cpu, cuda, cuda:1, mps ...")]

PATIENCE = 10.0
"""Minutes without progress in any process after which all of them are ended."""


def first_of(arguments: list[str], usage: Callable[[], str]) -> str:
    """The name that a command's options follow from; without one, says how it is used, and ends."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0]
    asked = "--help" in arguments or "-h" in arguments
    print(usage(), file=sys.stdout if asked else sys.stderr)
    sys.exit(0 if asked else 2)
