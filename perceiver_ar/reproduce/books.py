"""Text: perplexity by context and stride, and against Transformer-XL at equal speed."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from perceiver_ar import presets
from perceiver_ar.config import AnyModelConfig, Experiment, ModelConfig, TransformerXLConfig
from perceiver_ar.reproduce.cells import Ask, Figures, More, Trained, steps_a_second, trained
from perceiver_ar.reproduce.materials import store
from perceiver_ar.reproduce.recipes import recipe
from perceiver_ar.reproduce.study import Bench, Cell, Found, Row, Scale, Study, half_spread

PERPLEXITY: Figures = {"perplexity": itemgetter("perplexity")}
BYTES = "text: perceiver-ar prepare text FOLDER --out STORE"
BOOKS = {"small": BYTES, "paper": f"{BYTES} --tokenizer unigram --vocab-size 32000"}
PG19 = "PG-19: perceiver-ar download pg19 DIR; perceiver-ar prepare text DIR --out STORE"
WIKITEXT = "Wikitext-103: perceiver-ar download wikitext103 DIR; perceiver-ar prepare text DIR --out STORE"
CONTEXTS = {"paper": (1024, 4096, 8192, 16_384), "small": (512, 1024, 2048, 4096), "smoke": (16, 32)}
SHORT = {1024: "1k", 2048: "2k", 4096: "4k", 8192: "8k", 16_384: "16k"}


def _book(bench: Bench, context: int) -> Experiment:
    """Perceiver AR, as deep as the paper's or, at smaller scales, of one depth."""
    if bench.scale == "paper":
        return presets.get(f"books-{SHORT[context]}")
    small = bench.scale == "small"
    model = ModelConfig(
        259,
        context,
        512 if small else 8,
        channels=256 if small else 16,
        heads=4 if small else 1,
        layers=6 if small else 2,
        tied=True,
        queries="inputs",
        residual_dropout=0.1 if small else 0.0,
    )
    return Experiment("books", "text", model, recipe(bench.scale, 2000, learning_rate=1.5e-3))


def _paper(bench: Bench, context: int, **figures: float) -> Ask:
    """The paper's figures of a context, beside which one of another length may stand."""
    theirs = CONTEXTS["paper"][CONTEXTS[bench.scale].index(context)]
    return Ask(paper=figures, at="" if theirs == context else f"context {theirs:,}")


def _books(bench: Bench) -> list[Cell]:
    cells: list[Cell] = []
    paper = ((14.88, 2.19), (14.60, 2.09), (14.57, 1.95), (14.56, 1.75))
    for context, (perplexity, rate) in zip(CONTEXTS[bench.scale], paper, strict=False):
        ask = _paper(bench, context, perplexity=perplexity, **{"steps/s": rate})
        cells += _at(bench, context, [ask], partial(_pace, bench))
    return cells


def _at(
    bench: Bench, context: int, asks: Sequence[Ask], more: More | None = None, documents: int | None = None
) -> Iterator[Cell]:
    """The model of one context."""
    experiment, data = _book(bench, context), store(bench, "text")
    return trained({"context": context}, experiment, data, bench, PERPLEXITY, asks, more, documents=documents)


def _pace(bench: Bench, found: Trained, ask: Ask, place: Path) -> Found:
    """Steps a second of training, timed alone."""
    return steps_a_second(found.model.config, found.experiment.train.batch_size, bench)


