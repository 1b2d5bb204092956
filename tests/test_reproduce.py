"""Every table and figure runs as a command, keeps what is finished, and is told as it came out."""

import inspect
import itertools
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perceiver_ar import ModelConfig, PerceiverAR
from perceiver_ar.cli import main
from perceiver_ar.reproduce import STUDIES, Bench, Row, caching, cells, get, run
from perceiver_ar.reproduce.beside import learn_all
from perceiver_ar.reproduce.materials import reordered
from perceiver_ar.reproduce.page import costs, table, write_page
from perceiver_ar.reproduce.study import Cell, Study, means
from perceiver_ar.store import Store, write_store
from perceiver_ar.tasks.image import ImageTask
from tests.ranks import on_ranks, wait_until

SAID: list[str] = []


def counted(name: str, done: list[str], nats: float = 1.0, settings: int = 0) -> Cell:
    """A cell that says that it was run."""

    def work(place: Path) -> list[Row]:
        done.append(name)
        return [Row({"context": len(name)}, {"nats": nats}, {"nats": 2.0})]

    return Cell(name, {"settings": settings}, work)


def study_of(*cells: Cell, shows: bool | None = True) -> Study:
    return Study(
        "a",
        "table 0",
        "A claim.",
        "How.",
        lambda b: list(cells),
        lambda rows, scale: shows,
        ("context", "nats"),
    )


@pytest.mark.parametrize("name", STUDIES)
def test_each_study_runs_at_the_scale_smoke(name: str, tmp_path: Path) -> None:
    said: list[str] = []
    results = run(get(name), Bench("smoke", tmp_path, device="cpu"), None, said.append)
    done, wanted = map(int, results["cells"].split(" of "))
    assert done == wanted
    assert results["shown"] is None  # it proves the command, not the claim
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert (tmp_path / "plot.png").exists() == (get(name).drawn is not None)
    assert get(name).protocol in said[0]  # before anything runs
    figures = [value for row in results["rows"] for value in row["found"].values()]
    assert figures
    assert all(value is not None and value >= 0 for value in figures)


@pytest.mark.parametrize("scale", ["small", "paper"])
@pytest.mark.parametrize("name", STUDIES)
def test_each_cell_of_the_larger_scales_is_settled_and_named_once(
    name: str, scale: Any, tmp_path: Path
) -> None:
    cells = get(name).cells(Bench(scale, tmp_path, Path("store"), seeds=2))
    assert len({cell.name for cell in cells}) == len(cells)
    assert all(re.fullmatch(r"[\w.-]+", cell.name) for cell in cells)  # they are names of files
    json.dumps([cell.settings for cell in cells])
    if scale == "small":
        assert sum(cell.hours for cell in cells) < 1


def test_what_one_cell_has_trained_another_takes(tmp_path: Path) -> None:
    for name in ("books-context", "books-stride"):
        bench = Bench("smoke", tmp_path / name, device="cpu", shared=tmp_path)
        run(get(name), bench, None, SAID.append)
    assert len(list((tmp_path / "runs").iterdir())) == 2  # contexts


def test_trainings_side_by_side_find_what_they_find_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, said = [], list[str]()
    for jobs in (1, 3):
        if jobs > 1:  # evaluations are theirs, too
            monkeypatch.delattr("perceiver_ar.reproduce.cells.evaluate")
        bench = Bench("smoke", tmp_path / str(jobs), device="cpu")
        rows = run(get("image-order"), bench, None, said.append, jobs)["rows"]
        found.append([row["found"]["bits/dim"] for row in rows])
    assert found[0] == pytest.approx(found[1], abs=1e-6)
    (tmp_path / "3").rename(tmp_path / "image-order-small")
    write_page([get("image-order")], tmp_path, tmp_path / "page.md")
    assert "image-order --scale smoke --data STORE --jobs 3" in (tmp_path / "page.md").read_text()
    trained = [line for line in said if line.startswith("trained")]
    assert [line.split(":")[0] for line in trained] == [f"trained {count} of 4" for count in range(1, 5)]
    logs = [log.read_text() for log in (tmp_path / "image-order-small/cells").glob("*/train.log")]
    assert len(logs) == 4
    assert all("step" in log for log in logs)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, processes do not hear of it")
