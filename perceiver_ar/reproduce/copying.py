"""Copying: over how long a context, and with how many targets per step."""

from dataclasses import replace
from operator import itemgetter

from perceiver_ar import presets
from perceiver_ar.config import Experiment, ModelConfig, TrainConfig
from perceiver_ar.reproduce.cells import Ask, Figures, trained
from perceiver_ar.reproduce.materials import NONE
from perceiver_ar.reproduce.study import Bench, Cell, Row, Scale, Study

ACCURACY: Figures = {"accuracy": itemgetter("accuracy")}
COUNTS: Figures = {
    "scored": itemgetter("tokens"),
    "wrong": lambda report: round(report["tokens"] * (1 - report["accuracy"])),
}


def _copy(
    length: int, latents: int, channels: int, layers: int, train: TrainConfig, **task: object
) -> Experiment:
    heads = max(1, channels // 64)
    model = ModelConfig(
        259, length, latents, channels=channels, heads=heads, layers=layers, positions="sinusoidal"
    )
    return Experiment("copy", "copy", model, train, {"length": length, **task})


def _by_digits(length: int, digits: int, sequences: int) -> Experiment:
    """A model of 416,000 parameters, whose positions are digits, all learned alike."""
    model = ModelConfig(
        259,
        length,
        1024,
        channels=128,
        heads=2,
        layers=1,
        input_channels=64,
        cross_heads=1,
        positions="axial",
        axes=(3,) * digits,
    )
    train = TrainConfig(
        steps=8000,
        batch_size=4,
        learning_rate=2e-3,
        warmup_steps=50,
        schedule="cosine",
        cosine_steps=2000,
        betas=(0.9, 0.95),
        precision="float32",
        log_every=100,
    )
    options = {"length": length, "digits": digits, "spaced": 1024, "sequences": sequences}
    return Experiment("copy", "copy", model, train, options)


def _length(bench: Bench) -> list[Cell]:
    """Experiments, and how they are evaluated."""
    if bench.scale == "paper":
        chosen = {131_072: (presets.get("copy-131k"), {})}
    elif bench.scale == "small":
        wide = {"latents": 4096, "stride": 4096}
        chosen = {
            131_072: (_by_digits(131_072, 11, 12), wide),
            1_048_576: (_by_digits(1_048_576, 13, 4), {**wide, "every": 16}),
            8_388_608: (_by_digits(8_388_608, 15, 1), {**wide, "every": 128}),
        }
    else:
        tiny = _copy(16, 8, 16, 1, TrainConfig(steps=10, batch_size=8, warmup_steps=2))
        chosen = {16: (tiny, {})}
    paper = {131_072: {"wrong": 0.0}}
    return [
        cell
        for length, (experiment, settings) in chosen.items()
        for cell in trained(
            {"length": length},
            experiment,
            NONE,
            bench,
            COUNTS,
            [Ask(settings=settings, paper=paper.get(length, {}))],
        )
    ]


def _targets(bench: Bench) -> list[Cell]:
    """The latents and twice as many, half of the batch and all of it."""
    if bench.scale == "paper":
        base = presets.get("copy-8k")
    elif bench.scale == "small":
        train = TrainConfig(
            steps=4000, batch_size=16, learning_rate=1e-3, warmup_steps=100, schedule="cosine", log_every=100
        )
        base = _copy(128, 16, 128, 1, train, sequences=100)
    else:
        base = _copy(16, 4, 16, 1, TrainConfig(steps=10, batch_size=8, warmup_steps=2))
    latents, batch = base.model.latents, base.train.batch_size
    paper = {(1, 1): 0.0, (1, 2): 1.0, (2, 1): 1.0, (2, 2): 1.0}
    cells: list[Cell] = []
    for (wide, many), converged in paper.items():
        model = replace(base.model, latents=latents * wide)
        train = replace(base.train, batch_size=batch * many // 2)
        about = {"latents": model.latents, "batch": train.batch_size}
        at = "" if bench.scale == "paper" else f"{1024 * wide:,} latents, batch {64 * many}"
        ask = Ask(paper={"converged": converged}, at=at)
        cells += trained(
            about,
            replace(base, model=model, train=train),
            NONE,
            bench,
            {**ACCURACY, "converged": lambda report: float(report["accuracy"] > 0.99)},
            [ask],
        )
    return cells


def _all_copied(rows: list[Row], scale: Scale) -> bool:
    """Whether all is copied, up to the paper's length."""
    return all(row.found["wrong"] == 0 for row in rows if float(row.about["length"]) <= 131_072)


def _more_targets_converge(rows: list[Row], scale: Scale) -> bool:
    """Whether all converge but the one with the fewest of both, for every seed."""
    first, *others = sorted(rows, key=lambda row: (row.about["latents"], row.about["batch"]))
    return first.found["converged"] == 0 and all(row.found["converged"] == 1 for row in others)


STUDIES = [
    Study(
        "copy-length",
        "section 5.1.1",
        "The model makes use of a context of 131,072 tokens: it copies random bytes in reverse without an "
        "error.",
        "Random bytes followed by the same bytes in reverse; 12 validation sequences, scored on their second "
        "halves. At `small`, 128 channels and one layer, positions by learned digits of base 3, instead of "
        "sinusoids, trained on windows of up to 1,024 places and their copies (`--task.spaced`). Also 8 and "
        "64 times the paper's length: one window in 16 of 4 sequences, and one in 128 of a single one, drawn "
        "at random. All windows score as many tokens as they have latents, 4,096.",
        _length,
        _all_copied,
        None,
    ),
    Study(
        "copy-targets",
        "table 2",
        "At a context of 8,192 tokens, training with 1,024 latents and batches of 64 sequences does not "
        "converge; with twice the latents or twice the batch it does.",
        "One layer; four trainings with the same number of steps, which differ only in latents and batch "
        "size, without a curriculum. At `small`, 128 tokens, 128 channels, 16 or 32 latents, batches of 8 or "
        "16, 4,000 steps, 100 validation sequences; two CPU cores are enough.",
        _targets,
        _more_targets_converge,
        ("latents", "accuracy"),
    ),
]
