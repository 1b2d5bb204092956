"""Makes the Auto classes of transformers know models, configs and tokenizers of this library."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from perceiver_ar.interop.causal_lm import PerceiverARCache, PerceiverARConfig, PerceiverARForCausalLM
from perceiver_ar.interop.tokenizer import PerceiverARTokenizer

__all__ = ["PerceiverARCache", "PerceiverARConfig", "PerceiverARForCausalLM", "PerceiverARTokenizer"]

AutoConfig.register(PerceiverARConfig.model_type, PerceiverARConfig, exist_ok=True)
for auto in (AutoModel, AutoModelForCausalLM):  # there is no model without an output layer
    auto.register(PerceiverARConfig, PerceiverARForCausalLM, exist_ok=True)
AutoTokenizer.register(PerceiverARConfig, slow_tokenizer_class=PerceiverARTokenizer, exist_ok=True)
