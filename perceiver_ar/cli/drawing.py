"""Commands that draw from models: generate, and the playground."""

import json
from pathlib import Path
from typing import Annotated

import tyro

from perceiver_ar.cli.arguments import PATIENCE, Device, Json, Run


def generate(
    run: Run,
    prompt: str | None = None,
    prompt_file: Path | None = None,
    keep: int | None = None,
    tokens: int | None = None,
    seconds: float | None = None,
    samples: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    latents: int | None = None,
    seed: int = 0,
    int8: bool = False,
    out: Path | None = None,
    overwrite: bool = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Draw what follows a prompt; under torchrun, samples are shared out.

    Args:
        run: Folder of a run.
        prompt: What to go on from, as the task writes it: text, ids, bytes ... Default: a beginning.
        prompt_file: The same from a file.
        keep: How much of that file: tokens of text, seconds of sound, rows of an image. Default: all, or half
            an image.
        tokens: How many to draw at most. Default: what the task makes of it.
        seconds: Draw music or sound that lasts so long.
        samples: How many to draw at once, all different.
        temperature: Below 1 for likelier tokens, 0 for the likeliest.
        top_k: Draw from the k likeliest only.
        top_p: Draw from the likeliest that together reach this probability.
        min_p: Draw from those at least this share as likely as the likeliest.
        repetition_penalty: Above 1, tokens that came before become less likely.
        latents: How many to use at most. Default: as many as in training.
        seed: Another seed gives other samples.
        int8: Keep the weights of the blocks in eight bits: less memory, and on a CPU faster.
        out: File to write to; several samples are numbered. Of music, without .mid, .wav or .png: all three.
        overwrite: Write to files that exist.
    """
    from perceiver_ar.device import best_dtype
    from perceiver_ar.distributed import join, leave
    from perceiver_ar.drawing import draw
    from perceiver_ar.quantized import quantize
    from perceiver_ar.run import load
    from perceiver_ar.watch import Watch

    if prompt is not None and prompt_file is not None:
        raise ValueError("give --prompt or --prompt-file, not both.")
    if keep is not None and prompt_file is None:
        raise ValueError("--keep says how much of a --prompt-file is taken: give one.")
    ranks, where = join(device, minutes=24 * 60)  # one may have to wait for much longer samples
    model, task, _ = load(run, str(where))
    model = model.to(best_dtype(where))
    if int8:
        quantize(model)
    given = (
        task.prompt_file(prompt_file, keep)
        if prompt_file is not None
        else task.start(seed)
        if prompt is None
        else task.prompt(prompt)
    )
    settings = {
        "overwrite": overwrite,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "latents": latents,
        "seed": seed,
    }
    with Watch(ranks, PATIENCE) as watch:
        report = draw(
            model, task, given, tokens, seconds, samples, out, as_json, ranks, watch.beat, **settings
        )
    leave()
    if as_json and ranks.leads:
        print(json.dumps(report))


def playground(
    runs: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help="Folders of runs.")
    ],
    host: str = "127.0.0.1",
    port: int | None = None,
    share: bool = False,
    password: str | None = None,
    browser: bool = True,
    device: Device = "auto",
) -> None:
    """Open a web page to see and hear what models draw, and how runs in progress go.

    Args:
        host: Address to listen on. Others than this machine's own get a password.
        port: Default: the first free one from 7860.
        share: Also give it a public address, through Gradio's servers, behind a password.
        password: Ask visitors for it. Default: none on this machine alone, else a new one, which is shown.
        browser: Open it in a browser; with --no-browser, only say where it is.
    """
    from perceiver_ar.extras import need

    need("gradio", "playground")
    from perceiver_ar.playground import serve

    if not runs:
        raise ValueError("give the folder of a run, or several.")
    serve(list(runs), host, port, share, password, browser, device)
