"""The authors' weights give the authors' logits, from arrays and from the checkpoints they publish."""

import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from perceiver_ar import PerceiverAR, cli, presets
from perceiver_ar.interop.official import SWEEPS, _config, from_params, read_checkpoint

FIXTURES = Path(__file__).resolve().parents[2] / "shared/data/fixtures/official"
FORWARD = [
    "a_absolute_sinusoidal",
    "b2_rotary_half_positions",
    "c_images_axial",
    "d_wide_inputs",
    "e_query_mlp",
]


def load(name: str) -> Any:
    path = FIXTURES / f"{name}.npz"
    if not path.exists():
        pytest.skip("needs ../shared/data/fixtures/official")
    return np.load(path)


def params_of(fixture: Any) -> dict[str, np.ndarray]:
    return {key.removeprefix("param/"): fixture[key] for key in fixture if key.startswith("param/")}


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("kwargs", ["config", "explicit_kwargs"])
def test_logits_equal_the_authors_own(name: str, kwargs: str) -> None:
    fixture = load(name)
    model = from_params(params_of(fixture), json.loads(str(fixture[kwargs])))
    tokens, positions = (torch.from_numpy(fixture[key]).long() for key in ("inputs", "input_idxs"))
    logits = model(tokens, positions=positions)
    torch.testing.assert_close(logits, torch.from_numpy(fixture["logits"]), atol=1e-5, rtol=0)


def test_short_sequences_give_the_authors_logits_once_padded_on_the_left() -> None:
    fixture = load("h_short_sequence")
    model = from_params(params_of(fixture), json.loads(str(fixture["config"])))
    tokens, positions = (torch.from_numpy(fixture[key]).long() for key in ("inputs", "input_idxs"))
    lengths = (tokens > 0).sum(1)
    moved = [
        (tokens[row].roll(int(tokens.shape[1] - n), 0), positions[row].roll(int(tokens.shape[1] - n), 0))
        for row, n in enumerate(lengths)
    ]
    tokens, positions = (torch.stack(parts) for parts in zip(*moved, strict=True))
    logits = model(tokens, positions=positions, lengths=lengths)
    torch.testing.assert_close(logits, torch.from_numpy(fixture["logits"]), atol=1e-5, rtol=0)


def test_parameters_that_do_not_fit_are_named() -> None:
    fixture = load("a_absolute_sinusoidal")
    params, kwargs = params_of(fixture), json.loads(str(fixture["config"]))
    with pytest.raises(ValueError, match="perceiver_ar/~/embed/embeddings"):
        from_params({k: v for k, v in params.items() if k != "perceiver_ar/~/embed/embeddings"}, kwargs)
    with pytest.raises(ValueError, match="no place for the parameters perceiver_ar/~/extra/w"):
        from_params(params | {"perceiver_ar/~/extra/w": np.zeros(3)}, kwargs)
    with pytest.raises(ValueError, match="not that of the sinusoids"):
        from_params(params | {"perceiver_ar/~/embed_1/embeddings": np.zeros((51, 64))}, kwargs)


def test_arguments_that_cannot_be_met_are_named() -> None:
    fixture = load("a_absolute_sinusoidal")
    params, kwargs = params_of(fixture), json.loads(str(fixture["config"]))
    for wrong, sentence in (
        ({"mask_style": "other"}, "mask_style='other' is not supported: it must be 'final_block'"),
        ({"position_encoding_type": "foo"}, "position_encoding_type='foo' is not supported"),
        ({"num_clases": 3}, "did you mean 'num_classes'"),
        ({"initial_query_embed_style": "mlp"}, "query style 'mlp' with 2 layers"),
    ):
        with pytest.raises(ValueError, match=sentence):
            from_params(params, kwargs | wrong)
    with pytest.raises(ValueError, match="the argument num_classes is missing"):
        from_params(params, {k: v for k, v in kwargs.items() if k != "num_classes"})


