"""Every table and figure runs as a command, keeps what is finished, and is told as it came out."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from perceiver_ar import ModelConfig, PerceiverAR
from perceiver_ar.cli import main
from perceiver_ar.reproduce import STUDIES, Bench, Row, cells, get, machine, run
from perceiver_ar.reproduce.page import plan, table, write_page
from perceiver_ar.reproduce.study import Cell, Study, means

SAID: list[str] = []


def counted(name: str, done: list[str], nats: float = 1.0, settings: int = 0) -> Cell:
    """A cell that says that it was run."""

    def work(place: Path) -> list[Row]:
        done.append(name)
        return [Row({"context": len(name)}, {"nats": nats}, {"nats": 2.0})]

    return Cell(name, {"settings": settings}, work)


def study_of(*cells: Cell, shows: bool = True) -> Study:
    return Study(
        "a", "table 0", "A claim.", "How.", lambda b: list(cells), lambda rows: shows, ("context", "nats")
    )


@pytest.mark.parametrize("name", STUDIES)
def test_each_study_runs_at_the_scale_smoke(name: str, tmp_path: Path) -> None:
    said: list[str] = []
    results = run(get(name), Bench("smoke", tmp_path, device="cpu"), None, said.append)
    done, wanted = map(int, results["cells"].split(" of "))
    assert done == wanted
    assert results["shown"] is None  # it proves the command, not the claim
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert (tmp_path / "plot.png").exists()
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


@pytest.mark.parametrize("name", STUDIES)
def test_each_study_has_a_plan_at_the_paper_s_size(name: str, tmp_path: Path) -> None:
    words = plan(get(name), Bench("paper", tmp_path, Path("store")))
    assert f"reproduce {name} --scale paper" in words


def test_the_paper_s_image_model_costs_what_its_arithmetic_says(tmp_path: Path) -> None:
    (cell,) = get("imagenet64").cells(Bench("paper", tmp_path, Path("store")))
    # 750,000 steps of 2,048 images at 5.4 TFLOP each forward and backward, 4e14 a second.
    assert cell.hours == pytest.approx(750_000 * 2048 * 5.4e12 / 4e14 / 3600, rel=0.02)


def test_finished_cells_are_kept(tmp_path: Path) -> None:
    bench, done = Bench("small", tmp_path), []

    def interrupted(place: Path) -> list[Row]:
        raise KeyboardInterrupt

    first, second = counted("one", done), counted("three", done)
    with pytest.raises(KeyboardInterrupt):
        run(study_of(first, replace(second, work=interrupted)), bench, None, SAID.append)
    assert done == ["one"]
    assert json.loads((tmp_path / "results.json").read_text())["cells"] == "1 of 2"
    results = run(study_of(first, second), bench, None, SAID.append)
    assert done == ["one", "three"]
    assert results["shown"] is True
    assert results["cells"] == "2 of 2"


def test_a_cell_of_other_settings_is_not_taken_for_this_one(tmp_path: Path) -> None:
    bench = Bench("small", tmp_path)
    run(study_of(counted("one", [])), bench, None, SAID.append)
    with pytest.raises(ValueError, match="other settings"):
        run(study_of(counted("one", [], settings=1)), bench, None, SAID.append)


def test_one_cell_can_be_run_alone(tmp_path: Path) -> None:
    done: list[str] = []
    study = study_of(counted("one", done), counted("three", done))
    results = run(study, Bench("small", tmp_path), "three", SAID.append)
    assert done == ["three"]
    assert results["shown"] is None
    with pytest.raises(ValueError, match="no cell 'two', but one, three"):
        run(study, Bench("small", tmp_path), "two", SAID.append)


def test_data_are_asked_for_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="image-order needs data: --data with images of 32"):
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
    for name, shows in (("yes", True), ("no", False)):
        study = replace(study_of(counted("one", []), shows=shows), name=name)
        run(study, Bench("small", tmp_path / f"{name}-small"), None, SAID.append)
    studies = [replace(study_of(), name=name) for name in ("yes", "no", "never")]
    write_page(studies, tmp_path, tmp_path / "docs" / "page.md")
    page = (tmp_path / "docs" / "page.md").read_text()
    assert "| [yes](#yes) | table 0 | shown | not run |" in page
    assert "| [no](#no) | table 0 | not shown | not run |" in page
    assert "| [never](#never) | table 0 | not run | not run |" in page
    assert "../yes-small/plot.png" in page


def test_a_depth_is_matched_to_a_measured_speed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measured(config: ModelConfig, batch: int, bench: Bench) -> dict[str, float | None]:
        return {"steps/s": 1 / (0.5 + 0.1 * config.layers)}

    monkeypatch.setattr(cells, "steps_a_second", measured)
    config = ModelConfig(259, 64, 16, layers=8)
    for depth in (1, 5, 8, 23):
        assert cells.matching_depth(config, 1 / (0.52 + 0.1 * depth), 4, Bench("small", tmp_path)) == depth


@pytest.mark.parametrize("length", [24, 64])
def test_never_refreshing_is_another_thing_once_latents_run_out(length: int) -> None:
    torch.manual_seed(0)
    config = ModelConfig(33, 64, 24, channels=32, heads=2, layers=3)
    model, tokens = PerceiverAR(config), torch.randint(33, (2, length))
    torch.nn.init.normal_(model.output.weight)
    refreshed, never = (machine.nats_one_by_one(model, tokens, wanted) for wanted in (True, False))
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
    assert machine.nats_one_by_one(model, tokens, refreshed=True) == pytest.approx(float(plain), abs=1e-5)


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
    assert "| length | accuracy |" in capsys.readouterr().out
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
    ],
)
def test_mistakes_are_said_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, *words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
