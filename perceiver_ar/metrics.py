"""What a run tells: metrics.jsonl always, a live line on the terminal, and other loggers by choice."""

import importlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from perceiver_ar.config import TrainConfig
from perceiver_ar.sealed import write_whole


class Metrics:
    """Use as a context; `log` takes the numbers of a step."""

    def __init__(self, folder: Path, config: TrainConfig, start: int, show: bool, leads: bool = True) -> None:
        """leads: whether this process, of those that train together, is the one that tells anything."""
        self.path = folder / "metrics.jsonl"
        if leads:
            forget_after(self.path, start)
        show = show and leads
        self.leads, self.show = leads, show
        self.console = Console(stderr=True, markup=False, emoji=False)  # samples are shown as they are
        self.write_elsewhere, self.close_elsewhere = _logger(config.logger if leads else "none", folder)
        self.progress = Progress(
            TextColumn("step {task.completed:,} of {task.total:,}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (show and self.console.is_terminal),
        )
        self.task = self.progress.add_task("", total=config.steps, completed=start)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.progress.stop()
        self.close_elsewhere()

    def advance(self, done: int) -> None:
        self.progress.update(self.task, completed=done)

    def start_clock(self) -> None:
        """Begins a stretch whose speed is measured."""
        self.began, self.targets = time.perf_counter(), 0.0

    def count(self, targets: float) -> None:
        self.targets += targets

    def log_step(self, step: int, numbers: dict[str, float], waited: float) -> None:
        """The numbers of a step, with the speed since the clock was started or asked."""
        seconds = time.perf_counter() - self.began
        speed = {"targets_per_second": self.targets / seconds, "waiting": min(1.0, waited / seconds)}
        self.start_clock()
        self.log({"step": step, **numbers, **speed})
        loss, rate, per_second = numbers["loss"], numbers["lr"], speed["targets_per_second"]
        text = f"loss {loss:.4f}  lr {rate:.2e}  {per_second:,.0f} targets/s"
        self.progress.update(self.task, description=text)
        if not self.console.is_terminal:
            self.say(f"step {step:,}: {text}")

    def log(self, numbers: dict[str, Any]) -> None:
        """A line of metrics.jsonl, and of the other logger."""
        if not self.leads:
            return
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(numbers) + "\n")
        except OSError as error:
            self.say(f"{self.path} cannot be written: {error.strerror}. Training goes on.")
        self.write_elsewhere(numbers)

    def say(self, sentence: str) -> None:
        if self.show:
            self.progress.console.print(sentence, highlight=False, soft_wrap=True)


def forget_after(path: Path, start: int) -> None:
    """Drops the lines of steps that a resumed run will do again, and one that was cut short."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= start:
                kept.append(line + "\n")
        except ValueError:
            continue
    write_whole(path, "".join(kept).encode())


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{run} is not a run that has begun: it holds no {path.name}.")
    lines = whole_lines(path)
    if not any("loss" in line for line in lines):
        raise ValueError(f"{run} has logged no step yet.")
    return lines


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """All lines but a last one that is cut short, since the run goes on or was killed."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def import_logger(name: str) -> Any:
    """The logger's module, or None; called before a run begins, so that a missing one is said at once."""
    if name == "none":
        return None
    try:
        return importlib.import_module({"tensorboard": "torch.utils.tensorboard"}.get(name, name))
    except ImportError:
        raise ValueError(f"the logger {name} is not installed: pip install {name}") from None


def _logger(name: str, folder: Path) -> tuple[Callable[[dict[str, Any]], Any], Callable[[], Any]]:
    """A function that takes the numbers of a step, and one that is called at the end."""
    module = import_logger(name)
    if module is None:
        return lambda numbers: None, lambda: None
    if name == "tensorboard":
        writer = module.SummaryWriter(str(folder / "tensorboard"))
        return lambda numbers: [
            writer.add_scalar(key, value, numbers["step"]) for key, value in _scalars(numbers)
        ], writer.close
    module.init(project="perceiver-ar", name=folder.name)
    return lambda numbers: module.log(dict(_scalars(numbers)), step=numbers["step"]), module.finish


def _scalars(numbers: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """All numbers but the step; those of an evaluation as validation/nats and so on."""
    for key, value in numbers.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{key}/")
        elif key != "step":
            yield prefix + key, value
