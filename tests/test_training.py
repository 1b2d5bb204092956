"""Training: what it computes, and that nothing is lost whatever happens."""

import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reading
import torch
from damage import every_flip_is_noticed
from safetensors import SafetensorError
from safetensors.torch import load_file

import perceiver_ar.checkpoint as checkpoint_module
import perceiver_ar.keeping as keeping_module
import perceiver_ar.training as training_module
from perceiver_ar import Experiment, ModelConfig, PerceiverAR, TrainConfig, presets, train
from perceiver_ar.checkpoint import checkpoints, named_tensors
from perceiver_ar.data import Crops, collate
from perceiver_ar.distributed import Ranks
from perceiver_ar.layers import Linear
from perceiver_ar.optim import begin_state, learning_rate
from perceiver_ar.run import kept_from_others
from perceiver_ar.sealed import Damaged, file_digest, read_sealed, write_sealed
from perceiver_ar.source import open_source
from perceiver_ar.special import BOS, EOS
from perceiver_ar.store import Split
from perceiver_ar.tasks.copy import CopyTask
from perceiver_ar.tasks.tokens import TokensTask, prepare
from perceiver_ar.training import make_state
from tests.forked import SERVER
from tests.ranks import wait_until


def small(**settings: Any) -> Experiment:
    """A copy task that takes milliseconds a step."""
    model = ModelConfig(259, 16, 8, channels=16, heads=2, layers=1, positions="sinusoidal", cross_dropout=0.1)
    defaults: dict[str, Any] = {
        "steps": 12,
        "batch_size": 4,
        "warmup_steps": 4,
        "log_every": 1,
        "checkpoint_every": 3,
    }
    return Experiment("small", "copy", model, TrainConfig(**defaults | settings), {"length": 16})


def weights(run: Path) -> dict[str, torch.Tensor]:
    return reading.tensors(reading.newest(run))


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# Made by `python tests/test_training.py` on the CPU; the same with torch 2.11 and 2.13.
GOLDEN = [
    5.579692,
    5.590197,
    5.575192,
    5.560798,
    5.544095,
    5.530714,
    5.535111,
    5.522329,
    5.516706,
    5.512437,
    5.497796,
    5.497353,
    5.481636,
    5.49038,
    5.488792,
    5.48736,
    5.480817,
    5.485701,
    5.48239,
    5.476015,
]


def golden_losses(folder: Path) -> list[float]:
    """Twenty steps from weights of numpy's, since torch's own draws differ between its versions."""
    experiment = presets.get("copy-32")
    config = replace(experiment.model, channels=64, heads=4, residual_dropout=0.0)
    model, random = PerceiverAR(config), np.random.default_rng(0)
    for name, parameter in sorted(model.named_parameters()):
        scale = (
            1 / math.sqrt(parameter.shape[-1]) if name.endswith("weight") and parameter.dim() == 2 else 0.1
        )
        parameter.data = torch.from_numpy(random.normal(0, scale, parameter.shape)).float()
    model.save_pretrained(folder / "start")
    settings = replace(
        experiment.train, steps=20, batch_size=64, warmup_steps=5, learning_rate=5e-3, log_every=1
    )
    experiment = replace(experiment, model=config, train=settings)
    train(experiment, out=folder / "run", init=folder / "start", device="cpu", show=False)
    return losses(folder / "run")


def test_the_golden_loss_curve_is_reproduced(tmp_path: Path) -> None:
    assert golden_losses(tmp_path) == pytest.approx(GOLDEN, abs=1e-4)


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    train(small(ema=0.9), out=tmp_path / "whole", show=False)
    for steps in (5, 9, 12):
        # Cosine schedules would differ with the number of steps, so this one is constant.
        train(small(ema=0.9, steps=steps), out=tmp_path / "parts", resume=steps > 5, show=False)
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")


@pytest.mark.gpu
def test_a_deterministic_run_on_a_gpu_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    def experiment(steps: int) -> Experiment:
        model = ModelConfig(
            259, 512, 256, channels=256, heads=4, layers=2, cross_dropout=0.3, latent_dropout=0.1
        )
        settings = TrainConfig(steps=steps, batch_size=8, warmup_steps=4, log_every=1, deterministic=True)
        return Experiment("gpu", "copy", model, settings, {"length": 512})

    train(experiment(20), out=tmp_path / "whole", show=False)
    for steps in (9, 20):
        train(experiment(steps), out=tmp_path / "parts", resume=steps > 9, show=False)
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


