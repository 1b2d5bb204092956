"""Strided evaluation scores every token once, as a slow loop would."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from perceiver_ar import ModelConfig, PerceiverAR, evaluate, evaluation
from perceiver_ar.baselines import TransformerXL
from perceiver_ar.config import TransformerXLConfig
from perceiver_ar.data import collate
from perceiver_ar.evaluation import Documents, Windowing, score, windows
from perceiver_ar.store import write_store
from perceiver_ar.tasks.base import Document
from perceiver_ar.tasks.copy import CopyTask
from perceiver_ar.tasks.text import TextTask
from perceiver_ar.tasks.tokens import TokensTask
from perceiver_ar.windows import Window

V, M, N = 20, 12, 6


def test_a_batch_goes_to_a_device_but_for_its_lengths() -> None:
    pair = [Window(np.arange(3, 9), 0, 2), Window(np.arange(3, 7), 0, 2)]
    batch = collate(pair, 2, TokensTask()).to(torch.device("meta"))
    assert batch.inputs.device.type == batch.targets.device.type == "meta"
    assert batch.lengths is not None
    assert batch.lengths.tolist() == [5, 3]


def make(**settings: Any) -> PerceiverAR:
    config = ModelConfig(vocab_size=V, context=M, latents=N, channels=16, heads=2, layers=1, **settings)
    model = PerceiverAR(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def documents() -> list[Document]:
    random = np.random.default_rng(0)
    found = [random.integers(0, V, size=n) for n in (30, 2, 7, 13, 41)]
    return [Document(tokens, 1, len(tokens)) for tokens in found]


def one_at_a_time(model: PerceiverAR, stride: int, latents: int, positions: bool) -> tuple[float, int]:
    """The same windows, one forward pass and one token at a time."""
    total, count = 0.0, 0
    for document in documents():
        for target in range(1, len(document.tokens)):
            end = min(1 + math.ceil(target / stride) * stride, len(document.tokens))
            start = max(0, end - 1 - M)
            inputs = torch.from_numpy(document.tokens[start : end - 1])[None]
            places = torch.arange(start, end - 1)[None] if positions else None
            with torch.no_grad():
                logits = model(inputs, latents=latents, positions=places)[0]
            row = len(logits) - (end - target)
            total -= logits[row].log_softmax(-1)[document.tokens[target]].item()
            count += 1
    return total, count


def test_less_context_is_that_of_a_model_which_takes_no_more() -> None:
    model = make(max_wavelength=50.0)
    for context in (1, 4, M):
        short = PerceiverAR(replace(model.config, context=context, latents=min(N, context)))
        short.load_state_dict(model.state_dict())
        wanted = evaluate(short, TokensTask(), documents(), stride=1)
        report = evaluate(
            model, TokensTask(), documents(), stride=1, latents=min(N, context), context=context
        )
        assert report["nats"] == pytest.approx(wanted["nats"], abs=1e-6)
    for context in (0, M + 1):
        with pytest.raises(ValueError, match=f"context must be from 1 to {M}"):
            evaluate(model, TokensTask(), documents(), context=context)


def test_by_default_as_many_windows_go_together_as_have_so_many_latents_and_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, whole = make(), documents()
    monkeypatch.setattr(evaluation, "INPUTS", 5 * M)
    for latents, most, rows in ((6, 18, 3), (3, 18, 5), (6, 5, 1)):
        monkeypatch.setattr(evaluation, "LATENTS", most)
        windowing = Windowing.of(model, latents=latents, stride=3)
        found = [len(parts) for _, _, parts in score(model, TokensTask(), whole, windowing)]
        assert found[:-1] == [rows] * (len(found) - 1)
        assert len(found) > 2
    monkeypatch.setattr(evaluation, "LATENTS", 100)
    monkeypatch.setattr(evaluation, "LOGITS", 12 * V)
    assert Windowing.of(model, latents=3, stride=3).batch_size == 4


@pytest.mark.parametrize("latents", [N, 3, 9])
def test_strided_totals_equal_a_slow_loop_for_every_stride(latents: int) -> None:
    model = make()
    for stride in range(1, latents + 1):
        report = evaluate(model, TokensTask(), documents(), stride=stride, latents=latents, batch_size=3)
        total, count = one_at_a_time(model, stride, latents, positions=False)
        assert report["tokens"] == count == 88
        assert report["nats"] == pytest.approx(total / count, abs=1e-5)
        assert report["bits"] == pytest.approx(total / count / math.log(2), abs=1e-5)


def test_documents_of_a_store_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [np.arange(length) % V for length in (9, 2, 20)]
    split = write_store(tmp_path / "store", {"validation": tokens}, V, "tokens").split("validation")
    reads: list[int] = []
    read = split.read
    monkeypatch.setattr(split, "read", lambda index: (reads.append(index), read(index))[1])
    told: list[tuple[int, int]] = []
    report = evaluate(make(), TokensTask(), Documents([split]), progress=lambda *now: told.append(now))
    assert reads == [0, 1, 2]
    assert report["tokens"] == 28
    assert told[-1] == (28, 28)


def test_positions_of_a_task_go_on_through_the_document() -> None:
    class Absolute(TokensTask):
        def positions(self, places: np.ndarray) -> np.ndarray:
            return places[..., None]

    model = make(positions="sinusoidal")
    report = evaluate(model, Absolute(), documents(), stride=2)
    total, count = one_at_a_time(model, 2, N, positions=True)
    assert report["nats"] == pytest.approx(total / count, abs=1e-5)


def test_the_number_of_windows_at_a_time_changes_nothing() -> None:
    model = make()
    found = [evaluate(model, TokensTask(), documents(), batch_size=size)["nats"] for size in (1, 4, 100)]
    assert found == pytest.approx([found[0]] * 3, abs=1e-6)
    assert not model.training


@pytest.mark.parametrize("reading_on", [False, True])
def test_each_row_says_whose_it_is(reading_on: bool) -> None:
    xl = TransformerXL(TransformerXLConfig(V, N, memory=N, channels=16, heads=2, layers=2)).eval()
    torch.nn.init.normal_(next(xl.output.parameters()))
    model = xl if reading_on else make()
    sums = np.zeros(len(documents()))
    for nats, _, parts in score(model, TokensTask(), documents(), Windowing.of(model, batch_size=3)):
        np.add.at(sums, [part.document for part in parts], nats.sum(1).numpy())
    alone = [evaluate(model, TokensTask(), [document]) for document in documents()]
    assert sums == pytest.approx([report["nats"] * report["tokens"] for report in alone], rel=1e-5)


def test_every_target_lies_in_exactly_one_window() -> None:
    document = Document(np.arange(1000), 500, 990)
    places = [place for _, where in windows(document, 64, 7) for place in where]
    assert places == list(range(500, 990))
    for window, where in windows(document, 64, 7):
        assert window.tokens[-1] == where[-1]
        assert len(window.tokens) <= 65


@pytest.mark.parametrize("every", [1, 2, 5, 1000])
def test_one_window_in_so_many_is_an_estimate_from_those(every: int) -> None:
    model, task, told = make(), TokensTask(), list[tuple[int, int]]()

    def scored(**settings: int) -> list[tuple[int, range, float]]:
        found = score(model, task, documents(), Windowing.of(model, stride=3, batch_size=1, **settings))
        return [(*part, float(nats.sum())) for nats, _, (part,) in found]

    whole, some = scored(), scored(every=every)
    groups = [whole[start : start + every] for start in range(0, len(whole), every)]
    assert all(one in group for one, group in zip(some, groups, strict=True))
    report = evaluate(model, task, documents(), stride=3, every=every, progress=lambda *now: told.append(now))
    assert report["tokens"] == sum(len(places) for _, places, _ in some)
    assert report["nats"] * report["tokens"] == pytest.approx(sum(nats for *_, nats in some), rel=1e-5)
    assert report.get("every", 1) == every
    assert all(done <= wanted for done, wanted in told)


def test_an_estimate_is_of_all_places_where_documents_are_equally_long() -> None:
    model, whole = make(), [Document(np.arange(33) % V, 1, 33) for _ in range(64)]
    found = score(model, TokensTask(), whole, Windowing.of(model, stride=4, every=8))
    assert {part.places.start for *_, parts in found for part in parts} == set(range(1, 33, 4))


def test_transformer_xl_is_estimated_only_without_its_memory() -> None:
    xl = TransformerXL(TransformerXLConfig(V, N, memory=N, channels=16, heads=2, layers=2)).eval()
    with pytest.raises(ValueError, match="reads on from window to window: with every, set a stride"):
        evaluate(xl, TokensTask(), documents(), every=2)
    assert evaluate(xl, TokensTask(), documents(), every=2, stride=3)["tokens"] < 88


def test_an_estimate_says_nothing_that_needs_the_counts_of_all() -> None:
    class Counted(list[Document]):
        counts: ClassVar = {"bytes": 100}

    found = Counted(documents())
    assert "bits_per_byte" in evaluate(make(), TextTask(), found)
    assert "bits_per_byte" not in evaluate(make(), TextTask(), found, every=2)


def test_losses_by_position_add_up() -> None:
    model = PerceiverAR(ModelConfig(V, 64, 32, channels=16, heads=2, layers=1))
    document = Document(np.random.default_rng(0).integers(0, V, size=3000), 1, 3000)
    report = evaluate(model, TokensTask(), [document])
    counts = {bound: part["tokens"] for bound, part in report["by_position"].items()}
    assert counts == {"512": 511, "1024": 512, "2048": 1024, "4096": 952}
    weighted = sum(part["tokens"] * part["nats"] for part in report["by_position"].values())
    assert weighted / report["tokens"] == pytest.approx(report["nats"])


def test_accuracy_is_reported_where_it_means_something() -> None:
    model = PerceiverAR(ModelConfig(259, 32, 16, channels=16, heads=2, layers=1, positions="sinusoidal"))
    task = CopyTask(length=32)
    report = evaluate(model, task, task.documents("validation"))
    assert report["tokens"] == 12 * 16
    assert 0 <= report["accuracy"] <= 1
    (part,) = report["by_distance"].values()
    assert part == {name: report[name] for name in ("tokens", "nats", "accuracy")}
    assert "accuracy" not in evaluate(make(), TokensTask(), documents())


def test_copies_are_reported_by_distance() -> None:
    model = PerceiverAR(ModelConfig(259, 2048, 64, channels=16, heads=2, layers=1, positions="sinusoidal"))
    task = CopyTask(length=2048, sequences=2)
    report = evaluate(model, task, task.documents("validation"))
    parts = report["by_distance"]
    # The last token is 2,047 places from the first, and the two in the middle are neighbours.
    assert {bound: part["tokens"] for bound, part in parts.items()} == {"512": 512, "1024": 512, "2048": 1024}
    right = sum(part["tokens"] * part["accuracy"] for part in parts.values())
    assert right == pytest.approx(report["tokens"] * report["accuracy"])


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ({"stride": 0}, "stride must be from 1 to the 6 latents, but is 0"),
        ({"stride": 7}, "stride must be from 1 to the 6 latents, but is 7"),
        ({"latents": 13}, "latents must be from 1 to 12, but is 13"),
        ({"latents": 0}, "latents must be from 1 to 12, but is 0"),
        ({"every": 0}, "every must be from 1 to a billion, but is 0"),
    ],
)
def test_impossible_choices_are_refused(choice: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        evaluate(make(), TokensTask(), documents(), **choice)
