"""Counts the floating-point operations of a model."""

from perceiver_ar.config import AnyModelConfig, ModelConfig, TransformerConfig


def forward_flops(config: AnyModelConfig) -> float:
    """FLOPs of one sequence: all matrix products of the plain model, over the inputs that dropout keeps.

    Work that a fast path saves is counted all the same.
    """
    latents, width = config.latents, config.channels
    inside = 12 * latents * width**2  # query, key, value, output, and an MLP four times as wide
    logits = latents * width * config.vocab_size
    if isinstance(config, ModelConfig):
        wide = config.input_width
        dropped = config.cross_dropout if config.cross_dropout_scope != "latents" else 0.0
        inputs = latents + round((config.context - latents) * (1 - dropped))
        mapped = 3 * latents * width * wide  # inputs to latents, queries, output
        cross = 2 * inputs * wide**2 + mapped + 8 * latents * width**2
        seen = attention_flops(latents, inputs, wide) + config.layers * attention_flops(
            latents, latents, width
        )
        return 2 * (cross + config.layers * inside + logits) + seen
    if isinstance(config, TransformerConfig):
        return 2 * (config.layers * inside + logits) + config.layers * attention_flops(
            latents, latents, width
        )
    # Keys and values of the memory, too, and keys of all distances, whose scores are not causal.
    keys = latents + config.memory
    more = 2 * config.memory * width**2 + keys * width**2 + latents * keys * width
    return 2 * (config.layers * (inside + more) + logits) + config.layers * attention_flops(
        latents, keys, width
    )


def attention_flops(queries: int, keys: int, width: int) -> float:
    """FLOPs of one causal attention: scores and weighted sums over the keys that each query sees."""
    return 4 * queries * (keys - (queries - 1) / 2) * width
