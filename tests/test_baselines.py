"""Transformer and Transformer-XL: counts, causality, memory, and the same commands as Perceiver AR."""

import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from perceiver_ar import evaluate, generate, stream
from perceiver_ar.architectures import load_model
from perceiver_ar.baselines import Transformer, TransformerXL, _shifted
from perceiver_ar.cli import main
from perceiver_ar.config import AnyModelConfig, TransformerConfig, TransformerXLConfig
from perceiver_ar.decoder import Inputs
from perceiver_ar.strict import Config
from perceiver_ar.tasks.base import Document
from perceiver_ar.tasks.image import ImageTask
from perceiver_ar.tasks.tokens import TokensTask

V = 30


def shaken(model: Any) -> Any:
    """Every weight matters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def transformer(**settings: Any) -> Transformer:
    return shaken(Transformer(TransformerConfig(V, 12, channels=16, heads=2, layers=2, **settings)))


def xl(**settings: Any) -> TransformerXL:
    defaults: dict[str, Any] = {"segment": 4, "memory": 3, "evaluation_memory": 6}
    return shaken(
        TransformerXL(TransformerXLConfig(V, channels=16, heads=2, layers=3, **defaults | settings))
    )


MODELS = {
    "transformer": transformer,
    "xl": xl,
    "adaptive": lambda: xl(cutoffs=(4, 12), cutoff_factor=2),
}


@pytest.mark.parametrize("name", MODELS)
def test_no_output_depends_on_what_comes_later(name: str) -> None:
    model = MODELS[name]()
    tokens = torch.randint(V, (2, 10))
    plain = model(tokens)
    for place in range(10):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % V
        before = plain.shape[1] - (10 - place)
        moved = model(changed)
        if before > 0:
            torch.testing.assert_close(moved[:, :before], plain[:, :before], atol=1e-6, rtol=0)
        assert not torch.allclose(moved[:, max(0, before) :], plain[:, max(0, before) :])


@pytest.mark.parametrize("name", MODELS)
def test_padded_examples_give_the_same_logits_as_each_alone(name: str) -> None:
    model = MODELS[name]()
    tokens, lengths = torch.randint(V, (3, 10)), torch.tensor([10, 7, 3])
    together = model(tokens, lengths=lengths, latents=3)
    for row, length in enumerate(lengths.tolist()):
        alone = model(tokens[row : row + 1, -length:], latents=3)
        torch.testing.assert_close(together[row], alone[0], atol=1e-5, rtol=1e-5)


def test_scores_are_shifted_from_distances_to_keys() -> None:
    scores = torch.randn(2, 3, 4, 9)
    shifted = _shifted(scores)
    for i in range(4):
        for j in range(9 - 4 + i + 1):
            distance = 9 - 4 + i - j
            assert shifted[0, 0, i, j] == scores[0, 0, i, 9 - 1 - distance]


def one_long_pass(model: TransformerXL, tokens: Tensor, segment: int, reach: int) -> Tensor:
    """All layers over all inputs at once, each of which sees its segment and the memory before it."""
    place = torch.arange(tokens.shape[1])
    first = place // segment * segment - reach
    open_ = (place[None] <= place[:, None]) & (place[None] >= first[:, None])
    z = model.embedding(tokens, tokens[..., None])
    content, position = model.biases.weight
    for block in model.self_attends:
        x = block.norm(z)
        q, k, v = (block._heads(f(x)) for f in (block.query, block.key, block.value))
        width = q.shape[-1]
        far = model.distances(place[:, None])  # (T, C)
        r = block._heads(block.distance(far)[None])[0]  # (H, T, K)
        away = (place[:, None] - place[None]).clamp(min=0)
        u, w = (bias.view(block.heads, 1, width) for bias in (content, position))
        scores = (q + u) @ k.transpose(-1, -2) + torch.einsum("bhik,hijk->bhij", q + w, r[:, away])
        weights = (scores / math.sqrt(width)).masked_fill(~open_, -torch.inf).softmax(-1)
        z = z + block.out((weights @ v).transpose(1, 2).flatten(2))
        z = z + block.mlp(block.mlp_norm(z))
    return z


@pytest.mark.parametrize("reach", [0, 2, 6, 100])
def test_segments_with_a_memory_equal_one_long_pass_with_the_same_reach(reach: int) -> None:
    model = xl(evaluation_memory=reach)
    tokens, past, parts = torch.randint(V, (2, 19)), None, []
    with torch.no_grad():
        for start in range(0, 19, 4):
            z, past = model.segment(tokens[:, start : start + 4], past, None)
            parts.append(z)
        whole = one_long_pass(model, tokens, 4, reach)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_evaluation_passes_the_memory_on(batch_size: int) -> None:
    model = xl(evaluation_memory=6)
    torch.nn.init.normal_(model.output.bias)
    documents = [Document(np.random.default_rng(n).integers(3, V, n), 1, n) for n in (21, 9, 5)]
    nats = 0.0
    with torch.no_grad():
        for document in documents:  # whole numbers of segments, which is what the long pass takes
            tokens = torch.from_numpy(document.tokens)[None]
            z = model.norm(one_long_pass(model, tokens[:, :-1], 4, 6))
            nats += float(model.output(z, model.embedding.tokens, tokens[:, 1:]).nats.sum())
    empty = Document(np.array([2]), 1, 1)
    report = evaluate(model, TokensTask(), [empty, *documents, empty], batch_size=batch_size)
    assert report["tokens"] == 20 + 8 + 4
    assert report["nats"] * report["tokens"] == pytest.approx(nats, rel=1e-5)
    strided = evaluate(model, TokensTask(), documents, stride=4)
    assert abs(strided["nats"] - report["nats"]) > 1e-4  # whose memories begin anew in each window


def test_gradients_stop_at_the_memory() -> None:
    model = xl().train()
    seen = []
    model.embedding.tokens.register_forward_hook(lambda module, inputs, out: seen.append(out.requires_grad))
    model(torch.randint(V, (2, 10)), latents=4).sum().backward()
    assert seen == [False, True]


def test_some_of_the_memory_is_hidden_in_training_of_each_example_another() -> None:
    model = xl(memory_dropout=0.5, memory=6)
    tokens = torch.randint(V, (1, 10)).expand(5, -1)
    torch.testing.assert_close(model(tokens), model(tokens))
    model.train()
    assert not torch.allclose(model(tokens), model(tokens))
    assert not torch.allclose(*model(tokens)[:2])


def test_training_sees_no_further_than_its_own_memory() -> None:
    model, tokens = xl(), torch.randint(V, (1, 10))
    for place, in_training in ((2, False), (3, True)):  # before the last four and three
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % V
        assert not torch.allclose(model.eval()(tokens), model(changed))
        assert torch.allclose(model.train()(tokens), model(changed)) != in_training


def test_tied_adaptive_logits_are_what_the_formula_says() -> None:
    model = MODELS["adaptive"]()
    tokens, targets = torch.randint(V, (2, 9)), torch.arange(8).view(2, 4) * 4 % V
    logits = model(tokens)
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(2, 4))
    wanted = -logits.gather(-1, targets[..., None]).squeeze(-1)
    torch.testing.assert_close(model.nats(tokens, targets), wanted)
    z = model.norm(model._latents(Inputs(tokens, tokens[..., None]), 4))
    out, embedding = model.output, model.embedding.tokens
    band = embedding.tables[2].weight @ (embedding.projections[2].weight.T @ z[0, 0]) + out.bias[12:]
    head = torch.cat((embedding.tables[0].weight @ out.first(z[0, 0]) + out.bias[:4], out.bands(z[0, 0])))
    torch.testing.assert_close(logits[0, 0, 12:], head.log_softmax(0)[5] + band.log_softmax(0))


@pytest.mark.parametrize("cutoffs", [(), (100, 1000)])
def test_at_first_nothing_is_very_unlikely(cutoffs: tuple[int, ...]) -> None:
    model = TransformerXL(TransformerXLConfig(5000, 16, channels=256, heads=4, layers=1, cutoffs=cutoffs))
    nats = model.nats(torch.randint(5000, (4, 16)), torch.randint(5000, (4, 16)))
    assert nats.mean() < 1.6 * math.log(5000)  # a band is as likely as a token of the first


def test_a_baseline_without_layers_is_refused() -> None:
    for config in (xl().config, transformer().config):
        with pytest.raises(ValueError, match=r"layers.* must be at least 1"):
            replace(config, layers=0)


def test_a_misspelt_setting_of_a_baseline_is_named() -> None:
    for config in (xl().config, transformer().config):
        assert type(Holder.from_dict({"model": config.to_dict()}).model) is type(config)
        with pytest.raises(ValueError, match=f"'layer' is not a setting of {type(config).__name__}"):
            Holder.from_dict(
                {"model": {("layer" if k == "layers" else k): v for k, v in config.to_dict().items()}}
            )
    with pytest.raises(ValueError, match="ModelConfig needs the setting 'latents'"):
        Holder.from_dict({"model": {"vocab_size": 9, "context": 8, "layers": 1}})
    with pytest.raises(ValueError, match="model must be of type ModelConfig"):
        Holder.from_dict({"model": None})


@dataclass(frozen=True)
class Holder(Config):
    model: AnyModelConfig


@pytest.mark.parametrize("settings", [{"layers": 0}, {"segment": 0}, {"channels": 33, "heads": 3}])
def test_sizes_that_cannot_be_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|even number of channels"):
        TransformerXLConfig(V, **settings)


@pytest.mark.parametrize("name", MODELS)
def test_extending_equals_a_plain_forward(name: str) -> None:
    model = MODELS[name]()
    tokens, lengths = torch.randint(V, (2, 7)), torch.tensor([7, 4])
    places = (torch.arange(7) - (7 - lengths[:, None])).clamp(min=0)[..., None]
    visible = torch.arange(7) >= 7 - lengths[:, None]
    with torch.no_grad():
        logits, past = model.extend(tokens[:, :3], places[:, :3], None, visible[:, :3])
        for t in range(3, 7):
            logits, past = model.extend(tokens[:, t : t + 1], places[:, t : t + 1], past)
        plain = model(tokens, lengths=lengths, latents=1)[:, 0]
    torch.testing.assert_close(logits, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_cached_generation_equals_recomputing(name: str) -> None:
    model = MODELS[name]()
    if name != "transformer":
        model = xl(evaluation_memory=60)  # all that is drawn is seen
    prompt, lengths = torch.randint(V, (3, 5)), torch.tensor([5, 1, 3])
    for kinds in ({}, {"lengths": lengths}):
        asked: dict[str, Any] = {"max_new_tokens": 40, "seed": 3, **kinds}
        cached, recomputed = (
            generate(model, prompt, cache=cache, log_probs=True, **asked) for cache in (True, False)
        )
        assert cached[0].equal(recomputed[0])
        torch.testing.assert_close(cached[1], recomputed[1], atol=1e-4, rtol=1e-4)
        stepped = list(stream(model, prompt, **asked))
        assert torch.stack(stepped, dim=1).equal(cached[0][:, 5:])


def test_a_memory_stays_as_long_as_it_may_be() -> None:
    model = xl()
    past = None
    for _ in range(5):
        _, past = model.extend(torch.randint(V, (1, 9)), torch.zeros(1, 9, 1), past)
    assert {state.shape for (state,) in past.kept} == {(1, 6, 16)}
    ids = generate(model, torch.randint(V, (1, 30)), 30)
    assert ids.shape == (1, 60)


def test_a_transformer_forgets_half_where_there_is_no_more_room() -> None:
    model = transformer()
    assert [model.held(total) for total in (1, 12, 13, 18, 19, 24, 25)] == [1, 12, 7, 12, 7, 12, 7]


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_comes_back_as_what_it_was(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    model.save_pretrained(tmp_path / "model")
    again = load_model(tmp_path / "model")
    assert type(again) is type(model)
    assert again.config == model.config
    tokens = torch.randint(V, (1, 9))
    torch.testing.assert_close(again(tokens), model(tokens))


SETTINGS = {
    "transformer-1k": ["--model.context", "32", "--model.layers", "1"],
    "books-xl-23": [
        *("--model.segment", "16", "--model.memory", "8", "--model.evaluation-memory", "12"),
        *("--model.layers", "1"),
    ],
}


@pytest.mark.parametrize("preset", SETTINGS)
def test_the_same_commands_train_evaluate_and_generate(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["perceiver-ar", *arguments])
        main()
        return capsys.readouterr().out

    (tmp_path / "text.txt").write_text("a rose is a rose is a rose. " * 200)
    store = ("--out", str(tmp_path / "store"), "--validation", "0.2")
    run("prepare", "text", str(tmp_path / "text.txt"), *store)
    common = ["--data", str(tmp_path / "store"), "--out", str(tmp_path / "run"), "--device", "cpu"]
    sizes = [*SETTINGS[preset], "--model.channels", "32", "--model.heads", "2"]
    train = ["--train.batch-size", "8", "--train.warmup-steps", "5", "--train.learning-rate", "3e-3"]
    run("train", preset, *common, *sizes, *train, "--train.steps", "60")
    report = json.loads(run("evaluate", str(tmp_path / "run"), "--json", "--device", "cpu"))
    assert report["nats"] < 2.5  # of 5.6 at first
    drawn = json.loads(run("generate", str(tmp_path / "run"), "--prompt", "a ro", "--tokens", "50", "--json"))
    assert len(drawn["samples"][0]["tokens"]) <= 50
    again = [*common[:2], "--out", str(tmp_path / "more"), "--init", str(tmp_path / "run"), "--device", "cpu"]
    run("train", preset, *again, *sizes, *train, "--train.steps", "2")
    with pytest.raises(SystemExit) as refused:
        run("train", "tiny", *again[:2], "--out", str(tmp_path / "other"), "--init", str(tmp_path / "run"))
    assert refused.value.code == 2


def test_a_baseline_of_the_hub_is_known_for_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    xl().save_pretrained(tmp_path)
    monkeypatch.setattr("perceiver_ar.pretrained.snapshot_download", lambda name, **rest: str(tmp_path))
    assert isinstance(load_model(Path("me/mine")), TransformerXL)


def test_images_and_transformer_xl_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="take another model"):
        ImageTask(8).check(TransformerXLConfig(259))
