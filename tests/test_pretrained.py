"""Model folders: what is saved is what is loaded, and what does not fit is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from perceiver_ar import ModelConfig, PerceiverAR


def make(**settings: Any) -> PerceiverAR:
    config = ModelConfig(vocab_size=30, context=12, latents=5, channels=16, heads=2, layers=1, **settings)
    model = PerceiverAR(config).eval()
    torch.nn.init.normal_(model.norm.bias)
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tied": True},
        {"cutoffs": (4, 12), "cutoff_factor": 2},
        {"positions": "sinusoidal", "queries": "mlp"},
    ],
    ids=str,
)
def test_a_saved_model_comes_back_the_same(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = make(**settings)
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    loaded = PerceiverAR.from_pretrained(tmp_path)
    tokens = torch.randint(30, (2, 12))
    assert loaded.config == model.config
    assert not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert torch.equal(loaded(tokens), model(tokens))


def test_the_config_carries_type_and_version(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    assert data["model_type"] == "perceiver_ar"
    assert data["format_version"] == 1
    assert data["latents"] == 5


def test_what_push_to_hub_uploads_can_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi

    class Repo:
        repo_id = "me/mine"

    def upload(self: HfApi, *, folder_path: Path, **rest: Any) -> None:
        for path in Path(folder_path).iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())

    monkeypatch.setattr(HfApi, "create_repo", lambda self, **rest: Repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    model = make()
    model.push_to_hub("me/mine")
    loaded = PerceiverAR.from_pretrained(tmp_path)
    assert torch.equal(loaded.norm.bias, model.norm.bias)


def change_config(folder: Path, **changes: Any) -> None:
    data = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in data.items() if v != "gone"}))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"latent": 3}, "did you mean 'latents'"),
        ({"format_version": 99}, "format version 99"),
        ({"model_type": "bert"}, "a model of type 'bert'"),
        ({"vocab_size": "gone"}, "needs the setting 'vocab_size'"),
        ({"layers": 2}, "self_attends.1"),
        ({"channels": 32}, "size mismatch for"),
    ],
)
def test_a_folder_whose_config_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    make().save_pretrained(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=sentence):
        PerceiverAR.from_pretrained(tmp_path)


def test_a_folder_whose_tensors_do_not_fit_is_refused(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"extra": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="extra"):
        PerceiverAR.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ValueError, match="damaged or not a safetensors file"):
        PerceiverAR.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no model\.safetensors"):
        PerceiverAR.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds no settings"):
        PerceiverAR.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        PerceiverAR.from_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        PerceiverAR.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="neither a folder nor a model"):
        PerceiverAR.from_pretrained(tmp_path / "nowhere")
