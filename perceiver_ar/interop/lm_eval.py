"""Text models in lm-evaluation-harness: lm_eval --model perceiver-ar --model_args path=RUN --tasks TASK."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from perceiver_ar.device import pick_device
from perceiver_ar.evaluation import Windowing, score
from perceiver_ar.extras import need
from perceiver_ar.generation import stream
from perceiver_ar.run import load
from perceiver_ar.special import BOS, EOS, FIRST, PAD
from perceiver_ar.tasks.base import Document
from perceiver_ar.tasks.text import TextTask
from perceiver_ar.vocabulary import as_utf8

try:
    TemplateLM: Any = need("lm_eval.api.model", "lm-eval").TemplateLM
except ValueError:  # whoever makes a model is told so
    TemplateLM = object


class PerceiverARLM(TemplateLM):
    """The model of a run, which scores in the windows of `perceiver-ar evaluate`."""

    def __init__(
        self,
        path: str = "",
        device: str = "auto",
        batch_size: int | str = 1,
        latents: int | None = None,
        stride: int | None = None,
        **others: Any,
    ) -> None:
        if others or not path:
            raise ValueError(
                f"--model_args must be path=RUN, latents or stride, not {', '.join(others) or 'nothing'}."
            )
        self.tools = need("lm_eval.models.utils", "lm-eval")
        super().__init__()
        for name, value in (("batch_size", batch_size), ("latents", latents), ("stride", stride)):
            if value is not None and not str(value).isdecimal():
                raise ValueError(f"{name} must be a whole number, but is {value}.")
        self.batch_size = int(batch_size)
        self.latents, self.stride = (value if value is None else int(value) for value in (latents, stride))
        unsaid = device == "cuda:0" and not torch.cuda.is_available()  # by default its command says this
        self._device = pick_device("auto" if unsaid else device)
        self.model, task, _ = load(str(path), str(self._device))
        if not isinstance(task, TextTask):
            raise ValueError(f"{path} must be a run on text, but its task is {task.name}.")
        self.task = task

    @property
    def eot_token_id(self) -> int:
        return EOS

    @property
    def prefix_token_id(self) -> int:
        return BOS

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """A text that something may follow; after BOS, as documents are in a store."""
        start = [] if add_special_tokens is False else [BOS]
        return start + self.task.vocabulary.encode(as_utf8(string), final=False).tolist()

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Of each continuation: its log-probability, and whether its tokens are the likeliest."""
        if getattr(self.model.config, "cutoffs", ()):
            raise ValueError(
                "which token is the likeliest is not known of an adaptive softmax: choose tasks of the "
                "output_type loglikelihood_rolling or generate_until."
            )
        documents = []
        for (_, text), context, continuation in requests:
            if not continuation:
                raise ValueError(f"the continuation {text!r} has no token of its own after its context.")
            tokens = np.array(context + continuation)
            documents.append(Document(tokens, len(context), len(tokens)))
        return [
            (-nats, right == document.stop - document.first)
            for document, (nats, right) in zip(documents, self._score(documents, disable_tqdm), strict=True)
        ]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probabilities of whole documents, their ends included, as in a store."""
        documents = [self.task.document(as_utf8(request.args[0])) for request in requests]
        return [-nats for nats, _ in self._score(documents, disable_tqdm)]

    def _score(self, documents: list[Document], quiet: bool) -> list[tuple[float, int]]:
        """Nats of each document, and how many of its tokens are the likeliest; the longest come first."""
        order = sorted(range(len(documents)), key=lambda i: -documents[i].stop)
        nats, right = np.zeros(len(documents)), np.zeros(len(documents), dtype=int)
        tokens = sum(document.stop - document.first for document in documents)
        ordered = [documents[i] for i in order]
        windowing = Windowing.of(
            self.model, latents=self.latents, stride=self.stride, batch_size=self.batch_size
        )
        batches = score(self.model, self.task, ordered, windowing)
        with tqdm(total=tokens, desc="Scoring tokens", disable=quiet) as bar:
            for scores, hits, parts in batches:
                rows = [order[part.document] for part in parts]
                np.add.at(nats, rows, scores.double().sum(1).numpy())
                if hits is not None:
                    np.add.at(right, rows, hits.sum(1).numpy())
                bar.update(sum(len(part.places) for part in parts))
        return list(zip(nats.tolist(), right.tolist(), strict=True))

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What follows each context, up to one of its strings to stop at; alike requests in batches."""
        queue = self.tools.Collator(
            [request.args for request in requests],
            sort_fn=lambda pair: -len(pair[0]),
            group_by="gen_kwargs",
            group_fn=lambda pair: pair[1],
        )
        texts: list[str] = []
        with tqdm(total=len(requests), desc="Generating", disable=disable_tqdm) as bar:
            for number, batch in enumerate(queue.get_batched(n=self.batch_size)):
                texts += self._generate([context for context, _ in batch], batch[0][1], number)
                bar.update(len(batch))
        return queue.get_original(texts)

    def _generate(self, contexts: list[str], settings: dict[str, Any], seed: int) -> list[str]:
        """One batch; settings that are not lm-eval's own are those of `stream`."""
        settings = dict(self.tools.normalize_gen_kwargs(settings))
        until, most = [text for text in settings.pop("until") if text], settings.pop("max_gen_toks")
        if not settings.pop("do_sample"):
            settings["temperature"] = 0.0
        if unknown := settings.keys() - {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}:
            raise ValueError(f"generation_kwargs that cannot be used here: {', '.join(sorted(unknown))}.")
        config = self.model.config
        room = None if config.unbounded else -max(1, config.context - most + 1)
        prompts = [self.tok_encode(context)[room:] for context in contexts]
        longest = max(map(len, prompts))
        allowed = self.task.allowed(longest, config.vocab_size)
        drawn = stream(
            self.model,
            torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts]),
            most,
            lengths=torch.tensor([len(prompt) for prompt in prompts]),
            latents=self.latents,
            allowed=lambda t: allowed,
            stop=EOS if self.task.ends else None,
            seed=seed,
            **settings,
        )
        spell, texts = [self.task.speller() for _ in prompts], [""] * len(prompts)
        going = set(range(len(prompts)))
        for tokens in drawn:
            ids = tokens.tolist()
            for row in tuple(going):
                texts[row] += spell[row](ids[row])
                if ids[row] < FIRST or any(stop in texts[row] for stop in until):
                    going.remove(row)
            if not going:
                break
        return [self.tools.postprocess_generated_text(text, until, None) for text in texts]


if TemplateLM is not object:
    need("lm_eval.models", "lm-eval")  # lm-eval adds its own only while there are none
    registry = need("lm_eval.api.registry", "lm-eval").model_registry
    if "perceiver-ar" not in registry:  # lm-eval itself may have looked for it by that name
        registry.register("perceiver-ar", target=PerceiverARLM)
