"""Weights of a few bits: as near as these allow, as small as they promise, and read by every command."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from perceiver_ar import ModelConfig, PerceiverAR, presets
from perceiver_ar.packed import SCALE, pack, unpack
from perceiver_ar.pretrained import WEIGHTS, save_packed
from perceiver_ar.run import export, export_packed, load
from perceiver_ar.tasks.copy import CopyTask
from tests.forked import run

CONFIG = ModelConfig(259, 32, 16, channels=32, heads=2, layers=2)


@pytest.mark.parametrize("bits", range(2, 9))
def test_each_weight_is_the_nearest_that_its_row_s_scale_has(bits: int) -> None:
    torch.manual_seed(bits)
    weights = {
        "a": torch.randn(7, 13),
        "b": torch.randn(5, 3, 2),
        "zero": torch.zeros(2, 3),
        "c": torch.randn(9),
    }
    shapes = {name: weight.shape for name, weight in weights.items()}
    packed = pack(weights, bits)
    assert packed["a"].numel() == -(-7 * 13 * bits // 8)
    found = unpack(packed, bits, shapes)
    assert found.keys() == weights.keys()
    assert torch.equal(found["c"], weights["c"])
    assert torch.equal(found["zero"], weights["zero"])
    for name in ("a", "b"):
        step = packed[name + SCALE].float().view(-1, *[1] * (weights[name].dim() - 1))
        assert found[name].shape == weights[name].shape
        assert ((found[name] - weights[name]).abs() <= step * 0.502).all()  # scales are of 16 bits themselves
    assert all(
        torch.equal(again, found[name]) for name, again in unpack(pack(found, bits), bits, shapes).items()
    )


def test_a_packed_model_is_loaded_like_any_other(tmp_path: Path) -> None:
    model = PerceiverAR(CONFIG).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    save_packed(model, tmp_path / "packed", 8)
    model.save_pretrained(tmp_path / "whole")
    sizes = [(tmp_path / name / WEIGHTS).stat().st_size for name in ("packed", "whole")]
    assert sizes[0] < 0.35 * sizes[1]
    again = PerceiverAR.from_pretrained(tmp_path / "packed")
    tokens = torch.randint(259, (2, 32))
    with torch.no_grad():
        logits = model(tokens)
        difference = (again(tokens) - logits).abs().mean() / logits.std()
    assert 0 < difference < 0.05
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / WEIGHTS).stat().st_size == sizes[1]


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    save_packed(PerceiverAR(CONFIG), tmp_path, 6)
    weights = load_file(tmp_path / WEIGHTS)
    names = ["self_attends.0.query.weight", "norm.weight"]
    assert set(names) <= weights.keys()
    weights[names[0]] = weights[names[0]][:-1]
    del weights[names[1]]
    save_file(weights, tmp_path / WEIGHTS, metadata={"bits": "6"})
    with pytest.raises(ValueError, match=r"does not fit its config\.json") as said:
        PerceiverAR.from_pretrained(tmp_path)
    assert all(name in str(said.value) for name in names)


@pytest.mark.parametrize(
    ("name", "change", "bits", "said"),
    [
        ("", None, "x", "has weights of 'x' bits"),
        ("", None, "9", "has weights of '9' bits"),
        ("self_attends.0.query.weight", lambda x: x.float(), "6", "self_attends.0.query.weight"),
        ("self_attends.0.query.weight.scale", lambda x: x.repeat(2), "6", "query.weight.scale"),
        ("foo.scale", lambda x: x, "6", "foo.scale"),
        ("norm.weight", Tensor.half, "6", "norm.weight (F16)"),
        ("norm.weight", lambda x: x.to(torch.complex64), "6", "norm.weight (C64)"),
        ("self_attends.0.query.weight.scale", Tensor.long, "6", "query.weight.scale (I64)"),
        ("self_attends.0.query.weight", lambda x: torch.zeros(32, 32), "6", "query.weight (F32)"),
    ],
)
def test_what_was_not_packed_here_is_refused(
    tmp_path: Path, name: str, change: Any, bits: str, said: str
) -> None:
    save_packed(PerceiverAR(CONFIG), tmp_path, 6)
    weights = load_file(tmp_path / WEIGHTS)
    if name:
        weights[name] = change(weights.get(name, torch.ones(3)))
    save_file(weights, tmp_path / WEIGHTS, metadata={"bits": bits})
    with pytest.raises(ValueError, match=re.escape(said)):
        PerceiverAR.from_pretrained(tmp_path)


def test_what_cannot_be_packed_is_named() -> None:
    for value in (3e5, torch.inf, torch.nan):
        with pytest.raises(ValueError, match="a has weights that are too large"):
            pack({"a": torch.full((2, 3), value)}, 2)


def test_a_run_is_packed_for_every_command_and_tells_no_paths(tmp_path: Path) -> None:
    task = CopyTask(length=32)
    experiment = replace(presets.get("copy-32"), model=CONFIG, options=task.to_dict())
    export(tmp_path / "run/model", PerceiverAR(CONFIG), experiment, task, {"a/folder": 1.0})
    done = run("pack", str(tmp_path / "run"), str(tmp_path / "small"), "--bits", "5")
    assert done.returncode == 0, done.stderr
    assert "MB instead of" in done.stdout
    assert "a/folder" not in (tmp_path / "small/experiment.json").read_text()
    assert load(tmp_path / "small", "cpu")[2] is None
    evaluated = run("evaluate", str(tmp_path / "small"), "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    for folder, bits, sentence in (
        (tmp_path / "small", 5, "exists already"),
        (tmp_path / "new", 9, "from 2 to 8 bits, not 9"),
        (tmp_path / "new", 1, "not 1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            export_packed(tmp_path / "run", folder, bits)
    assert not (tmp_path / "new").exists()
