"""PerceiverAR as a model of the transformers library: its config, its cache, its generate.

Letters: B batch, T inputs of a call, N latents, V vocabulary.
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache as TheirCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.hub import cached_file

from perceiver_ar.caching import Cache, check_forgetting, prefill, step
from perceiver_ar.config import FORMAT_VERSION, ModelConfig
from perceiver_ar.model import PerceiverAR
from perceiver_ar.pretrained import WEIGHTS, check_types
from perceiver_ar.special import BOS, EOS, PAD

NAMES = tuple(f.name for f in fields(ModelConfig))


class PerceiverARConfig(PreTrainedConfig):
    """The settings of ModelConfig, beside those that every config of transformers has."""

    model_type = "perceiver_ar"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {  # noqa: RUF012
        "hidden_size": "channels",
        "num_attention_heads": "heads",
        "num_hidden_layers": "layers",
        "max_position_embeddings": "context",
    }

    def __init__(self, **settings: Any) -> None:
        ours = {name: settings.pop(name) for name in NAMES if name in settings}
        known = ModelConfig.from_dict({"vocab_size": 259, "context": 8192, "latents": 1024} | ours)
        for name, value in known.to_dict().items():
            setattr(self, name, list(value) if isinstance(value, tuple) else value)
        self.format_version = settings.pop("format_version", FORMAT_VERSION)
        if self.format_version != FORMAT_VERSION:
            raise ValueError(
                f"format version {self.format_version} is not {FORMAT_VERSION}, which this code reads."
            )
        if __name__.startswith("perceiver_ar."):  # what is saved from here carries no code
            settings.pop("auto_map", None)
        for name, value in (("pad", PAD), ("eos", EOS), ("bos", BOS)):
            settings.setdefault(f"{name}_token_id", value)
        settings.setdefault("use_cache", True)
        settings["tie_word_embeddings"] = False  # the model does that itself, with one tensor for both
        super().__init__(**settings)

    @property
    def settings(self) -> ModelConfig:
        """As the model takes them."""
        return ModelConfig.from_dict({name: getattr(self, name) for name in NAMES})


class PerceiverARCache(TheirCache):
    """Our cache, a value, where transformers wants an object that changes."""

    def __init__(self, inputs: int) -> None:
        """inputs: how many to have room for; the model's context is the most that is kept."""
        super().__init__(layers=[])
        self.most_inputs = inputs
        self.seen = 0
        self.held: Cache | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.held is not None:
            self.held = self.held.rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        assert self.held is not None
        self.reorder_cache(torch.arange(len(self.held.tokens)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("what a PerceiverARCache has read cannot be taken back.")


class PerceiverARForCausalLM(PreTrainedModel, GenerationMixin):
    """The model, with logits of the last N inputs: of all where there are no more than N."""

    config_class = PerceiverARConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True
    accepts_loss_kwargs = False  # Trainer would divide by the number of all labels, not of the last N
    _is_stateful = True  # no assisted decoding: the cache cannot take tokens back

    config: PerceiverARConfig

    def __init__(self, config: PerceiverARConfig) -> None:
        super().__init__(config)
        self.model = PerceiverAR(config.settings)
        self.post_init()

    @classmethod
    def of(cls, model: PerceiverAR) -> "PerceiverARForCausalLM":
        """Around a model that is there already; weights are shared."""
        with torch.device("meta"):
            made = cls(PerceiverARConfig(**model.config.to_dict()))
        made.model = model
        made.config.dtype = model.norm.weight.dtype
        return made.train(model.training)

    @classmethod
    def from_pretrained(
        cls,
        *args: Any,
        output_loading_info: bool = False,
        ignore_mismatched_sizes: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As in all of transformers, but weights that do not fit are named and refused, not drawn anew."""
        loaded: Any = super().from_pretrained(
            *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
        )
        model, info = loaded
        name = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        if name is not None:  # else the weights are given as state_dict
            for path in _weight_files(name, kwargs):
                check_types(path)
        misshapen = set() if ignore_mismatched_sizes else {name for name, *_ in info["mismatched_keys"]}
        for wrong, names in (
            ("have other sizes than its config:", misshapen),
            ("lack", set(info["missing_keys"])),
            ("have no place in the model:", set(info["unexpected_keys"])),
        ):
            if names:
                raise ValueError(f"the weights of this folder {wrong} {', '.join(sorted(names))}.")
        return loaded if output_loading_info else model

    def _init_weights(self, module: nn.Module) -> None:
        reset = getattr(module, "reset_parameters", None)
        if reset is not None and not isinstance(module, PerceiverAR):
            reset()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: PerceiverARCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """Logits of the last N inputs (B, N, V); with a cache, of the last one alone (B, 1, V).

        attention_mask (B, T) is 0 where a row is padded, which must be on the left. labels (B, T) are
        the inputs themselves, as in all of transformers: the loss is that of those after the last N.
        """
        if input_ids is None:
            raise ValueError("this model takes tokens, input_ids, and no inputs_embeds.")
        if past_key_values is None and use_cache and labels is None and not self.training:
            past_key_values = PerceiverARCache(self.config.context)
        loss = None
        if past_key_values is not None and labels is not None:
            raise ValueError("with past_key_values there is no loss: give labels with all of the inputs.")
        if past_key_values is not None:
            if not isinstance(past_key_values, PerceiverARCache):
                raise ValueError(
                    f"past_key_values must be a PerceiverARCache, not a {type(past_key_values).__name__}."
                )
            logits = self._continue(input_ids, attention_mask, position_ids, past_key_values)
        else:
            lengths = _lengths(attention_mask, input_ids)
            logits = self.model(input_ids, positions=position_ids, lengths=lengths)
        if labels is not None:
            following = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
            targets = following[:, -logits.shape[1] :].contiguous()
            loss = self.loss_function(logits, labels, self.config.vocab_size, shift_labels=targets)
        output = CausalLMOutputWithPast(loss, logits[:, -logits_to_keep:], past_key_values)
        wanted = self.config.return_dict if return_dict is None else return_dict
        return output if wanted else output.to_tuple()

    def _continue(
        self, tokens: Tensor, mask: Tensor | None, positions: Tensor | None, cache: PerceiverARCache
    ) -> Tensor:
        """Logits after the last of these tokens (B, T), which join those that the cache holds."""
        model, config = self.model, self.model.config
        cache.seen += tokens.shape[1]
        if cache.held is None:
            lengths = _lengths(mask, tokens)
            positions = model.place(tokens, positions, lengths)
            room = min(config.context, cache.most_inputs), config.latents
            if tokens.shape[1] > room[0]:  # as generation does
                check_forgetting(model)
                keep = config.context - config.latents // 2
                tokens, positions = tokens[:, -keep:], positions[:, -keep:]
                lengths = None if lengths is None else lengths.clamp(max=keep)
            logits, cache.held = prefill(model, tokens, positions, room, lengths)
            return logits[:, None]
        if mask is not None and not mask[:, -tokens.shape[1] :].all():
            raise ValueError(
                "what follows a cache cannot be padded: give its rows one by one, or start anew."
            )
        needed = cache.held.inputs + tokens.shape[1]
        if needed > cache.held.room[0] < config.context:  # the cache of an earlier call is gone on with
            cache.held = cache.held.with_room(min(config.context, max(needed, 2 * cache.held.room[0])))
        if positions is None:
            positions = self._following(cache.held, tokens)
        positions = positions if positions.dim() == 3 else positions[..., None]
        logits = tokens.new_empty(())
        for place in range(tokens.shape[1]):
            logits, cache.held = step(
                model, cache.held, tokens[:, place], positions[:, place : place + 1].clone()
            )
        return logits[:, None]

    def _following(self, held: Cache, tokens: Tensor) -> Tensor:
        if self.model.config.axes:
            raise ValueError("axial positions must be given: position_ids of shape (B, T, A).")
        ahead = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        return held.positions[:, held.inputs - 1 : held.inputs, 0] + ahead

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """Room for as much as generate will read at most."""
        if generation_config.prefill_chunk_size is not None:
            raise ValueError("prompts are read in stretches anyway: leave prefill_chunk_size out.")
        if self.model.config.axes:
            raise ValueError("transformers cannot give axial positions: draw by `perceiver-ar generate`.")
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = PerceiverARCache(max_cache_length + 1)

    def prepare_inputs_for_generation(self, input_ids: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Without a cache all is computed again at each step, from the last inputs that the model takes."""
        prepare: Any = super().prepare_inputs_for_generation
        inputs = prepare(input_ids, *args, **kwargs)
        if inputs.get("past_key_values") is None and self.model.config.unbounded:
            for name in ("input_ids", "attention_mask", "position_ids"):
                if inputs.get(name) is not None:
                    inputs[name] = inputs[name][:, -self.config.context :]
        return inputs

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        self.model.config = replace(self.model.config, checkpoint_activations=enable)

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.model.config.checkpoint_activations

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        assert isinstance(value, nn.Embedding)
        self.model.embedding.tokens.weight = value.weight

    def get_output_embeddings(self) -> None:
        return None

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """More tokens, each as the mean of those before, or fewer."""
        model, each = self.model, pad_to_multiple_of or 1
        size = -(-(new_num_tokens or self.config.vocab_size) // each) * each
        tokens = model.embedding.tokens
        if not isinstance(tokens, nn.Embedding):
            raise ValueError("adaptive embeddings (cutoffs) cannot be resized.")
        places = (tokens, "weight"), (model.output, "weight"), (model.output, "bias")
        for module, name in places:
            old = getattr(module, name)
            if old is not None:
                more = old.mean(0, keepdim=True).expand(max(0, size - len(old)), *old.shape[1:])
                new = torch.cat((old[:size], more)).detach()
                setattr(module, name, nn.Parameter(new, requires_grad=old.requires_grad))
        tokens.num_embeddings = size
        model.config = replace(model.config, vocab_size=size)
        self.config.vocab_size = size
        return tokens


def _weight_files(name: str | Path, settings: dict[str, Any]) -> list[Path]:
    """The files that weights were just loaded from: those of a folder, or of a copy of a repository."""
    where = {key: settings.get(key) for key in ("cache_dir", "revision", "token")}
    for file in (WEIGHTS, f"{WEIGHTS}.index.json"):
        found = cached_file(
            name,
            file,
            subfolder=settings.get("subfolder", ""),
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **where,
        )
        if found is not None:
            return sorted(Path(found).parent.glob(f"{Path(WEIGHTS).stem}*.safetensors"))
    return []


def _lengths(mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """How many tokens of each row are real, (B,), after padding on the left; None where there is none."""
    if mask is None:
        return None
    if mask.shape != tokens.shape:
        raise ValueError(
            f"attention_mask must have the shape {tuple(tokens.shape)}, not {tuple(mask.shape)}."
        )
    mask = mask.long()
    if bool((mask.diff(dim=1) < 0).any()):
        raise ValueError("inputs must be padded on the left: set tokenizer.padding_side to 'left'.")
    return None if bool(mask.all()) else mask.sum(1)