def _by_stride(bench: Bench) -> list[Cell]:
    """The paper's strides, or as large shares of the latents."""
    cells: list[Cell] = []
    for context in CONTEXTS[bench.scale]:
        most = _book(bench, context).model.latents
        strides = sorted({max(1, stride * most // 1024) for stride in (16, 64, 128, 512, 1024)})
        asks = [Ask({"stride": stride}, {"stride": stride}) for stride in strides]
        cells += _at(bench, context, asks, documents=1 if bench.scale == "small" else None)
    return cells


def _matched(bench: Bench) -> list[Cell]:
    """Perceiver AR at each context beside a Transformer-XL of its pace; then the other way round."""
    cells: list[Cell] = []
    paper = (
        ((14.006, 36, 2.19), (14.822, 23, 2.17)),
        ((13.806, 36, 2.09), (14.719, 24, 2.06)),
        ((13.791, 36, 1.95), (14.593, 25, 1.97)),
        ((13.749, 36, 1.75), (14.276, 28, 1.76)),
    )
    for context, (ours, theirs) in zip(CONTEXTS[bench.scale], paper, strict=False):
        experiment = _book(bench, context)
        rival = replace(experiment, model=_rival(bench, experiment.model))
        pace = f"Perceiver AR at {context:,}"
        cells += _compared(bench, pace, "Perceiver AR", context, experiment, ours)
        cells += _compared(bench, pace, "Transformer-XL", context, rival, theirs, experiment)
    deep = {"paper": 42, "small": 12, "smoke": 3}[bench.scale]
    first = CONTEXTS[bench.scale][0]
    rival = replace(_book(bench, first), model=replace(_rival(bench, _book(bench, first).model), layers=deep))
    pace = f"Transformer-XL of {deep}"
    cells += _compared(bench, pace, "Transformer-XL", first, rival, (13.253, 42, 1.17))
    found = ((12.849, 62, 1.19), (12.680, 61, 1.21), (12.660, 60, 1.25), (12.816, 56, 1.26))
    chosen = list(zip(CONTEXTS[bench.scale], found, strict=False))
    for context, ours in chosen if bench.scale == "paper" else chosen[::3]:
        cells += _compared(bench, pace, "Perceiver AR", context, _book(bench, context), ours, rival)
    return cells


def _compared(
    bench: Bench,
    pace: str,
    model: str,
    context: int,
    experiment: Experiment,
    paper: tuple[float, int, float],
    beside: Experiment | None = None,
) -> Iterator[Cell]:
    """A model at its own depth, or at the one at which it is as fast as another."""

    def more(found: Trained, ask: Ask, place: Path) -> Found:
        return {"depth": found.model.config.layers, **_pace(bench, found, ask, place)}

    figures = dict(zip(("perplexity", "depth", "steps/s"), paper, strict=True))
    asks = [_paper(bench, context, **figures)]
    about = {"pace": pace, "model": model, "context": experiment.model.context}
    return trained(about, experiment, store(bench, "text"), bench, PERPLEXITY, asks, more, beside)


def _rival(bench: Bench, model: AnyModelConfig) -> TransformerXLConfig:
    """One as wide, whose depth will change; residual dropout is shared, memory dropout the paper's."""
    sizes: dict[str, Any] = {
        "paper": {"memory_dropout": 0.25},
        "small": {"segment": 512, "memory": 192, "evaluation_memory": 800},
        "smoke": {"segment": 8, "memory": 4, "evaluation_memory": 8},
    }[bench.scale]
    assert isinstance(model, ModelConfig)
    shared = {name: getattr(model, name) for name in ("vocab_size", "channels", "heads", "layers")}
    return TransformerXLConfig(**shared, **sizes, residual_dropout=model.residual_dropout)


def _below_the_paper_s_size(bench: Bench) -> list[Cell]:
    """The models of books-context, on other text."""
    return [cell for context in CONTEXTS[bench.scale] for cell in _at(bench, context, [Ask()])]


def _pg19(bench: Bench) -> list[Cell]:
    if bench.scale != "paper":
        return _below_the_paper_s_size(bench)
    cells: list[Cell] = []
    for context in (2048, 4096):
        figures: Figures = {"perplexity": itemgetter("word_perplexity")}
        ask = Ask(paper={"perplexity": 45.9})
        experiment = presets.get(f"pg19-{SHORT[context]}")
        data = store(bench, "text")
        cells += trained({"context": context}, experiment, data, bench, figures, [ask], counted="words")
    return cells


def _wikitext(bench: Bench) -> list[Cell]:
    if bench.scale != "paper":
        return _below_the_paper_s_size(bench)
    cells: list[Cell] = []
    for context, perplexity in {1024: 17.86, 2048: 17.60, 4096: 17.66, 8192: 17.58}.items():
        ask = Ask(paper={"perplexity": perplexity})
        experiment = presets.get(f"wikitext103-{SHORT[context]}")
        about = {"model": "Perceiver AR", "context": context}
        cells += trained(about, experiment, store(bench, "text"), bench, PERPLEXITY, [ask])
    ask = Ask(paper={"perplexity": 17.58})
    about = {"model": "Transformer-XL", "context": 2624}
    cells += trained(about, presets.get("wikitext103-xl"), store(bench, "text"), bench, PERPLEXITY, [ask])
    return cells


def _found(row: Row) -> float:
    value = row.found["perplexity"]
    return float("inf") if value is None else value


def _better(one: Row, other: Row) -> bool:
    """Whether it is, by more than seeds differ."""
    noise = half_spread(one, "perplexity") + half_spread(other, "perplexity")
    return _found(one) + noise < _found(other)


def _longer_is_better(rows: list[Row], scale: Scale) -> bool:
    """Whether the longest context is better than the shortest."""
    by_context = sorted(rows, key=lambda row: float(row.about["context"]))
    return _better(by_context[-1], by_context[0])


def _no_gain_beyond_2048(rows: list[Row], scale: Scale) -> bool | None:
    """Whether both are within a hundredth, and as good as the paper's, which other sizes cannot be."""
    if scale != "paper":
        return None
    found = {row.about["context"]: _found(row) for row in rows}
    return abs(found[4096] - found[2048]) < 0.01 * found[2048] and found[2048] < 45.95


def _as_good_as_transformer_xl(rows: list[Row], scale: Scale) -> bool | None:
    """Whether ours is as good as the other, which is run at the paper's size alone."""
    rivals = [_found(row) for row in rows if row.about.get("model") == "Transformer-XL"]
    ours = [row for row in rows if row.about.get("model") == "Perceiver AR"]
    if not rivals:
        return None
    return _longer_is_better(ours, scale) and min(map(_found, ours)) < 1.005 * min(rivals)


def _shorter_strides_are_better(rows: list[Row], scale: Scale) -> bool:
    """Whether the shortest stride is better than the longest, at every context."""
    for context in {row.about["context"] for row in rows}:
        found = sorted((row.about["stride"], _found(row)) for row in rows if row.about["context"] == context)
        if found[0][1] >= found[-1][1]:
            return False
    return True


def _ours_is_better(rows: list[Row], scale: Scale) -> bool | None:
    """Whether ours is better, at every pace and context; None where steps/s are more than a tenth apart."""
    theirs = {row.about["pace"]: row for row in rows if row.about["model"] == "Transformer-XL"}
    pairs = [(row, theirs[row.about["pace"]]) for row in rows if row.about["model"] == "Perceiver AR"]
    rates = [[row.found["steps/s"] or 0.0 for row in pair] for pair in pairs]
    if any(max(pair) > 1.1 * min(pair) for pair in rates):
        return None
    return all(_better(ours, rival) for ours, rival in pairs)


_SMALL = (
    "At `small`, 6 layers of 256 channels, 512 latents, 2,000 steps of 32 sequences, contexts of 512 to "
    "4,096, text as bytes, perplexity per token."
)
STUDIES = [
    Study(
        "pg19",
        "table 6",
        "A perplexity per word of 45.9 on the validation books of PG-19, at contexts of 2,048 and 4,096: "
        "more than 2,048 gains nothing.",
        f"Validation books, stride N / 2. {_SMALL}",
        _pg19,
        _no_gain_beyond_2048,
        ("context", "perplexity"),
        {"small": PG19, "paper": f"{PG19} --tokenizer unigram --vocab-size 32077"},
    ),
    Study(
        "wikitext103",
        "table 10",
        "A perplexity per word of 17.86 at a context of 1,024 and of 17.58 at 8,192, as good as "
        "Transformer-XL, which also reaches 17.58.",
        f"Validation articles, stride N / 2. {_SMALL}",
        _wikitext,
        _as_good_as_transformer_xl,
        ("context", "perplexity"),
        {"small": WIKITEXT, "paper": f"{WIKITEXT} --tokenizer words"},
    ),
    Study(
        "books-context",
        "table 7",
        "Contexts longer than 1,024 lower the perplexity: 14.88 at 1,024, 14.56 at 16,384.",
        f"Four trainings that differ only in context, stride N / 2. {_SMALL}",
        _books,
        _longer_is_better,
        ("context", "perplexity"),
        BOOKS,
    ),
    Study(
        "books-stride",
        "appendix B, figure",
        "Shorter strides in evaluation lower the perplexity, at every context.",
        f"The models of books-context, evaluated with strides from N down to N / 64. {_SMALL} There, only "
        "one book is scored.",
        _by_stride,
        _shorter_strides_are_better,
        ("stride", "perplexity"),
        BOOKS,
    ),
    Study(
        "books-matched",
        "tables 8, 9",
        "At equal training speed in steps per second, Perceiver AR is better than Transformer-XL at every "
        "context.",
        "Both models have the same data, width, batch size, steps, optimizer, learning rate, residual "
        "dropout, precision and compiler; no activations are recomputed, and neither is tuned. One of them "
        "gets the depth at which its measured steps/s are nearest to the other's; for these timings "
        "Transformer-XL is given its memory. Both use fused attention kernels, but Transformer-XL's scores "
        "by distance are written to memory, which no kernel avoids. Its memory is 0.375 segments long in "
        "training, where it is recomputed for each window, and 1.5625 in evaluation, where it is carried "
        f"over. The paper's figures are for its test set. {_SMALL}",
        _matched,
        _ours_is_better,
        ("steps/s", "perplexity"),
        BOOKS,
        by="model",
    ),
]
