"""The command line, as a user meets it."""

import json
import subprocess
import sys

import pytest

from perceiver_ar import presets


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from perceiver_ar.cli import main; main()", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_presets_are_listed_with_their_sizes() -> None:
    result = run("presets")
    assert result.returncode == 0
    lines = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()}
    assert lines["name"] == ["task", "context", "latents", "layers", "channels", "parameters"]
    assert lines["imagenet64"] == ["image", "12,289", "1,024", "60", "1,024", "770.1M"]
    assert set(presets.names()) <= set(lines)


def test_presets_as_json_are_one_object_on_one_line() -> None:
    result = run("presets", "--json")
    (line,) = result.stdout.splitlines()
    assert json.loads(line)["copy-131k"]["context"] == 131_072


def test_mistakes_end_with_status_2_and_no_traceback() -> None:
    for args in ((), ("presest",), ("presets", "--jsn")):
        result = run(*args)
        assert result.returncode == 2, args
        assert "Traceback" not in result.stderr
        assert result.stdout == ""


def test_a_users_mistake_inside_a_command_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from perceiver_ar import cli

    def names() -> list[str]:
        raise ValueError("the sentence.")

    monkeypatch.setattr(presets, "names", names)
    monkeypatch.setattr(sys, "argv", ["perceiver-ar", "presets"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert capsys.readouterr().err == "perceiver-ar: the sentence.\n"


def test_help_comes_without_importing_torch() -> None:
    code = "import sys, perceiver_ar.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "presets" in run("--help").stdout
