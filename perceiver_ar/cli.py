"""The command line; the only importer of tyro. What a command needs is imported when it runs."""

import json
import os
import sys
import time
from dataclasses import asdict, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import tyro

from perceiver_ar.config import Experiment

app = tyro.extras.SubcommandApp()

Json = Annotated[bool, tyro.conf.arg(name="json", help="Print one JSON object instead.")]
Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help="Folder of a run.")]
Device = Annotated[str, tyro.conf.arg(help="auto, cpu, cuda, cuda:1, mps ...")]

PATIENCE = 10.0
"""Minutes after which processes of which none goes on are ended."""


@app.command(name="presets")
def show_presets(as_json: Json = False) -> None:
    """List the paper's experiments and their sizes."""
    from rich.console import Console
    from rich.table import Table

    from perceiver_ar import presets
    from perceiver_ar.architectures import parameter_count

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


@app.command(name="download")
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


@app.command(name="prepare")
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


def preset_fields(name: str) -> tuple[Experiment, list[tuple[str, Any, Any]]]:
    """An experiment, and the options that its settings are the defaults of."""
    from perceiver_ar import presets, tasks

    experiment = presets.get(name)
    fields: list[tuple[str, Any, Any]] = [
        (part, type(value), value)
        for part, value in (("model", experiment.model), ("train", experiment.train))
    ]
    if tasks.is_known(experiment.task):
        task = tasks.get(experiment.task, experiment.options)
        fields.append(("task", type(task), task))
    return experiment, fields


def as_chosen(experiment: Experiment, chosen: Any) -> Experiment:
    options = chosen.task.to_dict() if hasattr(chosen, "task") else experiment.options
    return replace(experiment, model=chosen.model, train=chosen.train, options=options)


@app.command(name="train")
def train(preset: Annotated[str, tyro.conf.Positional]) -> None:
    """Train a preset, with any of its settings changed: `perceiver-ar train PRESET --help`."""
    raise AssertionError("run by train_preset, which knows the preset's own settings")


def train_preset(arguments: list[str]) -> None:
    """The settings of the preset are the defaults of the options."""
    if not arguments or arguments[0].startswith("-"):
        print(
            "usage: perceiver-ar train PRESET [--data DIR] [--out RUN] [--model.latents 512 ...] [--resume]"
        )
        print("`perceiver-ar presets` lists the presets, `perceiver-ar train PRESET --help` all settings.")
        sys.exit(0 if "--help" in arguments or "-h" in arguments else 2)
    experiment, fields = preset_fields(arguments[0])
    fields += [
        ("data", Annotated[tuple[Path, ...], tyro.conf.arg(help="Token stores made by `prepare`.")], ()),
        (
            "weights",
            Annotated[tuple[float, ...], tyro.conf.arg(help="How much of each. Default: alike.")],
            (),
        ),
        ("out", Annotated[Path | None, tyro.conf.arg(help="Folder of the run. Default: runs/PRESET.")], None),
        ("init", Annotated[Path | None, tyro.conf.arg(help="Trained model to start from.")], None),
        ("resume", Annotated[bool, tyro.conf.arg(help="Go on from the newest checkpoint.")], False),
        ("device", Device, "auto"),
    ]
    kind = make_dataclass("Train", fields, frozen=True)
    chosen: Any = tyro.cli(
        kind, args=arguments[1:], prog=f"perceiver-ar train {arguments[0]}", description="Train a model."
    )
    from perceiver_ar.distributed import leave, restarts
    from perceiver_ar.training import train

    if chosen.weights and len(chosen.weights) != len(chosen.data):
        raise ValueError(f"{len(chosen.weights)} weights do not fit {len(chosen.data)} stores of --data.")
    if len({path.resolve() for path in chosen.data}) < len(chosen.data):
        raise ValueError("the same store stands twice in --data.")
    data = dict(zip(chosen.data, chosen.weights or [1.0] * len(chosen.data), strict=True))
    experiment = as_chosen(experiment, chosen)
    result = train(experiment, data, chosen.out, resume=chosen.resume, init=chosen.init, device=chosen.device)
    leave()
    done, most = restarts()
    if result["signal"] and done == most:  # else torchrun would start again what was asked to stop
        sys.exit(128 + result["signal"])


@app.command(name="plan")
def plan(preset: Annotated[str, tyro.conf.Positional]) -> None:
    """Say what training a preset would cost: `perceiver-ar plan PRESET --gpus 8 --gpu h200`."""
    raise AssertionError("run by plan_preset, which knows the preset's own settings")