def test_trainings_beside_each_other_stop_with_what_began_them(tmp_path: Path) -> None:
    asked = ("copy-targets", "--device", "cpu", "--jobs", "2", "--cell", "latents-16-batch-8-seed-0")
    command = [sys.executable, "-m", "perceiver_ar", "reproduce", *asked, "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = tmp_path / "cells/latents-16-batch-8-seed-0/train.log"
    wait_until(lambda: any(tmp_path.glob("runs/*/metrics.jsonl")), 100)
    process.terminate()
    process.wait(20)
    wait_until(lambda: "Stopped at step" in log.read_text(), 60)


def test_a_training_is_done_once_for_all_cells_that_share_it(tmp_path: Path) -> None:
    bench = Bench("smoke", tmp_path, device="cpu")
    first = get("copy-length").cells(bench)[0]
    said: list[str] = []
    learn_all(
        "copy-length", bench, [replace(first, name="another"), first, counted("none", [])], 2, said.append
    )
    assert len(said) == 1


def test_a_training_that_fails_beside_others_is_named(tmp_path: Path) -> None:
    bench = Bench("smoke", tmp_path, device="cpu")
    unknown = replace(get("copy-length").cells(bench)[0], name="unknown")
    with pytest.raises(ValueError, match=r"training of unknown was ended: see .*unknown/train.log"):
        learn_all("copy-length", bench, [unknown], 2, SAID.append)
    assert "StopIteration" in (tmp_path / "cells/unknown/train.log").read_text()


@pytest.mark.parametrize("name", STUDIES)
def test_each_study_has_a_plan_at_the_paper_s_size(name: str, tmp_path: Path) -> None:
    words = costs(get(name), Bench("paper", tmp_path, Path("store")))
    assert f"reproduce {name} --scale paper" in words


def test_the_paper_s_image_model_costs_what_its_arithmetic_says(tmp_path: Path) -> None:
    (cell,) = get("imagenet64").cells(Bench("paper", tmp_path, Path("store")))
    # 750,000 steps of 2,048 images at 5.4 TFLOP each forward and backward, at 4 to 5e14 a second.
    work = 750_000 * 2048 * 5.4e12 / 3600
    assert work / 5e14 < cell.hours < work / 4e14


def test_finished_cells_are_kept(tmp_path: Path) -> None:
    bench, done = Bench("small", tmp_path), []

    def interrupted(place: Path) -> list[Row]:
        raise KeyboardInterrupt

    first, second = counted("one", done), counted("three", done)
    with pytest.raises(KeyboardInterrupt):
        run(study_of(first, replace(second, work=interrupted)), bench, None, SAID.append)
    assert done == ["one"]
    assert json.loads((tmp_path / "results.json").read_text())["cells"] == "1 of 2"
    results = json.loads((tmp_path / "results.json").read_text())
    (tmp_path / "results.json").write_text(json.dumps({**results, "seconds": 5000.0}))
    results = run(study_of(first, second), bench, None, SAID.append)
    assert 5000 < results["seconds"] < 5060  # earlier attempts count
    assert done == ["one", "three"]
    assert results["shown"] is True
    assert results["cells"] == "2 of 2"


def test_a_cell_of_other_settings_is_not_taken_for_this_one(tmp_path: Path) -> None:
    bench = Bench("small", tmp_path)
    run(study_of(counted("one", [])), bench, None, SAID.append)
    with pytest.raises(ValueError, match="other settings"):
        run(study_of(counted("one", [], settings=1)), bench, None, SAID.append)


def test_cells_that_need_other_data_are_done_one_after_another(tmp_path: Path) -> None:
    def piece(name: str, data: str, **others: Any) -> Cell:
        return replace(counted(name, []), data=data, **others)

    stores = [tmp_path / name for name in "ab"]
    for name, store in zip(("v1", "v3"), stores, strict=True):
        write_store(store, {"train": [np.arange(ord(name[1]))]}, 300, "tokens")
        study = study_of(*(piece(each, "") for each in ("v1", "v3")))
        results = run(study, Bench("paper", tmp_path / "out", store), name, SAID.append)
    assert results["cells"] == "2 of 2"
    assert "done" in costs(study, Bench("paper", tmp_path / "out"))
    # Where all cells are of the same data, others are refused, and none need be told to see the plan.
    same = study_of(piece("v1", "seal of a"), piece("v3", "seal of a"))
    run(same, Bench("paper", tmp_path / "same", stores[0]), "v1", SAID.append)
    assert "done" in costs(same, Bench("paper", tmp_path / "same"))
    other = study_of(piece("v1", "seal of b"))
    with pytest.raises(ValueError, match="other settings, data or machine"):
        run(other, Bench("paper", tmp_path / "same", stores[1]), "v1", SAID.append)
    for name in ("maestro", "soundstream"):
        paper = get(name).cells(Bench("paper", tmp_path, stores[0]))
        assert {cell.data for cell in paper} == {""}


def cell_on_a_rank(folder: Path) -> list[Any]:
    bench, said = Bench("smoke", folder, device="cpu"), list[str]()
    found = run(get("books-context"), bench, "context-32-seed-0", said.append)
    return [row["found"]["perplexity"] for row in found["rows"]] + [len(said)]


def test_a_cell_is_trained_and_scored_by_all_processes_of_torchrun(tmp_path: Path) -> None:
    (alone,) = on_ranks(1, cell_on_a_rank, tmp_path / "one")
    first, second = on_ranks(2, cell_on_a_rank, tmp_path / "two")
    assert first[0] == second[0] == pytest.approx(alone[0], rel=1e-5)
    assert (first[1] > 0, second[1]) == (True, 0)  # which says what it does
    (kept,) = (tmp_path / "two/runs").iterdir()
    assert json.loads((kept / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 2


def test_one_cell_can_be_run_alone(tmp_path: Path) -> None:
    done: list[str] = []
    study = study_of(counted("one", done), counted("three", done))
    results = run(study, Bench("small", tmp_path), "three", SAID.append)
    assert done == ["three"]
    assert results["shown"] is None
    with pytest.raises(ValueError, match="no cell 'two', but one, three"):
        run(study, Bench("small", tmp_path), "two", SAID.append)


def test_data_are_asked_for_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"image-order needs data: --data with images: .* --size 32"):
        run(get("image-order"), Bench("small", tmp_path), None, SAID.append)
    assert not any(tmp_path.iterdir())


def test_seeds_are_merged_into_their_mean_and_spread() -> None:
    rows = [Row({"context": c, "seed": s}, {"nats": c + s / 10}) for s in range(2) for c in (16, 4)]
    merged = means(rows)
    assert [row.about for row in merged] == [{"context": 4}, {"context": 16}]
    assert merged[0].found == {"nats": 4.05, "nats (spread)": pytest.approx(0.1)}
    assert "| 4 | 4.05 ± 0.05 |" in table(merged)


def test_what_did_not_fit_into_memory_is_said() -> None:
    assert "| 8 | out of memory |" in table([Row({"context": 8}, {"steps/s": None})])


def test_the_page_tells_what_was_shown_and_what_was_not_run(tmp_path: Path) -> None:
    for name, shows in (("yes", True), ("no", False), ("perhaps", None)):
        study = replace(study_of(counted("one", []), shows=shows), name=name)
        run(study, Bench("small", tmp_path / f"{name}-small"), None, SAID.append)
    studies = [replace(study_of(), name=name) for name in ("yes", "no", "perhaps", "never")]
    write_page(studies, tmp_path, tmp_path / "docs" / "page.md")
    page = (tmp_path / "docs" / "page.md").read_text()
    assert "| [yes](#yes) | table 0 | shown | not run |" in page
    assert "| [no](#no) | table 0 | not shown | not run |" in page
    assert "| [perhaps](#perhaps) | table 0 | run; cannot be shown at this scale | not run |" in page
    assert "| [never](#never) | table 0 | not run | not run |" in page
    assert "../yes-small/plot.png" in page


def test_a_depth_is_matched_to_a_measured_speed() -> None:
    for usual, depth in itertools.product((1, 2, 8), (1, 5, 8, 23)):
        wanted = 0.52 + 0.1 * depth
        assert cells.matching_depth(lambda layers: 0.5 + 0.1 * layers, wanted, usual) in (
            depth,
            min(depth, 4 * max(2, usual) + 1),
        )


def paper_rows(name: str) -> list[Row]:
    """What the paper found, as the cells at its size would tell it."""
    rows = []
    for cell in get(name).cells(Bench("paper", Path("nowhere"), Path("store"))):
        asks = inspect.getclosurevars(cell.work).nonlocals["asks"]
        about = inspect.getclosurevars(cell.work).nonlocals["about"]
        rows += [Row({**about, **ask.about, "seed": 0}, dict(ask.paper), ask.paper) for ask in asks]
    return means(rows)


def changed(rows: list[Row], figure: str, value: float, **about: Any) -> list[Row]:
    """The same but for a figure of the rows that are about this."""
    hit = [all(row.about.get(key) == wanted for key, wanted in about.items()) for row in rows]
    assert any(hit)
    return [
        replace(row, found={**row.found, figure: value}) if yes else row
        for row, yes in zip(rows, hit, strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "figure", "value", "about"),
    [
        ("imagenet64", "bits/dim", 3.42, {}),
        ("image-latents", "bits/dim", 3.9, {"latents": 16}),
        ("image-latents", "bits/dim", 3.41, {"latents": 1536}),
        ("image-latents", "minutes", 4.0, {"latents": 16}),
        ("image-order", "bits/dim", 3.6, {"context": 1024, "order": "rgb"}),
        ("image-order", "bits/dim", 4.5, {"context": 12_289, "order": "rgb"}),
        ("pg19", "perplexity", 44.0, {"context": 4096}),
        ("wikitext103", "perplexity", 17.0, {"model": "Transformer-XL"}),
        ("wikitext103", "perplexity", 17.9, {"context": 8192}),
        ("books-context", "perplexity", 14.9, {"context": 16_384}),
        ("books-matched", "perplexity", 13.7, {"model": "Transformer-XL", "pace": "Perceiver AR at 16,384"}),
        ("maestro", "nats", 1.83, {"version": "v1"}),
        ("maestro", "nats", 1.91, {"version": "v3"}),
        ("soundstream", "nats", 2.4, {"context": 8192, "bit rate": "12kbps"}),
        ("soundstream", "nats", 2.6, {"context": 32_768, "bit rate": "12kbps"}),
    ],
)
def test_the_paper_s_own_figures_show_its_claim_and_others_do_not(
    name: str, figure: str, value: float, about: dict[str, Any]
) -> None:
    rows, shows = paper_rows(name), get(name).shows
    if name == "image-latents":
        rows = [row for row in rows if row.about["trained with"] == "fixed"]
    if name == "imagenet64":
        assert shows(rows, "paper") is None  # not known to be the paper's images
        rows = [replace(row, found={**row.found, "images": 49_999.0}) for row in rows]
    assert shows(rows, "paper") is True
    assert shows(changed(rows, figure, value, **about), "paper") is False


def test_what_is_less_than_seeds_differ_is_not_shown() -> None:
    measured = {
        512: (71.36, 0.71),
        1024: (70.71, 0.36),
        2048: (70.66, 0.72),
        4096: (70.25, 0.43),
    }  # docs/log.md
    for factor, shown in ((1.0, False), (0.9, True)):
        rows = [
            Row(
                {"context": c},
                {"perplexity": value * (factor if c == 4096 else 1), "perplexity (spread)": 2 * half},
            )
            for c, (value, half) in measured.items()
        ]
        assert get("books-context").shows(rows, "small") is shown
    assert get("pg19").shows(rows, "small") is None  # the paper's figure is part of the claim


def test_unequal_paces_show_nothing() -> None:
    rows, shows = paper_rows("books-matched"), get("books-matched").shows
    assert shows(changed(rows, "steps/s", 3.0, model="Transformer-XL"), "paper") is None


def of(name: str, *found: tuple[dict[str, Any], dict[str, float | None]]) -> bool | None:
    return get(name).shows([Row(about, figures) for about, figures in found], "small")


def test_copies_and_dropout_show_what_they_should() -> None:
    for wrong, shown in ((0, True), (1, False)):
        assert (
            of(
                "copy-length",
                ({"length": 131_072}, {"wrong": wrong}),
                ({"length": 2**20}, {"wrong": 5}),
            )
            is shown
        )
    for first, last, shown in ((0.0, 1.0, True), (1.0, 1.0, False), (0.0, 0.0, False), (0.0, 0.5, False)):
        cells = [({"latents": n, "batch": b}, {"converged": last}) for n, b in ((8, 4), (4, 8), (8, 8))]
        assert of("copy-targets", ({"latents": 4, "batch": 4}, {"converged": first}), *cells) is shown
    for deep, spread, shown in ((0.02, 0.0, True), (0.2, 0.0, False), (0.02, 0.05, False)):
        rows = []
        for kind, shallow, gain in (("cross", 0.1, deep), ("post-attention", 0.1, 0.3)):
            for depth, gained in ((4, shallow), (16, gain)):
                rows += [
                    (
                        {"kind": kind, "depth": depth, "dropout": d},
                        {"nats": 2 - gained * (d > 0), "nats (spread)": spread},
                    )
                    for d in (0.0, 0.75)
                ]
        assert of("dropout", *rows) is shown


def test_speed_shows_who_reaches_furthest() -> None:
    def rows(**rates: list[float | None]) -> list[tuple[dict[str, Any], dict[str, float | None]]]:
        names = {"ours": "Perceiver AR", "plain": "Transformer", "xl": "Transformer-XL"}
        return [
            ({"model": names[name], "context": 1024 * 4**i}, {"steps/s": rate})
            for name, found in rates.items()
            for i, rate in enumerate(found)
        ]

    assert (
        of("speed", *rows(ours=[9, 8, 7, None], plain=[10, 2, None, None], xl=[9.5, 5, None, None])) is True
    )
    assert of("speed", *rows(ours=[9, 8, 7, None], plain=[10, 2, 1, None], xl=[9.5, 5, None, None])) is False
    assert of("speed", *rows(ours=[9, 8, 7], plain=[10, 9, None], xl=[9.5, 5, None])) is False
    assert of("speed", *rows(ours=[None, None], plain=[None, None], xl=[None, None])) is False
    assert of("speed", *rows(ours=[9, 8], plain=[None, None], xl=[None, None])) is True


def test_caching_shows_what_it_should() -> None:
    def rows(slow: float, never: float) -> list[tuple[dict[str, Any], dict[str, float | None]]]:
        modes = {"cached": 1.0, "no caching": slow}
        return [
            *(({"batch": b, "mode": mode}, {"ms/step": ms}) for b in (1, 16) for mode, ms in modes.items()),
            ({"cache": "refreshed"}, {"nats": 1.0}),
            ({"cache": "never refreshed"}, {"nats": never}),
        ]

    assert of("caching", *rows(2.5, 1.1)) is True
    assert of("caching", *rows(1.5, 1.1)) is False
    assert of("caching", *rows(2.5, 0.9)) is False


def test_what_other_data_cannot_show_is_not_shown() -> None:
    assert of("imagenet64", ({}, {"bits/dim": 3.0})) is None
    assert of("piano", ({}, {"nats": 1.0})) is None
    assert of("soundstream", ({"context": 8}, {"nats": 1.0})) is None
    assert of("wikitext103", ({"context": 8}, {"perplexity": 1.0})) is None


def image_store(folder: Path, size: int, seed: int, order: Any = "raster") -> Path:
    task = ImageTask(size, order)
    pixels = np.random.default_rng(seed).integers(0, 256, (4, size, size, 3)).astype(np.uint8)
    documents = [task.encode(image) for image in pixels]
    write_store(folder, {"train": documents[:3], "validation": documents[3:]}, 259, "image", task.to_dict())
    return folder


def test_other_data_are_not_taken_for_the_same(tmp_path: Path) -> None:
    stores = [image_store(tmp_path / f"store-{seed}", 4, seed) for seed in range(2)]
    for given in (0, 1, 1):
        bench = Bench("small", tmp_path / "out", stores[given])
        folder = reordered(bench, "rgb").find()
        assert folder is not None
        first = ImageTask(4, "rgb").decode(Store.open(folder).split("train").read(0))
        wanted = ImageTask(4).decode(Store.open(stores[given]).split("train").read(0))
        assert np.array_equal(first, wanted)
    seals = {
        cell.data for store in stores for cell in get("image-order").cells(Bench("small", tmp_path, store))
    }
    assert len(seals) == 4


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("image-order", 64, "has size 64, but 32 is needed"),
        ("image-latents", 32, "has order rgb, but raster is needed"),
        ("maestro", 32, "of the task image, but music"),
    ],
)
def test_the_wrong_store_is_refused_before_anything_runs(
    name: str, size: int, said: str, tmp_path: Path
) -> None:
    given = image_store(tmp_path / "store", size, 0, "rgb")
    with pytest.raises(ValueError, match=said):
        run(get(name), Bench("small", tmp_path / "out", given), None, SAID.append)
    assert not (tmp_path / "out").exists()


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "speed-small").mkdir()
    for content in ("{", "{}", "[1]"):
        (tmp_path / "speed-small/results.json").write_text(content)
        with pytest.raises(ValueError, match=r"speed-small/results.json is damaged"):
            write_page([get("speed")], tmp_path, tmp_path / "page.md")


