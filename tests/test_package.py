"""What is shipped: a wheel that imports anywhere, modules that need the core alone, a true README."""

import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.forked import run

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "perceiver_ar").rglob("*.py")
    if not path.name.startswith("fused") or importlib.util.find_spec("triton")  # which torch for CUDA brings
)


def requirement(line: str) -> str:
    return re.split(r"[<>=!~\[; ]", line)[0].lower().replace("_", "-")


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


IMPORT_ALL = """
import importlib, importlib.metadata, re, sys

core = {core!r}
queue, allowed = list(core), set()
while queue:  # the core and all that it requires
    name = queue.pop().lower().replace("_", "-")
    if name in allowed:
        continue
    allowed.add(name)
    try:
        needs = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        continue
    queue += [re.split(r"[<>=!~\\[; (]", need)[0] for need in needs if "extra ==" not in need]
owners = importlib.metadata.packages_distributions()

class Refuse:
    def find_spec(self, name, path=None, target=None):
        names = [owner.lower().replace("_", "-") for owner in owners.get(name, [])]
        if names and not allowed.intersection(names) and "perceiver-ar" not in names:
            raise ImportError(f"{{name}} is not a core dependency")

sys.meta_path.insert(0, Refuse())
for module in {modules!r}:
    importlib.import_module(module)
"""


def test_every_module_imports_with_the_core_dependencies_alone() -> None:
    core = [requirement(line) for line in PROJECT["dependencies"]]
    assert core == ["torch", "numpy", "safetensors", "huggingface-hub", "tyro", "rich"]
    theirs = {f"perceiver_ar.interop.{name}" for name in ("causal_lm", "tokenizer", "transformers")}
    theirs |= {name for name in MODULES if name.startswith("perceiver_ar.playground")}  # made of gradio
    assert theirs < set(MODULES)  # classes of transformers' classes
    code = IMPORT_ALL.format(core=core, modules=[name for name in MODULES if name not in theirs])
    no_backends = os.environ | {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"
    }  # which others declare, as our plugin does
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=no_backends)
    refused = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL.format(core=core, modules=["hypothesis"])],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "hypothesis is not a core dependency" in refused.stderr


def test_every_dependency_is_pinned() -> None:
    wanted = [*PROJECT["dependencies"], *itertools.chain(*PROJECT["optional-dependencies"].values())]
    assert {requirement(line) for line in wanted} <= set(pins())
    assert pins()["torch"] == "2.13.0"
    assert set(PROJECT["optional-dependencies"]) == {
        "text", "image", "music", "audio", "flash", "hf", "lm-eval", "playground", "dev",
    }  # fmt: skip


@pytest.mark.slow
def test_the_wheel_imports_from_a_clean_folder(tmp_path: Path) -> None:
    source = tmp_path / "source"  # so that nothing left from an earlier build slips in
    shutil.copytree(ROOT / "perceiver_ar", source / "perceiver_ar")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, source]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]

    # A fresh environment that has the wheel itself, and borrows only the core dependencies.
    venv.create(tmp_path / "env", with_pip=False)
    site = next((tmp_path / "env").rglob("site-packages"))
    zipfile.ZipFile(wheel).extractall(site)
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    (site / "core.pth").write_text(str(Path(spec.origin).parents[1]) + "\n")
    code = (
        f"import perceiver_ar, torch; assert perceiver_ar.__file__.startswith({str(site)!r});"
        "model = perceiver_ar.build(perceiver_ar.ModelConfig(9, 8, 4, channels=16, heads=2, layers=1));"
        "print(tuple(model(torch.zeros(1, 8, dtype=torch.long)).shape));"
        "from perceiver_ar.run import load; print(type(load('piano', 'cpu')[0]).__name__)"
    )
    python = tmp_path / "env/bin/python"
    result = subprocess.run(
        [python, "-I", "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert result.stdout == "(1, 4, 9)\nPerceiverAR\n"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_python_in_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = next(block for block in blocks("python") if "model.nats" in block)
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {})


def test_links_between_documents_lead_to_files_and_headings() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("*/*.md"), *ROOT.glob("perceiver_ar/box/*/README.md")]
    for page in pages:
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
            path, _, heading = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), (page, link)
            if heading and target.suffix == ".md":
                titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
                anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
                assert heading in anchors, (page, link)


def test_figures_of_results_are_those_of_the_files_that_they_name() -> None:
    rows = [line for line in (ROOT / "docs/results.md").read_text().splitlines() if ".json)" in line]
    assert rows
    for row in rows:
        (name,) = re.findall(r"\]\(([^)]*\.json)\)", row)
        found = json.loads((ROOT / "docs" / name).read_text())
        cells = [cell.strip() for cell in row.split("|")]
        assert f"{found['tokens']:,}" in cells, row
        wrong = round(found["tokens"] * (1 - found["accuracy"])) if "accuracy" in found else None
        assert (f"{found['nats']:.4f}" if wrong is None else f"{wrong:,}") in cells, row


def test_the_readme_opens_with_the_two_commands() -> None:
    first, second, *_ = blocks("sh")[0].splitlines()
    assert first.startswith("make quickstart ")
    assert second.startswith("make test ")


@pytest.mark.slow
def test_the_commands_in_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 9, size=(20, 60)))
    for folder in ("books", "others"):
        (tmp_path / folder).mkdir()
        for name in ("one", "two", "three", "four"):
            (tmp_path / f"{folder}/{name}.txt").write_text((ROOT / "README.md").read_text()[:3000])
    commands = [line for line in blocks("sh")[1].splitlines() if line.startswith("perceiver-ar")]
    assert len(commands) == 13
    monkeypatch.chdir(tmp_path)
    for command in commands:
        _, *args = shlex.split(command, comments=True)
        result = run(*args)
        assert result.returncode == 0, (command, result.stderr)