def plan_preset(arguments: list[str]) -> None:
    """The settings of the preset are the defaults of the options, as in training."""
    if not arguments or arguments[0].startswith("-"):
        print("usage: perceiver-ar plan PRESET [--gpus 8] [--gpu h200] [--train.batch-size 64 ...]")
        sys.exit(0 if "--help" in arguments or "-h" in arguments else 2)
    from perceiver_ar.plan import GPUS, plan

    experiment, fields = preset_fields(arguments[0])
    fields += [
        ("gpus", Annotated[int, tyro.conf.arg(help="How many.")], 1),
        ("gpu", Annotated[str, tyro.conf.arg(help=f"Which: {', '.join(GPUS)}.")], "h200"),
        ("as_json", Json, False),
    ]
    kind = make_dataclass("Plan", fields, frozen=True)
    chosen: Any = tyro.cli(
        kind,
        args=arguments[1:],
        prog=f"perceiver-ar plan {arguments[0]}",
        description="What training it would cost. The sums fit one H200 within 15 %; no other GPU was tried.",
    )
    found = plan(as_chosen(experiment, chosen), chosen.gpu, chosen.gpus)
    print(json.dumps(asdict(found)) if chosen.as_json else found)


@app.command(name="evaluate")
def evaluate(
    run: Run,
    split: str = "validation",
    latents: int | None = None,
    stride: int | None = None,
    context: int | None = None,
    batch_size: int | None = None,
    data: Path | None = None,
    plot: Path | None = None,
    compile: bool = False,
    int8: bool = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Score every token of a split once, with strided windows; under torchrun, they are shared out.

    Args:
        run: Folder of a run.
        split: Which split of the store.
        latents: How many to use. Default: as many as in training.
        stride: Targets between windows; fewer give each more context. Default: half the latents; of
            Transformer-XL: none, but segments to which the memory is passed on.
        context: Most inputs of a window. Default: as many as the model takes.
        batch_size: Windows at a time. Default: as many as have 16,384 latents, a million inputs
            and a gigabyte of logits.
        data: Another token store than the run was trained on.
        plot: Picture of the loss by position in the document.
        compile: Compile each block: on a GPU, faster after a minute's wait.
        int8: Round the weights of the blocks to eight bits, to see what that costs.
    """
    import torch

    from perceiver_ar.architectures import compile_blocks
    from perceiver_ar.distributed import join, leave
    from perceiver_ar.evaluation import evaluate, predict
    from perceiver_ar.plots import check_picture, draw_positions
    from perceiver_ar.quantized import quantize
    from perceiver_ar.report import progress_bar, show
    from perceiver_ar.run import check_vocabulary, load, open_source
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


@app.command(name="plot")
def plot(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")], out: Path
) -> None:
    """Draw the losses of runs, finished or not, by step.

    Args:
        runs: Folders of runs.
        out: The picture: .png, .svg or .pdf.
    """
    from perceiver_ar.plots import check_picture, draw_curves

    if not runs:
        raise ValueError("give the folder of at least one run.")
    check_picture(out)
    draw_curves(runs, out)


@app.command(name="export")
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


@app.command(name="pack")
def pack(run: Run, folder: Annotated[Path, tyro.conf.Positional], bits: int = 6) -> None:
    """Write a run's model with few bits a weight, to send along: all commands read it.

    Args:
        run: Folder of a run.
        folder: A new folder.
        bits: Of each weight: 2 to 8. `evaluate FOLDER --data STORE` tells what they cost.
    """
    from perceiver_ar.pretrained import WEIGHTS
    from perceiver_ar.run import model_folder, pack

    pack(run, folder, bits)
    before, after = ((place / WEIGHTS).stat().st_size / 1e6 for place in (model_folder(run), folder))
    print(f"{folder}: {after:,.1f} MB instead of {before:,.1f}.")


@app.command(name="score")
def score(
    run: Run,
    file: Annotated[Path, tyro.conf.Positional],
    latents: int | None = None,
    stride: int | None = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Print the nats of each token of one document, one a line.

    Args:
        run: Folder of a run.
        file: The document.
        latents: How many to use. Default: as many as in training.
        stride: Targets between windows. Default: half the latents.
    """
    from perceiver_ar.device import pick_device
    from perceiver_ar.evaluation import score
    from perceiver_ar.run import load

    model, task, _ = load(run, str(pick_device(device)))
    document = task.read(file)
    if document.tokens.max() >= model.config.vocab_size:
        raise ValueError(f"{file} holds tokens that the model does not know.")
    nats: list[float] = []
    for batch, _, parts in score(model, task, [document], latents, stride, 8):
        for row, part in zip(batch.float().cpu(), parts, strict=True):
            nats += row[len(row) - len(part.places) :].tolist()
    if as_json:
        print(json.dumps({"tokens": len(nats), "nats": nats, "mean": sum(nats) / len(nats)}))
    else:
        print("\n".join(f"{value:.6f}" for value in nats))


@app.command(name="generate")
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
        int8: Keep the weights of the blocks in eight bits: half the memory.
        out: File to write to; several samples are numbered. Of music, without .mid, .wav or .png: all three.
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


@app.command(name="playground")
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


@app.command(name="reproduce")
def reproduce(
    name: Annotated[str | None, tyro.conf.Positional] = None,
    scale: Literal["smoke", "small", "paper"] = "small",
    data: Path | None = None,
    out: Path | None = None,
    seeds: int = 1,
    cell: str | None = None,
    jobs: int = 1,
    all: bool = False,
    report: bool = False,
    page: Path = Path("docs/reproduction.md"),
    device: Device = "auto",
) -> None:
    """Run a table or a figure of the paper: `perceiver-ar reproduce` lists them.

    Stopped, it goes on where it was when it is started again: what is finished is kept.

    Args:
        name: Which one.
        scale: smoke: a minute on a laptop, which shows that the command works and nothing else; small: about
            ten minutes on a GPU; paper: its full size, shown as a plan of cells to run one by one by --cell.
        data: Token store, where data are needed.
        out: Folder for runs and results. Default: reproduction/NAME-SCALE.
        seeds: How often each training is done.
        cell: Run only this part.
        jobs: Train and evaluate so many models at a time, before anything is timed: small ones leave most
            of a GPU idle.
        all: All of them, one after another.
        report: Run nothing, but collect what was found in one page; --out is then the folder of all results.
        page: That page.
    """
    from perceiver_ar import reproduce as studies
    from perceiver_ar.reproduce.page import plan, table, write_page

    if report:
        if name is not None:
            raise ValueError("the report is of all studies: give no name.")
        write_page(list(studies.STUDIES.values()), out or Path("reproduction"), page)
        print(f"{page} is written.")
        return
    if name is None and not all:
        for known in studies.STUDIES.values():
            print(f"{known.name:15} {known.where:25} {known.claim}")
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("a study runs in one process: start it without torchrun.")
    if name is not None and all:
        raise ValueError("give a name or --all, not both.")
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, but is {seeds}.")
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, but is {jobs}.")
    if all and (data is not None or cell is not None or scale != "smoke"):
        raise ValueError("--all is for --scale smoke, and --report: others need data of their own each.")
    for study in studies.STUDIES.values() if name is None else [studies.get(name)]:
        named = Path(out or "reproduction") / f"{study.name}-{scale}"
        folder, shared = (named, named.parent) if all or out is None else (out, None)
        bench = studies.Bench(scale, folder, data, seeds, device, shared)
        if scale == "paper" and cell is None:
            print(plan(study, bench))
            continue
        results = studies.run(study, bench, cell, lambda line: print(line, file=sys.stderr, flush=True), jobs)
        print(table([studies.Row(**row) for row in results["rows"]]))


@app.command(name="convert")
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


def main() -> None:
    """Runs a command; a user's mistake ends with one sentence and status 2."""
    try:
        own = {"prepare": prepare_task, "train": train_preset, "plan": plan_preset}
        if sys.argv[1:2] and sys.argv[1] in own:
            own[sys.argv[1]](sys.argv[2:])
        else:
            app.cli(
                prog="perceiver-ar",
                description="Perceiver AR: long-context autoregressive models.",
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except KeyboardInterrupt:
        print("perceiver-ar: interrupted.", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError) as error:
        end(str(error), 2)
    except RuntimeError as error:
        if not is_lost(error):
            raise
        end(f"another process of this run died, or does not answer ({str(error).splitlines()[0]}).", 1)


def end(why: str, status: int) -> NoReturn:
    """With one sentence. Under torchrun the first process of a machine says it, and all are ended."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)  # by then it is over, unless this one alone is wrong
    print(f"perceiver-ar: {why}", file=sys.stderr, flush=True)
    if ranks_talk():
        os._exit(status)  # else torch would wait, or abort
    sys.exit(status)


def ranks_talk() -> bool:
    """Whether this is one of several processes; without importing torch to find out."""
    module = sys.modules.get("perceiver_ar.distributed")
    return module is not None and module.joined()


def is_lost(error: RuntimeError) -> bool:
    """Whether it says that another process cannot be reached."""
    from torch.distributed import DistError

    return ranks_talk() and (isinstance(error, DistError) or "gloo" in str(error))
