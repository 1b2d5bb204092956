"""The network: causality under every option, padding, latents at call time, dropout, precision."""

import dataclasses
import itertools
import math
import resource
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import perceiver_ar.model as model_module
from perceiver_ar.architectures import compile_blocks, parameter_count
from perceiver_ar.attention import rotation
from perceiver_ar.chance import branch, draws
from perceiver_ar.config import ModelConfig, Positions, Queries
from perceiver_ar.decoder import Inputs, _some_padded
from perceiver_ar.embedding import InputEmbedding, LearnedPositions
from perceiver_ar.layers import look_up
from perceiver_ar.model import Block, PerceiverAR, Seen, _hide_last, _keep_some

B, M, N, V = 2, 12, 5, 30
POSITIONS: list[Positions] = ["rotary", "sinusoidal", "learned", "axial", "none"]
QUERIES: list[Queries] = ["linear", "inputs", "mlp", "learned", "learned-shared"]


def make(**settings: Any) -> PerceiverAR:
    """A small model whose every weight matters: nothing is left at zero."""
    defaults: dict[str, Any] = {
        "vocab_size": V,
        "context": M,
        "latents": N,
        "channels": 16,
        "heads": 2,
        "layers": 2,
    }
    if settings.get("positions") == "axial":
        defaults["axes"] = (M, 3)
    model = PerceiverAR(ModelConfig(**defaults | settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def draw(model: PerceiverAR, batch: int = B, length: int = M) -> tuple[Tensor, Tensor | None]:
    """Tokens, and positions where the model wants them."""
    tokens = torch.randint(V, (batch, length))
    if model.config.positions != "axial":
        return tokens, None
    steps = torch.arange(length).expand(batch, -1)
    return tokens, torch.stack((steps, steps % 3), dim=-1)


def variants(positions: Positions, queries: Queries) -> Iterator[tuple[dict[str, Any], bool]]:
    """Every possible combination of the other options, with and without left padding."""
    outputs = [{}, {"tied": True}, {"cutoffs": (4, 12), "cutoff_factor": 2}]
    widths = [{}, {"input_channels": 24, "cross_heads": 3}]
    dropouts = [
        {},
        {"residual_dropout": 0.3},
        {"latent_dropout": 0.5},
        {"cross_dropout": 0.5},
        {"cross_dropout": 0.5, "cross_dropout_scope": "latents"},
        {"cross_dropout": 0.5, "cross_dropout_scope": "prefix"},
        {"residual_dropout": 0.3, "latent_dropout": 0.5, "cross_dropout": 0.9},
        {"cross_dropout": 0.9, "cross_dropout_scope": "latents", "latent_dropout": 0.5},
    ]
    for output, width, dropout, checkpointed, padded in itertools.product(
        outputs, widths, dropouts, (False, True), (False, True)
    ):
        if width and (queries == "inputs" or "tied" in output):
            continue  # refused by the config
        settings = {"positions": positions, "queries": queries, "checkpoint_activations": checkpointed}
        yield settings | output | width | dropout, padded


def check_causality(model: PerceiverAR, padded: bool) -> None:
    """By perturbation and by gradient: no latent's logits depend on a later input."""
    tokens, positions = draw(model, batch=3)
    lengths = torch.tensor([M, M - 4, N - 2]) if padded else None
    kept: list[Tensor] = []

    def logits(inputs: Tensor) -> Tensor:
        times = len(inputs) // len(tokens)
        more = {"positions": positions, "lengths": lengths, "seeds": torch.arange(3)}  # the same is dropped
        return model(inputs, **{name: x if x is None else torch.cat([x] * times) for name, x in more.items()})

    changed = tokens.repeat(N, 1, 1)  # of the first, nothing
    for latent in range(1, N):
        changed[latent, :, M - N + latent] += 1
    before, *after = logits((changed % V).flatten(0, 1)).detach().unflatten(0, (N, 3))
    for latent, found in enumerate(after, start=1):
        difference = (found - before)[:, :latent].abs().max()
        assert difference < 1e-5, f"latent {latent} reaches back"

    hook = model.embedding.register_forward_hook(lambda module, args, out: kept.append(out))
    out = logits(tokens)
    hook.remove()
    for latent in range(N):
        loss = out[:, latent].square().sum()
        (grad,) = torch.autograd.grad(loss, kept[:1], retain_graph=True)
        later = grad.shape[1] - N + latent + 1
        assert grad[:, later:].count_nonzero() == 0
        assert grad[:, :later].count_nonzero() > 0 or model.config.cross_dropout > 0


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("positions", POSITIONS)
def test_no_latent_sees_the_future_under_any_options(positions: Positions, queries: Queries) -> None:
    for settings, padded in variants(positions, queries):
        model = make(layers=1, **settings)
        dropping = any(value for key, value in settings.items() if key.endswith("dropout"))
        check_causality(model.train(dropping or settings["checkpoint_activations"]), padded)


def test_the_causality_check_finds_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaky(q: Tensor, k: Tensor, v: Tensor, *mask: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    monkeypatch.setattr(model_module, "attend", leaky)
    with pytest.raises(AssertionError, match="reaches back"):
        check_causality(make(), padded=False)


def test_every_latent_sees_all_inputs_up_to_its_own() -> None:
    model = make(layers=0)
    tokens, _ = draw(model)
    before = model(tokens)
    for column in range(M):
        changed = tokens.clone()
        changed[:, column] = (changed[:, column] + 1) % V
        moved = (model(changed) != before).flatten(2).any(-1)  # (B, N)
        first = max(0, column - (M - N))
        assert moved[:, first:].all()
        assert not moved[:, :first].any()


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("positions", POSITIONS)
def test_padded_examples_give_the_same_logits_as_each_alone(positions: Positions, queries: Queries) -> None:
    model = make(positions=positions, queries=queries)
    tokens, given = draw(model, batch=4)
    lengths = torch.tensor([M, M - 3, N - 2, 1])
    if given is not None:
        given = torch.stack([row.roll(M - int(n), 0) for row, n in zip(given, lengths, strict=True)])
    together = model(tokens, positions=given, lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        own = None if given is None else given[row : row + 1, -length:]
        alone = model(tokens[row : row + 1, -length:], positions=own)
        count = min(N, length)
        assert alone.shape[1] == count
        torch.testing.assert_close(together[row, -count:], alone[0], atol=1e-5, rtol=1e-5)
    assert together.isfinite().all()


@pytest.mark.parametrize(("shortest", "padded"), [(N, False), (N - 1, True)], ids=["inputs", "latents"])
def test_self_attends_are_masked_only_where_latents_are_padded(shortest: int, padded: bool) -> None:
    model = make()
    tokens, _ = draw(model)
    lengths = torch.tensor([M, shortest])
    assert _some_padded(tokens, lengths, N) == padded
    given = Inputs(tokens, model.place(tokens, None, lengths), lengths)
    masked, unmasked = (model._latents(given._replace(padded=x), N)[1, -shortest:] for x in (True, False))
    assert torch.allclose(masked, unmasked, atol=1e-5) != padded


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("count", [1, 3, N, 9, M])
def test_latents_at_call_time_equal_a_model_built_with_as_many(queries: Queries, count: int) -> None:
    model = make(queries=queries)
    tokens, _ = draw(model)
    if queries == "learned" and count > N:
        with pytest.raises(ValueError, match="from 1 to 5"):
            model(tokens, latents=count)
        return
    built = PerceiverAR(dataclasses.replace(model.config, latents=count)).eval()
    weights = model.state_dict()
    if queries == "learned":
        weights["queries.learned.weight"] = weights["queries.learned.weight"][:count]
    built.load_state_dict(weights)
    logits = model(tokens, latents=count)
    assert logits.shape == (B, count, V)
    torch.testing.assert_close(logits, built(tokens), atol=1e-5, rtol=1e-5)


def test_nats_are_the_targets_own_and_those_of_every_output_agree_with_the_logits() -> None:
    for output in ({}, {"tied": True}, {"cutoffs": (4, 12), "cutoff_factor": 2}):
        model = make(**output)
        tokens, _ = draw(model)
        targets = torch.randint(V, (B, N))
        wanted = -model(tokens).log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
        torch.testing.assert_close(model.nats(tokens, targets), wanted, atol=1e-5, rtol=1e-5)
        fewer = model.nats(tokens, targets[:, -2:])
        torch.testing.assert_close(
            fewer, -model(tokens, latents=2).log_softmax(-1).gather(-1, targets[:, -2:, None]).squeeze(-1)
        )


def test_wrong_calls_say_what_is_wrong() -> None:
    model = make()
    tokens, _ = draw(model)
    for call, sentence in (
        (lambda: model(torch.zeros(1, M + 1, dtype=torch.long)), "takes from 1 to 12"),
        (lambda: model(tokens[:, :0]), "takes from 1 to 12"),
        (lambda: model(tokens, latents=0), "latents must be from 1 to 12"),
        (lambda: model(tokens, latents=M + 1), "latents must be from 1 to 12"),
        (lambda: model(tokens, positions=torch.zeros(B, M - 1, dtype=torch.long)), "do not fit tokens"),
        (lambda: model.nats(tokens[:, :3], tokens[:, :4]), r"targets, int64 of shape \(2, 4\), do not fit"),
        (lambda: model.nats(tokens, tokens[0]), "do not fit tokens"),
        (lambda: model(tokens, latents=2, targets=tokens[:, :3]), "do not fit tokens"),
        (lambda: make(positions="axial")(tokens), "axial positions must be given"),
        (lambda: model(tokens[0]), r"tokens must be whole numbers of shape \(B, M\), not int64 of shape"),
        (lambda: model(tokens.float()), "tokens must be whole numbers"),
        (lambda: model(tokens, lengths=torch.tensor([3])), r"whole numbers of shape \(2,\)"),
        (
            lambda: model(tokens, lengths=torch.tensor([3, 99])),
            "from 0 to the 12 inputs, but go from 3 to 99",
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()


@pytest.mark.parametrize("scope", ["all", "latents", "prefix"])
def test_cross_attend_dropout_equals_hiding_the_same_inputs(scope: Any) -> None:
    model = make(layers=0, cross_dropout=0.5, cross_dropout_scope=scope).train()
    tokens, _ = draw(model)
    seeds = torch.arange(B, dtype=torch.int32)
    given = Inputs(tokens, model.place(tokens, None, None))
    dropped = model._latents(given._replace(seeds=seeds), N)
    columns = torch.arange(M).expand(B, -1)
    visible = torch.ones(B, M, dtype=torch.bool)
    if scope != "latents":
        chances = draws(branch(seeds, -2), M - N)
        chosen, _, _ = _keep_some(Seen(columns, columns[..., None], None), chances, round((M - N) / 2))
        visible[:, :-N] = False
        visible.scatter_(1, chosen[:, :-N], True)
    if scope != "prefix":
        visible[:, -N:] = _hide_last(None, N, 0.5, branch(seeds, -3))
    assert 0 < visible.sum() < visible.numel()
    hidden = model._attend_inputs(given, Seen(tokens, given.positions, visible), N, None)
    torch.testing.assert_close(dropped, hidden, atol=1e-5, rtol=1e-5)


def test_inputs_that_cross_attend_dropout_drops_are_never_embedded() -> None:
    model = make(context=400, latents=20, cross_dropout=0.9, positions="sinusoidal").train()
    seen: list[int] = []
    model.embedding.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    tokens, _ = draw(model, length=400)
    model(tokens)
    model.eval()(tokens)
    assert seen == [38 + 20, 400]


def test_of_the_inputs_that_cross_attend_dropout_keeps_padding_comes_first() -> None:
    columns, visible = torch.arange(100).expand(3, -1), torch.arange(100) >= torch.tensor([[0], [30], [60]])
    chances = draws(torch.arange(3, dtype=torch.int32), 90)
    kept, _, shown = _keep_some(Seen(columns, columns[..., None], visible), chances, 45)
    assert shown is not None
    assert shown.equal(visible.gather(1, kept))
    assert (shown.diff(dim=1, prepend=shown[:, :1]).sum(1) <= 1).all()  # hidden, then shown


def test_cross_attend_dropout_keeps_its_share_of_every_input() -> None:
    columns, chances = torch.arange(50).expand(2000, -1), draws(torch.arange(2000, dtype=torch.int32), 40)
    chosen, positions, _ = _keep_some(Seen(columns, columns[..., None], None), chances, 12)
    assert torch.equal(chosen, positions[..., 0])
    assert all(len(set(row.tolist())) == 22 for row in chosen)
    shares = chosen.flatten().bincount(minlength=50) / 2000
    assert torch.equal(shares[40:], torch.ones(10))
    assert (shares[:40] - 0.3).abs().max() < 0.05  # five standard deviations


def test_training_stays_finite_when_everything_is_dropped() -> None:
    model = make(cross_dropout=0.999, latent_dropout=0.999).train()
    tokens, _ = draw(model)
    model.nats(tokens, tokens[:, :N]).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert model.cross_attend.mlp.widen.weight.grad is not None


def test_checkpointing_changes_no_gradient() -> None:
    grads = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = make(checkpoint_activations=checkpointed, residual_dropout=0.3, cross_dropout=0.3).train()
        torch.manual_seed(1)
        tokens, _ = draw(model)
        model.nats(tokens, tokens[:, :N]).sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_adaptive_embedding_looks_up_each_band() -> None:
    tokens = torch.arange(V)[None]
    embedding = make(cutoffs=(4, 12), cutoff_factor=2).embedding.tokens
    for token in range(V):
        band = 0 if token < 4 else 1 if token < 12 else 2
        table, projection = embedding.tables[band], embedding.projections[band]
        wanted = projection(table.weight[token - (0, 4, 12)[band]])
        torch.testing.assert_close(embedding(tokens)[0, token], wanted)
    for outside in (-1, V):
        with pytest.raises(IndexError):
            embedding(torch.tensor([[outside]]))


def test_weights_start_as_the_authors_do() -> None:
    model = PerceiverAR(ModelConfig(vocab_size=300, context=64, latents=64, channels=256, heads=4, layers=1))
    block = model.self_attends[0]
    for linear in (model.queries.linear, model.cross_attend.key, block.query, block.mlp.narrow):
        assert linear.weight.var().item() == pytest.approx(1 / linear.in_features, rel=0.05)
        assert linear.bias.count_nonzero() == 0
    tokens = model.embedding.tokens.weight
    assert tokens.abs().max() <= 2
    assert tokens.std().item() == pytest.approx(0.88, abs=0.01)
    assert model(torch.zeros(1, 4, dtype=torch.long)).count_nonzero() == 0
    tied = PerceiverAR(dataclasses.replace(model.config, tied=True))
    x = torch.randint(300, (2, 64))
    assert tied.nats(x, x).mean().item() == pytest.approx(math.log(300), abs=0.3)


@pytest.mark.parametrize(
    "settings", [{}, {"tied": True}, {"cutoffs": (4, 12), "queries": "learned"}], ids=str
)
def test_a_model_from_the_meta_device_starts_like_any_other(settings: dict[str, Any]) -> None:
    config = make(**settings, cutoff_factor=2).config
    with torch.device("meta"):
        model = PerceiverAR(config)
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    model.reset_parameters()
    torch.manual_seed(5)
    for name, parameter in PerceiverAR(config).named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter)
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("positions", POSITIONS)
def test_a_model_can_be_cast(positions: Positions, dtype: torch.dtype) -> None:
    model = make(positions=positions, channels=32).double()
    tokens, given = draw(model)
    exact = model(tokens, positions=given)
    cast = model.to(dtype)(tokens, positions=given, lengths=torch.tensor([M, M]))
    assert cast.dtype == dtype
    assert (cast.double() - exact).abs().max() < {torch.bfloat16: 0.1}.get(dtype, 0.02) * exact.abs().max()


def test_unscored_targets_count_nothing() -> None:
    for output in ({}, {"cutoffs": (4, 12), "cutoff_factor": 2}):
        model = make(**output)
        tokens, _ = draw(model)
        targets = torch.randint(V, (B, N))
        some = targets.clone()
        some[:, ::2] = -1
        nats, whole = model.nats(tokens, some), model.nats(tokens, targets)
        assert nats[:, ::2].count_nonzero() == 0
        assert torch.equal(nats[:, 1::2], whole[:, 1::2])


def test_every_parameter_gets_a_gradient_even_without_rare_targets() -> None:
    """DDP waits for all of them."""
    model = make(cutoffs=(4, 12), cutoff_factor=2)
    tokens, _ = draw(model)
    model.nats(tokens, torch.zeros(B, N, dtype=torch.long)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("positions", POSITIONS)
def test_bf16_autocast_gives_nearly_the_same_logits(positions: Positions) -> None:
    model = make(positions=positions, channels=64)
    tokens, given = draw(model)
    exact = model(tokens, positions=given)
    targets = torch.randint(V, (B, N))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(tokens, positions=given)
        nats = model.nats(tokens, targets, positions=given)
    assert (rounded.float() - exact).abs().max() < 0.05 * exact.abs().max()
    assert nats.dtype == torch.float32
    assert (nats - model.nats(tokens, targets, positions=given)).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize(
    "settings",
    [
        *({"positions": a, "queries": b} for a, b in zip(POSITIONS, QUERIES, strict=True)),
        {"tied": True},
        {"cutoffs": (4, 12), "cutoff_factor": 2},
    ],
    ids=str,
)
def test_the_forward_pass_is_one_graph(settings: dict[str, Any]) -> None:
    model = make(**settings, layers=1, cross_dropout=0.5, latent_dropout=0.5, residual_dropout=0.1)
    tokens, given = draw(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    shapes = [(M, N), (M - 1, N), (M, 3), (3, 3), (N, N)]
    for length, count in shapes if settings.get("positions") == "rotary" else shapes[:1]:
        cut = None if given is None else given[:, :length]
        torch.testing.assert_close(
            compiled(tokens[:, :length], positions=cut, latents=count),
            model(tokens[:, :length], positions=cut, latents=count),
        )
    compiled.train()(tokens, positions=given, lengths=torch.tensor([M, M - 4]))
    torch.compiler.reset()


@pytest.mark.slow
def test_compiled_logits_and_gradients_are_the_same() -> None:
    model = make(layers=1, cross_dropout=0.5)
    tokens, _ = draw(model)
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(tokens), model(tokens), atol=1e-4, rtol=1e-4)
    grads = []
    for run in (model, compiled):
        model.zero_grad()
        run(tokens, targets=tokens[:, :N]).nats.sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for plain, fused in zip(*grads, strict=True):
        torch.testing.assert_close(plain, fused, atol=1e-4, rtol=1e-4)
    loss = compiled.train()(tokens, targets=tokens[:, :N]).nats.sum()
    loss.backward()
    assert loss.isfinite()


LONG = """
import torch
from perceiver_ar import ModelConfig, PerceiverAR
config = ModelConfig(vocab_size=259, context=131072, latents=1024, channels=256, heads=4, layers=2)
model = PerceiverAR(config).eval()
tokens = torch.randint(259, (1, 131072))
with torch.no_grad():
    assert model(tokens).shape == (1, 1024, 259)
    assert model(tokens, lengths=torch.tensor([100000])).shape == (1, 1024, 259)
"""


@pytest.mark.slow
def test_131072_inputs_on_the_cpu_stay_below_4_gb() -> None:
    # A forked child reports its parent's peak until it has its own, so a shell starts the process.
    subprocess.run(["/bin/sh", "-c", f"exec '{sys.executable}' -c '{LONG}'"], check=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    assert peak < 4e9


@pytest.mark.parametrize("positions", ["rotary", "none"])
@pytest.mark.parametrize("settings", [{}, {"cross_dropout": 0.5}, {"tied": True}, {"input_channels": 24}])
def test_keys_and_values_by_look_up_equal_projected_ones(
    positions: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(positions=positions, context=64, **settings).double().train()
    tokens, targets = torch.randint(V, (3, 60)), torch.randint(V, (3, N))

    def results(lengths: Tensor | None) -> list[Any]:
        torch.manual_seed(0)
        model.zero_grad()
        nats = model.nats(tokens, targets, lengths=lengths)
        nats.sum().backward()
        return [nats, *(parameter.grad for parameter in model.parameters())]

    for lengths in (None, torch.tensor([60, 3, 31])):
        with monkeypatch.context() as patch:
            patch.setattr(model_module, "look_up", watched := Mock(wraps=look_up))
            found = results(lengths)
        assert watched.call_count == 2  # keys, values
        with monkeypatch.context() as patch:
            patch.setattr(InputEmbedding, "table", None)
            plain = results(lengths)
        for a, b in zip(found, plain, strict=True):
            torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("heads", [1, 4])
def test_queries_keys_and_values_by_one_product_equal_those_one_by_one(heads: int) -> None:
    torch.manual_seed(heads)
    block = Block(16, heads, 0.0).double()
    z = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    turn = rotation(torch.arange(5)[None], 16 // heads, 0.5, 48.0)
    together = block.project(z, None, (turn, turn))
    latents = block.norm(z)
    apart = block.ask(latents, turn), *block.keys_values(latents, turn)
    weights = [torch.randn_like(x) for x in apart]
    gradients = []
    for found in (together, apart):
        total = sum((x * w).sum() for x, w in zip(found, weights, strict=True))
        gradients.append(torch.autograd.grad(total, [z, *block.query.parameters(), *block.key.parameters()]))
    for a, b in zip((*together, *gradients[0]), (*apart, *gradients[1]), strict=True):
        torch.testing.assert_close(a, b)


def test_learned_positions_are_rows_of_tables_whoever_holds_those() -> None:
    positions, places = LearnedPositions((4, 6), 8), torch.randint(4, (2, 5, 2))
    weights = [table.get_parameter("weight") for table in positions.tables]
    found = positions(places)
    wanted = sum(F.embedding(places[..., axis], weight) for axis, weight in enumerate(weights))
    assert torch.equal(found, wanted)
    probe = torch.randn_like(found)
    gradients = [torch.autograd.grad((x * probe).sum(), weights) for x in (found, wanted)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    others = {name: torch.ones_like(weight) for name, weight in positions.named_parameters()}
    assert (torch.func.functional_call(positions, others, (places,)) == 2).all()


@pytest.mark.gpu
def test_the_gradient_of_a_look_up_on_the_gpu() -> None:
    table = torch.randn(259, 64, device="cuda", requires_grad=True)
    ids = torch.randint(259, (4, 5000), device="cuda")
    weight = torch.randn(4, 5000, 64, device="cuda")
    (look_up(table, ids) * weight).sum().backward()
    summed = torch.zeros_like(table).index_add(0, ids.flatten(), weight.flatten(0, 1))
    torch.testing.assert_close(table.grad, summed, atol=2e-2, rtol=1e-2)


@pytest.mark.slow
def test_nothing_is_compiled_again_when_lengths_latents_and_modes_come_back() -> None:
    made = run = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal made
        made += 1

        def counted(*args: Any) -> Any:
            nonlocal run
            run += 1
            return graph.forward(*args)

        return counted

    model = make(context=64, latents=16, layers=3, cross_dropout=0.3, residual_dropout=0.1)
    compile_blocks(model, backend=backend)
    cases = [
        (3, 64, 16, True, None),
        (3, 50, 16, True, None),
        (3, 64, 8, True, None),
        (3, 64, 16, False, None),
        (3, 64, 16, True, torch.tensor([64, 30, 20])),
        (3, 64, 16, True, torch.tensor([64, 30, 5])),
        (2, 64, 16, True, None),
        (2, 33, 12, False, torch.tensor([33, 3])),
    ]
    counts = []
    for _ in range(3):
        made = run = 0
        for batch, inputs, latents, training, lengths in cases:
            model.train(training)
            with torch.set_grad_enabled(training):
                model(torch.randint(V, (batch, inputs)), latents=latents, lengths=lengths)
        counts.append((made, run))
    parts = 5 * len(cases)  # four blocks and the output
    assert counts[0][0] > 8  # more than torch would by default
    assert counts == [(counts[0][0], parts), (0, parts), (0, parts)]
