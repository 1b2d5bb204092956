"""Commands that take models elsewhere, and bring others in: export, pack and convert."""

from pathlib import Path
from typing import Annotated

import tyro

from perceiver_ar.cli.arguments import Run


def export(run: Run, folder: Annotated[Path, tyro.conf.Positional], license: str = "unknown") -> None:
    """Write a run as a folder that transformers loads, with its tokenizer, code and a model card.

    Args:
        run: Folder of a run.
        folder: A new folder.
        license: What the model card says of the weights, such as apache-2.0.
    """
    from perceiver_ar.interop.export import export

    export(run, folder, license)
    print(f"{folder}: AutoModelForCausalLM.from_pretrained reads it, and so do our own commands.")


def pack(run: Run, folder: Annotated[Path, tyro.conf.Positional], bits: int = 6) -> None:
    """Write a run's model with few bits a weight, to send along: all commands read it.

    Args:
        run: Folder of a run.
        folder: A new folder.
        bits: Of each weight: 2 to 8. `evaluate FOLDER --data STORE` tells what they cost.
    """
    from perceiver_ar.pretrained import WEIGHTS
    from perceiver_ar.run import export_packed, model_folder

    export_packed(run, folder, bits)
    before, after = ((place / WEIGHTS).stat().st_size / 1e6 for place in (model_folder(run), folder))
    print(f"{folder}: {after:,.1f} MB instead of {before:,.1f}.")


def convert(
    format: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FORMAT")],
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")],
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")],
    kwargs: str | None = None,
) -> None:
    """Make a model folder of what others published.

    Args:
        format: official: a checkpoint of the authors' code.
        source: The checkpoint.
        folder: New folder for the model.
        kwargs: How that model was made, where the checkpoint does not say it: the name of the authors'
            experiment, such as random_mirrored_131072, or a JSON file of their constructor's arguments.
    """
    from perceiver_ar.interop import official
    from perceiver_ar.store import check_new
    from perceiver_ar.strict import unknown

    if format != "official":
        raise ValueError(unknown("format", format, ["official"]))
    check_new(folder)
    model = official.from_params(*official.read_checkpoint(source, kwargs))
    model.save_pretrained(folder)
    print(f"{folder} is there. Next: PerceiverAR.from_pretrained({str(folder)!r}). Its positions start at 1.")
