"""Generation: cached equals uncached, draws follow the probabilities, rows do not mind each other."""

import copy
import gc
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from perceiver_ar import ModelConfig, PerceiverAR, generate, stream
from perceiver_ar.caching import Cache, prefill, read, refresh, step
from perceiver_ar.interop.official import from_params
from perceiver_ar.sampling import Sampling, sample
from perceiver_ar.special import PAD
from tests.test_model import POSITIONS, QUERIES, V, make
from tests.test_official import load, params_of

CONTEXT, LATENTS = 48, 6


def small(**settings: Any) -> PerceiverAR:
    torch.manual_seed(0)
    if settings.get("positions") == "axial":
        settings["axes"] = (CONTEXT, 3)
    return make(context=CONTEXT, latents=LATENTS, **settings)


def places_for(model: PerceiverAR, batch: int, count: int) -> Tensor | None:
    """Positions where they must be given."""
    if model.config.positions != "axial":
        return None
    steps = torch.arange(count).expand(batch, -1)
    return torch.stack((steps, steps % 3), dim=-1)


def schedule(prompt: int, most: int, steps: int) -> list[int]:
    """How many latents stand behind each step: half, one more each time, and half again after all."""
    latents = [min(prompt, max(1, most // 2))]
    while len(latents) < steps:
        latents.append(latents[-1] + 1 if latents[-1] < most else max(1, most // 2))
    return latents


def test_latents_go_from_half_to_all_and_back() -> None:
    half = LATENTS // 2
    assert schedule(9, LATENTS, 40) == [half + t % (half + 1) for t in range(40)]


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("positions", POSITIONS)
def test_every_step_equals_the_last_row_of_a_plain_forward(
    positions: Any, queries: Any, padded: bool
) -> None:
    model = small(positions=positions, queries=queries)
    for given, most in (
        (9, LATENTS),
        (1, LATENTS),
        (9, 1),
        (4, 5),
        *(() if queries == "learned" else ((9, 11),)),
    ):
        lengths = torch.tensor([given, 1, (given + 1) // 2]) if padded else None
        check_steps(model, given, most, lengths, new=2 * most + 3)


def check_steps(model: PerceiverAR, given: int, most: int, lengths: Tensor | None, new: int) -> None:
    tokens = torch.randint(V, (3, given + new))
    told = places_for(model, 3, given + new)
    places = model.place(tokens, told, None if lengths is None else lengths + new)
    with torch.no_grad():
        logits, cache = prefill(model, tokens[:, :given], places[:, :given], (CONTEXT, most), lengths)
        for t, latents in enumerate(schedule(given, most, new)):
            end = given + t
            plain = model(
                tokens[:, :end],
                positions=None if told is None else told[:, :end],
                latents=latents,
                lengths=None if lengths is None else lengths + t,
            )[:, -1]
            torch.testing.assert_close(logits, plain, atol=1e-4, rtol=1e-4)
            assert (cache.inputs, cache.latents) == (end, latents)
            logits, cache = step(model, cache, tokens[:, end], places[:, end : end + 1])


@pytest.mark.parametrize(
    "settings", [{}, {"cutoffs": (4, 12), "cutoff_factor": 2}, {"tied": True}, {"layers": 0}]
)
@pytest.mark.parametrize("new", [30, 100], ids=["within the context", "past the context"])
def test_without_a_cache_the_same_tokens_are_drawn(settings: dict[str, Any], new: int) -> None:
    model = small(**settings)
    prompt, lengths = torch.randint(V, (3, 9)), torch.tensor([9, 2, 5])
    for more in (
        {"temperature": 0},
        {"lengths": lengths, "temperature": 0},
        {"lengths": lengths, "latents": 11, "top_p": 0.9},
        {"latents": 7, "repetition_penalty": 1.3, "min_p": 0.01},
    ):
        drawn, scores = generate(model, prompt, new, log_probs=True, **more)
        again, same = generate(model, prompt, new, log_probs=True, cache=False, **more)
        assert drawn.equal(again)
        torch.testing.assert_close(scores, same, atol=1e-4, rtol=1e-4)


def test_the_authors_sampler_starts_with_one_latent() -> None:
    fixture = load("i_generation")
    model = from_params(params_of(fixture), json.loads(str(fixture["config"])))
    prompt, places = (torch.from_numpy(fixture[key]).long() for key in ("prompt", "event_idxs"))
    cache = Cache.empty(model, len(prompt), inputs=64, latents=16, position_rows=len(prompt))
    with torch.no_grad():
        logits, cache = refresh(model, read(model, cache, prompt, places[:, : prompt.shape[1]]), latents=1)
        for t in range(40):
            assert cache.latents == fixture["latents_visible"][t]
            np.testing.assert_allclose(logits, fixture["logits"][:, t], atol=1e-5)
            token = logits.argmax(-1)
            assert token.tolist() == fixture["tokens"][:, t].tolist()
            if t < 39:
                place = prompt.shape[1] + t
                logits, cache = step(model, cache, token, places[:, place : place + 1])


def test_a_refresh_may_come_at_any_time_with_any_number_of_latents() -> None:
    model, tokens = small(), torch.randint(V, (2, 20))
    places = torch.arange(20)[None, :, None]
    with torch.no_grad():
        _, cache = prefill(model, tokens[:, :10], places[:, :10], (20, 16))
        for end, latents in ((10, 3), (12, 12), (20, 16)):
            cache = read(model, cache, tokens[:, cache.inputs : end], places[:, cache.inputs : end])
            logits, cache = refresh(model, cache, latents)
            torch.testing.assert_close(logits, model(tokens[:, :end], latents=latents)[:, -1])


def test_a_long_prompt_is_read_in_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = small(), torch.randint(V, (2, 40))
    whole = generate(model, prompt, 5, log_probs=True)
    monkeypatch.setattr("perceiver_ar.caching._STRETCH", 6)
    for a, b in zip(whole, generate(model, prompt, 5, log_probs=True), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_a_long_prompt_takes_little_more_memory_than_its_cache() -> None:
    code = """
import re, torch
from pathlib import Path
from perceiver_ar import ModelConfig, PerceiverAR, stream
def peak():  # of this process alone, unlike getrusage's
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
model = PerceiverAR(ModelConfig(259, 262_144, 64, channels=256, heads=4, layers=1)).eval()
next(stream(model, torch.zeros(1, 1000, dtype=torch.long), 1))
before = peak()
next(stream(model, torch.randint(259, (1, 262_144)), 1))
print(peak() - before)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    cache = 2 * 262_144 * 256 * 4
    # 150e6 to 195e6 were seen; at once, the inputs alone would take 270e6 more than that.
    assert cache < int(result.stdout) < cache + 260e6


@pytest.mark.parametrize("given", [CONTEXT - 1, CONTEXT, CONTEXT + 1, 3 * CONTEXT])
def test_inputs_are_forgotten_only_when_they_are_full(given: int) -> None:
    model = small()
    tokens = torch.randint(V, (2, given))
    drawn = generate(model, tokens, 9, temperature=0)
    kept, latents = given, LATENTS // 2
    if given > CONTEXT:
        kept = CONTEXT - LATENTS // 2
    for t in range(9):
        window = drawn[:, given + t - kept : given + t]
        assert model(window, latents=latents)[:, -1].argmax(-1).equal(drawn[:, given + t])
        if kept == CONTEXT:
            kept, latents = CONTEXT - LATENTS // 2, LATENTS // 2
        elif latents == LATENTS:
            kept, latents = kept + 1, LATENTS // 2
        else:
            kept, latents = kept + 1, latents + 1


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_counted_positions_but_rotary_ones_are_not_taken_past_the_context(positions: Any) -> None:
    model = small(positions=positions)
    prompt = torch.randint(V, (1, 8))
    generate(model, prompt, CONTEXT - 7)  # the last token is not an input
    with pytest.raises(ValueError, match=f"{positions} positions cannot go beyond its context of {CONTEXT}"):
        stream(model, prompt, CONTEXT - 6)


def test_axial_positions_go_past_the_context_as_far_as_their_tables_reach() -> None:
    model = make(context=CONTEXT, latents=LATENTS, positions="axial", axes=(3 * CONTEXT, 3))
    prompt, places = torch.randint(V, (2, 8)), torch.arange(3 * CONTEXT + 1)[None]
    places = torch.stack((places, places % 3), dim=-1)
    settings: dict[str, Any] = {"positions": places, "temperature": 0, "log_probs": True}
    drawn, said = generate(model, prompt, 3 * CONTEXT - 7, **settings)
    again, same = generate(model, prompt, 3 * CONTEXT - 7, cache=False, **settings)
    assert drawn.equal(again)
    torch.testing.assert_close(said, same)
    with pytest.raises(ValueError, match=f"positions must be whole numbers below \\({3 * CONTEXT}, 3\\)"):
        stream(model, prompt, 3 * CONTEXT - 6, positions=torch.cat((places, places[:, -1:]), dim=1))


@pytest.mark.slow
def test_ten_thousand_tokens_past_the_context_take_no_more_memory() -> None:
    model = small(layers=1)
    sizes, drawn = {}, []
    for t, token in enumerate(stream(model, torch.randint(V, (1, 5)), 10_000 + CONTEXT)):
        drawn.append(int(token))
        if t in (1_000, 10_000):
            sizes[t] = sum(x.numel() for x in gc.get_objects() if type(x) is Tensor)
    assert len(drawn) == 10_000 + CONTEXT
    assert len(set(drawn[-500:])) > V // 2  # still alive
    assert sizes[10_000] <= sizes[1_000]


def test_a_seed_gives_the_same_tokens_whatever_the_batch() -> None:
    model = small()
    prompts = torch.cat((torch.randint(V, (4, 9)), torch.randint(V, (1, 9)).expand(3, -1)))
    together = generate(model, prompts, 40, seed=5)
    for row in range(5):
        assert generate(model, prompts[row : row + 1], 40, seed=5).equal(together[row : row + 1])
    assert generate(model, prompts[2:6], 40, seed=5).equal(together[2:6])
    assert len({tuple(row.tolist()) for row in together[4:]}) == 3  # equal prompts go different ways
    even = PerceiverAR(
        model.config
    )  # untrained: all tokens are as likely, so what is drawn shows the numbers
    assert len({tuple(row.tolist()) for row in generate(even, prompts, 10)[:, 9:]}) == len(prompts)
    assert not generate(model, prompts, 40, seed=6).equal(together)
    assert generate(model, prompts, 25, seed=5).equal(together[:, :34])  # and whatever the number asked for


def test_samples_of_one_prompt_differ_whatever_the_prompt() -> None:
    model = small()
    for prompt in torch.randint(V, (20, 1, 7)):
        together = generate(model, prompt.expand(3, -1), 20)
        assert len({tuple(row.tolist()) for row in together}) == 3


def test_padding_does_not_change_what_is_drawn() -> None:
    model, prompt = small(), torch.randint(V, (1, 4))
    padded = torch.cat((torch.full((1, 5), 7), prompt), dim=1)
    mixed = torch.cat((padded, torch.randint(V, (1, 9))))
    alone = generate(model, prompt, 30, latents=4)
    assert generate(model, mixed, 30, latents=4, lengths=torch.tensor([4, 9]))[0, 5:].equal(alone[0])


def test_a_stream_gives_what_generate_gives_and_leaves_the_model_alone() -> None:
    model = small(residual_dropout=0.5).train()
    prompt = torch.randint(V, (2, 9))
    steps = []
    for token in stream(model, prompt, 30, top_k=5):
        assert model.training
        assert torch.is_grad_enabled()
        assert token.shape == (2,)
        steps.append(token)
    assert generate(model, prompt, 30, top_k=5).equal(torch.cat((prompt, torch.stack(steps, 1)), dim=1))
    assert model.training


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """How likely such counts, or less fitting ones, are."""
    likely = probabilities > 0
    assert not counts[~likely].any()
    expected = probabilities[likely] * counts.sum()
    statistic = ((counts[likely] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((int(likely.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def filtered(logits: Tensor, how: Sampling, allowed: Tensor | None, seen: Tensor | None) -> Tensor:
    """The probabilities of one row, token by token: the slow twin of `adjust`."""
    values = logits.tolist()
    for token, value in enumerate(values):
        if seen is not None and seen[token]:
            values[token] = value / how.repetition_penalty if value > 0 else value * how.repetition_penalty
    open_ = [token for token in range(len(values)) if allowed is None or allowed[token]]
    weights = {token: np.exp(values[token] / how.temperature) for token in open_}
    ranked = sorted(open_, key=lambda token: -weights[token])[: how.top_k]
    if how.top_p is not None:
        total, reached, kept = sum(weights[token] for token in ranked), 0.0, []
        for token in ranked:
            if reached < how.top_p:
                kept.append(token)
            reached += weights[token] / total
        ranked = kept
    if how.min_p is not None:
        ranked = [token for token in ranked if weights[token] >= how.min_p * weights[ranked[0]]]
    total = sum(weights[token] for token in ranked)
    return torch.tensor([weights[t] / total if t in ranked else 0.0 for t in range(len(values))]).double()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 1.5, "temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "allowed"])
def test_tokens_are_drawn_as_often_as_they_are_likely(settings: dict[str, Any], masked: bool) -> None:
    torch.manual_seed(1)
    how, rows = Sampling(**settings), 20_000
    logits, seen = torch.randn(V, dtype=torch.float64) * 1.5, torch.rand(V) < 0.5
    allowed = torch.rand(V) < 0.6 if masked else None
    chance = torch.rand(rows, dtype=torch.float64)
    drawn = sample(logits.expand(rows, -1), chance, how, allowed, seen.expand(rows, -1))
    probabilities = filtered(logits, how, allowed, seen)
    assert chi_square(drawn.bincount(minlength=V).double(), probabilities) > 1e-3
    greedy = Sampling(how.repetition_penalty, temperature=0)
    first = sample(logits[None], chance[:1], greedy, allowed, seen[None])
    assert probabilities[first] == probabilities.max()


def test_a_model_draws_what_its_probabilities_say() -> None:
    model, prompt = small().requires_grad_(False), torch.randint(V, (1, 9))
    rows = torch.cat([generate(model, prompt.expand(500, -1), 1, seed=seed)[:, -1] for seed in range(8)])
    probabilities = model(prompt, latents=LATENTS // 2)[0, -1].double().softmax(-1)
    few = probabilities * len(rows) < 5  # too rare for the test: taken together
    counts = rows.bincount(minlength=V).double()
    pooled = [torch.cat((x[~few], x[few].sum()[None])) for x in (counts, probabilities)]
    assert chi_square(*pooled) > 1e-3


@pytest.mark.parametrize("chance", [0.0, 0.5, 1 - 2**-53, 1.0])
def test_no_chance_draws_what_cannot_come(chance: float) -> None:
    """Nor 1, which the largest chance is rounded to in float32."""
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]])
    assert int(sample(logits, torch.tensor([chance], dtype=torch.float64), Sampling())) in (1, 3)


def test_rows_stop_at_a_stop_token_and_go_on_with_padding() -> None:
    model, prompt = small(), torch.randint(V, (6, 9))
    free = generate(model, prompt, 60)
    ends = {3, 11, 12}
    stopped, scores = generate(model, prompt, 60, stop=ends, log_probs=True)
    assert stopped.shape == free.shape == (6, 69)
    for row, whole, score in zip(stopped[:, 9:].tolist(), free[:, 9:].tolist(), scores, strict=True):
        length = next((t + 1 for t, token in enumerate(whole) if token in ends), 60)
        assert row == whole[:length] + [PAD] * (60 - length)
        assert not score[length:].any()
        assert score[:length].all()
    assert any(PAD in row for row in stopped[:, 9:].tolist())
    everything = generate(model, prompt, 60, stop=range(V))
    assert everything[:, 10:].eq(PAD).all()
    assert everything.shape == (6, 69)


def test_log_probabilities_are_the_models_own() -> None:
    model, prompt = small(), torch.randint(V, (2, 9))
    ids, scores = generate(model, prompt, 3, temperature=0.3, top_k=4, log_probs=True)
    for t in range(3):
        nats = model.nats(ids[:, : 9 + t], ids[:, 10 + t - LATENTS // 2 - t : 10 + t])[:, -1]
        torch.testing.assert_close(scores[:, t], -nats)


def test_only_allowed_tokens_are_drawn() -> None:
    model, prompt = small(), torch.randint(V, (2, 9))
    tokens = torch.arange(V)
    for temperature in (0.0, 1.0):
        drawn = generate(model, prompt, 30, temperature, allowed=lambda t: (tokens % 3 == t % 3).numpy())
        assert (drawn[:, 9:] % 3).eq(torch.arange(30) % 3).all()
    by_row = torch.stack((tokens < 5, tokens >= 25))
    drawn = generate(model, prompt, 30, allowed=lambda t: by_row)[:, 9:]
    assert drawn[0].max() < 5
    assert drawn[1].min() >= 25


def test_mistakes_are_told_before_anything_is_drawn() -> None:
    model, prompt = small(), torch.randint(V, (2, 9))
    for wrong, sentence in (
        ({"prompt": prompt[0]}, "a prompt must be whole numbers of shape"),
        ({"prompt": prompt[:, :0]}, "at least one a row"),
        ({"prompt": prompt + V}, f"tokens of the prompt must be from 0 to {V - 1}"),
        ({"max_new_tokens": 0}, "at least 1 token must be asked for"),
        ({"temperature": -1}, "temperature must be 0 or more"),
        ({"temperature": float("nan")}, "temperature must be 0 or more"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1"),
        ({"min_p": 1.5}, "min_p must be above 0 and at most 1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"latents": CONTEXT + 1}, f"latents must be from 1 to {CONTEXT}"),
        ({"seed": -1}, "seed must be from 0"),
        ({"seed": 2**64}, "seed must be from 0"),
        ({"positions": torch.arange(109.0)[None]}, "positions must be whole numbers"),
        ({"lengths": torch.tensor([0, 9])}, "lengths must be whole numbers from 1 to 9"),
        ({"positions": torch.arange(9)[None]}, "positions of shape"),
        ({"grow_latents": False}, "set cache=False"),
    ):
        with pytest.raises(ValueError, match=sentence):
            stream(model, **{"prompt": prompt, **wrong})  # not even begun
    for allowed, sentence in (
        (torch.ones(3, dtype=torch.bool), "must give a mask of shape"),
        (torch.zeros(V, dtype=torch.bool), "allows no token at all"),
    ):
        with pytest.raises(ValueError, match=sentence):
            generate(model, prompt, allowed=lambda t, mask=allowed: mask)


def test_no_caching_as_in_the_paper_uses_all_latents_at_every_step() -> None:
    model, prompt = small(), torch.randint(V, (2, 9))
    drawn = generate(model, prompt, 60, temperature=0, cache=False, grow_latents=False)
    for end in range(9, 69):
        window = drawn[:, max(0, end - CONTEXT) : end]
        assert model(window)[:, -1].argmax(-1).equal(drawn[:, end])

    long = torch.randint(V, (2, CONTEXT + 9))
    _, scores = generate(model, long, 1, cache=False, grow_latents=False, temperature=0, log_probs=True)
    exact = model(long[:, -CONTEXT:])[:, -1].log_softmax(-1).amax(-1)
    torch.testing.assert_close(scores[:, 0], exact)


@pytest.mark.parametrize("cache", [True, False])
def test_what_was_drawn_or_given_is_penalised_but_padding_is_not(cache: bool) -> None:
    model = small().requires_grad_(False)
    model.output.bias -= 100  # the penalty multiplies negative logits
    prompt = torch.tensor([[7, 7, 7, 3, 4], [5, 6, 7, 8, 9]])
    drawn = generate(
        model, prompt, V - 5, 0, lengths=torch.tensor([2, 5]), repetition_penalty=1e9, cache=cache
    )
    assert sorted(drawn[1].tolist()) == list(range(V))
    assert len(set(drawn[0, 3:].tolist())) == V - 3
    assert 7 in drawn[0, 5:]


@pytest.mark.parametrize("cache", [True, False])
def test_given_positions_stay_with_their_tokens_when_a_prompt_is_cut(cache: bool) -> None:
    model, given = small(), CONTEXT + 7
    prompt, places = torch.randint(V, (2, given)), torch.randint(5, (2, given + 3)).cumsum(1)
    kept = CONTEXT - LATENTS // 2
    _, scores = generate(model, prompt, 3, 0, positions=places, cache=cache, log_probs=True)
    exact = model(prompt[:, -kept:], positions=places[:, given - kept : given], latents=LATENTS // 2)
    torch.testing.assert_close(scores[:, 0], exact[:, -1].log_softmax(-1).amax(-1))


@pytest.mark.parametrize("positions", ["learned", "axial"])
def test_positions_outside_their_tables_are_refused(positions: Any) -> None:
    model, prompt = small(positions=positions), torch.randint(V, (1, 9))
    axes = 2 if positions == "axial" else 1
    places = torch.zeros(1, 20, axes, dtype=torch.long)
    generate(model, prompt, 11, positions=places)
    for wrong in (-1, CONTEXT):
        with pytest.raises(ValueError, match=f"whole numbers below .{CONTEXT}"):
            stream(model, prompt, 11, positions=places.index_fill(1, torch.tensor(15), wrong))


def test_modes_autocast_and_gradients_are_as_before() -> None:
    model, prompt = small(residual_dropout=0.5).train(), torch.randint(V, (1, 9))
    model.cross_attend.eval()
    plain = generate(model, prompt, 20)
    assert model.training
    assert not model.cross_attend.training
    model.eval()
    model.cross_attend.train()
    with torch.autocast("cpu", torch.bfloat16):
        assert generate(model, prompt, 20).equal(plain)
    assert model.cross_attend.training
    assert not model.training
    logits, _ = prefill(model, prompt, torch.arange(9)[None, :, None], (20, 6))  # without no_grad
    assert not logits.requires_grad


def test_pieces_refuse_what_does_not_fit() -> None:
    model, prompt, places = small(), torch.randint(V, (1, 9)), torch.arange(9)[None, :, None]
    with pytest.raises(ValueError, match="9 inputs do not fit into a cache with room for 8"):
        prefill(model, prompt, places, (8, 6))
    _, cache = prefill(model, prompt[:, :3], places[:, :3], (20, 6))
    for latents in (0, 4, 7):
        with pytest.raises(ValueError, match="latents must be from 1 to the 3 inputs"):
            refresh(model, cache, latents)


def test_logits_that_are_no_numbers_are_told() -> None:
    model = small().requires_grad_(False)
    model.output.bias[3] = torch.nan
    with pytest.raises(ValueError, match="the model's logits are not numbers"):
        generate(model, torch.randint(V, (1, 9)), 2)


def test_of_equal_tokens_top_k_keeps_k() -> None:
    chances = torch.linspace(0, 0.99, 50)
    drawn = sample(torch.tensor([1.0, 1.0, 1.0, 0.0]).expand(50, -1), chances, Sampling(top_k=2))
    assert len(set(drawn.tolist())) == 2


def test_half_precision_models_generate() -> None:
    model = PerceiverAR(ModelConfig(V, 64, 16, channels=32, heads=2, layers=2)).bfloat16()
    ids = generate(model, torch.randint(V, (2, 9)), 30, lengths=torch.tensor([9, 4]))
    assert ids.shape == (2, 39)


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("heads", [2, 4], ids=["fused", "plain"])
def test_a_captured_step_equals_a_plain_forward_on_the_gpu(heads: int, padded: bool) -> None:
    model = small(heads=heads).cuda()
    prompt = torch.randint(V, (3, 9))
    lengths = torch.tensor([9, 1, 5]) if padded else None
    settings: dict[str, Any] = {
        "max_new_tokens": 100,
        "lengths": lengths,
        "log_probs": True,
        "temperature": 0,
    }
    fast, fast_scores = generate(model, prompt, **settings)
    slow, slow_scores = generate(model, prompt, cache=False, **settings)
    assert fast.equal(slow)
    torch.testing.assert_close(fast_scores, slow_scores, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("heads", [2, 16], ids=["wide", "narrow"])
def test_what_is_drawn_in_bf16_is_as_likely_as_it_is_said_to_be(device: str, rows: int, heads: int) -> None:
    model = make(context=1024, latents=256, channels=128, heads=heads, layers=4).to(device)
    rough = copy.deepcopy(model).bfloat16()
    drawn, said = generate(rough, torch.randint(V, (rows, 15)), 240, log_probs=True)
    with torch.no_grad():
        nats = model.nats(drawn[:, :-1], targets=drawn[:, 1:])[:, 14:]
    assert nats.mean() > 1
    assert (said + nats).abs().mean() < 0.1
