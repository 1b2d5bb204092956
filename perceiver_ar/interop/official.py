"""The authors' parameters (JAX, Haiku) as a PerceiverAR that gives the same logits."""

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from perceiver_ar.config import ModelConfig, Queries
from perceiver_ar.interop.plain_pickle import Array, read_pickle
from perceiver_ar.model import Block, PerceiverAR
from perceiver_ar.strict import unknown

DEFAULTS: dict[str, Any] = {
    "input_embed_dim": 1024,
    "position_encoding_type": "absolute",
    "position_encoding": "sinusoidal",
    "learnable_position_embeddings": False,
    "initial_query_embed_style": "none",
    "share_learned_initial_query": False,
    "fraction_to_rotate": 0.25,
    "max_wavelength": 8192,
    "dropout_prob": 0.0,
    "latent_dropout_prob": 0.0,
    "encoder_dropout_prob": 0.0,
}

FIXED: dict[str, tuple[Any, ...]] = {
    "cross_attend_widening_factor": (4,),
    "transformer_widening_factor": (4,),
    "activation_name": ("sq_relu",),
    "use_positions_from_data": (True,),
    "use_negative_rotary_positions": (False,),
    "fraction_heads_to_rotate": (1.0,),
    "cross_attention_shape_for_attn": ("kv",),
    "encoder_use_query_residual": (True,),
    "include_initial_cross_attention": (True,),
    "additional_cross_attend_after_layers": (None, [], ()),
    "initial_query_offsetting": (False,),
    "num_latents_per_position": (1,),
    "mask_style": ("final_block",),
    "train_input_positions": (0,),
    "position_encoding_type": ("absolute", "rotary"),
    "position_encoding": ("sinusoidal", "random"),
}
"""Arguments of their constructor that this model has only in these settings."""

WITHOUT_EFFECT = (
    "chunked_cross_attention",
    "chunked_cross_key_size",
    "chunked_cross_query_size",
    "concat_pos",
    "cross_attention_head_group_size",
    "final_layer_init_zeros",
    "name",
    "z_pos_enc_init_scale",
)
"""Arguments that change how the logits are computed or started, not what they are."""

NEEDED = (
    "num_classes",
    "max_context_length",
    "z_index_dim",
    "num_z_channels",
    "num_transformer_heads",
    "num_transformers_per_block",
    "num_cross_attend_heads",
    "input_idx_size",
)
QUERY_MLP = ("initial_query_embed_num_layers", "initial_query_embed_activation_name")

_PUBLISHED = {
    "num_z_channels": 1024,
    "num_transformer_heads": 16,
    "num_cross_attend_heads": 16,
    "dropout_prob": 0.1,
}
SWEEPS: dict[str, dict[str, Any]] = {
    "random_mirrored_32": {
        "max_context_length": 32,
        "z_index_dim": 16,
        "num_transformers_per_block": 1,
        **_PUBLISHED,
    },
    "random_mirrored_131072": {
        "max_context_length": 131_072,
        "z_index_dim": 1024,
        "num_transformers_per_block": 6,
        **_PUBLISHED,
    },
    "imagenet_w_positions": {
        "max_context_length": 12_416,
        "z_index_dim": 1024,
        "num_transformers_per_block": 60,
        "position_encoding": "random",
        "learnable_position_embeddings": True,
        **_PUBLISHED,
    },
}
"""Arguments of the authors' experiments, by their names; their checkpoints do not hold them."""


