"""Plans agree with what was measured, and what they advise makes a run fit."""

import itertools
import json
import shlex
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.sizes import SIZES
from perceiver_ar import presets
from perceiver_ar.cli import main
from perceiver_ar.config import Experiment, ModelConfig, TrainConfig
from perceiver_ar.plan import plan

MEASURED = {
    "laptop": (4, 364.1, 0.2851),
    "8k": (32, 380.2, 16.58),
    "12k-60": (32, 86.39, 73.08),
    "131k": (16, 163.6, 17.88),
    "1m": (1, 22.33, 9.912),
}
"""Sequences a step, sequences a second and GiB on one H200 (benchmarks/RESULTS.md)."""


@pytest.mark.parametrize("name", MEASURED)
def test_plans_agree_with_what_was_measured(name: str) -> None:
    batch, rate, gib = MEASURED[name]
    found = plan(Experiment("it", "tokens", SIZES[name].model, TrainConfig(batch_size=batch)))
    assert batch / found.step_seconds == pytest.approx(rate, rel=0.15)
    assert sum(found.memory.values()) / 2**30 == pytest.approx(gib, rel=0.15)
    assert not found.advice


def wide(**train: Any) -> Experiment:
    model = ModelConfig(259, 8192, 1024, channels=4096, heads=32, layers=24)
    return Experiment("it", "tokens", model, TrainConfig(batch_size=256, steps=1000, **train))


def few() -> Experiment:
    """A model for many GPUs, but not sequences."""
    model = replace(presets.get("imagenet64").model, channels=16_384, heads=64)
    return Experiment("it", "tokens", model, TrainConfig(batch_size=8))


def long(**train: Any) -> Experiment:
    model = ModelConfig(259, 2**25, 1024, layers=6)
    return Experiment("it", "tokens", model, TrainConfig(batch_size=64, **train))


def test_ranks_that_share_inputs_have_less_of_them() -> None:
    alone, eight = plan(long(micro_batch_size=1)), plan(long(micro_batch_size=1, context_parallel=8), gpus=8)
    assert eight.step_flops == alone.step_flops
    assert eight.memory["inputs"] == pytest.approx(alone.memory["inputs"] / 8, rel=0.01)
    assert eight.seconds["attention"] == pytest.approx(alone.seconds["attention"] / 8, rel=0.01)
    assert eight.seconds["products"] == pytest.approx(alone.seconds["products"])
    assert alone.advice
    assert not eight.advice
    assert any("--train.context-parallel" in advice for advice in alone.advice)


def test_ranks_share_the_work_and_what_they_hold() -> None:
    alone, eight = plan(wide(), gpus=1), plan(wide(), gpus=8)
    assert eight.step_flops == alone.step_flops
    assert eight.seconds["products"] == pytest.approx(alone.seconds["products"] / 8)
    assert eight.hours == pytest.approx(eight.step_seconds * 1000 / 3600)
    held = {mode: plan(wide(parallel=mode), gpus=8).memory for mode in ("ddp", "zero1", "fsdp", "hybrid")}
    assert held["zero1"]["Adam"] == pytest.approx(held["ddp"]["Adam"] / 8)
    assert held["zero1"]["weights"] == held["ddp"]["weights"]
    assert held["fsdp"]["weights"] == pytest.approx(held["ddp"]["weights"] / 8)
    assert held["hybrid"] == held["fsdp"] != plan(wide(parallel="hybrid"), gpus=16).memory


@pytest.mark.parametrize(("gpu", "gpus"), [*itertools.product(["h200", "a100", "4090"], [1, 2, 8])])
@pytest.mark.parametrize("name", ["imagenet64", "pg19-4k", "copy-131k", "wide", "few", "long"])
def test_advice_makes_it_fit(name: str, gpu: str, gpus: int) -> None:
    experiment = {"wide": wide, "few": few, "long": long}.get(name, lambda: presets.get(name))()
    for advice in plan(experiment, gpu, gpus).advice:
        train, model, on = experiment.train, experiment.model, gpus
        words = shlex.split(advice.replace(",", ""))
        for word, value in itertools.pairwise([*words, ""]):
            if word == "--train.micro-batch-size":
                train = replace(train, micro_batch_size=int(value))
            elif word == "--train.parallel":
                train = replace(train, parallel=value)
            elif word == "--train.context-parallel":
                train = replace(train, context_parallel=int(value))
            elif word == "--model.checkpoint-activations":
                model = replace(model, checkpoint_activations=True)
            elif value == "GPUs":
                on = int(word)
        if "fewer" not in words:
            assert not plan(replace(experiment, model=model, train=train), gpu, on).advice


def test_the_command_prints_a_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["perceiver-ar", "plan", *arguments])
        main()
        return capsys.readouterr().out

    text = run("imagenet64", "--gpus", "8", "--gpu", "h200")
    assert "770,094,339" in text
    assert "--train.micro-batch-size 32" in text
    assert "on 8 GPUs, compiled" in text
    assert "minutes on 1 GPU, compiled" in run("copy-32")
    found = json.loads(run("imagenet64", "--gpus", "8", "--train.micro-batch-size", "32", "--json"))
    assert found["sequences"] == 32
    assert not found["advice"]
    for wrong, said in (
        (["--gpu", "h20"], "did you mean 'h200'?"),
        (["--gpus", "7"], "multiple of 7"),
    ):
        with pytest.raises(SystemExit, match="2"):
            run("imagenet64", *wrong)
        assert said in capsys.readouterr().err


def test_only_perceiver_ar_shares_inputs() -> None:
    experiment = presets.get("wikitext103-xl")
    with pytest.raises(ValueError, match="context_parallel shares out the inputs"):
        replace(experiment, train=replace(experiment.train, context_parallel=2))


def test_advice_for_muon_leaves_its_matrices_whole() -> None:
    experiment = presets.get("imagenet64")
    muon = replace(experiment, train=replace(experiment.train, optimizer="muon"))
    advice = plan(muon, "4090", 8).advice
    assert advice
    assert not any("zero1" in line or "fsdp" in line for line in advice)