@pytest.mark.parametrize("short", [{}, {"centred": True, "first_half": 2}])
def test_micro_batches_change_nothing_but_rounding(
    short: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, calls, loss = [], [], training_module.training_loss
    monkeypatch.setattr(training_module, "training_loss", lambda *args: (calls.append(1), loss(*args))[1])
    for size, parts in ((None, 1), (3, 2), (1, 4)):
        experiment = small(micro_batch_size=size)
        model = replace(experiment.model, cross_dropout=0.0)
        experiment = replace(experiment, model=model, options=experiment.options | short)
        train(experiment, out=tmp_path / str(size), show=False)
        found.append(losses(tmp_path / str(size)))
        assert len(calls) == 12 * parts  # of short sequences, too, although there are four times as many
        calls.clear()
    assert found[1] == pytest.approx(found[0], abs=1e-4)
    assert found[2] == pytest.approx(found[0], abs=1e-4)


def test_no_call_of_the_model_has_more_rows_than_cuda_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = small(steps=2)
    model = replace(experiment.model, cross_dropout=0.0)
    options = experiment.options | {"centred": True, "first_half": 2}  # 16 rows
    experiment, calls, loss = (
        replace(experiment, model=model, options=options),
        [],
        training_module.training_loss,
    )
    monkeypatch.setattr(training_module, "training_loss", lambda *args: (calls.append(1), loss(*args))[1])
    for most, parts in ((2**15, 1), (5, 4)):
        monkeypatch.setattr(training_module, "MOST_ROWS", most)
        train(experiment, out=tmp_path / str(most), show=False)
        assert len(calls) == 2 * parts
        calls.clear()
    assert losses(tmp_path / "5") == pytest.approx(losses(tmp_path / str(2**15)), abs=1e-4)


def full_gpu(*args: Any) -> None:
    raise torch.OutOfMemoryError


def full_cpu(*args: Any) -> None:
    torch.empty(2**60)


@pytest.mark.parametrize("full", [full_gpu, full_cpu])
def test_too_large_a_batch_is_halved_into_micro_batches(
    full: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    forward = PerceiverAR.forward

    def cramped(self: PerceiverAR, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if len(tokens) > 1:
            full()
        return forward(self, tokens, *args, **kwargs)

    monkeypatch.setattr(PerceiverAR, "forward", cramped)
    assert train(small(), out=tmp_path / "run")["step"] == 12
    said = capfd.readouterr().err
    assert "micro-batches of 2" in said
    assert "micro-batches of 1" in said
    assert reading.state(reading.newest(tmp_path / "run"))["micro"] == 1


@pytest.mark.parametrize("full", [full_gpu, full_cpu])
@pytest.mark.parametrize(
    ("of", "name", "sentence"),
    [
        (PerceiverAR, "forward", "one sequence does not fit into memory: set --model.checkpoint-act"),
        (torch.optim.AdamW, "step", "the optimizer's state does not fit into memory: lower"),
        (training_module, "make_state", "the model does not fit into memory: lower"),
    ],
)
def test_what_does_not_fit_into_memory_is_said(
    full: Any, of: Any, name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of, name, lambda *args, **settings: full())
    with pytest.raises(ValueError, match=sentence):
        train(small(), out=tmp_path / "run", show=False)


def test_other_errors_are_not_taken_for_full_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **settings: Any) -> None:
        torch.ones(2) @ torch.ones(3)

    for of, name in ((torch.optim.AdamW, "step"), (PerceiverAR, "forward")):
        with monkeypatch.context() as patch:
            patch.setattr(of, name, wrong)
            with pytest.raises(RuntimeError, match="size"):
                train(small(), out=tmp_path / name, show=False)


def test_only_the_run_itself_is_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = training_module.update
    monkeypatch.setattr(
        training_module,
        "update",
        lambda *args: seen.append(torch.are_deterministic_algorithms_enabled()) or real(*args),
    )
    train(small(deterministic=True, steps=2), out=tmp_path / "run", device="cpu", show=False)
    assert seen == [True, True]
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_loss_that_is_not_finite_stops_before_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = training_module.training_loss
    calls = []

    def poisoned(scores: Any, config: TrainConfig) -> torch.Tensor:
        calls.append(None)
        return real(scores, config) * (math.nan if len(calls) == 8 else 1)

    monkeypatch.setattr(training_module, "training_loss", poisoned)
    with pytest.raises(ValueError, match=r"step 8 \(the batch of seed 0, step 7\)"):
        train(small(), out=tmp_path / "run", show=False)
    kept = weights(tmp_path / "run")
    assert all(tensor.isfinite().all() for tensor in kept.values())
    monkeypatch.undo()
    train(small(), out=tmp_path / "run", resume=True, show=False)
    train(small(), out=tmp_path / "clean", show=False)
    assert equal(weights(tmp_path / "run"), weights(tmp_path / "clean"))


def test_a_full_disk_is_said_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write = checkpoint_module.write_sealed

    def full(path: Path, data: dict[str, Any]) -> None:
        if data["step"] in (6, 9):
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(checkpoint_module, "write_sealed", full)
    train(small(), out=tmp_path / "run")
    said = capfd.readouterr().err
    assert all(f"The disk is full: nothing kept of step {step}." in said for step in (6, 9))
    found = checkpoints(tmp_path / "run/checkpoints")
    assert [path.name for path in found] == ["step-00000003", "step-00000012"]
    assert {path.name for path in (tmp_path / "run/checkpoints").iterdir()} == {path.name for path in found}


@pytest.mark.timeout(60)
def test_a_disk_that_is_really_full_is_said_and_training_goes_on(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_training import small
from perceiver_ar import train
disk = Path(sys.argv[2])
train(small(steps=3, evaluate_every=100), out=disk / "run", device="cpu", show=False)
size = sum(path.stat().st_size for path in disk.glob("run/checkpoints/step-*/*"))
for part in (0.1, 0.5, 0.95):  # torch has other words for each
    there = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(there.f_bavail * there.f_bsize - int(part * size)))
    try:
        train(small(evaluate_every=100), out=disk / "run", resume=True, device="cpu")
    except ValueError as error:
        print(error, sorted(path.name for path in (disk / "run/checkpoints").iterdir()))
    (disk / "filler").unlink()
print(train(small(evaluate_every=100), out=disk / "run", resume=True, device="cpu", show=False)["step"])
"""
    alone = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    mount = 'mount -t tmpfs -o size=4m none "$0" && exec "$@"'
    if subprocess.run([*alone, mount, tmp_path, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a disk of its own")
    here = str(Path(__file__).parent)
    asked = [sys.executable, "-c", script, here, str(tmp_path)]
    done = subprocess.run(
        [*alone, mount, str(tmp_path), *asked],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    end = "the disk is full: free some space, then --resume to write the end. ['step-00000003']"
    assert done.stdout.splitlines() == [end, end, end, "12"], done.stderr
    assert done.stderr.count("The disk is full: nothing kept of step 6. Training goes on") == 3


def test_what_could_not_be_written_is_kept_when_training_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, real = checkpoint_module.write_sealed, training_module.training_loss
    failures, calls = [6], []

    def full_at_first(path: Path, data: dict[str, Any]) -> None:
        if data["step"] in failures:
            failures.clear()
            raise OSError(28, "No space left on device")
        write(path, data)

    def poisoned(scores: Any, config: TrainConfig) -> torch.Tensor:
        calls.append(None)
        return real(scores, config) * (math.nan if len(calls) == 7 else 1)

    monkeypatch.setattr(checkpoint_module, "write_sealed", full_at_first)
    monkeypatch.setattr(training_module, "training_loss", poisoned)
    with pytest.raises(ValueError, match="the loss of step 7"):
        train(small(), out=tmp_path / "run", show=False)
    assert not failures
    assert reading.newest(tmp_path / "run").name == "step-00000006"


def test_nothing_is_being_written_any_more_when_training_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint_module.write_sealed
    monkeypatch.setattr(checkpoint_module, "write_sealed", lambda *args: time.sleep(0.3) or write(*args))

    def fails(job: Any, run: Any, *args: Any) -> None:
        assert run.step < 4

    monkeypatch.setattr(training_module, "after_step", fails)
    with pytest.raises(AssertionError):
        train(small(), out=tmp_path / "run", show=False)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000003"]


def test_a_checkpoint_that_lacks_something_is_refused(tmp_path: Path) -> None:
    train(small(steps=3), out=tmp_path / "run", show=False)
    source = open_source("copy", {"length": 16}, None)
    run = make_state(small(ema=0.9), source, torch.device("cpu"), None, Ranks())
    with pytest.raises(Damaged, match=r"step-00000003 lacks average\.cross_attend"):
        run.restore(reading.newest(tmp_path / "run"))


def test_muon_steps_linear_maps_alone_and_orthogonally() -> None:
    after = {}
    for kind in ("adamw", "muon"):
        source = open_source("copy", {"length": 16}, None)
        run = make_state(small(optimizer=kind), source, torch.device("cpu"), None, Ranks())
        before = {name: weight.detach().clone() for name, weight in run.model.named_parameters()}
        random = torch.Generator().manual_seed(0)
        for parameter in run.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=random)
        for group in run.optimizer.param_groups:
            group["lr"] = 0.01
        run.optimizer.step()
        run.optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in run.model.parameters())
        after[kind] = {name: (w - before[name]).detach() for name, w in run.model.named_parameters()}
    maps = {f"{name}.weight" for name, module in run.model.named_modules() if type(module) is Linear}
    assert "self_attends.0.mlp.widen.weight" in maps
    for name, step in after["muon"].items():
        if name not in maps:
            assert torch.equal(step, after["adamw"][name])
            continue
        found = torch.linalg.svdvals(step) / 0.01 / (0.2 * math.sqrt(max(step.shape)))
        assert 0.6 < found.median() < 1.3
        assert found.max() < 1.4


def test_a_loaded_state_of_muon_is_used() -> None:
    source = open_source("copy", {"length": 16}, None)
    run = make_state(small(optimizer="muon"), source, torch.device("cpu"), None, Ranks())
    begin_state(run.optimizer)
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    for parameter in run.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    run.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    state = run.optimizer.state[run.model.cross_attend.query.weight]
    assert state["momentum_buffer"].abs().sum() > 0


def test_a_run_by_muon_is_resumed_bit_for_bit_and_needs_whole_matrices(tmp_path: Path) -> None:
    train(small(optimizer="muon", steps=4), out=tmp_path / "whole", show=False)
    train(small(optimizer="muon", steps=2), out=tmp_path / "run", show=False)
    train(small(optimizer="muon", steps=4), out=tmp_path / "run", resume=True, show=False)
    assert equal(weights(tmp_path / "run"), weights(tmp_path / "whole"))
    train(small(steps=4), out=tmp_path / "other", show=False)
    assert not equal(weights(tmp_path / "run"), weights(tmp_path / "other"))
    with pytest.raises(ValueError, match="muon needs whole matrices: set parallel to ddp"):
        small(optimizer="muon", parallel="fsdp")


def test_an_optimizer_that_knows_other_weights_is_not_packed() -> None:
    run = make_state(small(), open_source("copy", {"length": 16}, None), torch.device("cpu"), None, Ranks())
    begin_state(run.optimizer)
    named_tensors(run.model, run.optimizer, [])
    run.model.norm.weight = torch.nn.Parameter(run.model.norm.weight.detach())  # as a step given up leaves it
    with pytest.raises(AssertionError):
        named_tensors(run.model, run.optimizer, [])


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch evil",)


def test_nothing_of_others_is_built_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train(small(steps=3), out="run", show=False)
    place = reading.newest(tmp_path / "run")
    (place / ".metadata").write_bytes(pickle.dumps(Evil()))
    state = read_sealed(place / "state.json")
    state["files"][".metadata"] = file_digest(place / ".metadata")
    write_sealed(place / "state.json", state)
    with pytest.raises(ValueError, match=r"holds posix\.system, which is none of a checkpoint's"):
        train(small(steps=6), out="run", resume=True, show=False)
    assert not (tmp_path / "evil").exists()


def test_a_checkpoint_of_the_first_format_is_gone_on_from(tmp_path: Path) -> None:
    for name in ("new", "old"):
        train(small(steps=3, ema=0.9), out=tmp_path / name, show=False)
    place = reading.newest(tmp_path / "old")
    reading.as_first_format(place)
    assert {path.name for path in place.iterdir()} == {"tensors.safetensors", "state.json"}
    for name in ("new", "old"):
        train(small(steps=6, ema=0.9), out=tmp_path / name, resume=True, show=False)
    assert losses(tmp_path / "old") == losses(tmp_path / "new")
    assert equal(weights(tmp_path / "old"), weights(tmp_path / "new"))
    place = reading.newest(tmp_path / "old")
    reading.as_first_format(place)
    every_flip_is_noticed(sorted(place.iterdir()), 50, lambda: reading.state(place))


def test_the_words_of_safetensors_for_a_full_disk_are_understood() -> None:
    # As it raised them on a full tmpfs.
    error = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert checkpoint_module.disk_is_full(error)
    assert not checkpoint_module.disk_is_full(PermissionError(13, "Permission denied"))


def test_every_single_bit_flip_in_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    train(small(keep=1), out=tmp_path / "run", show=False)
    (place,) = checkpoints(tmp_path / "run/checkpoints")
    files = sorted(place.iterdir())
    assert len(files) == 3
    every_flip_is_noticed(files, 500, lambda: reading.state(place))


def test_the_newest_good_checkpoint_is_used(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(small(), out=tmp_path / "run", show=False)
    whole = weights(tmp_path / "run")
    newest = reading.newest(tmp_path / "run") / "__0_0.distcp"
    newest.write_bytes(newest.read_bytes()[:-1])
    train(small(), out=tmp_path / "run", resume=True)
    said = capfd.readouterr().err
    assert "__0_0.distcp is missing or damaged. Trying the one before." in said
    assert "step 10: loss" in said
    assert equal(weights(tmp_path / "run"), whole)
    for place in checkpoints(tmp_path / "run/checkpoints"):
        (place / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole"):
        train(small(), out=tmp_path / "run", resume=True, show=False)


def test_runs_are_begun_resumed_and_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(small(), out=tmp_path / "run", resume=True)  # nothing there: from the beginning
    assert f"Nothing to resume in {tmp_path / 'run'}: starting a new run." in capfd.readouterr().err
    with pytest.raises(ValueError, match="exists already: add --resume to go on"):
        train(small(), out=tmp_path / "run", show=False)
    with pytest.raises(
        ValueError, match=r"other settings: train.learning_rate was 0.0003 and is 0.1\. Use those"
    ):
        train(small(learning_rate=0.1), out=tmp_path / "run", resume=True, show=False)
    capfd.readouterr()
    assert train(small(log_every=2), out=tmp_path / "run", resume=True)["step"] == 12
    said = capfd.readouterr().err
    assert "is finished: 12 steps." in said
    assert "Nothing to resume" not in said


def test_a_run_is_not_put_into_a_folder_of_other_things(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("Dear all")
    with pytest.raises(ValueError, match="mine is not empty, but holds no run"):
        train(small(), out=tmp_path / "mine", resume=True, show=False)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]


CHILD = """
import sys
sys.path.insert(0, {tests!r})
from test_training import small
from perceiver_ar import train
result = train(small(steps={steps}, checkpoint_every=1), out={out!r}, resume=True)
sys.exit(128 + result["signal"] if result["signal"] else 0)
"""


def child(out: Path, steps: int) -> subprocess.Popen[bytes]:
    code = CHILD.format(tests=str(Path(__file__).parent), out=str(out), steps=steps)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, env=environment)


def go_on(out: Path) -> None:
    torch.set_num_threads(1)
    train(small(steps=150, checkpoint_every=1), out=out, resume=out.exists(), show=False)


@pytest.mark.slow
def test_twenty_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    random, reached, log = np.random.default_rng(0), [0], tmp_path / "killed/metrics.jsonl"
    for kill in range(20):
        process = SERVER.Process(target=go_on, args=(tmp_path / "killed",))
        process.start()
        before = log.read_bytes() if log.exists() else b""
        if kill % 5:
            wait_until(lambda before=before: log.exists() and log.read_bytes() != before)  # a step is done
        time.sleep(random.uniform(0, 0.15 if kill % 5 else 0.3))  # or at any moment of the start
        assert process.is_alive(), "the run ended before it was killed twenty times"
        process.kill()
        process.join()
        reached.append(len(losses(tmp_path / "killed")) if log.exists() else 0)
    assert reached[-1] > reached[0]
    for name in ("killed", "whole"):
        process = SERVER.Process(target=go_on, args=(tmp_path / name,))
        process.start()
        process.join(120)
        assert process.exitcode == 0
    assert equal(weights(tmp_path / "killed"), weights(tmp_path / "whole"))
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    models = [load_file(tmp_path / name / "model/model.safetensors") for name in ("killed", "whole")]
    assert equal(*models)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_leaves(tmp_path: Path, number: int) -> None:
    process = child(tmp_path / "run", 100_000)
    assert process.stderr is not None
    assert any(b"loss" in line for line in process.stderr)  # a step was done
    process.send_signal(number)
    sent = time.monotonic()
    said = process.communicate(timeout=60)[1].decode()
    assert time.monotonic() - sent < 10
    assert process.returncode == 128 + number
    assert "continue with --resume" in said
    state = reading.state(reading.newest(tmp_path / "run"))
    assert state["step"] >= 1
    assert (tmp_path / "run/model/model.safetensors").exists()


def test_learning_rates_follow_the_paper() -> None:
    constant = TrainConfig(steps=100, learning_rate=1.0, warmup_steps=10)
    assert [learning_rate(s, constant) for s in (0, 4, 9, 10, 99)] == pytest.approx([0.1, 0.5, 1, 1, 1])
    cosine = replace(constant, schedule="cosine")
    assert [learning_rate(s, cosine) for s in (10, 55, 100)] == pytest.approx([1, 0.5, 0])
    last = replace(cosine, cosine_steps=20)
    assert [learning_rate(s, last) for s in (50, 80, 90, 100)] == pytest.approx([1, 1, 0.5, 0])


def test_z_loss_and_label_smoothing_are_what_they_say() -> None:
    from perceiver_ar.embedding import Scores

    logits, targets = torch.randn(2, 3, 7), torch.randint(7, (2, 3))
    log_z = logits.logsumexp(-1)
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(
        2, 3
    )
    scores = Scores(nats, log_z, log_z - logits.mean(-1), None)
    wanted = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=0.3
    )
    config = TrainConfig(label_smoothing=0.3, z_loss=0.01)
    torch.testing.assert_close(
        training_module.training_loss(scores, config), wanted + 0.01 * log_z.square().sum()
    )


def test_latents_are_drawn_anew_each_step_and_the_same_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    forward = PerceiverAR.forward

    def watch(self: PerceiverAR, tokens: torch.Tensor, **kwargs: Any) -> Any:
        seen.append(kwargs["targets"].shape[1])
        return forward(self, tokens, **kwargs)

    monkeypatch.setattr(PerceiverAR, "forward", watch)
    train(small(latents_drawn=(2, 4, 8)), out=tmp_path / "a", show=False)
    assert set(seen) == {2, 4, 8}
    first = list(seen)
    seen.clear()
    for steps in (5, 12):
        train(small(latents_drawn=(2, 4, 8), steps=steps), out=tmp_path / "b", resume=steps > 5, show=False)
    assert seen == first


def test_the_average_of_the_weights_is_what_is_kept(tmp_path: Path) -> None:
    train(small(ema=0.5), out=tmp_path / "run", show=False)
    tensors, kept = weights(tmp_path / "run"), load_file(tmp_path / "run/model/model.safetensors")
    assert all(torch.equal(kept[name], tensors[f"average.{name}"]) for name in kept)
    assert not torch.equal(kept["norm.weight"], tensors["model.norm.weight"])


def test_the_best_model_is_kept_and_patience_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([3.0, 2.0, 2.5, 2.6, 1.0])
    saved: list[int] = []
    monkeypatch.setattr(keeping_module, "evaluate", lambda *args, **rest: {"nats": next(values)})
    export = keeping_module.export
    monkeypatch.setattr(keeping_module, "export", lambda *args: (saved.append(1), export(*args)))
    result = train(small(evaluate_every=2, patience=2), out=tmp_path / "run", show=False)
    assert result["step"] == 8
    assert len(saved) == 2
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["validation"]["nats"] for line in lines if "validation" in line] == [3.0, 2.0, 2.5, 2.6]


def test_metrics_go_to_another_logger_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """trackio, wandb: a module with init, log and finish."""
    logged: list[dict[str, float]] = []
    module = types.ModuleType("trackio")
    module.init = lambda **about: logged.append(about)
    module.log = lambda numbers, step: logged.append(numbers | {"step": step})
    module.finish = lambda: logged.append({})
    monkeypatch.setitem(sys.modules, "trackio", module)
    train(small(logger="trackio", evaluate_every=6), out=tmp_path / "run", show=False)
    assert logged[0] == {"project": "perceiver-ar", "name": "run"}
    assert logged.pop() == {}
    assert {} not in logged
    steps = [numbers for numbers in logged if "loss" in numbers]
    assert [numbers["loss"] for numbers in steps] == losses(tmp_path / "run")
    assert [numbers["step"] for numbers in steps] == list(range(1, 13))
    assert [numbers["step"] for numbers in logged if "validation/nats" in numbers] == [6, 12]


def validations(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["validation"]["nats"] for line in lines if "validation" in line}


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_evaluation_given_up_for_a_signal_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    real, calls = keeping_module.evaluate, []

    def interrupted(*args: Any, progress: Any, **rest: Any) -> Any:
        calls.append(None)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, progress=progress, **rest)

    settings = small(evaluate_every=5, checkpoint_every=1000)
    monkeypatch.setattr(keeping_module, "evaluate", interrupted)
    assert train(settings, out=tmp_path / "run", show=False)["signal"] == signal.SIGTERM
    assert len(calls) == at
    train(settings, out=tmp_path / "run", resume=True, show=False)
    monkeypatch.undo()
    train(settings, out=tmp_path / "whole", show=False)
    assert validations(tmp_path / "run") == validations(tmp_path / "whole")
    assert list(validations(tmp_path / "run")) == [5, 10, 12]
    kept, whole = (load_file(tmp_path / name / "model/model.safetensors") for name in ("run", "whole"))
    assert equal(kept, whole)


def test_damaged_checkpoints_are_set_aside_and_never_outlive_good_ones(tmp_path: Path) -> None:
    train(small(steps=6, keep=9), out=tmp_path / "run", show=False)
    for keep in (9, 1):  # the same step is damaged twice
        newest = checkpoints(tmp_path / "run/checkpoints")[-1]
        (newest / "state.json").write_text("{}")
        train(small(steps=6, keep=keep), out=tmp_path / "run", resume=True, show=False)
    names = {path.name for path in (tmp_path / "run/checkpoints").iterdir()}
    assert names == {"step-00000006", "damaged-step-00000006"}
    reading.state(tmp_path / "run/checkpoints/step-00000006")


def test_a_run_is_not_trained_twice_at_once(tmp_path: Path) -> None:
    train(small(steps=2), out=tmp_path / "run", show=False)
    with kept_from_others(tmp_path / "run"), pytest.raises(ValueError, match="is being trained"):
        train(small(steps=4), out=tmp_path / "run", resume=True, show=False)
    train(small(steps=4), out=tmp_path / "run", resume=True, show=False)


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, update, written = checkpoint_module.file_digest, training_module.update, []

    def slowly(path: Path) -> str:
        time.sleep(0.3)
        return digest(path)

    def noting(job: Any, run: Any, batch: Any) -> Any:
        written.append((run.step, job.keeper.pending is not None and not job.keeper.pending.done()))
        return update(job, run, batch)

    monkeypatch.setattr(checkpoint_module, "file_digest", slowly)
    monkeypatch.setattr(training_module, "update", noting)
    train(small(steps=6, checkpoint_every=3), out=tmp_path / "run", show=False)
    assert written == [(0, False), (1, False), (2, False), (3, True), (4, True), (5, True)]


def test_a_crash_between_the_renames_loses_nothing(tmp_path: Path) -> None:
    train(small(steps=6, keep=1), out=tmp_path / "run", show=False)
    whole = weights(tmp_path / "run")
    folder = tmp_path / "run/checkpoints"
    (folder / "step-00000006").rename(folder / ".step-00000006.old")
    (folder / ".step-00000006.partial").mkdir()
    (tmp_path / "run/model").rename(tmp_path / "run/.model.old")
    train(small(steps=6, keep=1), out=tmp_path / "run", resume=True, show=False)
    assert equal(weights(tmp_path / "run"), whole)
    assert [path.name for path in folder.iterdir()] == ["step-00000006"]
    assert (tmp_path / "run/model/model.safetensors").exists()


def test_a_full_disk_at_the_end_is_an_error_that_resuming_mends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "write_sealed", full)
    with pytest.raises(ValueError, match="the disk is full: free some space, then --resume"):
        train(small(), out=tmp_path / "run", show=False)
    monkeypatch.undo()
    assert train(small(), out=tmp_path / "run", resume=True, show=False)["step"] == 12


def test_data_and_first_weights_are_remembered(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 1)):
        np.save(tmp_path / f"{name}.npy", np.random.default_rng(seed).integers(0, 40, size=(30, 50)))
        prepare(tmp_path / f"{name}.npy", tmp_path / name, vocab_size=40)
    train(small(steps=3), data=tmp_path / "a", out=tmp_path / "first", show=False)
    arguments = {"data": tmp_path / "a", "init": tmp_path / "first"}
    train(small(), **arguments, out=tmp_path / "whole", show=False)
    train(small(steps=4), **arguments, out=tmp_path / "parts", show=False)
    train(small(), out=tmp_path / "parts", resume=True, show=False)  # both are in config.json
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    with pytest.raises(ValueError, match="was begun on other data"):
        train(small(), data=tmp_path / "b", out=tmp_path / "parts", resume=True, show=False)


def test_a_run_with_a_checkpoint_needs_its_first_weights_no_more(tmp_path: Path) -> None:
    rotary = replace(small().model, positions="rotary", cross_dropout=0.0)

    def tuned(steps: int, context: int = 32) -> Experiment:
        model = replace(rotary, context=context)
        return replace(small(steps=steps), model=model, options={"length": 32})

    train(replace(small(steps=1), model=rotary), out=tmp_path / "first", show=False)
    for steps, name in ((6, "whole"), (3, "parts"), (3, "begun")):
        train(tuned(steps), init=tmp_path / "first", out=tmp_path / name, show=False)
    shutil.rmtree(tmp_path / "begun/checkpoints")
    (tmp_path / "first").rename(tmp_path / "elsewhere")
    train(tuned(6), out=tmp_path / "parts", resume=True, show=False)
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    with pytest.raises(ValueError, match=r"begun with other settings: model.context was 32 and is 48"):
        train(tuned(6, 48), out=tmp_path / "parts", resume=True, show=False)
    with pytest.raises(ValueError, match="neither a folder nor a model"):
        train(tuned(6), out=tmp_path / "begun", resume=True, show=False)
    train(tuned(6), init=tmp_path / "elsewhere", out=tmp_path / "begun", resume=True, show=False)
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "begun"))


def test_what_was_trained_is_kept_when_the_store_turns_out_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "ids.npy", np.arange(40))
    prepare(tmp_path / "ids.npy", tmp_path / "store")
    calls = []
    read = Split.read

    def failing(self: Split, *args: Any) -> Any:
        calls.append(None)
        if len(calls) > 30:
            raise Damaged("tokens.bin is damaged")
        return read(self, *args)

    monkeypatch.setattr(Split, "read", failing)
    with pytest.raises(Damaged):
        train(small(checkpoint_every=1000), data=tmp_path / "store", out=tmp_path / "run", show=False)
    assert reading.state(reading.newest(tmp_path / "run"))["step"] == 7


def test_a_run_out_of_patience_stays_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([1.0, 2.0, 3.0])
    monkeypatch.setattr(keeping_module, "evaluate", lambda *args, **rest: {"nats": next(values)})
    for resume in (False, True):
        result = train(small(evaluate_every=2, patience=2), out=tmp_path / "run", resume=resume, show=False)
        assert result["step"] == 6


def test_windows_grow_to_the_whole_whatever_its_length() -> None:
    examples = CopyTask(length=100, centred=True).examples()
    while examples.learned(0.0):
        pass
    assert examples.half == 50


def test_windows_of_every_size_are_sequences_of_their_own_with_as_many_targets() -> None:
    examples = CopyTask(length=100, centred=True).examples()
    for half, count in ((8, 12), (16, 6), (32, 3), (50, 3)):
        assert examples.half == half
        windows = examples.windows(0, 0, 3, 32)
        assert len(windows) == count
        for window in windows:
            assert (window.tokens[0], window.offset, window.scored) == (BOS, 50 - half, min(half, 32))
            scored = window.tokens[half:]
            copied = np.append(window.tokens[1:half][::-1], EOS)[: len(scored)]
            assert np.array_equal(scored, copied)
        examples.learned(0.0)


def test_spaced_windows_hold_each_target_at_the_mirrored_place() -> None:
    task, alone, pairs = CopyTask(length=200, digits=5, spaced=20), np.zeros(5), []
    assert (task.base, task.shift) == (3, 22)
    examples = task.examples()
    for half, scored, rows in ((8, 8, 8), (16, 16, 4), (20, 16, 4)):
        assert examples.state == {"half": half}
        for step in range(30):
            windows = examples.windows(0, step, 4, 16)
            batch = collate(windows, scored, task)
            assert batch.targets.shape == (rows, scored)
            assert batch.lengths is None
            for window, inputs, targets in zip(windows, batch.inputs, batch.targets, strict=True):
                places = window.places.tolist()
                assert places == sorted(set(places))
                assert -22 <= places[0] < places[scored - 1] < 99 < places[scored]
                first = dict(zip(places, inputs[:scored].tolist(), strict=False))
                copied = [first[200 - 2 - place] for place in places[scored:]]
                assert targets.tolist() == [EOS if token == BOS else token for token in copied]
                assert first[0] == BOS
                digits = task.positions(window.places[:scored])
                differ = digits[:, None] != digits
                alone += differ[differ.sum(-1) == 1].sum(0)
                pairs.append((differ.sum(-1) == 1).sum())
        digits = task.positions(np.stack([window.places for window in windows]))
        assert np.array_equal(digits, np.asarray(batch.positions))
        assert np.array_equal(digits[:, scored:], 2 - digits[:, :scored][:, ::-1])
        examples.learned(0.0)
    assert np.mean(pairs[-120:]) > 25  # of 36 in a whole grid of two digits; random places have 16
    assert alone.min() > 0.2 * alone.max()  # pairs of keys that differ in one digit, by that digit
    assert examples.learned(0.0) is None


@pytest.mark.parametrize("wrong", [{"digits": 0}, {"centred": True}, {"spaced": 1}, {"spaced": 100}])
def test_spaced_windows_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {"length": 200, "digits": 5, "spaced": 20}
    with pytest.raises(ValueError, match="spaced places need digits, no centred windows, and must be from 2"):
        CopyTask(**(right | wrong))
    with pytest.raises(ValueError, match="6 digits are more than 200 spaced places need: use fewer"):
        CopyTask(**(right | {"digits": 6}))
    with pytest.raises(ValueError, match="20 spaced places need as many latents, but there are 16"):
        CopyTask(**right).check(ModelConfig(259, 200, 16, positions="axial", axes=(3,) * 5))


def test_crops_show_every_target_about_as_often() -> None:
    store = np.arange(3, 515)

    class OneDocument:
        folder = "x"

        def lengths(self) -> np.ndarray:
            return np.array([len(store)])

        def length(self, index: int) -> int:
            return len(store)

        def read(self, index: int, start: int, end: int) -> np.ndarray:
            return store[start:end]

    for context, latents in ((128, 16), (128, 64), (128, 128), (1024, 1024)):
        crops = Crops(OneDocument(), context, TokensTask())
        seen = np.zeros(len(store))
        for step in range(40):
            for window in crops.windows(0, step, 100, latents):
                end = window.offset + len(window.tokens)
                seen[end - window.scored : end] += 1
        targets = seen[1:]
        assert targets.min() > 0.3 * np.median(targets)
        assert targets.max() < 1.8 * np.median(targets)


def test_the_curriculum_grows_and_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from perceiver_ar.tasks.copy import CopyExamples

    def learned(self: CopyExamples, nats: float) -> str | None:
        return CopyExamples_learned(self, 0.0 if nats > 0 else 1.0)

    CopyExamples_learned = CopyExamples.learned
    monkeypatch.setattr(CopyExamples, "learned", learned)
    experiment = replace(small(), options={"length": 16, "centred": True, "first_half": 2})
    train(replace(experiment, train=replace(experiment.train, steps=2)), out=tmp_path / "run", show=False)
    state = reading.state(reading.newest(tmp_path / "run"))
    assert state["examples"] == {"half": 8}
    train(experiment, out=tmp_path / "run", resume=True, show=False)
    train(experiment, out=tmp_path / "whole", show=False)
    assert equal(weights(tmp_path / "run"), weights(tmp_path / "whole"))


@pytest.mark.parametrize(("length", "digits", "base"), [(16, 2, 5), (26, 3, 3), (28, 3, 5), (4096, 4, 9)])
def test_what_is_copied_has_the_mirrored_digits(length: int, digits: int, base: int) -> None:
    task = CopyTask(length=length, digits=digits)
    assert task.base == base
    places = task.positions(np.arange(length))
    assert places.shape == (length, digits)
    assert places.min() >= 0
    assert places.max() < base
    assert len(np.unique(places, axis=0)) == length
    task.positions(np.arange(-1, length + 5))  # beside them, any will do
    # What follows place p, a copy, stands at length - 2 - p.
    assert (places[: length - 1] + places[length - 2 :: -1] == base - 1).all()


def test_digits_of_a_copy_are_learned_as_axes(tmp_path: Path) -> None:
    axial = replace(small().model, positions="axial", axes=(5, 5))
    experiment = replace(small(evaluate_every=6), model=axial, options={"length": 16, "digits": 2})
    train(experiment, out=tmp_path / "run", show=False)
    for digits, model, words in (
        (2, small().model, "2 digits of 16 places need --model.positions axial --model.axes 5 5."),
        (2, replace(axial, axes=(5, 4)), "--model.axes 5 5."),
        (3, axial, "--model.axes 3 3 3."),
        (0, axial, "set --task.digits"),
    ):
        with pytest.raises(ValueError, match=words):
            CopyTask(length=16, digits=digits).check(model)


def test_a_store_is_trained_on_and_its_vocabulary_taken(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 40, size=(30, 50)))
    prepare(tmp_path / "ids.npy", tmp_path / "store")
    train(small(evaluate_every=6), data=tmp_path / "store", out=tmp_path / "run")
    assert "Using the store's vocabulary of 43 tokens instead of the preset's." in capfd.readouterr().err
    assert PerceiverAR.from_pretrained(tmp_path / "run/model").config.vocab_size == 43


def test_training_starts_from_a_trained_model(tmp_path: Path) -> None:
    train(small(), out=tmp_path / "first", show=False)
    trained = load_file(tmp_path / "first/model/model.safetensors")
    longer = replace(small(steps=1, learning_rate=1e-9, warmup_steps=0), options={"length": 32})
    longer = replace(longer, model=replace(longer.model, context=32))
    train(longer, out=tmp_path / "second", init=tmp_path / "first", show=False)
    started = load_file(tmp_path / "second/model/model.safetensors")
    for name, tensor in trained.items():
        torch.testing.assert_close(started[name], tensor, atol=1e-6, rtol=0)
    wider = replace(small(), model=replace(small().model, channels=32))
    with pytest.raises(ValueError, match=r"has channels 16, but 32 is asked for: set --model.channels"):
        train(wider, out=tmp_path / "third", init=tmp_path / "first", show=False)
    assert not (tmp_path / "third").exists()


def test_a_longer_context_keeps_the_trained_wavelengths() -> None:
    from perceiver_ar.initial import fit

    trained = ModelConfig(259, 16, 8, channels=16, heads=2, layers=1)
    assert fit(trained, replace(trained, context=64), "x").max_wavelength == 16
    assert fit(trained, replace(trained, context=64, max_wavelength=50.0), "x").max_wavelength == 50
    learned = replace(trained, positions="learned")
    with pytest.raises(ValueError, match="learned 16 positions"):
        fit(learned, replace(learned, context=64), "x")


@pytest.mark.slow
def test_copy_32_is_learned_on_the_cpu_within_two_minutes(tmp_path: Path) -> None:
    experiment = presets.get("copy-32")
    model = replace(experiment.model, channels=128, heads=4, cross_dropout=0.0, residual_dropout=0.0)
    settings = replace(
        experiment.train, steps=600, batch_size=64, warmup_steps=20, learning_rate=2e-3, evaluate_every=600
    )
    began = time.monotonic()
    train(replace(experiment, model=model, train=settings), out=tmp_path / "run", device="cpu", show=False)
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    report = next(line for line in map(json.loads, lines) if "validation" in line)["validation"]
    assert report["tokens"] == 192
    assert report["accuracy"] == 1.0
    assert time.monotonic() - began < 120


if __name__ == "__main__":
    import tempfile

    print([round(value, 6) for value in golden_losses(Path(tempfile.mkdtemp()))])
