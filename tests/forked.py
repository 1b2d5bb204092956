"""Commands in processes forked from one with all slow imports done, so that they start at once."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "perceiver_ar.cli",
        "perceiver_ar.drawing",
        "perceiver_ar.training",
        "torch._dynamo",
        *(f"torch.distributed.{name}" for name in ("fsdp", "optim", "checkpoint")),
    ]
)


def run(*args: str) -> subprocess.CompletedProcess[str]:
    """Runs a command; returns its exit status, standard output and standard error."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = SERVER.Process(target=_command, args=(args, out, err, str(Path.cwd()), dict(os.environ)))
        process.start()
        try:
            process.join()
        finally:
            process.kill()
            process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(args, process.exitcode, out.read_text(), err.read_text())


def _command(args: tuple[str, ...], out: Path, err: Path, folder: str, environment: dict[str, str]) -> None:
    from perceiver_ar.cli import main

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.argv = ["perceiver-ar", *args]
    main()
