"""Work in processes: nothing that one item does can harm the others."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from perceiver_ar.workers import Lost, each


def work(item: int) -> int:
    if item == 3:
        os.kill(os.getpid(), signal.SIGSEGV)
    if item == 5:
        time.sleep(60)
    if item == 7:
        raise ValueError("seven")
    return item * item


def test_what_crashes_hangs_or_fails_is_told_and_the_rest_is_done() -> None:
    done = {item: (value, error) for item, value, error in each(work, range(12), workers=2, seconds=6.0)}
    assert sorted(done) == list(range(12))
    for item, (value, error) in done.items():
        if item in (3, 5):
            assert isinstance(error, Lost)
        elif item == 7:
            assert isinstance(error, ValueError)
            assert str(error) == "seven"
        else:
            assert (value, error) == (item * item, None)
    assert "crashed" in str(done[3][1])
    assert "too long" in str(done[5][1])


def threads(item: int) -> int:
    return torch.get_num_threads()


def test_processes_share_the_cores() -> None:
    cores = os.cpu_count() or 1
    for workers in (1, cores):
        assert [value for _, value, _ in each(threads, [0], workers)] == [max(1, cores // workers)]


def test_no_items_need_no_processes() -> None:
    assert list(each(work, [], workers=2)) == []


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from tests.test_workers import note
from perceiver_ar.workers import each
if __name__ == "__main__":
    list(each(note, [{str(tmp_path)!r}] * 2, 2))
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def note(folder: str) -> None:
    """Says that it runs, and works on for a second."""
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(1)


def test_a_script_without_a_guard_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "from perceiver_ar.workers import each\nprint('once')\n"
        "from os.path import basename\nprint([done.value for done in each(basename, ['a/b'], workers=1)])\n"
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "a.py")], capture_output=True, text=True, check=True
    )
    assert done.stdout == "once\n['b']\n"
