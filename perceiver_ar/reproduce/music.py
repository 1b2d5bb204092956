"""Music: nats by version, bit rate and context, and what dropout does at which depth."""

from dataclasses import replace
from itertools import pairwise
from operator import itemgetter

from perceiver_ar import presets
from perceiver_ar.config import Experiment, ModelConfig
from perceiver_ar.reproduce.cells import Ask, Figures, trained
from perceiver_ar.reproduce.materials import CODES, LEVELS, part, store
from perceiver_ar.reproduce.recipes import recipe
from perceiver_ar.reproduce.study import Bench, Cell, Row, Scale, Study, half_spread

NATS: Figures = {"nats": itemgetter("nats")}
MUSIC = "MIDI: perceiver-ar download maestro-v3 DIR; perceiver-ar prepare music DIR --out STORE"
BOTH = f"{MUSIC}; for cells of v1 the same with maestro-v1"
AUDIO = (
    "recordings: perceiver-ar prepare audio FOLDER --out STORE --codec CODEC --levels LEVELS; at the paper's "
    "size, a store with as many levels as the cell needs"
)


def _events(bench: Bench) -> Experiment:
    if bench.scale == "smoke":
        return Experiment(
            "music", "music", ModelConfig(391, 64, 32, channels=16, heads=1, layers=1), recipe("smoke", 2)
        )
    model = ModelConfig(
        391,
        4096,
        2048,
        channels=512,
        heads=8,
        layers=10,
        cross_dropout=0.5,
        cross_dropout_scope="prefix",
        residual_dropout=0.15,
    )
    return Experiment("music", "music", model, recipe(bench.scale, 6000, ema=0.999), {"transpose": 5})


def _maestro(bench: Bench) -> list[Cell]:
    if bench.scale == "paper":
        cells: list[Cell] = []
        for version, nats in (("v1", 1.82), ("v3", 1.90)):
            experiment = presets.get(f"maestro-{version}")
            cells += trained(
                {"version": version},
                experiment,
                store(bench, "music"),
                bench,
                NATS,
                [Ask(paper={"nats": nats})],
                own_data=True,
            )
        return cells
    ask = Ask(paper={"nats": 1.90})
    return list(trained({"version": "v3"}, _events(bench), store(bench, "music"), bench, NATS, [ask]))


def _piano(bench: Bench) -> list[Cell]:
    experiment = presets.get("piano-32k") if bench.scale == "paper" else _events(bench)
    ask = Ask(paper={"nats": 1.24}, at="its own data, test set")
    return list(trained({}, experiment, store(bench, "music"), bench, NATS, [ask]))


def _sound(bench: Bench) -> list[Cell]:
    """Bit rates and contexts of the paper; else two contexts of one store."""
    cells: list[Cell] = []
    if bench.scale == "paper":
        found = {
            ("8k", "12kbps"): 2.27,
            ("8k", "18kbps"): 2.52,
            ("8k", "22kbps"): 2.60,
            ("32k", "12kbps"): 2.28,
            ("32k", "18kbps"): 2.51,
            ("32k", "22kbps"): 2.55,
            ("65k", "12kbps"): 2.34,
            ("65k", "18kbps"): 2.57,
            ("65k", "22kbps"): 2.62,
        }
        for (reach, rate), nats in found.items():
            experiment = presets.get(f"soundstream-{reach}-{rate}")
            about = {"context": experiment.model.context, "bit rate": rate}
            ask, data = Ask(paper={"nats": nats}), store(bench, "audio")
            cells += trained(about, experiment, data, bench, NATS, [ask], own_data=True)
        return cells
    small = bench.scale == "small"
    for context in (2048, 8192) if small else (32, 64):
        model = (
            ModelConfig(
                259, context, 1024, channels=512, heads=8, layers=8, cross_dropout=0.25, residual_dropout=0.1
            )
            if small
            else ModelConfig(LEVELS * CODES + 3, context, 16, channels=16, heads=1, layers=1)
        )
        experiment = Experiment("audio", "audio", model, recipe(bench.scale, 2500, ema=0.999))
        cells += trained({"context": context}, experiment, store(bench, "audio"), bench, NATS)
    return cells


