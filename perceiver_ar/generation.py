"""Generation: reads a prompt, then draws tokens one by one, each from the logits at the last position.

Notable:
- a row's tokens depend on the seed, its prompt and the number of equal prompts above it in the batch, not
  on the other rows (except that the longest prompt determines how many latents all rows have, and how
  many columns they drop);
- without a cache, the same latents are recomputed at every step, and give the same tokens.

Letters: B batch, P prompt, M inputs that are kept, N latents at most, V vocabulary, A position axes.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from perceiver_ar.baselines import Transformer, TransformerXL, continued, recomputed
from perceiver_ar.caching import check_forgetting, grow, half, prefill, step
from perceiver_ar.captured import fastest
from perceiver_ar.decoder import Decoder, Engine
from perceiver_ar.model import PerceiverAR
from perceiver_ar.sampling import Sampling, sample
from perceiver_ar.special import PAD
from perceiver_ar.windows import generator


def generate(
    model: Decoder,
    prompt: Tensor,
    max_new_tokens: int = 100,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    latents: int | None = None,
    seed: int = 0,
    cache: bool = True,
    positions: Tensor | None = None,
    allowed: Callable[[int], Any] | None = None,
    lengths: Tensor | None = None,
    stop: int | Iterable[int] | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    grow_latents: bool = True,
    log_probs: bool = False,
) -> Any:
    """The prompt (B, P) and its continuation, (B, P + max_new_tokens).

    The arguments are those of `stream`. With log_probs, returns a pair: the tokens, and the
    log-probabilities of the new ones, (B, max_new_tokens).
    """
    drawn = list(
        stream(
            model,
            prompt,
            max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            latents=latents,
            seed=seed,
            cache=cache,
            positions=positions,
            allowed=allowed,
            lengths=lengths,
            stop=stop,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            grow_latents=grow_latents,
            log_probs=log_probs,
        )
    )
    tokens, scores = zip(*drawn, strict=True) if log_probs else (drawn, None)
    new = torch.stack(list(tokens), dim=1)
    missing = max_new_tokens - new.shape[1]  # when all rows stopped early
    ids = torch.cat((prompt.to(new), torch.nn.functional.pad(new, (0, missing), value=PAD)), dim=1)
    if scores is None:
        return ids
    return ids, torch.nn.functional.pad(torch.stack(list(scores), dim=1), (0, missing))


def stream(
    model: Decoder,
    prompt: Tensor,
    max_new_tokens: int = 100,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    latents: int | None = None,
    seed: int = 0,
    cache: bool = True,
    positions: Tensor | None = None,
    allowed: Callable[[int], Any] | None = None,
    lengths: Tensor | None = None,
    stop: int | Iterable[int] | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    grow_latents: bool = True,
    log_probs: bool = False,
    above: int = 0,
) -> Iterator[Any]:
    """The tokens that follow a prompt, as they are drawn: one (B,) tensor per step.

    Args:
        model: Computes in the precision of its weights, on their device.
        prompt: Tokens (B, P), padded on the left where lengths (B,) are below P.
        max_new_tokens: How many to draw.
        temperature: Above 1 flattens the distribution, below sharpens it; 0 takes the most likely token.
        top_k: Draw only from the k most likely tokens.
        top_p: Draw only from the most likely tokens that together reach this probability.
        latents: N, the maximum number of latents; by default as many as in training.
        seed: Of the random numbers.
        cache: Whether to cache keys and values, or recompute everything at every step.
        positions: (B or 1, P + max_new_tokens) or with A axes; by default 0, 1, ... from the first token.
        allowed: Given t, the number of tokens drawn so far, returns a mask of the tokens that may come
            next: (V,) or (B, V).
        lengths: Of the prompts, (B,).
        stop: Tokens that end a row, which then continues with PAD; the stream ends when all rows have.
        min_p: Draw only from tokens at least this fraction as likely as the most likely one.
        repetition_penalty: Above 1, makes tokens that occurred before less likely.
        grow_latents: False, without a cache: N latents at every step, the paper's "no caching".
        log_probs: Yield pairs: the tokens, and their log-probabilities (B,) under the unmodified logits.
        above: The number of equal prompts above each of these, if these are part of a larger batch.
    """
    sampling = Sampling(repetition_penalty, temperature, top_k, top_p, min_p)
    most = model.config.check_latents(latents)
    prompt, lengths = _check(model, prompt, lengths, max_new_tokens, cache, grow_latents)
    chances = _chances(prompt, lengths, seed, above)
    seen = None if repetition_penalty == 1 else _seen(model, prompt, lengths)
    ends = torch.tensor(_ids(stop), dtype=torch.long, device=prompt.device)
    places = _places(model, prompt, lengths, positions, max_new_tokens)
    if isinstance(model, Transformer | TransformerXL):
        engine = (continued if cache else recomputed)(model, prompt, places, lengths)
        return _draw(model, engine, max_new_tokens, sampling, chances, allowed, ends, seen, log_probs)
    assert isinstance(model, PerceiverAR)
    if prompt.shape[1] > model.config.context:
        keep = model.config.context - (most // 2 if grow_latents else 0)
        prompt, places = prompt[:, -keep:], places[:, prompt.shape[1] - keep :]
        lengths = None if lengths is None else lengths.clamp(max=keep)
    engine = (
        _cached(model, prompt, places, lengths, most)
        if cache
        else _recomputed(model, prompt, places, lengths, most, grow_latents)
    )
    return _draw(model, engine, max_new_tokens, sampling, chances, allowed, ends, seen, log_probs)


def _draw(
    model: Decoder,
    engine: Engine,
    new: int,
    sampling: Sampling,
    chances: Iterator[Tensor],
    allowed: Callable[[int], Any] | None,
    ends: Tensor,
    seen: Tensor | None,
    log_probs: bool,
) -> Iterator[Any]:
    """The loop of generation: gets logits from the engine, samples a token, and sends it back."""
    token = finished = None
    modules = list(model.modules())  # listing those of 60 layers takes a quarter of a millisecond
    for t, chance in zip(range(new), chances, strict=False):
        with _evaluating(model.norm.weight.device.type, modules):
            logits = next(engine) if token is None else engine.send(token)
            if finished is None:
                _check_logits(logits)
                finished = torch.zeros_like(chance, dtype=torch.bool)
            may = None if allowed is None else _mask(allowed(t), logits, t)
            token = sample(logits, chance, sampling, may, seen).masked_fill(finished, PAD)
            if seen is not None:
                seen.scatter_(1, token[:, None], True)
            drawn = logits.float().log_softmax(-1).gather(1, token[:, None]).squeeze(1) if log_probs else None
        yield token if drawn is None else (token, drawn.masked_fill(finished, 0.0))
        if len(ends):
            finished |= torch.isin(token, ends)
            if finished.all():
                return


@contextmanager
def _evaluating(device: str, modules: Iterable[nn.Module]) -> Generator[None]:
    """Evaluation mode without gradients or autocast, left before each yield to the caller of a stream."""
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad(), torch.autocast(device, enabled=False):
            yield
    finally:
        for module in training:
            module.training = True


def _cached(
    model: PerceiverAR,
    prompt: Tensor,
    places: Tensor,
    lengths: Tensor | None,
    most: int,
) -> Engine:
    """Generates with a cache: each token is computed once, and N latents trigger a refresh."""
    given, total = prompt.shape[1], places.shape[1]
    room = min(model.config.context, total), most
    logits, cache = prefill(model, prompt, places[:, :given], room, lengths)
    decode, stack = fastest(model, cache, total - given)
    for place in range(given, total):
        token = yield logits
        logits, cache = step(model, cache, token, places[:, place : place + 1], decode, stack)


def _recomputed(
    model: PerceiverAR,
    tokens: Tensor,
    places: Tensor,
    lengths: Tensor | None,
    most: int,
    grow_latents: bool,
) -> Engine:
    """Recomputes everything at every step, with the inputs and latents of the cache, or N latents."""
    context = model.config.context
    prompted = inputs = tokens.shape[1]
    latents = half(inputs, most)
    while True:
        total = tokens.shape[1]
        if not grow_latents:
            inputs, latents = min(total, context), most
        real = None if lengths is None else (lengths + total - prompted).clamp(max=inputs)
        window = places[:, total - inputs : total]
        logits = model(tokens[:, -inputs:], positions=window, latents=latents, lengths=real)
        token = yield logits[:, -1]
        tokens = torch.cat((tokens, token[:, None]), dim=1)
        inputs, latents = grow(inputs, latents, context, most)


def _check(
    model: Decoder, prompt: Tensor, lengths: Tensor | None, new: int, cache: bool, grow_latents: bool
) -> tuple[Tensor, Tensor | None]:
    """Validates the arguments; returns prompt and lengths on the model's device."""
    if prompt.dim() != 2 or prompt.is_floating_point() or not prompt.numel():
        raise ValueError(
            f"a prompt must be whole numbers of shape (B, P), at least one a row, not {tuple(prompt.shape)}."
        )
    if new < 1:
        raise ValueError(f"at least 1 token must be asked for, not {new}.")
    if cache and not grow_latents:
        raise ValueError("grow_latents=False recomputes all latents at every step: set cache=False.")
    low, high, known = int(prompt.min()), int(prompt.max()), model.config.vocab_size
    if low < 0 or high >= known:
        raise ValueError(f"tokens of the prompt must be from 0 to {known - 1}, but go from {low} to {high}.")
    if prompt.shape[1] + new - 1 > model.config.context:
        check_forgetting(model)
    device = model.norm.weight.device
    if lengths is not None:
        fits = lengths.shape == prompt.shape[:1] and not lengths.is_floating_point()
        if not fits or int(lengths.min()) < 1 or int(lengths.max()) > prompt.shape[1]:
            raise ValueError(
                f"lengths must be whole numbers from 1 to {prompt.shape[1]}, one for each of the "
                f"{len(prompt)} prompts."
            )
        lengths = lengths.to(device, torch.long)
    return prompt.to(device, torch.long), lengths


