"""Model folders: config.json and model.safetensors, on disk or on the Hugging Face hub."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from huggingface_hub import PyTorchModelHubMixin, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from perceiver_ar.config import FORMAT_VERSION
from perceiver_ar.packed import FEW, SCALE, pack, unpack
from perceiver_ar.strict import Config

CONFIG, WEIGHTS, BITS = "config.json", "model.safetensors", "bits"
_WRAPPED = "model."
"""Prefix of the weights' names in folders written through transformers."""


class Pretrained(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="perceiver-ar",
    paper_url="https://arxiv.org/abs/2202.07765",
    tags=["perceiver-ar"],
):
    """A module built from one config, with save_pretrained, from_pretrained and push_to_hub."""

    config_class: ClassVar[type[Config]]
    model_type: ClassVar[str]
    config: Any

    def _save_pretrained(self, save_directory: Path) -> None:
        weights = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        save_file(weights, save_directory / WEIGHTS, metadata={"format": "pt"})
        head = {"model_type": self.model_type, "format_version": FORMAT_VERSION}
        (save_directory / CONFIG).write_text(json.dumps(head | self.config.to_dict(), indent=2) + "\n")

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *, map_location: str = "cpu", **hub: Any
    ) -> Self:
        """Loads a folder, or a repository on the hub, in evaluation mode.

        hub: arguments of huggingface_hub's snapshot_download, such as revision, token or cache_dir.
        """
        folder = find(pretrained_model_name_or_path, hub)
        with torch.device("meta"):
            model = cls(cls.read_config(folder))
        try:
            weights = load_weights(folder / WEIGHTS, model, str(map_location))
            if all(name.startswith(_WRAPPED) for name in weights):  # written by interop/causal_lm.py
                weights = {name.removeprefix(_WRAPPED): tensor for name, tensor in weights.items()}
            model.load_state_dict(weights, assign=True)
        except FileNotFoundError:
            sharded = ", but parts of it: save it with a larger max_shard_size"
            found = sharded if (folder / f"{WEIGHTS}.index.json").exists() else ""
            raise ValueError(f"{folder} holds no {WEIGHTS}{found}.") from None
        except SafetensorError as error:
            raise ValueError(f"{folder / WEIGHTS} is damaged or not a safetensors file: {error}") from None
        except RuntimeError as error:  # its text names the missing, unexpected or misshapen tensors
            raise ValueError(f"{folder / WEIGHTS} does not fit its {CONFIG}: {error}") from None
        return model.eval()

    @classmethod
    def read_config(cls, folder: Path) -> Config:
        """Reads and checks the config of a model folder."""
        try:
            data = json.loads((folder / CONFIG).read_text())
        except FileNotFoundError:
            raise ValueError(f"{folder} holds no {CONFIG}: is it a model folder?") from None
        except ValueError as error:
            raise ValueError(f"{folder / CONFIG} is not JSON: {error}") from None
        if not isinstance(data, dict):
            raise ValueError(f"{folder / CONFIG} holds no settings.")
        kind, version = data.pop("model_type", None), data.pop("format_version", None)
        if kind != cls.model_type:
            raise ValueError(f"{folder} holds a model of type {kind!r}, not {cls.model_type!r}.")
        if version != FORMAT_VERSION:
            raise ValueError(
                f"{folder / CONFIG} has format version {version}, but this perceiver-ar reads version "
                f"{FORMAT_VERSION}: install the one that wrote it."
            )
        if "transformers_version" in data:  # its many other settings mean nothing here
            names = {f.name for f in fields(cls.config_class)}
            data = {name: value for name, value in data.items() if name in names}
        return cls.config_class.from_dict(data)


def load_weights(path: Path, model: nn.Module, device: str) -> dict[str, torch.Tensor]:
    """Loads the weights of a file, unpacking them if they were packed."""
    with safe_open(path, framework="pt") as file:
        bits = (file.metadata() or {}).get(BITS)
    if bits is None:
        check_types(path)
        return load_file(path, device=device)
    if bits not in map(str, FEW):
        raise ValueError(f"{path} has weights of '{bits}' bits, which no perceiver-ar writes.")
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    check_packed_types(path, shapes)
    weights = unpack(load_file(path), int(bits), shapes)
    return {name: tensor.to(device) for name, tensor in weights.items()}


def save_packed(model: "Pretrained", folder: Path, bits: int) -> None:
    """Saves a model as save_pretrained does, but with the given number of bits per weight."""
    weights = pack(model.state_dict(), bits)
    model.save_pretrained(folder)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt", BITS: str(bits)})


def check_packed_types(path: Path, shapes: Mapping[str, torch.Size]) -> None:
    """Raises unless the weights have the types that `pack` gives them."""
    kinds, wanted = _kinds(path), dict[str, str]()
    for name, shape in shapes.items():
        wanted |= {name: "F32"} if len(shape) < 2 else {name: "U8", name + SCALE: "F16"}
    wrong = [f"{name} ({kind})" for name, kind in kinds.items() if kind != wanted.get(name, kind)]
    if wrong:
        raise ValueError(f"{path} has weights of other types than packed ones: {', '.join(sorted(wrong))}.")


def check_types(path: Path) -> None:
    """Raises unless all weights have the same floating-point type."""
    kinds = _kinds(path)
    floats = Counter(kind for kind in kinds.values() if kind in _FLOATS)
    (most, _), *_ = floats.most_common(1) or [("F32", 0)]
    wrong = [f"{name} ({kind})" for name, kind in kinds.items() if kind != most]
    if wrong:
        raise ValueError(f"{path} has weights of other types than {most}: {', '.join(sorted(wrong))}.")


def _kinds(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


_FLOATS = ("F64", "F32", "F16", "BF16")


def find(name: str | Path, hub: dict[str, Any]) -> Path:
    """The folder of that name, or the local copy of a repository on the hub."""
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(str(name), allow_patterns=[CONFIG, WEIGHTS], **hub))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"'{name}' is neither a folder nor a model that the hub gives: {reason}") from None