@pytest.mark.parametrize("length", [24, 64])
def test_never_refreshing_is_another_thing_once_latents_run_out(length: int) -> None:
    torch.manual_seed(0)
    config = ModelConfig(33, 64, 24, channels=32, heads=2, layers=3)
    model, tokens = PerceiverAR(config), torch.randint(33, (2, length))
    torch.nn.init.normal_(model.output.weight)
    refreshed, never = (caching.nats_one_by_one(model, tokens, wanted) for wanted in (True, False))
    if length == 24:  # 12 latents, and 12 more
        assert refreshed == pytest.approx(never, abs=1e-5)
    else:
        assert abs(refreshed - never) > 1e-3


def test_nats_one_by_one_are_those_of_a_plain_forward_while_latents_suffice() -> None:
    torch.manual_seed(0)
    model = PerceiverAR(ModelConfig(33, 64, 24, channels=32, heads=2, layers=3)).eval()
    tokens = torch.randint(33, (2, 24))
    torch.nn.init.normal_(model.output.weight)
    with torch.no_grad():
        plain = model.nats(tokens[:, :-1], tokens[:, 1:])[:, 11:].mean()
    assert caching.nats_one_by_one(model, tokens, refreshed=True) == pytest.approx(float(plain), abs=1e-5)


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["perceiver-ar", "reproduce", *words])
    main()


