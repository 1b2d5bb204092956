"""What is exported is loaded by transformers, trained on, and read back; and gives what we give."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import ModelCard
from torch import Tensor

from perceiver_ar import ModelConfig, PerceiverAR, generate
from perceiver_ar.config import Experiment, TrainConfig, TransformerConfig
from perceiver_ar.run import load
from perceiver_ar.tasks.text import prepare
from perceiver_ar.training import train
from tests.forked import run
from tests.test_text import byte_level

transformers = pytest.importorskip("transformers")
from perceiver_ar.interop.export import export  # noqa: E402
from perceiver_ar.interop.transformers import (  # noqa: E402
    PerceiverARConfig,
    PerceiverARForCausalLM,
    PerceiverARTokenizer,
)

V, M, N = 259, 64, 16
PROSE = [f"Line {n}: the quick brown fox, {'very ' * (n % 5)}jumps över the lazy dog.\n" for n in range(60)]


def make(**settings: Any) -> PerceiverAR:
    settings = {"channels": 32, "heads": 2, "layers": 2} | settings
    model = PerceiverAR(ModelConfig(V, M, N, **settings)).eval()
    for parameter in model.output.parameters():
        torch.nn.init.normal_(parameter)
    return model


def drawn(rows: int, length: int) -> Tensor:
    return torch.randint(3, V, (rows, length))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "a.txt").write_text("".join(PROSE))
    prepare(str(folder / "a.txt"), folder / "store", validation=0.2)
    settings = TrainConfig(steps=20, batch_size=4, learning_rate=1e-2, warmup_steps=1, evaluate_every=20)
    model = ModelConfig(V, M, N, channels=32, heads=2, layers=1)
    train(
        Experiment("small", "text", model, settings),
        folder / "store",
        folder / "it",
        device="cpu",
        show=False,
    )
    return folder / "it"


@pytest.fixture(scope="module")
def exported(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "model"
    export(run_folder, out, "apache-2.0")
    return out


def test_weights_may_be_given_without_a_folder() -> None:
    config = PerceiverARConfig(**ModelConfig(33, 24, 8, channels=16, heads=2, layers=1).to_dict())
    weights = PerceiverARForCausalLM(config).state_dict()
    again = PerceiverARForCausalLM.from_pretrained(None, config=config, state_dict=weights)
    assert all(torch.equal(value, weights[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize("settings", [{}, {"tied": True}, {"positions": "learned"}, {"queries": "learned"}])
def test_logits_are_ours(settings: dict[str, Any], tmp_path: Path) -> None:
    model, tokens = make(**settings), drawn(3, 40)
    wrapped = PerceiverARForCausalLM.of(model)
    wrapped.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    mask = torch.ones_like(tokens)
    mask[0, :30] = mask[1, :7] = 0
    for found in (wrapped, loaded):
        assert found(tokens).logits.equal(model(tokens))
        assert found(tokens[:1]).logits.equal(model(tokens[:1]))
        assert found(tokens, logits_to_keep=3).logits.equal(model(tokens)[:, -3:])
        assert found(tokens, attention_mask=mask).logits.equal(model(tokens, lengths=mask.sum(1)))
    assert PerceiverAR.from_pretrained(tmp_path)(tokens).equal(model(tokens))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_greedy_generation_is_ours_across_refreshes_and_beyond_the_context(rows: int, padded: bool) -> None:
    model, prompt = make(), drawn(rows, 20)
    mask = torch.ones_like(prompt)
    if padded:
        mask[0, :9] = 0
    found = PerceiverARForCausalLM.of(model).generate(
        prompt, attention_mask=mask, max_new_tokens=70, do_sample=False, eos_token_id=None
    )
    lengths = mask.sum(1) if padded else None
    assert found.equal(generate(model, prompt, 70, temperature=0, lengths=lengths))


def test_a_prompt_beyond_the_context_is_cut_as_ours_is() -> None:
    model, prompt = make(), drawn(2, 100)
    found = PerceiverARForCausalLM.of(model).generate(
        prompt, max_new_tokens=30, do_sample=False, eos_token_id=None
    )
    assert found.equal(generate(model, prompt, 30, temperature=0))


def test_a_prompt_beyond_learned_positions_is_refused_as_ours_is() -> None:
    wrapped = PerceiverARForCausalLM.of(make(positions="learned"))
    with pytest.raises(ValueError, match="a model with learned positions cannot go beyond its context"):
        wrapped.generate(drawn(1, wrapped.config.context + 5), max_new_tokens=2)


def test_a_cache_is_gone_on_with_by_hand() -> None:
    model, tokens = make(), drawn(2, 30)
    wrapped = PerceiverARForCausalLM.of(model)
    first = wrapped(tokens[:, :20], use_cache=True)
    second = wrapped(tokens[:, 20:], past_key_values=first.past_key_values)
    latents = N // 2  # after the prompt; it grows by one a token, and starts again after N
    for length in range(21, 31):
        latents = latents + 1 if latents < N else N // 2
        wanted = model(tokens[:, :length], latents=latents)[:, -1]
    torch.testing.assert_close(second.logits[:, 0], wanted, atol=1e-4, rtol=1e-4)
    assert second.past_key_values.get_seq_length() == 30


def test_beams_find_what_is_at_least_as_likely() -> None:
    model, prompt = make(), drawn(2, 20)
    wrapped = PerceiverARForCausalLM.of(model)
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    one, four = (wrapped.generate(prompt, num_beams=n, **settings) for n in (1, 4))
    assert four.shape == (2, 32)

    def likelihood(ids: Tensor) -> Tensor:
        return -model(ids[:, :-1], targets=ids[:, 1:][:, -12:], latents=12).nats.sum(1)

    assert (likelihood(four) >= likelihood(one) - 1e-3).all()


def test_beams_of_padded_rows_are_those_of_each_alone_over_refreshes() -> None:
    wrapped, short, long = PerceiverARForCausalLM.of(make()), drawn(1, 9), drawn(1, 20)
    settings = {"num_beams": 3, "max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    mask = torch.tensor([[0] * 11 + [1] * 9, [1] * 20])
    prompts = torch.cat((F.pad(short, (11, 0)), long))
    together = wrapped.generate(prompts, attention_mask=mask, **settings)
    for row, alone in zip(together, (short, long), strict=True):
        assert row[-40:].equal(wrapped.generate(alone, **settings)[0, -40:])


def test_beams_keep_their_own_caches() -> None:
    model, prompt = make(), drawn(1, 20)
    wrapped = PerceiverARForCausalLM.of(model)
    out = wrapped.generate(
        prompt,
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=7,
        eos_token_id=None,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    for ids, score in zip(out.sequences, out.sequences_scores, strict=True):
        total = 0.0
        for place in range(7):
            given = ids[None, : 20 + place]
            logits = model(given, latents=N // 2 + place)[0, -1]
            total += logits.log_softmax(-1)[ids[20 + place]].item()
        assert float(score) == pytest.approx(total, abs=1e-3)


def test_sampling_options_streamers_and_stopping_criteria() -> None:
    model, prompt = make(), drawn(1, 20)
    wrapped = PerceiverARForCausalLM.of(model)
    heard: list[int] = []

    class Ear(transformers.generation.streamers.BaseStreamer):
        def put(self, value: Tensor) -> None:
            heard.extend(value.flatten().tolist())

        def end(self) -> None: ...

    def enough(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(ids),), ids.shape[1] >= 27)

    criteria = transformers.StoppingCriteriaList([enough])
    found = wrapped.generate(
        prompt,
        max_new_tokens=20,
        do_sample=True,
        top_k=5,
        top_p=0.9,
        min_p=0.01,
        temperature=0.7,
        repetition_penalty=1.2,
        eos_token_id=None,
        streamer=Ear(),
        stopping_criteria=criteria,
    )
    assert found.shape == (1, 27)
    assert heard == found[0].tolist()
    settings = {"max_new_tokens": 20, "eos_token_id": None}
    greedy = wrapped.generate(prompt, do_sample=False, **settings)
    assert wrapped.generate(prompt, do_sample=True, top_k=1, **settings).equal(greedy)
    banned = wrapped.generate(prompt, do_sample=False, bad_words_ids=[[int(greedy[0, 20])]], **settings)
    assert banned[0, 20] == model(prompt, latents=N // 2)[0, -1].topk(2).indices[1]
    uncached = wrapped.generate(prompt, max_new_tokens=5, do_sample=False, use_cache=False, eos_token_id=None)
    assert uncached.equal(
        generate(model, prompt, 5, temperature=0, cache=False, grow_latents=False)
    )  # N latents at every step
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        wrapped.generate(prompt, max_new_tokens=5, assistant_model=wrapped)


def last_nats(model: PerceiverAR, tokens: Tensor) -> float:
    """Mean of those after the last N inputs; the last of these has none after it."""
    targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-1)[:, -N:]
    return float(model(tokens, targets=targets).nats.sum() / (len(tokens) * (N - 1)))


def test_the_loss_is_that_of_the_last_latents() -> None:
    model, tokens = make(), drawn(3, 40)
    wrapped = PerceiverARForCausalLM.of(model)
    for more in ({}, {"num_items_in_batch": torch.tensor(3 * 39)}):
        assert float(wrapped(tokens, labels=tokens, **more).loss) == pytest.approx(last_nats(model, tokens))


def test_a_cache_of_generate_is_used_again() -> None:
    wrapped, prompt = PerceiverARForCausalLM.of(make()), drawn(2, 20)
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
    first = wrapped.generate(prompt, max_new_tokens=10, return_dict_in_generate=True, **settings)
    cache = first.past_key_values
    both = wrapped.generate(first.sequences, past_key_values=cache, max_new_tokens=30, **settings)
    assert both.equal(wrapped.generate(prompt, max_new_tokens=40, **settings))


def test_what_cannot_be_done_is_said() -> None:
    wrapped, tokens = PerceiverARForCausalLM.of(make()), drawn(2, 20)
    ones = torch.ones_like(tokens)
    cache = wrapped(tokens, use_cache=True).past_key_values
    for sentence, call in (
        ("must have the shape", lambda: wrapped(tokens, attention_mask=ones[:, :9])),
        ("no inputs_embeds", lambda: wrapped(inputs_embeds=torch.zeros(1, 2, 32))),
        ("must be a PerceiverARCache", lambda: wrapped(tokens, past_key_values=transformers.DynamicCache())),
        ("give labels with all", lambda: wrapped(tokens, labels=tokens, past_key_values=cache)),
        ("cannot be padded", lambda: wrapped(tokens, attention_mask=0 * ones, past_key_values=cache)),
        ("leave prefill_chunk_size out", lambda: wrapped.generate(tokens, prefill_chunk_size=8)),
        ("format version 9", lambda: PerceiverARConfig(format_version=9)),
        ("has no tokenizer", PerceiverARTokenizer),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()
    masked = wrapped(tokens, attention_mask=ones.float()).logits
    assert masked.equal(wrapped(tokens).logits)
    assert isinstance(wrapped(tokens, use_cache=True, return_dict=False), tuple)


def test_without_a_cache_generation_goes_beyond_the_context_too() -> None:
    model, prompt = make(), drawn(1, 60)
    found = PerceiverARForCausalLM.of(model).generate(
        prompt, max_new_tokens=8, do_sample=False, use_cache=False, eos_token_id=None
    )
    positions = torch.arange(68)[None]
    wanted = generate(model, prompt, 8, temperature=0, cache=False, grow_latents=False, positions=positions)
    assert found.equal(wanted)


def test_padding_on_the_right_is_refused() -> None:
    tokens, mask = drawn(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[0, 8:] = 0
    with pytest.raises(ValueError, match="padded on the left"):
        PerceiverARForCausalLM.of(make())(tokens, attention_mask=mask)


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_are_resized(tied: bool, tmp_path: Path) -> None:
    model, tokens = make(tied=tied), drawn(2, 20)
    before = model(tokens)
    wrapped = PerceiverARForCausalLM.of(model)
    wrapped.resize_token_embeddings(V + 1, pad_to_multiple_of=8)
    assert wrapped.config.vocab_size == 264
    torch.testing.assert_close(wrapped(tokens).logits[..., :V], before)
    assert wrapped(torch.full((1, 5), 263)).logits.isfinite().all()
    assert PerceiverARTokenizer("bytes").decode([100, 263]) == "a<|263|>"
    wrapped.save_pretrained(tmp_path)
    assert PerceiverAR.from_pretrained(tmp_path).config.vocab_size == 264
    wrapped.resize_token_embeddings(V)
    torch.testing.assert_close(wrapped(tokens).logits, before)


def test_gradient_checkpointing_changes_no_gradient() -> None:
    tokens, gradients = drawn(2, 30), []
    wrapped, calls = PerceiverARForCausalLM.of(make()).train(), list[None]()
    wrapped.model.self_attends[0].norm.register_forward_pre_hook(lambda *_: calls.append(None))
    for enable in (False, True):
        if enable:
            wrapped.gradient_checkpointing_enable()
        assert wrapped.is_gradient_checkpointing == enable
        calls.clear()
        wrapped(tokens, labels=tokens).loss.backward()
        assert len(calls) == 1 + enable  # once more in the backward pass
        gradients.append([p.grad.clone() for p in wrapped.parameters() if p.grad is not None])
        wrapped.zero_grad()
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


FRESH = """
import sys, torch
if "{blocked}":
    sys.modules["perceiver_ar"] = None
