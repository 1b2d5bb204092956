"""Commands that sample from models: generate and playground."""

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
    """Generate samples from a model; under torchrun, the processes share the samples.

    Args:
        run: Folder of a run, or of a model alone; or piano, a model that comes with this package.
        prompt: What to continue: text, ids, or hexadecimal bytes for the copy task. Default: start from
            nothing; the copy task starts from random bytes.
        prompt_file: File to continue: text, ids, a picture, MIDI or a recording.
        keep: How much of that file to keep: tokens of text, seconds of music or audio, rows of a picture.
            Default: all; half of a picture.
        tokens: Maximum number of tokens. Default: 500 for text and ids, the rest of an image or a copy.
        seconds: Generate this many seconds of music or audio. Default: 20 of music, 5 of audio.
        samples: Number of samples to generate side by side.
        temperature: Below 1 favours likely tokens; 0 always takes the likeliest.
        top_k: Sample from the k likeliest tokens only.
        top_p: Sample from the likeliest tokens that together reach this probability.
        min_p: Sample from tokens at least this fraction as likely as the likeliest.
        repetition_penalty: Above 1 makes tokens that have already occurred less likely.
        latents: Maximum number of latents. Default: as in training.
        seed: Seed of the random numbers.
        int8: Keep the weights of the blocks in 8 bits: less memory, and faster on a CPU.
        out: File to write; several samples are numbered. For music, a name without a suffix writes .mid, .wav
            and .png. Default: text is printed; all else is written to a file named after the run, a
            new one unless --overwrite is given.
        overwrite: Overwrite existing files.
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
        "name": run.resolve().name,
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
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="RUN ...", help="Folders of runs; or piano."),
    ],
    host: str = "127.0.0.1",
    port: int | None = None,
    share: bool = False,
    password: str | None = None,
    browser: bool = True,
    device: Device = "auto",
) -> None:
    """Open a web page to try out models and to follow runs in progress.

    Args:
        host: Address to listen on. Any other than this machine's own is protected by a password.
        port: Port to listen on. Default: the first free one from 7860.
        share: Also give the page a public address through Gradio's servers, behind a password.
        password: Password for visitors. Default: none on this machine alone, otherwise a random one, printed.
        browser: Open the page in a browser; with --no-browser, only print its address.
    """
    from perceiver_ar.extras import need

    need("gradio", "playground")
    from perceiver_ar.playground import serve

    if not runs:
        raise ValueError("give the folder of a run, or several.")
    serve(list(runs), host, port, share, password, browser, device)
