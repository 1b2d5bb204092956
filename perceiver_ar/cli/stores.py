"""Commands that get data: download and prepare."""

import sys
from pathlib import Path
from typing import Annotated

import tyro


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
    if folder is None:
        raise ValueError(f"where to? perceiver-ar download {name} DIR")
    datasets.download(name, folder)
    print(f"{folder} is there. Next: {datasets.DATASETS[name].prepare.replace('DIR', str(folder))}")


def prepare(task: Annotated[str, tyro.conf.Positional]) -> None:
    """Turn raw files into a token store: `perceiver-ar prepare TASK --help`."""
    raise AssertionError("run by prepare_task, which knows the task's own settings")


def prepare_task(arguments: list[str]) -> None:
    """The settings are those of the task's own function."""
    from perceiver_ar import tasks

    if not arguments or arguments[0].startswith("-"):
        print(f"usage: perceiver-ar prepare {'|'.join(tasks.prepared())} SOURCE --out DIR")
        print("`perceiver-ar prepare text --help` lists all settings.")
        sys.exit(0 if "--help" in arguments or "-h" in arguments else 2)
    store = tyro.cli(
        tasks.preparer(arguments[0]),
        args=arguments[1:],
        prog=f"perceiver-ar prepare {arguments[0]}",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    for name, split in store.meta["splits"].items():
        counted = "".join(f", {count:,} {what}" for what, count in split.get("counts", {}).items())
        print(f"{name}: {split['documents']:,} documents, {split['tokens']:,} tokens{counted}")
    size, kind = store.vocab_size, store.meta["dtype"]
    print(f"{store.folder}: vocabulary {size:,} with the special tokens, stored as {kind}")
