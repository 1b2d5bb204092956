"""Commands that measure how good a model is: evaluate, score and plot."""

import json
from pathlib import Path
from typing import Annotated

import tyro

from perceiver_ar.cli.arguments import PATIENCE, Device, Json, Run


def evaluate(
    run: Run,
    split: str = "validation",
    latents: int | None = None,
    stride: int | None = None,
    context: int | None = None,
    batch_size: int | None = None,
    every: int = 1,
    data: Path | None = None,
    plot: Path | None = None,
    compile: bool = False,
    int8: bool = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Evaluate a model, scoring every token of a split once; under torchrun, the processes share the work.

    Args:
        run: Folder of a run, or of a model alone; or piano, a model that comes with this package.
        split: Split of the store: train, validation or test.
        latents: Number of latents. Default: as in training.
        stride: Tokens scored per window: fewer give each of them more context. Default: half the latents;
            Transformer-XL reads on in segments instead, with its memory.
        context: Maximum number of inputs per window. Default: the model's context.
        batch_size: Windows per batch. Default: within 16,384 latents, a million inputs and 1 GiB of logits;
            8 documents for Transformer-XL in segments.
        every: Score only one window in so many, drawn at random: an estimate, where all would take too long.
            Transformer-XL needs a stride with it.
        data: Token store to evaluate on. Default: the one that the run was trained on.
        plot: Write a plot of the loss by position in the document (of copies, by distance) to this file.
        compile: Compile each block: faster on a GPU, after about a minute of compiling.
        int8: Round the weights of the blocks to 8 bits, to measure what that costs.
    """
    import torch

    from perceiver_ar.architectures import compile_blocks
    from perceiver_ar.distributed import join, leave
    from perceiver_ar.evaluation import evaluate, predict
    from perceiver_ar.plots import check_picture, draw_positions
    from perceiver_ar.quantized import quantize
    from perceiver_ar.report import progress_bar, show
    from perceiver_ar.run import load
    from perceiver_ar.source import check_vocabulary, open_source
    from perceiver_ar.watch import Watch

    if plot is not None:
        check_picture(plot)
    ranks, where = join(device, minutes=24 * 60)  # some windows take longer than others
    model, task, before = load(run, str(where))
    source = open_source(task.name, task.to_dict(), data or before)
    check_vocabulary(source, model)
    if int8:
        quantize(model)
    if compile:
        compile_blocks(model)
    documents = source.documents(split)
    with Watch(ranks, PATIENCE) as watch, progress_bar(ranks.leads and not as_json, "scoring") as progress:

        def going_on(done: int, wanted: int) -> None:
            watch.beat()
            progress(done, wanted)

        report = evaluate(
            model,
            source.task,
            documents,
            latents=latents,
            stride=stride,
            context=context,
            batch_size=batch_size,
            every=every,
            progress=going_on,
            ranks=ranks,
        )
    leave()
    if not ranks.leads:
        return
    if plot is not None:
        draw_positions(report, plot)
    if as_json:
        print(json.dumps(report))
    else:
        with torch.compiler.set_stance("force_eager"):  # not worth compiling for
            sample = source.task.show(*predict(model, source.task, documents[0], 16))
        show(report, sample)


def score(
    run: Run,
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")],
    latents: int | None = None,
    stride: int | None = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Print the negative log-likelihood of each token of a document, in nats, one per line.

    Args:
        run: Folder of a run, or of a model alone; or piano, a model that comes with this package.
        file: Document to score: a text, a picture, a MIDI file, a recording or ids.
        latents: Number of latents. Default: as in training.
        stride: Tokens scored per window: fewer give each of them more context. Default: half the latents;
            Transformer-XL reads on in segments instead, with its memory.
    """
    from perceiver_ar.device import pick_device
    from perceiver_ar.evaluation import Windowing, score
    from perceiver_ar.report import progress_bar
    from perceiver_ar.run import load

    model, task, _ = load(run, str(pick_device(device)))
    document = task.read(file)
    if document.stop <= document.first:
        raise ValueError(f"{file} holds no tokens to score.")
    if document.tokens.max() >= model.config.vocab_size:
        raise ValueError(f"{file} holds tokens that the model does not know.")
    nats: list[float] = []
    windowing = Windowing.of(model, latents=latents, stride=stride, batch_size=8)
    with progress_bar(not as_json, "scoring") as progress:
        for batch, _, parts in score(model, task, [document], windowing):
            for row, part in zip(batch.float().cpu(), parts, strict=True):
                nats += row[len(row) - len(part.places) :].tolist()
            progress(len(nats), document.stop - document.first)
    if as_json:
        print(json.dumps({"tokens": len(nats), "nats": nats, "mean": sum(nats) / len(nats)}))
    else:
        print("\n".join(f"{value:.6f}" for value in nats))


def plot(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")], out: Path
) -> None:
    """Plot the loss of one or more runs, finished or not, by training step.

    Args:
        runs: Folders of runs.
        out: File to write: .png, .svg or .pdf.
    """
    from perceiver_ar.plots import check_picture, draw_curves

    if not runs:
        raise ValueError("give the folder of at least one run.")
    check_picture(out)
    draw_curves(runs, out)