def read_checkpoint(path: Path, kwargs: str | None = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """What from_params takes, from a checkpoint.dill of the authors' training code, or its folder.

    kwargs: the name of one of SWEEPS, or a JSON file, of arguments that the checkpoint does not hold.
    """
    given = {} if kwargs is None else read_arguments(kwargs)
    path = path / "checkpoint.dill" if path.is_dir() else path
    held = read_pickle(path)
    if not isinstance(held, dict):
        raise ValueError(f"{path} holds no parameters: it must be a dict with 'params'.")
    params = _flat(held.get("params", held), path)
    arguments = _configured(held.get("config")) | given
    if not arguments:
        raise ValueError(
            f"{path} does not say how its model was made: add --kwargs with the name of the authors' "
            f"experiment ({', '.join(SWEEPS)}), or with a JSON file of their constructor's arguments."
        )
    return params, _sizes(params) | arguments


def read_arguments(name: str) -> dict[str, Any]:
    """The arguments of one of SWEEPS, or those in a JSON file."""
    if name in SWEEPS:
        return SWEEPS[name]
    if not Path(name).is_file():
        raise ValueError(unknown("JSON file or experiment of the authors", name, SWEEPS))
    try:
        arguments = json.loads(Path(name).read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"{name} must hold one JSON object, of the arguments of the authors' constructor.")
    return arguments


def _flat(params: Any, path: Path) -> dict[str, np.ndarray]:
    """Haiku's dicts in a dict as one; of copies that several devices held, the first."""
    arrays: dict[str, Array] = {}
    for module, inner in params.items() if isinstance(params, dict) else ():
        for name, array in inner.items() if isinstance(inner, dict) else (("", inner),):
            full = f"{module}/{name}".removesuffix("/")
            if not full.isprintable() or not isinstance(array, Array):
                raise ValueError(f"{path} holds no array for the parameter {full[:100]!r}.")
            arrays[full] = array
    norm = arrays.get("perceiver_ar/layer_norm/scale")
    if norm is None:
        raise ValueError(f"{path} holds no parameters of a Perceiver AR of the authors.")
    if sum(len(array.content) for array in arrays.values()) > path.stat().st_size:
        raise ValueError(f"{path} claims more parameters than fit in it.")
    devices = norm.shape[0] if len(norm.shape) == 2 else 0
    copies = devices > 0 and all(array.shape[:1] == (devices,) for array in arrays.values())
    return {name: array.values[0] if copies else array.values for name, array in arrays.items()}


def _configured(config: Any) -> dict[str, Any]:
    """The constructor's arguments in their training's config, whether all of it is kept or only they are."""
    for part in ("experiment_kwargs", "config"):
        config = config.get(part, config) if isinstance(config, dict) else {}
    match config:
        case {"model": {"perceiver_ar_kwargs": dict(arguments)}, "data": {"max_context_length": context}}:
            return {"max_context_length": context} | arguments
        case dict():
            return config
    return {}


def _sizes(params: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The arguments that follow from the shapes of the tables; their code takes them from the data set."""
    rows: list[int] = []
    while (table := params.get(f"perceiver_ar/~/embed_{len(rows) + 1}/embeddings")) is not None:
        rows += table.shape[:1] or [-1]
    tokens = params.get("perceiver_ar/~/embed/embeddings")
    classes = {} if tokens is None or tokens.ndim == 0 else {"num_classes": len(tokens)}
    return classes | {"input_idx_size": rows or [-1]}


def from_params(params: Mapping[str, ArrayLike], kwargs: Mapping[str, Any]) -> PerceiverAR:
    """Makes a PerceiverAR, in evaluation mode, from a dict of "module path/name" to arrays.

    kwargs are those of the authors' constructor. Their positions start at 1: pass them as they are.
    """
    config = _config(kwargs)
    if config.layers > len(params):
        raise ValueError(f"{config.layers:,} layers cannot be made of {len(params)} parameters.")
    try:
        with torch.device("meta"):
            model = PerceiverAR(config)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"no model can be made of these arguments: {error}") from None
    left = {name: torch.from_numpy(np.array(value, dtype=np.float32)) for name, value in params.items()}
    try:
        weights = _weights(model, left)
    except KeyError as error:
        raise ValueError(f"the parameters lack {error}, which these arguments call for.") from None
    if left:
        raise ValueError(f"these arguments have no place for the parameters {', '.join(sorted(left))}.")
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"the parameters do not fit these arguments: {error}") from None
    return model.eval()


def _config(kwargs: Mapping[str, Any]) -> ModelConfig:
    for name, possible in FIXED.items():
        if name in kwargs and kwargs[name] not in possible:
            asked = reprlib.repr(kwargs[name])
            raise ValueError(f"{name}={asked} is not supported: it must be {possible[0]!r}.")
    known = {*FIXED, *DEFAULTS, *NEEDED, *WITHOUT_EFFECT, *QUERY_MLP}
    for name in kwargs:
        if name not in known:
            raise ValueError(unknown("argument of the authors' constructor", name, sorted(known)))
    for name in NEEDED:
        if name not in kwargs:
            raise ValueError(f"the argument {name} is missing.")
    k = DEFAULTS | dict(kwargs)
    for name, kinds, what in (
        ("input_idx_size", list | tuple, "a list"),
        ("max_wavelength", int | float, "a number"),
    ):
        if not isinstance(k[name], kinds):
            raise ValueError(f"{name} must be {what}, but is {reprlib.repr(k[name])}.")
    rotary = k["position_encoding_type"] == "rotary"
    tables = not rotary and (k["position_encoding"] != "sinusoidal" or k["learnable_position_embeddings"])
    if not rotary and not tables and len(k["input_idx_size"]) > 1:
        raise ValueError("sinusoidal positions on several axes are not supported.")
    return ModelConfig(
        vocab_size=k["num_classes"],
        context=k["max_context_length"],
        latents=k["z_index_dim"],
        channels=k["num_z_channels"],
        heads=k["num_transformer_heads"],
        layers=k["num_transformers_per_block"],
        input_channels=k["input_embed_dim"],
        cross_heads=k["num_cross_attend_heads"],
        positions="rotary" if rotary else "axial" if tables else "sinusoidal",
        rotary_fraction=k["fraction_to_rotate"],
        max_wavelength=float(k["max_wavelength"]) if rotary else None,
        axes=tuple(k["input_idx_size"]) if tables else (),
        queries=_queries(k),
        residual_dropout=k["dropout_prob"],
        latent_dropout=k["latent_dropout_prob"],
        cross_dropout=k["encoder_dropout_prob"],
    )


def _queries(k: Mapping[str, Any]) -> Queries:
    style = k["initial_query_embed_style"]
    if style == "none":
        return "linear"
    if style == "learned":
        return "learned-shared" if k["share_learned_initial_query"] else "learned"
    layers, activation = (
        k.get("initial_query_embed_num_layers", 2),
        k.get("initial_query_embed_activation_name"),
    )
    if style != "mlp" or layers != 3 or activation != "gelu":
        told = (reprlib.repr(value) for value in (style, layers, activation))
        raise ValueError("query style {} with {} layers of {} is not supported.".format(*told))
    return "mlp"


def _weights(model: PerceiverAR, left: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict, taken out of theirs; raises KeyError for what is not there."""
    top = "perceiver_ar/~"
    weights: dict[str, Tensor] = {"embedding.tokens.weight": left.pop(f"{top}/embed/embeddings")}
    for axis in range(len(model.config.axes)):
        weights[f"embedding.positions.tables.{axis}.weight"] = left.pop(f"{top}/embed_{axis + 1}/embeddings")
    if model.config.positions == "sinusoidal":
        _check_sinusoids(model, left.pop(f"{top}/embed_1/embeddings"))

    style = model.config.queries
    if style in ("learned", "learned-shared"):
        weights["queries.learned.weight"] = left.pop("perceiver_ar/q_embed_learned")
    if style == "mlp":  # their numbers begin with the MLP, though the plain map is applied first
        for layer, name in enumerate(("linear", "linear_1", "linear_2")):
            weights |= _linear(left, f"{top}/{name}", f"queries.mlp.{layer}")
    if style in ("linear", "mlp"):
        weights |= _linear(left, f"{top}/{'linear_3' if style == 'mlp' else 'linear'}", "queries.linear")

    weights |= _block(left, f"{top}/cross_attention", "cross_attend", model.cross_attend)
    for layer, block in enumerate(model.self_attends):
        theirs = f"{top}/{_numbered('self_attention', layer)}"
        weights |= _block(left, theirs, f"self_attends.{layer}", block)
    weights |= _norm(left, "perceiver_ar/layer_norm", "norm")
    return weights | _linear(left, f"{top}/logits", "output")


def _check_sinusoids(model: PerceiverAR, table: Tensor) -> None:
    """Theirs is a table; ours the formula, exact where their float32 is off by 0.01 at 131,072."""
    assert model.embedding.positions is not None
    rows = torch.arange(table.shape[0] if table.ndim else 0)
    sinusoids = model.embedding.positions(rows[:, None])
    if sinusoids.shape != table.shape or not torch.allclose(sinusoids, table, atol=0.02):
        raise ValueError("the table of positions in perceiver_ar/~/embed_1 is not that of the sinusoids.")


def _block(left: dict[str, Tensor], theirs: str, ours: str, block: torch.nn.Module) -> dict[str, Tensor]:
    assert isinstance(block, Block)
    norms = ("norm", "mlp_norm") if block.input_norm is None else ("norm", "input_norm", "mlp_norm")
    maps = ("attention", ("query", "key", "value", "out")), ("dense", ("mlp.widen", "mlp.narrow"))
    weights: dict[str, Tensor] = {}
    for number, name in enumerate(norms):
        weights |= _norm(left, f"{theirs}/{_numbered('layer_norm', number)}", f"{ours}.{name}")
    for module, names in maps:
        for number, name in enumerate(names):
            weights |= _linear(left, f"{theirs}/{module}/{_numbered('linear', number)}", f"{ours}.{name}")
    return weights


def _numbered(name: str, number: int) -> str:
    """Haiku's way: linear, linear_1, linear_2, ..."""
    return f"{name}_{number}" if number else name


def _linear(left: dict[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    return {f"{ours}.weight": left.pop(f"{theirs}/w").T.contiguous(), f"{ours}.bias": left.pop(f"{theirs}/b")}


def _norm(left: dict[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    return {f"{ours}.weight": left.pop(f"{theirs}/scale"), f"{ours}.bias": left.pop(f"{theirs}/offset")}
