"""The command line; the only importer of tyro. What a command needs is imported when it runs."""

import json
import sys
from typing import Annotated, Any

import tyro

app = tyro.extras.SubcommandApp()

Json = Annotated[bool, tyro.conf.arg(name="json", help="Print one JSON object instead.")]


@app.command(name="presets")
def show_presets(as_json: Json = False) -> None:
    """List the paper's experiments and their sizes."""
    from rich.console import Console
    from rich.table import Table

    from perceiver_ar import presets
    from perceiver_ar.model import parameter_count

    rows: dict[str, dict[str, Any]] = {}
    for name in presets.names():
        experiment = presets.get(name)
        sizes = {key: getattr(experiment.model, key) for key in ("context", "latents", "layers", "channels")}
        rows[name] = {"task": experiment.task, **sizes, "parameters": parameter_count(experiment.model)}
    if as_json:
        print(json.dumps(rows))
        return
    table = Table("name", "task", box=None, padding=(0, 1, 0, 0))
    for heading in ("context", "latents", "layers", "channels", "parameters"):
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        row["parameters"] = f"{row['parameters'] / 1e6:,.1f}M"
        table.add_row(name, *(f"{cell:,}" if isinstance(cell, int) else cell for cell in row.values()))
    Console().print(table)


def main() -> None:
    """Runs a command; a user's mistake ends with one sentence and status 2."""
    try:
        app.cli(
            prog="perceiver-ar",
            description="Perceiver AR: long-context autoregressive models.",
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except ValueError as error:
        print(f"perceiver-ar: {error}", file=sys.stderr)
        sys.exit(2)
