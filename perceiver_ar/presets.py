"""The paper's experiments, and two starting points: one function each, which returns a complete Experiment.

Settings are the paper's. Where it is silent, the authors' published code decides (residual dropout
0.1, batch sizes of copy-32 and imagenet64); where that is silent too, UNSTATED says so.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from perceiver_ar.config import (
    Experiment,
    ModelConfig,
    TrainConfig,
    TransformerConfig,
    TransformerXLConfig,
)
from perceiver_ar.strict import unknown

BYTES = 256 + 3
EVENTS = 388 + 3
UNSTATED_BATCH = 128
UNSTATED_STEPS = 1_000_000


def get(name: str) -> Experiment:
    """The experiment of that name."""
    if name not in _PRESETS:
        raise ValueError(unknown("preset", name, names()))
    return _PRESETS[name](name)


def names() -> list[str]:
    return sorted(_PRESETS)


def _common(**settings: Any) -> ModelConfig:
    """Appendix F.1: C = E = 1,024, 16 + 16 heads, rotary 0.5, cross-attend dropout 0.1."""
    defaults: dict[str, Any] = {"latents": 1024, "residual_dropout": 0.1, "cross_dropout": 0.1}
    return ModelConfig(**defaults | settings)


def starter(name: str, context: int, latents: int, channels: int, layers: int, **train: Any) -> Experiment:
    """A starting point that is not in the paper, for tokens of one's own."""
    model = ModelConfig(
        BYTES, context, latents, channels=channels, heads=channels // 64, layers=layers, cross_dropout=0.1
    )
    return Experiment(name, "tokens", model, TrainConfig(schedule="cosine", **train))


def copy(name: str, length: int, latents: int, layers: int, batch_size: int) -> Experiment:
    """Sections 5.1.1 and 5.1.2, appendix F.3: mirrored random bytes."""
    model = _common(vocab_size=BYTES, context=length, latents=latents, layers=layers, positions="sinusoidal")
    train = TrainConfig(steps=25_000, batch_size=batch_size, warmup_steps=1000, schedule="cosine")
    return Experiment(name, "copy", model, train, {"length": length})


def imagenet64(name: str) -> Experiment:
    """Section 5.2, appendix F.4: bytes of 64 x 64 images, axial positions, 60 layers."""
    train = TrainConfig(steps=750_000, batch_size=2048, schedule="cosine", cosine_steps=50_000)
    return Experiment(name, "image", _image(12_289, layers=60), train, {"size": 64, "order": "raster"})


def imagenet64_order(name: str, order: str, context: int) -> Experiment:
    """Section 5.2.2, table 5: context length against the order of the bytes."""
    train = TrainConfig(steps=30_000, batch_size=2048)
    return Experiment(name, "image", _image(context, layers=16), train, {"size": 64, "order": order})


def _image(context: int, layers: int) -> ModelConfig:
    return _common(vocab_size=BYTES, context=context, layers=layers, positions="axial", axes=(66, 66, 5))


def pg19(name: str, context: int, cross_dropout: float) -> Experiment:
    """Section 5.3, appendix F.6: wide inputs, many cross-attend heads, very high dropout."""
    model = _common(
        vocab_size=32_077,
        context=context,
        layers=60,
        input_channels=4096,
        cross_heads=128,
        cross_dropout=cross_dropout,
    )
    train = TrainConfig(steps=200_000, batch_size=2048)
    return Experiment(name, "text", model, train, {"tokenizer": "unigram"})


def books(name: str, context: int, layers: int) -> Experiment:
    """Section 5.4, appendix F.7: tied embeddings, no linear map of the queries."""
    model = _common(vocab_size=32_000, context=context, layers=layers, tied=True, queries="inputs")
    train = TrainConfig(steps=500_000, batch_size=256)
    return Experiment(name, "text", model, train, {"tokenizer": "unigram"})


def wikitext103(name: str, context: int) -> Experiment:
    """Section 5.5, appendix F.5: words, learned queries and positions. Cutoffs as in its Transformer-XL."""
    model = _common(
        vocab_size=267_735,
        context=context,
        layers=18,
        positions="learned",
        queries="learned",
        cutoffs=(20_000, 40_000, 200_000),
        cross_dropout=0.15,
        cross_dropout_scope="latents",
    )
    train = TrainConfig(steps=UNSTATED_STEPS, batch_size=UNSTATED_BATCH)
    return Experiment(name, "text", model, train, {"tokenizer": "words"})


def books_xl(name: str, layers: int) -> Experiment:
    """Section 5.4, appendix F.7: the Transformer-XL that Books models are compared with."""
    model = TransformerXLConfig(32_000, layers=layers, residual_dropout=0.1, memory_dropout=0.25)
    train = TrainConfig(steps=500_000, batch_size=256)
    return Experiment(name, "text", model, train, {"tokenizer": "unigram"})


