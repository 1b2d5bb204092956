"""Arguments that several commands have."""

from pathlib import Path
from typing import Annotated

import tyro

Json = Annotated[bool, tyro.conf.arg(name="json", help="Print one JSON object instead.")]
Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help="Folder of a run.")]
Device = Annotated[str, tyro.conf.arg(help="auto, cpu, cuda, cuda:1, mps ...")]

PATIENCE = 10.0
"""Minutes after which processes of which none goes on are ended."""
