"""Commands that get data: download and prepare."""

from pathlib import Path
from typing import Annotated

import tyro

from perceiver_ar.cli.arguments import first_of
from perceiver_ar.strict import unknown


def download(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = None,
    folder: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER]")] = None,
) -> None:
    """Download one of the paper's data sets, or list them. An interrupted download is resumed.

    Args:
        name: Data set to download. Without it, they are listed.
        folder: New folder for it.
    """
    from perceiver_ar import datasets

    if name is None:
        for known, dataset in datasets.DATASETS.items():
            print(f"{known:17} {dataset.about}\n{'':17} {dataset.licence}")
        return
    if name not in datasets.DATASETS:
        raise ValueError(unknown("data set", name, sorted(datasets.DATASETS)))
    if folder is None:
        raise ValueError(f"where to? perceiver-ar download {name} DIR")
    datasets.download(name, folder)
    print(f"Wrote {folder}. Next: {datasets.DATASETS[name].prepare.replace('DIR', str(folder))}")


def prepare(arguments: list[str]) -> None:
    """Turn raw files into a token store: see `perceiver-ar prepare TASK --help`."""
    from perceiver_ar import tasks

    task = first_of(
        arguments,
        lambda: (
            f"usage: perceiver-ar prepare {'|'.join(tasks.prepared())} SOURCE --out DIR\n"
            "`perceiver-ar prepare text --help` lists the options for text."
        ),
    )
    store = tyro.cli(
        tasks.preparer(task),  # whose settings are the options
        args=arguments[1:],
        prog=f"perceiver-ar prepare {task}",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    for name, split in store.meta["splits"].items():
        counted = "".join(f", {count:,} {what}" for what, count in split.get("counts", {}).items())
        print(f"{name}: {split['documents']:,} documents, {split['tokens']:,} tokens{counted}")
    size, kind = store.vocab_size, store.meta["dtype"]
    print(f"{store.folder}: vocabulary of {size:,} tokens, special ones included, stored as {kind}")