def wikitext103_xl(name: str) -> Experiment:
    """Section 5.5, appendix F.5: Transformer-XL on words, with adaptive embeddings."""
    cutoffs = (20_000, 40_000, 200_000)
    model = TransformerXLConfig(267_735, cutoffs=cutoffs, residual_dropout=0.1, memory_dropout=0.25)
    train = TrainConfig(steps=UNSTATED_STEPS, batch_size=UNSTATED_BATCH)
    return Experiment(name, "text", model, train, {"tokenizer": "words"})


def transformer(name: str, context: int) -> Experiment:
    """Figure 3: the 6-layer Transformer of the speed comparison. Its data are not stated: we use bytes."""
    model = TransformerConfig(BYTES, context, layers=6, residual_dropout=0.1)
    return Experiment(name, "text", model, TrainConfig(batch_size=UNSTATED_BATCH), {"tokenizer": "bytes"})


def maestro(name: str) -> Experiment:
    """Section 5.6, appendix F.8: symbolic piano music."""
    model = _common(
        vocab_size=EVENTS,
        context=4096,
        latents=2048,
        layers=12,
        heads=4,
        cross_heads=1,
        rotary_fraction=0.25,
        cross_dropout=0.7,
    )
    train = TrainConfig(steps=1_000_000, batch_size=UNSTATED_BATCH, learning_rate=1e-4)
    return Experiment(name, "music", model, train)


def piano(name: str) -> Experiment:
    """Section 5.7, appendix F.8: 10,000 hours of transcribed piano (private data).

    Its pieces have 1,024 to 32,768 events: `prepare music --min-events 1024 --max-events 32768`.
    """
    model = _common(
        vocab_size=EVENTS,
        context=32_768,
        layers=24,
        rotary_fraction=0.25,
        latent_dropout=0.25,
        queries="mlp",
    )
    train = TrainConfig(steps=UNSTATED_STEPS, batch_size=UNSTATED_BATCH, learning_rate=2e-4)
    return Experiment(name, "music", model, train)


def soundstream(name: str, context: int, layers: int, levels: int) -> Experiment:
    """Sections 5.6 and 5.7, appendices F.8 and I: codes of piano recordings."""
    model = _common(vocab_size=levels * 1024 + 3, context=context, layers=layers, cross_dropout=0.7)
    train = TrainConfig(steps=UNSTATED_STEPS, batch_size=UNSTATED_BATCH, learning_rate=2e-4)
    return Experiment(name, "audio", model, train, {"levels": levels, "codes": 1024})


_PRESETS: dict[str, Callable[[str], Experiment]] = {
    "copy-131k": partial(copy, length=131_072, latents=1024, layers=6, batch_size=4096),
    "copy-8k": partial(copy, length=8192, latents=1024, layers=1, batch_size=128),
    "copy-32": partial(copy, length=32, latents=16, layers=1, batch_size=1024),
    "small": partial(
        starter,
        context=8192,
        latents=1024,
        channels=512,
        layers=8,
        steps=20_000,
        batch_size=32,
        learning_rate=6e-4,
        warmup_steps=500,
    ),
    "tiny": partial(
        starter,
        context=1024,
        latents=256,
        channels=128,
        layers=4,
        steps=1000,
        batch_size=16,
        learning_rate=2e-3,
        warmup_steps=50,
    ),
    "imagenet64": imagenet64,
    "pg19-2k": partial(pg19, context=2048, cross_dropout=0.875),
    "pg19-4k": partial(pg19, context=4096, cross_dropout=0.96875),
    "wikitext103-xl": wikitext103_xl,
    "maestro-v1": maestro,
    "maestro-v3": maestro,
    "piano-32k": piano,
}
for _order in ("raster", "rgb"):
    for _short, _context in (("1k", 1024), ("12k", 12_289)):
        _PRESETS[f"imagenet64-order-{_order}-{_short}"] = partial(
            imagenet64_order, order=_order, context=_context
        )
for _short, _context, _matched in (("1k", 1024, 62), ("4k", 4096, 61), ("8k", 8192, 60), ("16k", 16_384, 56)):
    _PRESETS[f"books-{_short}"] = partial(books, context=_context, layers=36)
    _PRESETS[f"books-{_short}-matched"] = partial(books, context=_context, layers=_matched)
for _short, _context in (("1k", 1024), ("2k", 2048), ("4k", 4096), ("8k", 8192)):
    _PRESETS[f"wikitext103-{_short}"] = partial(wikitext103, context=_context)
    _PRESETS[f"transformer-{_short}"] = partial(transformer, context=_context)
for _layers in (23, 24, 25, 28, 42):
    _PRESETS[f"books-xl-{_layers}"] = partial(books_xl, layers=_layers)
for _short, _context, _layers in (("8k", 8192, 12), ("32k", 32_768, 24), ("65k", 65_536, 48)):
    for _rate, _levels in (("12kbps", 24), ("18kbps", 36), ("22kbps", 44)):
        _PRESETS[f"soundstream-{_short}-{_rate}"] = partial(
            soundstream, context=_context, layers=_layers, levels=_levels
        )