@pytest.mark.parametrize("shared", [False, True])
def test_learned_queries_are_taken_over(shared: bool) -> None:
    fixture = load("a_absolute_sinusoidal")
    params, kwargs = params_of(fixture), json.loads(str(fixture["config"]))
    learned = np.random.default_rng(0).normal(size=(1 if shared else 16, 64)).astype(np.float32)
    params = {k: v for k, v in params.items() if not k.startswith("perceiver_ar/~/linear/")}
    style = {"initial_query_embed_style": "learned", "share_learned_initial_query": shared}
    model = from_params(params | {"perceiver_ar/q_embed_learned": learned}, kwargs | style)
    assert model.config.queries == ("learned-shared" if shared else "learned")
    assert np.array_equal(model.queries.learned.weight.detach().numpy(), learned)


class FlatMapping:
    """Pickled as Haiku's."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def __reduce__(self) -> Any:
        return FlatMapping, (self.content,)


def reconstruct_device_array(*args: Any) -> None: ...
def _reconstruct_array(*args: Any) -> None: ...


class JaxArray:
    """Pickled as JAX's."""

    def __init__(self, values: np.ndarray, by: Callable[..., None]) -> None:
        self.values, self.by = np.array(values), by

    def __reduce__(self) -> Any:
        return self.by, (*self.values.__reduce__(), {"weak_type": False, "named_shape": {}})


class ScaleByAdamState(NamedTuple):
    count: Any
    mu: Any
    nu: Any


class EmptyState(NamedTuple): ...


FOREIGN = {
    "haiku._src.data_structures": FlatMapping,
    "jax._src.device_array": reconstruct_device_array,
    "jax._src.array": _reconstruct_array,
    "optax._src.transform": ScaleByAdamState,
    "optax._src.base": EmptyState,
}


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of the libraries that wrote the checkpoint, as far as a pickle names them."""
    made: dict[str, ModuleType] = {}
    for name, thing in FOREIGN.items():
        package, inner, last = name.split(".")
        for full in (package, f"{package}.{inner}", name):
            made.setdefault(full, ModuleType(full))
            monkeypatch.setitem(sys.modules, full, made[full])
        setattr(sys.modules[package], inner, sys.modules[f"{package}.{inner}"])
        setattr(sys.modules[f"{package}.{inner}"], last, sys.modules[name])
        setattr(sys.modules[name], thing.__name__, thing)
        monkeypatch.setattr(thing, "__module__", name)


def nested(params: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    modules: dict[str, dict[str, np.ndarray]] = {}
    for name, array in params.items():
        module, _, leaf = name.rpartition("/")
        modules.setdefault(module, {})[leaf] = array
    return modules


def as_haiku(params: dict[str, np.ndarray], by: Callable[..., None]) -> FlatMapping:
    modules = nested(params).items()
    return FlatMapping(
        {m: FlatMapping({n: JaxArray(x, by) for n, x in inner.items()}) for m, inner in modules}
    )


def as_trained(params: dict[str, np.ndarray], by: Callable[..., None]) -> dict[str, Any]:
    """What the authors' training code dumps."""
    count = JaxArray(np.array(7), by)
    adam = ScaleByAdamState(count, as_haiku(params, by), as_haiku(params, by))
    return {
        "global_step": 7,
        "params": as_haiku(params, by),
        "state": FlatMapping({}),
        "opt_state": (EmptyState(), (adam, EmptyState())),
    }


def as_copies(params: dict[str, np.ndarray]) -> dict[str, Any]:
    return {"params": nested({name: np.stack([x, x + 1]) for name, x in params.items()})}


LAYOUTS: dict[str, Callable[[dict[str, np.ndarray]], Any]] = {
    "trained": lambda params: as_trained(params, reconstruct_device_array),
    "trained with a newer JAX": lambda params: as_trained(params, _reconstruct_array),
    "numpy": lambda params: {"params": nested(params), "step": np.int64(3)},
    "copies": as_copies,
    "bare": nested,
    "flat": lambda params: params,
}


def dumped(content: Any, protocol: int | None = None) -> bytes:
    return pytest.importorskip("dill").dumps(content, protocol)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["perceiver-ar", "convert", *map(str, arguments)])
    cli.main()


