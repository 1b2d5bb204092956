"""The models that are timed, by name, and how much arithmetic they are."""

from dataclasses import dataclass

from perceiver_ar import ModelConfig


@dataclass(frozen=True)
class Size:
    """A model and a batch to train it with."""

    model: ModelConfig
    batch: int


SIZES = {
    "laptop": Size(ModelConfig(259, 4096, 512, channels=256, heads=8, layers=6), 4),
    "8k": Size(ModelConfig(259, 8192, 1024, layers=12), 32),
    "12k-60": Size(ModelConfig(259, 12_289, 1024, layers=60), 16),
    "131k": Size(ModelConfig(259, 131_072, 1024, layers=6), 4),
    "1m": Size(ModelConfig(259, 1_048_576, 1024, layers=6), 1),
}


def forward_flops(config: ModelConfig) -> float:
    """Of one sequence: every matrix product of the plain model over the inputs that are not dropped.

    Work that a fast path saves is counted all the same.
    """
    assert config.queries == "linear"
    latents, width, wide = config.latents, config.channels, config.input_width
    inputs = latents + round((config.context - latents) * (1 - config.cross_dropout))
    mlp = 8 * latents * width**2
    cross = (
        2 * inputs * wide**2 + 3 * latents * width * wide + mlp
    )  # keys and values; queries, their map, output
    self_attend = 4 * latents * width**2 + mlp
    seen = attention_flops(latents, inputs, wide) + config.layers * attention_flops(latents, latents, width)
    return 2 * (cross + config.layers * self_attend + latents * width * config.vocab_size) + seen


def attention_flops(queries: int, keys: int, width: int) -> float:
    """Of one causal attention: scores and weighted sums over the keys that each query sees."""
    return 4 * queries * (keys - (queries - 1) / 2) * width