def test_the_command_lists_plans_runs_and_reports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command(monkeypatch)
    assert len(capsys.readouterr().out.splitlines()) == len(STUDIES)
    command(monkeypatch, "imagenet64", "--scale", "paper")
    assert "seed-0" in capsys.readouterr().out
    assert not any(tmp_path.iterdir())
    command(monkeypatch, "copy-length", "--scale", "smoke", "--device", "cpu", "--seeds", "2")
    assert "| length | scored | wrong |" in capsys.readouterr().out
    assert (tmp_path / "reproduction/copy-length-smoke/results.json").exists()
    command(monkeypatch, "--all", "--report")
    assert (
        "| [copy-length](#copy-length) | section 5.1.1 | not run | not run |"
        in (tmp_path / "docs/reproduction.md").read_text()
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("copy-lengths",), "did you mean 'copy-length'"),
        (("copy-length", "--all"), "give a name or --all, not both"),
        (("--all",), "--all is for --scale smoke"),
        (("maestro",), "maestro needs data"),
        (("copy-length", "--seeds", "0"), "at least 1"),
        (("copy-length", "--jobs", "0"), "jobs must be at least 1"),
        (("copy-length", "--report"), "give no name"),
        (("--all", "--report"), "reproduction holds no results"),
    ],
)
def test_mistakes_are_said_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, *words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
