"""PerceiverAR as a model of the transformers library: its config, its cache, its generate.

Letters: B batch, T inputs of a call, N latents, V vocabulary.
"""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache as TheirCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from perceiver_ar.caching import Cache, prefill, step
from perceiver_ar.config import FORMAT_VERSION, ModelConfig
from perceiver_ar.model import PerceiverAR
from perceiver_ar.tasks.base import BOS, EOS, PAD

NAMES = tuple(f.name for f in fields(ModelConfig))


class PerceiverARConfig(PreTrainedConfig):
    """The settings of ModelConfig, beside those that every config of transformers has."""

    model_type = "perceiver_ar"
    keys_to_ignore_at_inference = ("past_key_values",)
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
        for name, value in (("pad", PAD), ("eos", EOS), ("bos", BOS)):
            settings.setdefault(f"{name}_token_id", value)
        settings.setdefault("use_cache", True)
        settings["tie_word_embeddings"] = False  # the model does that itself, with one tensor for both
        super().__init__(**settings)

    @property
    def settings(self) -> ModelConfig:
        """Those of the model itself."""
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
    _is_stateful = True  # so it never proposes tokens, or checks another's, which would have to be taken back

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
        input_ids: Tensor,
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
        if past_key_values is None and use_cache and labels is None and not self.training:
            past_key_values = PerceiverARCache(self.config.context)
        if past_key_values is not None:
            logits = self._continue(input_ids, attention_mask, position_ids, past_key_values)
            return CausalLMOutputWithPast(None, logits, past_key_values)  # ty: ignore[invalid-argument-type]
        lengths = _lengths(attention_mask)
        logits = self.model(input_ids, positions=position_ids, lengths=lengths)
        loss = None
        if labels is not None:
            following = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
            targets = following[:, -logits.shape[1] :].contiguous()
            loss = self.loss_function(
                logits, labels, vocab_size=self.config.vocab_size, shift_labels=targets, **others
            )
        output = CausalLMOutputWithPast(loss=loss, logits=logits[:, -logits_to_keep:])
        return output.to_tuple() if return_dict is False else output

    def _continue(
        self, tokens: Tensor, mask: Tensor | None, positions: Tensor | None, cache: PerceiverARCache
    ) -> Tensor:
        """Logits after the last of these tokens (B, T), which join those that the cache holds."""
        model, config = self.model, self.model.config
        cache.seen += tokens.shape[1]
        if cache.held is None:
            lengths = _lengths(mask)
            positions = model.place(tokens, positions, lengths)
            room = min(config.context, cache.most_inputs), config.latents
            if tokens.shape[1] > room[0]:  # as generation does
                keep = config.context - config.latents // 2
                tokens, positions = tokens[:, -keep:], positions[:, -keep:]
                lengths = None if lengths is None else lengths.clamp(max=keep)
            logits, cache.held = prefill(model, tokens, positions, room, lengths)
            return logits[:, None]
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
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = PerceiverARCache(max_cache_length + 1)

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        self.model.config = replace(self.model.config, checkpoint_activations=enable)

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.model.config.checkpoint_activations

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding.tokens

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
                setattr(module, name, nn.Parameter(torch.cat((old[:size], more)).detach()))
        tokens.num_embeddings = size
        model.config = replace(model.config, vocab_size=size)
        self.config.vocab_size = size
        return tokens


def _lengths(mask: Tensor | None) -> Tensor | None:
    """Of rows that are padded on the left; None where none is."""
    if mask is None or bool(mask.all()):
        return None
    if mask.dim() != 2 or bool((mask.diff(dim=1) < 0).any()):
        raise ValueError("inputs must be padded on the left: set tokenizer.padding_side to 'left'.")
    return mask.sum(1)