@pytest.mark.usefixtures("foreign")
@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_converted_checkpoints_give_the_authors_logits(
    name: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture = load(name)
    (tmp_path / "checkpoint.dill").write_bytes(dumped(LAYOUTS[layout](params_of(fixture))))
    (tmp_path / "kwargs.json").write_text(str(fixture["explicit_kwargs"]))
    where = tmp_path if layout == "trained" else tmp_path / "checkpoint.dill"
    run(monkeypatch, "official", where, tmp_path / "model", "--kwargs", tmp_path / "kwargs.json")
    model = PerceiverAR.from_pretrained(tmp_path / "model")
    tokens, positions = (torch.from_numpy(fixture[key]).long() for key in ("inputs", "input_idxs"))
    logits = model(tokens, positions=positions)
    torch.testing.assert_close(logits, torch.from_numpy(fixture["logits"]), atol=1e-5, rtol=0)


TINY: dict[str, Any] = {
    "max_context_length": 12,
    "z_index_dim": 4,
    "num_z_channels": 8,
    "input_embed_dim": 8,
    "num_transformer_heads": 2,
    "num_cross_attend_heads": 2,
    "num_transformers_per_block": 1,
    "position_encoding_type": "rotary",
    "fraction_to_rotate": 1.0,
}


def tiny_params() -> dict[str, np.ndarray]:
    """Of a model of TINY, by the authors' names."""
    top, shapes = "perceiver_ar/~", {"perceiver_ar/~/embed/embeddings": (11, 8)}

    def add(kind: str, module: str, *shape: int) -> None:
        names = {"linear": ("w", "b"), "norm": ("scale", "offset")}[kind]
        shapes.update({f"{module}/{names[0]}": shape, f"{module}/{names[1]}": shape[-1:]})

    add("linear", f"{top}/linear", 8, 8)
    for block, norms in ((f"{top}/cross_attention", 3), (f"{top}/self_attention", 2)):
        for number in range(norms):
            add("norm", f"{block}/layer_norm{f'_{number}' if number else ''}", 8)
        for number in range(4):
            add("linear", f"{block}/attention/linear{f'_{number}' if number else ''}", 8, 8)
        add("linear", f"{block}/dense/linear", 8, 32)
        add("linear", f"{block}/dense/linear_1", 32, 8)
    add("norm", "perceiver_ar/layer_norm", 8)
    add("linear", f"{top}/logits", 8, 11)
    chance = np.random.default_rng(0)
    return {name: chance.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.usefixtures("foreign")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_every_layout_gives_the_model_of_its_parameters(layout: str, protocol: int, tmp_path: Path) -> None:
    params, path = tiny_params(), tmp_path / "checkpoint.dill"
    (tmp_path / "kwargs.json").write_text(json.dumps(TINY))
    for content in (
        dumped(LAYOUTS[layout](params), protocol),
        pickle.dumps(LAYOUTS[layout](params), protocol),
    ):
        path.write_bytes(content)
        found, kwargs = read_checkpoint(path, str(tmp_path / "kwargs.json"))
        assert kwargs == TINY | {"num_classes": 11, "input_idx_size": [-1]}
        assert found.keys() == params.keys()
        assert all(np.array_equal(found[name], params[name]) for name in params)
    tokens = torch.arange(10)[None]
    assert torch.equal(from_params(found, kwargs)(tokens), from_params(params, kwargs)(tokens))


@pytest.mark.parametrize("whole", [True, False])
def test_the_arguments_are_taken_from_the_config_where_there_is_one(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {name: value for name, value in TINY.items() if name != "max_context_length"}
    config: dict[str, Any] = {"model": {"perceiver_ar_kwargs": model}, "data": {"max_context_length": 12}}
    config = {"experiment_kwargs": {"config": config}, "seed": 3} if whole else TINY
    (tmp_path / "it.pkl").write_bytes(pickle.dumps({"params": nested(tiny_params()), "config": config}))
    run(monkeypatch, "official", tmp_path / "it.pkl", tmp_path / "model")
    assert "model. Next: PerceiverAR.from_pretrained(" in capsys.readouterr().out
    expected = from_params(tiny_params(), TINY | {"num_classes": 11, "input_idx_size": [-1]})
    found = PerceiverAR.from_pretrained(tmp_path / "model")
    assert found.config == expected.config
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))


def test_the_authors_experiments_are_the_presets_of_the_paper() -> None:
    for name, preset, rows in (
        ("random_mirrored_32", "copy-32", [33]),
        ("random_mirrored_131072", "copy-131k", [131_073]),
        ("imagenet_w_positions", "imagenet64", [66, 66, 5]),
    ):
        ours = presets.get(preset).model
        theirs = _config(SWEEPS[name] | {"num_classes": 259, "input_idx_size": rows})
        for key in ("vocab_size", "latents", "layers", "channels", "heads", "positions", "residual_dropout"):
            assert getattr(theirs, key) == getattr(ours, key), (name, key)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_mistakes_of_a_conversion_are_told_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    params = nested(tiny_params())
    for name, content in {
        "good": {"params": params},
        "list": [params],
        "other": {"params": {"a": {"w": np.zeros(3)}}},
        "text": {"params": params | {"a": {"w": "abc"}}},
        "none": {"params": None},
        "deep": {"params": params | {"a": {"w": {"x": np.zeros(3)}}}},
        "evil": {"params": params, "state": Evil()},
    }.items():
        Path(f"{name}.dill").write_bytes(pickle.dumps(content))
    for name, content in {
        "tiny": TINY,
        "list": [1],
        "sizes": TINY | {"input_idx_size": 3},
        "wave": TINY | {"max_wavelength": "long"},
        "layers": TINY | {"num_transformers_per_block": 10**12},
        "channels": TINY | {"num_z_channels": 2**40},
        "misspelt": TINY | {"num_clases": 3},
    }.items():
        Path(f"{name}.json").write_text(json.dumps(content))
    Path("bad.json").write_text("{")
    Path("there").mkdir()
    with pytest.raises(SystemExit):
        run(monkeypatch, "oficial", "good.dill", "new")
    assert "'oficial' is not a format; did you mean 'official'?" in capsys.readouterr().err
    for source, folder, kwargs, sentence in (
        ("good.dill", "there", "tiny.json", "there exists already"),
        ("missing", "new", "tiny.json", "missing is not a file"),
        ("there", "new", "tiny.json", "there/checkpoint.dill is not a file"),
        ("good.dill", "new", None, "good.dill does not say how its model was made: add --kwargs with the"),
        ("good.dill", "new", "random_mirrored_13107", "did you mean 'random_mirrored_131072'?"),
        ("good.dill", "new", "bad.json", "bad.json is not JSON"),
        ("good.dill", "new", "list.json", "list.json must hold one JSON object"),
        ("good.dill", "new", "sizes.json", "input_idx_size must be a list, but is 3."),
        ("good.dill", "new", "wave.json", "max_wavelength must be a number"),
        ("good.dill", "new", "layers.json", "1,000,000,000,000 layers cannot be made of"),
        ("good.dill", "new", "channels.json", "no model can be made of these arguments"),
        ("good.dill", "new", "misspelt.json", "did you mean 'num_classes'"),
        ("good.dill", "new", "random_mirrored_32", "lack 'perceiver_ar/~/embed_1"),
        ("list.dill", "new", "tiny.json", "it must be a dict with 'params'"),
        ("other.dill", "new", "tiny.json", "no parameters of a Perceiver AR"),
        ("none.dill", "new", "tiny.json", "no parameters of a Perceiver AR"),
        ("text.dill", "new", "tiny.json", "no array for the parameter 'a/w'"),
        ("deep.dill", "new", "tiny.json", "no array for the parameter 'a/w'"),
        ("evil.dill", "new", "tiny.json", "refused, and nothing of it was run: it holds 'posix.system'"),
    ):
        options = () if kwargs is None else ("--kwargs", kwargs)
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, "official", source, folder, *options)
        said = capsys.readouterr()
        assert ended.value.code == 2
        assert sentence in said.err
        assert said.err.startswith("perceiver-ar: ")
        assert said.out == ""
        assert not Path("new").exists()
        assert not Path("ran").exists()


def test_bytes_that_stand_for_many_parameters_are_not_believed(tmp_path: Path) -> None:
    shared = b"\0" * 4000
    array = np.zeros(1000, np.float32).__reduce__()
    state = (*array[2][:4], shared)

    class Shared:
        def __reduce__(self) -> Any:
            return (*array[:2], state)

    names = ["perceiver_ar/layer_norm/scale", *map(str, range(9))]
    (tmp_path / "it").write_bytes(pickle.dumps({name: Shared() for name in names}))
    with pytest.raises(ValueError, match="claims more parameters than fit in it"):
        read_checkpoint(tmp_path / "it", "random_mirrored_32")