def _places(
    model: Decoder, prompt: Tensor, lengths: Tensor | None, positions: Tensor | None, new: int
) -> Tensor:
    """Positions of the prompt and the new tokens, (B or 1, P + new, A)."""
    tokens = prompt.new_empty(len(prompt), prompt.shape[1] + new)
    if positions is None:
        return model.place(tokens, None, None if lengths is None else lengths + new)
    places, config = model.place(tokens, positions.to(prompt.device), None), model.config
    rows = config.axes or ((config.context,) if config.positions == "learned" else ())
    used = places[:, :-1].flatten(0, 1)  # the last token is never an input
    if places.is_floating_point() or any(
        not 0 <= low <= high < count
        for low, high, count in zip(used.amin(0).tolist(), used.amax(0).tolist(), rows, strict=False)
    ):
        raise ValueError(
            "positions must be whole numbers" + (f" below {rows}, one for each axis." if rows else ".")
        )
    return places


def _ids(stop: int | Iterable[int] | None) -> list[int]:
    return [] if stop is None else [stop] if isinstance(stop, int) else [int(token) for token in stop]


def _chances(prompt: Tensor, lengths: Tensor | None, seed: int, above: int) -> Iterator[Tensor]:
    """Uniform random numbers (B,) in [0, 1) for each step.

    Each row has a stream of its own, seeded by its prompt and how often that occurred above.
    """
    repetitions: Counter[bytes] = Counter()
    rows = []
    for index, row in enumerate(prompt.cpu().numpy()):
        key = blake2b(row[_padding(row, lengths, index) :].tobytes(), digest_size=8).digest()
        rows.append(generator(seed, (int.from_bytes(key) + above + repetitions[key]) % 2**64))
        repetitions[key] += 1
    return _in_blocks(rows, prompt.device)


