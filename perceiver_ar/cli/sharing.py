"""Commands that export and import models: export, pack and convert."""

from pathlib import Path
from typing import Annotated

import tyro

from perceiver_ar.cli.arguments import Run


def export(
    run: Run,
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")],
    license: str | None = None,
) -> None:
    """Export a model for transformers, with its tokenizer, code and a model card.

    Args:
        run: Folder of a run, or of a model alone; or piano, a model that comes with this package.
        folder: New folder to write.
        license: Licence of the weights that the model card states, such as apache-2.0. Default: that of a
            model in the box, otherwise unknown.
    """
    from perceiver_ar.interop.export import export

    export(run, folder, license)
    print(f"Wrote {folder}: load it with AutoModelForCausalLM.from_pretrained or any perceiver-ar command.")


def pack(
    run: Run,
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")],
    bits: int = 6,
) -> None:
    """Write a smaller copy of a model, with few bits per weight, that every command can read.

    Args:
        run: Folder of a run, or of a model alone; or piano, a model that comes with this package.
        folder: New folder to write.
        bits: Bits per weight, from 2 to 8. `evaluate FOLDER --data STORE` measures what they cost.
    """
    from perceiver_ar.pretrained import WEIGHTS
    from perceiver_ar.run import export_packed, model_folder

    export_packed(run, folder, bits)
    before, after = ((place / WEIGHTS).stat().st_size / 1e6 for place in (model_folder(run), folder))
    print(f"Wrote {folder}: {after:,.1f} MB instead of {before:,.1f}.")


def convert(
    format: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FORMAT")],
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")],
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")],
    kwargs: str | None = None,
) -> None:
    """Convert a published checkpoint into a model folder.

    Args:
        format: official: a checkpoint of the authors' code.
        source: Checkpoint to convert.
        folder: New folder for the model.
        kwargs: Settings of the model that the checkpoint does not contain: the name of one of the authors'
            experiments, such as random_mirrored_131072, or a JSON file of their constructor's arguments.
    """
    from perceiver_ar.interop import official
    from perceiver_ar.store import check_new
    from perceiver_ar.strict import unknown

    if format != "official":
        raise ValueError(unknown("format", format, ["official"]))
    check_new(folder)
    model = official.from_params(*official.read_checkpoint(source, kwargs))
    model.save_pretrained(folder)
    print(f"Wrote {folder}. Next: PerceiverAR.from_pretrained({str(folder)!r}). Its positions start at 1.")