else:
    import perceiver_ar.interop.transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline
trust = {{"trust_remote_code": True}} if "{blocked}" else {{}}
model = AutoModelForCausalLM.from_pretrained("{folder}", **trust)
assert type(AutoModel.from_pretrained("{folder}", **trust)) is type(model)
tokenizer = AutoTokenizer.from_pretrained("{folder}", **trust)
ids = tokenizer(["the quick", "Line 12: é"], return_tensors="pt", padding=True)
torch.save((ids["input_ids"], ids["attention_mask"], model(**ids).logits,
            model.generate(**ids, max_new_tokens=40, do_sample=False, eos_token_id=None)), "{out}")
piped = pipeline("text-generation", model=model, tokenizer=tokenizer)
(told,) = piped("the quick", max_new_tokens=40, do_sample=False, eos_token_id=None)
assert told["generated_text"] == tokenizer.decode(torch.load("{out}")[3][0], skip_special_tokens=True), told
"""


@pytest.mark.parametrize("blocked", ["", "blocked"], ids=["with our package", "without it"])
def test_a_fresh_process_loads_what_was_exported(exported: Path, tmp_path: Path, blocked: str) -> None:
    script = FRESH.format(blocked=blocked, folder=exported, out=tmp_path / "out.pt")
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=120)
    ids, mask, logits, longer = torch.load(tmp_path / "out.pt")
    model, task, _ = load(exported, "cpu")
    for row, seen, text in zip(ids, mask, ["the quick", "Line 12: é"], strict=True):
        assert row[seen.bool()].tolist() == task.prompt(text).tolist()
    lengths = mask.sum(1)
    for found, wanted, length in zip(logits, model(ids, lengths=lengths), lengths, strict=True):
        torch.testing.assert_close(found[-length:], wanted[-length:])
    assert longer.equal(generate(model, ids, 40, temperature=0, lengths=lengths))


FINE_TUNE = """
import torch
import perceiver_ar.interop.transformers
from transformers import AutoModel, Trainer, TrainingArguments
model = AutoModel.from_pretrained("{folder}")
torch.manual_seed(0)
data = [{{"input_ids": row, "labels": row}} for row in torch.randint(3, 259, (8, 40))]
settings = TrainingArguments(
    "{out}/trainer", max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
    gradient_checkpointing=True, logging_steps=1,
)
trainer = Trainer(model, settings, train_dataset=data, eval_dataset=data)
before = trainer.evaluate()["eval_loss"]
trainer.train()
trainer.save_model("{out}/saved")
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
tokens = torch.stack([x["input_ids"] for x in data])
torch.save((before, losses, model.model.state_dict(), tokens), "{out}/state.pt")
"""


def test_what_trainer_saves_is_read_back(exported: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script = FINE_TUNE.format(folder=exported, out=tmp_path)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    loss, losses, trained, tokens = torch.load(tmp_path / "state.pt")
    model = PerceiverAR.from_pretrained(exported)
    assert loss == pytest.approx(last_nats(model, tokens), rel=1e-4)
    assert losses == pytest.approx([loss, loss], rel=0.2)  # of two batches of it
    assert "auto_map" not in json.loads((tmp_path / "saved/config.json").read_text())
    before = model.state_dict()
    found = PerceiverAR.from_pretrained(tmp_path / "saved").state_dict()
    assert found.keys() == trained.keys() == before.keys()
    assert all(found[name].equal(trained[name]) for name in found)
    assert any(not found[name].equal(before[name]) for name in found)


def test_our_commands_read_what_was_exported(run_folder: Path, exported: Path) -> None:
    store = str(run_folder.parent / "store")
    ours, theirs = (run("evaluate", str(f), "--data", store, "--json") for f in (run_folder, exported))
    assert json.loads(theirs.stdout) == json.loads(ours.stdout)


def test_the_card_tells_task_licence_and_metrics(exported: Path) -> None:
    data = ModelCard.load(exported / "README.md").data
    assert (data.pipeline_tag, data.license, data.library_name) == (
        "text-generation",
        "apache-2.0",
        "transformers",
    )
    assert {"perceiver-ar", "text"} <= set(data.tags)
    results = {result.metric_type: result.metric_value for result in data.eval_results}
    assert results["nats"] > 0
    assert "bits_per_byte" in results
    assert "tokens" not in results
    assert f"gives logits for the last {N} of them" in (exported / "README.md").read_text()


def test_the_card_tells_of_the_model_that_was_kept(run_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(run_folder, tmp_path / "it")
    with (tmp_path / "it/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 99, "validation": {"nats": 99.0}}) + "\n")  # worse: not kept
    export(tmp_path / "it", tmp_path / "out")
    results = ModelCard.load(tmp_path / "out/README.md").data.eval_results
    assert {r.metric_value for r in results if r.metric_type == "nats"}.isdisjoint({99.0})


def test_a_killed_run_is_exported_and_the_folder_does_not_say_where_its_data_were(
    run_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(run_folder, tmp_path / "it")
    with (tmp_path / "it/metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "validation": {"nats": 0.1}')
    export(tmp_path / "it", tmp_path / "out")
    results = ModelCard.load(tmp_path / "out/README.md").data.eval_results
    assert {r.metric_value for r in results if r.metric_type == "nats"}.isdisjoint({0.1})
    assert load(tmp_path / "it", "cpu")[2]
    assert load(tmp_path / "out", "cpu")[2] is None


@pytest.mark.parametrize("kind", ["bytes", "unigram", "bpe", "words", "tokenizers"])
def test_tokenizers_give_the_tokens_of_a_store(kind: Any, tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    source = tmp_path / "a.txt"
    source.write_text("".join(PROSE))
    settings: dict[str, Any] = {"vocab_size": 320} if kind in ("unigram", "bpe") else {}
    if kind == "tokenizers":
        settings["tokenizer_file"] = tmp_path / "tokenizer.json"
        settings["tokenizer_file"].write_bytes(byte_level().save())
    else:
        settings["tokenizer"] = kind
    prepare(str(source), tmp_path / "store", validation=0.0, **settings)
    model = ModelConfig(V, M, N, channels=16, heads=2, layers=1)
    experiment = Experiment("small", "text", model, TrainConfig(steps=1, batch_size=2))
    train(experiment, tmp_path / "store", tmp_path / "run", device="cpu", show=False)
    export(tmp_path / "run", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert isinstance(tokenizer, PerceiverARTokenizer)
    _, task, _ = load(tmp_path / "out", "cpu")
    assert tokenizer.model_max_length == M
    for text in ("the quick brown fox", " över\n\tLine 3:  <|eos|>jumps", "".join(PROSE[:3])):
        ids = tokenizer(text)["input_ids"]
        assert ids == task.prompt(text).tolist()
        again = tokenizer.decode(ids, skip_special_tokens=True)
        assert again.encode() == task.vocabulary.decode(np.array(ids))
        assert tokenizer.decode(ids).startswith("<|bos|>")
    assert len(tokenizer) == task.vocabulary.size == len(tokenizer.get_vocab())
    tokenizer.save_pretrained(tmp_path / "again")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again(text)["input_ids"] == ids


def test_mistakes_are_told(run_folder: Path, exported: Path, tmp_path: Path) -> None:
    again = run("export", str(run_folder), str(exported))
    assert again.returncode == 2
    assert "exists already" in again.stderr
    (tmp_path / "a.txt").write_text("".join(PROSE))
    prepare(str(tmp_path / "a.txt"), tmp_path / "store", validation=0.0)
    model = TransformerConfig(V, 32, channels=16, heads=2, layers=1)
    experiment = Experiment("small", "text", model, TrainConfig(steps=1, batch_size=2))
    train(experiment, tmp_path / "store", tmp_path / "run", device="cpu", show=False)
    refused = run("export", str(tmp_path / "run"), str(tmp_path / "out"))
    assert refused.returncode == 2
    assert "only a PerceiverAR" in refused.stderr
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="channels"):
        PerceiverARConfig(channels=30, heads=16)


@pytest.mark.parametrize("damage", ["missing", "extra", "misshapen", "whole", "half", "complex"])
def test_weights_that_do_not_fit_are_named(exported: Path, tmp_path: Path, damage: str) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(exported / "model.safetensors")
    name = "model.norm.weight"
    match damage:
        case "missing":
            del weights[name]
        case "extra":
            weights["model.more"] = torch.zeros(2)
            name = "model.more"
        case "misshapen":
            weights[name] = torch.zeros(7)
        case _:
            kinds = {"whole": torch.int64, "half": torch.float16, "complex": torch.complex64}
            weights[name] = weights[name].to(kinds[damage])
    (tmp_path / "config.json").write_text((exported / "config.json").read_text())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=name.removeprefix("model.")):
        PerceiverAR.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=name):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=name):
        PerceiverARForCausalLM.from_pretrained(
            pretrained_model_name_or_path=tmp_path.parent, subfolder=tmp_path.name
        )


def test_weights_of_other_types_from_the_hub_are_named(exported: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    copy = tmp_path / "models--me--mine"
    (copy / "refs").mkdir(parents=True)
    (copy / "refs/main").write_text("0" * 40)
    shutil.copytree(exported, copy / "snapshots" / ("0" * 40))
    where = {"cache_dir": tmp_path, "local_files_only": True}
    assert PerceiverARForCausalLM.from_pretrained("me/mine", **where).config.latents == N
    path = copy / "snapshots" / ("0" * 40) / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"] = weights["model.norm.weight"].long()
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"other types than F32: model\.norm\.weight \(I64\)"):
        PerceiverARForCausalLM.from_pretrained("me/mine", **where)


def test_parts_of_weights_are_said_to_be_parts(exported: Path, tmp_path: Path) -> None:
    PerceiverARForCausalLM.from_pretrained(exported).save_pretrained(tmp_path, max_shard_size="20KB")
    with pytest.raises(ValueError, match=r"holds no model\.safetensors, but parts of it"):
        PerceiverAR.from_pretrained(tmp_path)


def test_what_the_docs_show_runs(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    text = (Path(__file__).parents[1] / "docs/interop.md").read_text()
    shutil.copytree(run_folder, tmp_path / "runs/text")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for language, block in re.findall(r"```(sh|python)\n(.*?)```", text, re.DOTALL):
        if language == "sh":
            assert all(run(*line.split()[1:]).returncode == 0 for line in block.splitlines())
        else:
            exec(compile(block, "docs/interop.md", "exec"), {})