def _in_blocks(rows: list[np.random.Generator], device: torch.device) -> Iterator[Tensor]:
    """Draws 512 steps at a time, to transfer numbers to the device less often."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    while True:
        yield from torch.from_numpy(np.stack([row.random(512) for row in rows], axis=1)).to(device, dtype)


def _padding(row: Any, lengths: Tensor | None, index: int) -> int:
    return 0 if lengths is None else len(row) - int(lengths[index])


def _check_logits(logits: Tensor) -> None:
    if logits.isnan().any():
        raise ValueError("the model's logits are not numbers: its weights must be damaged, or diverged.")


def _seen(model: Decoder, prompt: Tensor, lengths: Tensor | None) -> Tensor:
    """Mask of the tokens that occur in the prompts, (B, V)."""
    seen = torch.zeros(len(prompt), model.config.vocab_size, dtype=torch.bool, device=prompt.device)
    for index, row in enumerate(prompt):
        seen[index, row[_padding(row, lengths, index) :]] = True
    return seen


def _mask(allowed: Any, logits: Tensor, t: int) -> Tensor:
    """Validates a mask returned by `allowed`, (V,) or (B, V)."""
    mask = torch.as_tensor(allowed)
    if mask.dtype != torch.bool or mask.shape not in (logits.shape, logits.shape[1:]):
        raise ValueError(
            f"allowed({t}) must give a mask of shape ({logits.shape[1]},) or {tuple(logits.shape)}."
        )
    if not mask.any(-1).all():
        raise ValueError(f"allowed({t}) allows no token at all.")
    return mask.to(logits.device)
