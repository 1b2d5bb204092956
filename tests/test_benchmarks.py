"""The benchmark runs, and says what it measured."""

import subprocess
import sys
from pathlib import Path

import torch

from perceiver_ar import ModelConfig, PerceiverAR

ROOT = Path(__file__).resolve().parents[1]

from benchmarks.__main__ import Size, time_training  # noqa: E402
from benchmarks.generation import time_generation  # noqa: E402


def test_a_training_step_is_timed() -> None:
    size = Size(ModelConfig(259, 32, 8, channels=16, heads=2, layers=1), batch=2)
    result = time_training(size, torch.device("cpu"), repeats=2, compiled=False, cross_dropout=0.5)
    assert 0 < result["spread"][0] <= result["sequences_per_second"] <= result["spread"][1]
    assert result["device"] == "cpu"


def test_generation_is_timed() -> None:
    model = PerceiverAR(ModelConfig(259, 32, 8, channels=16, heads=2, layers=1))
    for cache in (False, True):
        result = time_generation(model, rows=2, prompt=3, tokens=9, cache=cache, compiled=False)
        assert result["tokens_per_second"] > 0
        assert result["ms_per_step"] > 0


def test_a_misspelt_size_is_refused() -> None:
    command = [sys.executable, "-m", "benchmarks", "latop"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == "benchmarks: 'latop' is not a size; did you mean 'laptop'?\n"
