"""In lm-evaluation-harness a run scores as it does here, in its perplexities and token by token."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perceiver_ar import ModelConfig, PerceiverAR, evaluate, generate, presets
from perceiver_ar.run import export, load
from perceiver_ar.source import open_source
from perceiver_ar.tasks.copy import CopyTask
from perceiver_ar.tasks.text import prepare

pytest.importorskip("lm_eval")
pytest.importorskip("perceiver_ar_lm_eval")
import lm_eval
import perceiver_ar_lm_eval
from lm_eval.tasks import TaskManager

from perceiver_ar.interop.lm_eval import PerceiverARLM
from tests.forked import run as command_line

ROOT = Path(__file__).resolve().parents[1]
M, N = 24, 8
LINES = [
    "The Perceiver reads a long line, and speaks of its end alone.",
    "short one",
    "Est-ce tout\u00a0? Oui\u2003: presque\u3000tout.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.\nA second line\tfollows it.",
    "x",
]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def make_run(folder: Path, tokenizer: Any = "bytes", **settings: Any) -> tuple[Path, Path]:
    """A run with random weights, and the store that it would have been trained on."""
    texts = folder / "texts"
    texts.mkdir()
    for split, lines in (("train", LINES * 20), ("validation", LINES)):
        (texts / f"{split}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    size = 310 if tokenizer == "unigram" else None
    store = prepare(str(texts), folder / "store", tokenizer=tokenizer, vocab_size=size, workers=1)
    config = ModelConfig(store.vocab_size, M, N, channels=16, heads=2, layers=1, **settings)
    task = open_source("text", {}, store.folder).task
    experiment = replace(presets.get("tiny"), task="text", options=task.to_dict(), model=config)
    model = PerceiverAR(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    export(folder / "run/model", model, experiment, task, {str(store.folder): 1.0})
    return folder / "run", store.folder


def write_task(folder: Path, output_type: str, **settings: Any) -> None:
    """A task of lm-eval, named local, on the validation texts."""
    about = {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "texts/validation.jsonl")}},
        "test_split": "test",
        "output_type": output_type,
        **settings,
    }
    (folder / "tasks").mkdir()
    (folder / "tasks/local.yaml").write_text(json.dumps(about))


ROLLING = {"doc_to_text": "", "doc_to_target": "{{text}}"}


def simple(run: Path, folder: Path, **settings: Any) -> dict[str, Any]:
    """What lm-eval reports of its task."""
    arguments = {"path": str(run), "device": "cpu"} | settings
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    found = lm_eval.simple_evaluate(
        "perceiver-ar", model_args=arguments, tasks=["local"], task_manager=manager, batch_size=3
    )
    assert found is not None
    return found["results"]["local"]


def ask(*pairs: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=pair) for pair in pairs]


@pytest.mark.parametrize(("tokenizer", "stride"), [("bytes", None), ("bytes", 7), ("unigram", None)])
def test_perplexities_are_those_of_evaluate(tmp_path: Path, tokenizer: str, stride: int | None) -> None:
    run, store = make_run(tmp_path, tokenizer)
    write_task(tmp_path, "loglikelihood_rolling", **ROLLING)
    model, task, _ = load(run, "cpu")
    documents = open_source("text", {}, store).documents("validation")
    ours = evaluate(model, task, documents, stride=stride)
    theirs = simple(run, tmp_path, **({} if stride is None else {"stride": stride}))
    assert theirs["word_perplexity,none"] == pytest.approx(ours["word_perplexity"], rel=1e-4)
    assert theirs["byte_perplexity,none"] == pytest.approx(2 ** ours["bits_per_byte"], rel=1e-4)
    assert theirs["bits_per_byte,none"] == pytest.approx(ours["bits_per_byte"], rel=1e-4)


def test_a_choice_is_scored_as_a_sum_of_nats(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path)
    choices = ["apple", "pear tree", "plum"]
    write_task(
        tmp_path, "multiple_choice", doc_to_text="{{text[:9]}}", doc_to_choice=choices, doc_to_target=1
    )
    model, task, _ = load(run, "cpu")

    def best(text: str) -> int:
        sums = []
        for choice in choices:
            context, whole = task.prompt(text[:9]), task.prompt(f"{text[:9]} {choice}")
            total = 0.0
            for start in range(len(context), len(whole), N // 2):
                end = min(start + N // 2, len(whole))
                tokens = torch.from_numpy(whole[max(0, end - 1 - M) : end])[None]
                nats = model.nats(tokens[:, :-1], tokens[:, -N:] if tokens.shape[1] > N else tokens[:, 1:])
                total += nats[0, start - end :].sum().item()
            sums.append(total)
        lm = PerceiverARLM(str(run), device="cpu", batch_size=2)
        answers = lm.loglikelihood(ask(*((text[:9], f" {choice}") for choice in choices)))
        assert [-nats for nats, _ in answers] == pytest.approx(sums, rel=1e-5)
        return sums.index(min(sums))

    share = sum(best(text) == 1 for text in LINES) / len(LINES)
    assert simple(run, tmp_path)["acc,none"] == pytest.approx(share)


def test_long_contexts_and_continuations_count_every_token_once(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path)
    device = "cpu" if torch.cuda.is_available() else "cuda:0"  # which lm-eval asks for by default
    lm = PerceiverARLM(str(run), device, batch_size=4, stride=1)
    context, continuation = "a context longer than the model's ", "and what follows, longer than N latents"
    (whole,) = lm.loglikelihood(ask(("", context + continuation)), disable_tqdm=True)
    # Spaces at the end of a context are moved to what follows it.
    pairs = ask(("", context[:-1]), (context, continuation), (context + continuation[:-1], "s"))
    begin, end, last = lm.loglikelihood(pairs, disable_tqdm=True)
    assert begin[0] + end[0] == pytest.approx(whole[0], rel=1e-5)
    tokens = torch.tensor(lm.tok_encode(context + continuation))[None, -(M + 1) :]
    nats = lm.model.nats(tokens[:, :-1], tokens[:, -N:])
    assert last[0] == pytest.approx(-nats[0, -1].item(), rel=1e-5)


def test_the_likeliest_continuation_is_greedy(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path)
    lm = PerceiverARLM(str(run), device="cpu", stride=1)
    prompt = torch.from_numpy(lm.task.prompt("What comes next"))[None]
    drawn = prompt
    for _ in range(N + 1):  # each with N latents, as windows have
        drawn = torch.cat((drawn, lm.model(drawn[:, -M:])[:, -1:].argmax(-1)), dim=1)
    context, likeliest = prompt[0].tolist(), drawn[0, prompt.shape[1] :].tolist()
    other = [*likeliest[:-1], (likeliest[-1] + 1) % lm.model.config.vocab_size]
    requests = [(("", ""), context, tokens) for tokens in (likeliest, other)]
    found = [greedy for _, greedy in lm._loglikelihood_tokens(requests)]
    assert found == [True, False]


def test_generation_stops_at_a_string(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path)
    lm = PerceiverARLM(str(run), device="cpu", batch_size=2)
    contexts = ["Once upon a time in a land far away", "A", "Thrice"]
    sampled = {"do_sample": True, "temperature": 0.9, "max_gen_toks": 16}
    free = lm.generate_until(ask(*((context, sampled) for context in contexts)))
    assert all(free)
    stop = free[1][3:5]
    cut = lm.generate_until(ask(*((context, sampled | {"until": ["", stop]}) for context in contexts)))
    assert cut == [text.split(stop)[0] for text in free]
    greedy = lm.generate_until(ask((contexts[1], {"until": ["\n\n"], "max_gen_toks": 9})))
    prompt = torch.from_numpy(lm.task.prompt(contexts[1]))[None]
    allowed = lm.task.allowed(0, lm.model.config.vocab_size)
    ids = generate(lm.model, prompt, 9, temperature=0, allowed=lambda t: allowed, stop=1)[0, 2:]
    assert greedy == ["".join(map(lm.task.vocabulary.speller(), ids.tolist())).split("\n\n")[0]]
    repeated = lm.generate_until(ask(*(("B", sampled),) * 4))
    assert len(set(repeated)) == 4


def test_words_are_scored_as_in_a_store_but_never_called_the_likeliest(tmp_path: Path) -> None:
    run, store = make_run(tmp_path, "words", tied=False, cutoffs=(8, 16))
    lm = PerceiverARLM(str(run), device="cpu", batch_size=2)
    documents = open_source("text", {}, store).documents("validation")
    ours = evaluate(lm.model, lm.task, documents)
    theirs = lm.loglikelihood_rolling(ask(*((line,) for line in LINES)))
    assert -sum(theirs) == pytest.approx(ours["nats"] * ours["tokens"], rel=1e-5)
    assert lm.tok_encode("short one") == lm.task.prompt("short one").tolist()
    with pytest.raises(ValueError, match="not known of an adaptive softmax"):
        lm.loglikelihood(ask(("short", " one")))


def test_a_run_on_something_else_is_refused(tmp_path: Path) -> None:
    experiment = presets.get("copy-32")
    config = replace(experiment.model, channels=16, heads=2, layers=1)
    model = PerceiverAR(config)
    task = CopyTask(**experiment.options)
    export(tmp_path / "run/model", model, replace(experiment, model=config), task, None)
    with pytest.raises(ValueError, match="must be a run on text, but its task is copy"):
        PerceiverARLM(str(tmp_path / "run"), device="cpu")
    for name in ("batch_size", "stride", "latents"):
        with pytest.raises(ValueError, match=f"{name} must be a whole number, but is auto"):
            PerceiverARLM(str(tmp_path / "run"), **{name: "auto"})


def test_the_command_line_runs_a_local_task(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path)
    write_task(tmp_path, "loglikelihood_rolling", **ROLLING)
    command = [str(Path(sys.executable).with_name("lm_eval")), "--model", "perceiver-ar"]
    tasks = ["--tasks", "local", "--include_path", str(tmp_path / "tasks")]
    model_args = ["--model_args", f"path={run},stride=4", "--device", "cpu"]
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    result = subprocess.run(
        [*command, *model_args, *tasks, "--output_path", str(tmp_path / "out.json")],
        cwd=ROOT,
        env=os.environ | offline,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "word_perplexity" in result.stdout
    (out,) = tmp_path.glob("out*.json")
    theirs = json.loads(out.read_text())["results"]["local"]
    ours = json.loads(command_line("evaluate", str(run), "--stride", "4", "--device", "cpu", "--json").stdout)
    assert theirs["word_perplexity,none"] == pytest.approx(ours["word_perplexity"], rel=1e-4)
    assert theirs["byte_perplexity,none"] == pytest.approx(2 ** ours["bits_per_byte"], rel=1e-4)


def test_nothing_but_lm_eval_is_touched_when_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys, torch; print([name for name in sys.modules if name.startswith('lm_eval')])"
    plain = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert plain.stdout.strip() == "[]"
    for held in ({}, {"model_registry": None}, {"model_registry": 1}):  # as in other releases
        monkeypatch.setitem(sys.modules, "lm_eval.api.registry", SimpleNamespace(**held))
        perceiver_ar_lm_eval.announce()
