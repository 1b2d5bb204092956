"""Commands that get data: download and prepare."""

from pathlib import Path
from typing import Annotated

import tyro

from perceiver_ar.cli.arguments import first_of
from perceiver_ar.strict import unknown


def download(
    name: Annotated[str | None, tyro.conf.Positional] = None,
    folder: Annotated[Path | None, tyro.conf.Positional] = None,
) -> None:
    """Fetch a data set of the paper: `perceiver-ar download` lists them.

    Interrupted, it goes on where it was when it is started again.

    Args:
        name: Which one.
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
    print(f"{folder} is there. Next: {datasets.DATASETS[name].prepare.replace('DIR', str(folder))}")


def prepare(arguments: list[str]) -> None:
    """Turn raw files into a token store: `perceiver-ar prepare TASK --help`."""
    from perceiver_ar import tasks

    task = first_of(
        arguments,
        lambda: (
            f"usage: perceiver-ar prepare {'|'.join(tasks.prepared())} SOURCE --out DIR\n"
            "`perceiver-ar prepare text --help` lists all settings."
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
    print(f"{store.folder}: vocabulary {size:,} with the special tokens, stored as {kind}")
