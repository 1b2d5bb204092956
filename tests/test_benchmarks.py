"""Every benchmark runs, and says what it measured."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from perceiver_ar import (
    Experiment,
    ModelConfig,
    PerceiverAR,
    TrainConfig,
    TransformerConfig,
    TransformerXL,
    TransformerXLConfig,
    build,
    train,
)
from perceiver_ar.flops import forward_flops
from perceiver_ar.store import write_store
from perceiver_ar.timing import time_repeatedly

ROOT = Path(__file__).resolve().parents[1]

import benchmarks.fp8 as fp8_module  # noqa: E402
from benchmarks import evaluation, generation, kernels, loading, measure, sizes, training  # noqa: E402
from benchmarks.__main__ import draw  # noqa: E402

CPU = torch.device("cpu")
SMALL = sizes.Size(ModelConfig(259, 64, 16, channels=16, heads=2, layers=1), batch=2)


@pytest.fixture(autouse=True)
def matmuls_of_any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "matmul_rate", lambda device, dtype: 1e12)


def check(figure: measure.Figure) -> None:
    line = json.loads(figure.line())
    assert 0 < line["spread"][0] <= line["median"] <= line["spread"][1]
    assert line["device"] == "cpu"
    assert line["torch"] == torch.__version__


@pytest.mark.parametrize(("plain", "fp8"), [(False, False), (True, False), (False, True)])
def test_a_training_step_is_timed(plain: bool, fp8: bool) -> None:
    figure = training.time_training("small", SMALL, CPU, 2, cross_dropout=0.5, plain=plain, fp8=fp8)
    check(figure)
    assert torch.nn.functional.linear is fp8_module.plain_linear
    assert figure.details["of_matmul_rate"] > 0


def test_products_of_eight_bit_floats_are_near_the_others() -> None:
    torch.manual_seed(0)
    for rows, exact in ((16, False), (15, True)):
        x, weight, bias = torch.randn(2, rows, 48), torch.randn(64, 48), torch.randn(64)
        probe, found = torch.randn(2, rows, 64), []
        for linear in (fp8_module.linear, fp8_module.plain_linear):
            given = [part.clone().requires_grad_() for part in (x, weight, bias)]
            y = linear(*given)
            (y * probe).sum().backward()
            found.append([y.detach(), *(part.grad for part in given)])
        for eight, plain in zip(*found, strict=True):
            error = (eight - plain).norm() / plain.norm()
            assert error == 0 if exact else error < 0.1
        assert torch.equal(found[0][0], found[1][0]) is exact  # and not by the same products


def test_losses_with_and_without_eight_bit_floats_are_set_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_store(tmp_path / "store", {"train": np.arange(3000)[None] % 17 + 3}, 259, "text")
    monkeypatch.setitem(sizes.SIZES, "small", SMALL)
    fp8_module.compare(tmp_path / "store", tmp_path / "runs", "small", steps=20, batch=2, device="cpu")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in lines] == list(range(2, 21, 2))
    assert all(abs(line["plain"] - line["fp8"]) < 0.05 for line in lines)
    assert any(line["plain"] != line["fp8"] for line in lines)


@pytest.mark.slow
def test_fast_paths_are_at_least_1_3_times_as_fast_on_a_cpu() -> None:
    size, best = replace(sizes.SIZES["laptop"], batch=1), {False: 0.0, True: 0.0}
    for plain in (False, True, False, True):  # others may be using the machine
        rates = training.time_training("laptop", size, CPU, 1, plain=plain).values
        best[plain] = max(best[plain], *rates, 0)
    assert best[False] > 1.3 * best[True]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_two_hundred_steps_learn_alike_with_and_without_fast_paths(tmp_path: Path, dropout: float) -> None:
    steps = np.random.default_rng(0).choice([1, 2, 5], size=(4, 3000), p=[0.7, 0.2, 0.1])
    write_store(tmp_path / "store", {"train": 3 + steps.cumsum(axis=1) % 30}, 33, "tokens")
    model = ModelConfig(33, 96, 16, channels=32, heads=2, layers=2, cross_dropout=dropout)
    settings = TrainConfig(steps=200, batch_size=8, learning_rate=3e-3, warmup_steps=20, log_every=1)
    curves = []
    for plain in (False, True):
        with training.slow_twins(plain):
            run = train(
                Experiment("alike", "tokens", model, settings),
                tmp_path / "store",
                tmp_path / f"run-{plain}",
                show=False,
                device="cpu",
            )
        lines = (Path(run["run"]) / "metrics.jsonl").read_text().splitlines()
        curves.append([json.loads(line)["loss"] for line in lines])
    fast, slow = map(np.array, curves)
    assert slow[-20:].mean() < 0.5 * slow[0]
    assert np.abs(fast - slow).max() < 0.02


def test_generation_is_timed() -> None:
    model = PerceiverAR(SMALL.model)
    found: list[Any] = []
    for mode, tokens in (("cached", None), ("cached", 6), ("no-caching", None)):
        for figure in generation.time_generation("small", model, 2, 20, tokens, mode):
            check(figure)
            found.append((figure.unit, figure.details.get("refreshes")))
            assert figure.unit != "% of the time" or figure.median < 100
    drawn = [[("ms/token", n), ("tokens/s", n)] for n in (4, 0, 0)]
    share = ("% of the time", None)
    assert found == [*drawn[0], share, *drawn[1], share, *drawn[2]]


def test_generation_in_eight_bits_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sizes.SIZES, "small", SMALL)
    figures = list(draw("small", CPU, (1,), (20,), int8=True, tokens=6, mode="cached", compiled=False))
    for figure in figures:
        check(figure)
    assert {figure.case for figure in figures} == {"small, int8", "small, int8, refreshes"}


def test_evaluation_and_loading_are_timed() -> None:
    figures = [*evaluation.time_evaluation("small", SMALL, CPU, 2), loading.time_loading("small", SMALL, 2)]
    for figure in figures:
        check(figure)


def test_every_kernel_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CPU_SHAPES", [(1, 2, 8, 32, 8), (1, 2, 8, 8, 8)])
    figures = list(kernels.time_attention(CPU, 2))
    for figure in figures:
        check(figure)
    named = {figure.case.split(": ")[1].split(",")[0] for figure in figures}
    assert named == {"chosen", "square", "in two", "reference", "rows"}


def test_arithmetic_is_counted_as_the_brief_counts_it() -> None:
    # 77.6 sequences/s of the largest size are 419 TFLOP/s.
    assert 77.6 * 3 * forward_flops(sizes.SIZES["12k-60"].model) == pytest.approx(419e12, rel=2e-3)


def test_arithmetic_is_what_torch_counts_but_for_what_is_hidden() -> None:
    config = ModelConfig(33, 64, 16, channels=32, heads=2, layers=2, input_channels=48)
    model, tokens = PerceiverAR(config), torch.randint(33, (1, 64))
    with training.slow_twins(True), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    hidden = 4 * (16 * 15 / 2) * (48 + 2 * 32)  # above the diagonal: computed there, then masked
    assert counter.get_total_flops() == forward_flops(config) + hidden


def test_arithmetic_of_the_baselines_is_what_torch_counts_but_for_what_is_hidden() -> None:
    hidden = 2 * 4 * (16 * 15 / 2) * 32
    plain = TransformerConfig(33, 16, channels=32, heads=2, layers=2)
    with training.slow_twins(True), FlopCounterMode(display=False) as counter, torch.no_grad():
        build(plain)(torch.randint(33, (1, 16)))
    assert counter.get_total_flops() == forward_flops(plain) + hidden
    config = TransformerXLConfig(33, 16, 8, 8, channels=32, heads=2, layers=2)
    model, tokens = TransformerXL(config).requires_grad_(False), torch.randint(33, (1, 16))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.score_on(tokens, tokens, model.blank(1), None)
    assert counter.get_total_flops() == forward_flops(config) + hidden


@pytest.mark.parametrize("in_a_row", [1, 3])
def test_time_is_what_the_clock_says(in_a_row: int) -> None:
    seconds = time_repeatedly(lambda: time.sleep(0.02), CPU, 3, warm_up=0, in_a_row=in_a_row)
    assert all(0.02 <= second < 0.2 for second in seconds)


def test_lines_and_a_table_are_printed() -> None:
    result = run("load", "laptop", "--repeats", "2")
    assert result.returncode == 0
    assert json.loads(result.stdout)["benchmark"] == "load"
    assert "sequences/s" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("latop",), "'latop' is not a benchmark or size; did you mean 'laptop'?"),
        (("load", "--repeats", "0"), "--repeats must be at least 1."),
        (("generate", "--tokens", "4"), "--tokens must be at least 5."),
        (("generate", "--batch", "0"), "--batch must be at least 1."),
        (("attention", "8k"), "attention is timed at shapes of its own: give no size."),
    ],
)
def test_bad_options_are_refused_before_anything_is_timed(arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stderr == f"benchmarks: {said}\n"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