def _dropout(bench: Bench) -> list[Cell]:
    """Each kind of dropout at each depth, the other kind as the paper has it."""
    base = presets.get("maestro-v3") if bench.scale == "paper" else _events(bench)
    data, train = store(bench, "music"), base.train
    if bench.scale == "small":
        model = replace(base.model, context=1024, latents=512, channels=256, heads=4)
        # Short, and without what else keeps a model from knowing its pieces by heart.
        base = replace(base, model=replace(model, tied=True), options={})
        train = replace(train, steps=1500, batch_size=16, ema=0.0)
        data = part(bench, "music", 10)
    cells: list[Cell] = []
    for depth in {"paper": (12, 24, 48), "small": (2, 12), "smoke": (1, 2)}[bench.scale]:
        for kind in ("cross", "post-attention"):
            for share in (0.0, 0.5, 0.75):
                cross, residual = (share, 0.5) if kind == "cross" else (0.7, share)
                model = replace(base.model, layers=depth, cross_dropout=cross, residual_dropout=residual)
                model = replace(model, cross_dropout_scope="all")
                about = {"kind": kind, "depth": depth, "dropout": share}
                chosen = replace(base, model=model, train=train)
                few = 40 if bench.scale == "small" else None
                cells += trained(about, chosen, data, bench, NATS, documents=few)
    return cells


def _depth_decides(rows: list[Row], scale: Scale) -> bool:
    """From the shallowest to the deepest, 0.75 gains less in the cross-attend, and more after attention."""
    known = {(row.about["kind"], row.about["depth"], row.about["dropout"]): row for row in rows}
    depths = [depth for _, depth, _ in known]

    def grows(kind: str) -> tuple[float, float]:
        """By how much the gain is more in the deepest, and how far seeds may be off in that."""
        four = [known[kind, d, share] for d in (max(depths), min(depths)) for share in (0.0, 0.75)]
        deep, deep_dropped, shallow, shallow_dropped = (row.found["nats"] or 0.0 for row in four)
        more = (deep - deep_dropped) - (shallow - shallow_dropped)
        return more, sum(half_spread(row, "nats") for row in four)

    (cross, noise), (after, noise_after) = grows("cross"), grows("post-attention")
    return cross < -noise and after > noise_after


def _as_good_as_the_paper_s(rows: list[Row], scale: Scale) -> bool:
    """Whether each version that was run is as good as the paper's, to the digits that are printed."""
    return all((row.found["nats"] or 99) < row.paper["nats"] + 0.005 for row in rows)


def _rates_and_contexts(rows: list[Row], scale: Scale) -> bool | None:
    """At each context, more bits a second cost more nats a code; at each rate, 8k and 32k are within 0.06."""
    if scale != "paper":  # of one rate alone
        return None
    nats = {(row.about["context"], row.about.get("bit rate", "")): row.found["nats"] or 0.0 for row in rows}
    contexts, rates = (sorted({key[i] for key in nats}) for i in range(2))
    rising = all(nats[c, a] < nats[c, b] for c in contexts for a, b in pairwise(rates))
    return rising and all(abs(nats[contexts[0], rate] - nats[contexts[1], rate]) <= 0.06 for rate in rates)


STUDIES = [
    Study(
        "maestro",
        "table 11",
        "1.82 nats per event on MAESTRO v1 (Music Transformer: 1.84), 1.90 on v3.",
        "All validation pieces, stride N / 2, EOS not scored. At `small`, 35M parameters on v3, 10 minutes, "
        "with transposed training pieces, which the paper does without.",
        _maestro,
        _as_good_as_the_paper_s,
        ("version", "nats"),
        {"small": MUSIC, "paper": BOTH},
    ),
    Study(
        "soundstream",
        "tables 12, 13",
        "At higher bit rates each code costs more nats; contexts of 8,192 and 32,768 are about equally good.",
        "Validation recordings, nats per code, stride N / 2. At `small`, a short and a long context, and "
        "Lyra's codes, which have 16 values instead of 1,024, so that figures cannot be compared. The "
        "paper's codec is not published: the paper's size needs one with 1,024 values per code and 24, 36 "
        "and 44 levels.",
        _sound,
        _rates_and_contexts,
        ("context", "nats"),
        AUDIO,
    ),
    Study(
        "dropout",
        "appendix H, two figures",
        "The deeper the model, the less cross-attend dropout helps, and the more post-attention dropout.",
        "MAESTRO v3, dropout rates of 0, 0.5 and 0.75. While cross-attend dropout is varied, post-attention "
        "dropout is 0.5; while the latter is varied, the former is 0.7. At `small`, 10 training pieces "
        "without transposition, 256 channels, depths of 2 and 12, 512 latents, contexts of 1,024, 1,500 "
        "steps of 16 sequences, 40 validation pieces.",
        _dropout,
        _depth_decides,
        ("dropout", "nats"),
        MUSIC,
    ),
    Study(
        "piano",
        "section 5.7",
        "1.24 nats per event on 10,000 hours of transcribed piano music.",
        "The paper's data are private, so its claim cannot be tested: this trains on any folder of MIDI.",
        _piano,
        lambda rows, scale: None,
        None,
        "MIDI: perceiver-ar prepare music FOLDER --out STORE --min-events 1024 --max-events 32768",
    ),
]
