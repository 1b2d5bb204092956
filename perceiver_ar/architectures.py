"""The three kinds of model: the module for a config, and the model in a folder."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from perceiver_ar.baselines import RelativeBlock, Transformer, TransformerXL
from perceiver_ar.config import AnyModelConfig, ModelConfig, TransformerConfig, TransformerXLConfig
from perceiver_ar.decoder import Decoder
from perceiver_ar.embedding import Output
from perceiver_ar.model import Block, PerceiverAR
from perceiver_ar.pretrained import CONFIG, find

MODELS: dict[type, type[Decoder]] = {
    ModelConfig: PerceiverAR,
    TransformerConfig: Transformer,
    TransformerXLConfig: TransformerXL,
}


def build(config: AnyModelConfig) -> Decoder:
    """Builds the module that a config describes."""
    return MODELS[type(config)](config)


def parameter_count(config: AnyModelConfig) -> int:
    """Counts the parameters of a config's module without allocating them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config).parameters())


def load_model(name: Path, device: str = "cpu") -> Decoder:
    """Loads the model in a folder or a repository on the hub, whichever kind it is."""
    folder = find(name, {})
    try:
        found = json.loads((folder / CONFIG).read_text()).get("model_type")
    except (OSError, ValueError, AttributeError):
        found = None  # from_pretrained reports what is wrong
    kinds = {kind.model_type: kind for kind in MODELS.values()}
    return kinds.get(found, PerceiverAR).from_pretrained(folder, map_location=device)


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """Compiles each block and the output in place; blocks of the same shape share the compiled code.

    Training, evaluation, padding and changing lengths each recompile it. Together they exceed torch's
    default limit, beyond which it silently runs uncompiled code.
    """
    import torch._dynamo  # takes a second

    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = max(64, dynamo.recompile_limit)
    for module in model.modules():
        if isinstance(module, Block | RelativeBlock | Output):
            module.compile(**options)
