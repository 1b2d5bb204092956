"""Several processes train the run that one does, whatever happens to them."""

import json
import os
import re
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reading
import torch
from safetensors.torch import load_file

import perceiver_ar.evaluation as evaluation_module
import perceiver_ar.training as training_module
from perceiver_ar import Experiment, ModelConfig, PerceiverAR, TrainConfig, attention, cli, train
from perceiver_ar.checkpoint import Keeper, checkpoints, share
from perceiver_ar.config import AnyModelConfig, TransformerXLConfig
from perceiver_ar.distributed import Ranks, join, shard, whole
from perceiver_ar.model import Seen, _own_part
from perceiver_ar.source import open_source
from perceiver_ar.tasks.tokens import prepare
from perceiver_ar.training import make_state
from perceiver_ar.watch import Watch
from tests.ranks import command, finish, free_port, gone, on_ranks, under_torchrun, wait_until, workers

MODEL = ModelConfig(
    *(259, 16, 8),
    channels=16,
    heads=2,
    layers=2,
    residual_dropout=0.2,
    latent_dropout=0.2,
    cross_dropout=0.3,
)
XL = TransformerXLConfig(
    259,
    8,
    memory=12,
    evaluation_memory=12,
    channels=16,
    heads=2,
    layers=2,
    residual_dropout=0.2,
    memory_dropout=0.3,
)


def experiment(model: AnyModelConfig = MODEL, **settings: Any) -> Experiment:
    """A task that takes milliseconds a step."""
    usual: dict[str, Any] = {"steps": 20, "batch_size": 12, "warmup_steps": 2, "log_every": 1, "ema": 0.9}
    return Experiment("small", "copy", model, TrainConfig(**usual | settings), {"length": 16})


def store(folder: Path) -> Path:
    """Documents of many lengths."""
    random = np.random.default_rng(0)
    lines = [json.dumps(random.integers(0, 90, size).tolist()) for size in random.integers(2, 60, 60)]
    (folder / "ids.jsonl").write_text("\n".join(lines))
    prepare(folder / "ids.jsonl", folder / "store", validation=0.3)
    return folder / "store"


def losses(run: Path) -> list[float]:
    """Of training, and of evaluations."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] if "loss" in line else line["validation"]["nats"] for line in lines]


def tensors(run: Path) -> dict[str, torch.Tensor]:
    return reading.tensors(reading.newest(run))


def names(run: Path) -> list[str]:
    """What is in the folder of checkpoints, whatever it is."""
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def same(run: Path, other: Path, exactly: bool = False) -> None:
    wanted, found = tensors(other), tensors(run)
    assert wanted.keys() == found.keys()
    if exactly:
        assert losses(run) == losses(other)
        assert all(found[name].equal(x) for name, x in wanted.items())
        return
    assert losses(run) == pytest.approx(losses(other), abs=1e-5)
    for name, x in wanted.items():
        torch.testing.assert_close(found[name], x, atol=1e-4, rtol=1e-3)
    models = [load_file(folder / "model/model.safetensors") for folder in (other, run)]
    torch.testing.assert_close(*models, atol=1e-4, rtol=1e-3)


def train_all(runs: list[tuple[Path, Experiment]], data: Path | None, said: Path | None = None) -> list[Any]:
    """One after another in the same processes."""
    if said is None:
        return [train(asked, data, out, device="cpu", show=False) for out, asked in runs]
    with said.with_name(f"{said.name}-{os.environ['RANK']}").open("w") as file, redirect_stderr(file):
        return [train(asked, data, out, device="cpu") for out, asked in runs]


def attend_together(files: Path) -> list[float]:
    """How far keys that ranks share are from what one attends to, with all gradients, for several masks."""
    ranks, _ = join("cpu")
    torch.manual_seed(0)
    found = []
    for inputs, count, told in ((23, 5, 0), (23, 5, 5), (23, 5, 14), (23, 5, 23), (6, 5, 6), (5, 5, 5)):
        q, k, v = (torch.randn(2, 3, size, 8).double().requires_grad_() for size in (count, inputs, inputs))
        visible, upstream = torch.rand(2, told) > 0.5 if told else None, torch.randn(2, 3, count, 8).double()
        wanted = attention.reference(q, k, v, visible)
        gradients = torch.autograd.grad(wanted, (q, k, v), upstream)
        numbers = torch.arange(inputs).expand(2, -1)
        part, _, shown = _own_part(Seen(numbers, numbers, visible), count, ranks)
        own = slice(*(part[0, [0, -1]] + torch.tensor([0, 1])).tolist()) if part.numel() else slice(0, 0)
        here = (q, *(x[:, :, own].detach().requires_grad_() for x in (k, v)))
        got = attention.attend(*here, shown, share=ranks)
        dq, *rest = torch.autograd.grad(got, here, upstream)
        pairs = [(got, wanted), (dq, gradients[0])]
        # What one has counts for all, as theirs are averaged.
        pairs += [(x / ranks.size, y[:, :, own]) for x, y in zip(rest, gradients[1:], strict=True)]
        found += [(a - b).abs().max().item() for a, b in pairs if a.numel()]
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_attend_together_as_one_does_with_gradients(size: int, tmp_path: Path) -> None:
    for found in on_ranks(size, attend_together, tmp_path):
        assert isinstance(found, list), found
        assert len(found) > 12
        assert max(found) < 1e-6


@pytest.mark.timeout(150)
def test_ranks_that_share_the_inputs_train_as_one_does(tmp_path: Path) -> None:
    """20 steps with every dropout; with other shardings; two pairs of ranks with rows of their own."""
    data = store(tmp_path)
    few = replace(MODEL, latents=3)
    added = replace(MODEL, positions="sinusoidal", cross_dropout=0.0)
    one = [
        ("one-a", experiment(evaluate_every=8)),
        ("one-b", experiment(added, steps=6)),
        ("one-c", experiment(few, steps=6, evaluate_every=3)),
    ]
    train_all([(tmp_path / name, asked) for name, asked in one], data)
    for size, cases in (
        (2, (("a", {"parallel": "ddp"}), ("b", {"parallel": "fsdp", "micro_batch_size": 4}))),
        (4, (("a", {"context_parallel": 4}), ("b", {}), ("c", {"parallel": "zero1"}))),
    ):
        asked = [
            (
                tmp_path / f"{size}-{name}",
                replace(e, train=replace(e.train, **{"context_parallel": 2, **changed})),
            )
            for name, changed in cases
            for known, e in one
            if known == f"one-{name}"
        ]
        results = on_ranks(size, train_all, asked, data, tmp_path / "said")
        assert [[x["step"] for x in result] for result in results] == [[20, 6, 6][: len(cases)]] * size
        for name, _ in cases:
            same(tmp_path / f"{size}-{name}", tmp_path / f"one-{name}")


def go_on(out: Path, asked: Experiment, data: Path) -> int:
    return train(asked, data, out, resume=True, device="cpu", show=False)["step"]


def test_a_run_that_shares_inputs_goes_on_with_an_evaluation_and_with_fewer_ranks(tmp_path: Path) -> None:
    """An evaluation that comes before the first step must leave sharded weights fit for training."""
    data, run = store(tmp_path), tmp_path / "run"
    first = experiment(steps=2, parallel="fsdp", context_parallel=2)
    on_ranks(2, train_all, [(run, first)], data)
    then = replace(first, train=replace(first.train, steps=4, evaluate_every=2))
    assert on_ranks(2, go_on, run, then, data) == [4, 4]
    last = replace(then, train=replace(then.train, steps=6, context_parallel=1, parallel="ddp"))
    assert go_on(run, last, data) == 6
    train_all([(tmp_path / "one", replace(last, train=replace(last.train)))], data)
    assert losses(run)[-1] == pytest.approx(losses(tmp_path / "one")[-1], abs=1e-5)


@pytest.mark.timeout(150)
def test_two_ranks_train_as_one_does_however_they_share_the_work(tmp_path: Path) -> None:
    """20 steps with every dropout, and evaluations, of windows or of what Transformer-XL reads on."""
    data = store(tmp_path)
    adaptive = replace(MODEL, cutoffs=(20, 40), cutoff_factor=2)
    cases = [
        ("ddp", experiment(parallel="ddp", micro_batch_size=3, evaluate_every=8)),
        ("zero1", experiment(parallel="zero1", micro_batch_size=4)),
        ("fsdp", experiment(parallel="fsdp", micro_batch_size=2, evaluate_every=8)),
        ("adaptive", experiment(adaptive, steps=4)),
        ("xl", experiment(XL, steps=6, parallel="fsdp", micro_batch_size=2, evaluate_every=3)),
    ]
    results = on_ranks(
        2, train_all, [(tmp_path / name, asked) for name, asked in cases], data, tmp_path / "said"
    )
    assert [[x["step"] for x in result] for result in results] == [[20, 20, 20, 4, 6]] * 2
    said = [(tmp_path / f"said-{rank}").read_text() for rank in (0, 1)]
    assert said[0].count("step 20: loss") == 3  # one of them speaks
    assert not said[1]
    on_ranks(1, train_all, [(tmp_path / f"{name}-alone", asked) for name, asked in cases], data)
    for name, _ in cases:
        same(tmp_path / name, tmp_path / f"{name}-alone")


@pytest.mark.timeout(100)
def test_two_machines_of_two_ranks_train_as_one_does(tmp_path: Path) -> None:
    asked = experiment(parallel="hybrid")
    on_ranks(4, train_all, [(tmp_path / "four", asked)], None, LOCAL_WORLD_SIZE=2)
    on_ranks(1, train_all, [(tmp_path / "one", asked)], None)
    same(tmp_path / "four", tmp_path / "one")


@pytest.mark.timeout(60)
def test_sharded_weights_are_trained_in_bf16_too(tmp_path: Path) -> None:
    runs = [
        (tmp_path / mode, experiment(steps=4, precision="bf16", parallel=mode)) for mode in ("fsdp", "ddp")
    ]
    assert [x[0]["step"] for x in on_ranks(2, train_all, runs, None)] == [4, 4]
    assert losses(runs[0][0]) == pytest.approx(losses(runs[1][0]), abs=1e-3)


def rounded_gradients() -> dict[str, float]:
    """How far from float32 they are with weights and gradients of the blocks sent as bf16, in all."""
    torch.distributed.init_process_group("nccl")
    device = torch.device("cuda")
    torch.manual_seed(0)
    models = [PerceiverAR(replace(MODEL, channels=64)).to(device).eval() for _ in range(2)]
    torch.nn.init.normal_(models[0].output.weight, std=0.1)  # which begins at 0, and gives no gradients
    models[1].load_state_dict(models[0].state_dict())
    shard(models[1], device, (1,), torch.bfloat16)
    tokens = torch.randint(259, (4, 17), device=device)
    for model, kind in zip(models, (torch.float32, torch.bfloat16), strict=True):
        with torch.autocast("cuda", kind, enabled=kind is torch.bfloat16):
            model(tokens[:, :-1], targets=tokens[:, -8:]).nats.mean().backward()
    found = {}
    for (name, exact), rounded in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert exact.grad is not None
        off = whole(rounded.grad).float() - exact.grad
        found[name] = float(off.norm() / (exact.grad.norm() + 1e-6))
    return found


@pytest.mark.gpu
@pytest.mark.timeout(60)
def test_blocks_are_sent_as_bf16_on_a_gpu() -> None:
    (errors,) = on_ranks(1, rounded_gradients)
    assert all(error < 0.05 for error in errors.values()), errors
    assert errors["self_attends.0.mlp.widen.weight"] > 0


def save_again(asked: Experiment, place: Path, out: Path) -> None:
    ranks, device = join("cpu")
    state = make_state(asked, open_source("copy", {"length": 16}, None), device, None, ranks)
    state.restore(place)
    with Keeper(out, 1, ranks) as keeper:
        keeper.save(state.step, state.checkpoint())
        keeper.wait()


@pytest.mark.timeout(100)
def test_checkpoints_go_from_any_number_of_ranks_to_any_other(tmp_path: Path) -> None:
    asked = experiment(steps=3, parallel="fsdp")
    on_ranks(2, train_all, [(tmp_path / "run", asked)], None)
    wanted = tensors(tmp_path / "run")
    assert {name.split(".")[0] for name in wanted} == {"model", "average", "optimizer"}
    place = reading.newest(tmp_path / "run")
    for ranks in (1, 4, 2):
        if ranks == 2:
            reading.as_first_format(place)
        assert on_ranks(ranks, save_again, asked, place, tmp_path / str(ranks)) == [None] * ranks
        (place,) = checkpoints(tmp_path / str(ranks))
        found = reading.tensors(place)
        assert found.keys() == wanted.keys()
        assert all(found[name].equal(x) for name, x in wanted.items())


def shares(mode: str) -> tuple[list[str], list[str]]:
    ranks, device = join("cpu")
    asked = experiment(parallel=mode)
    state = make_state(asked, open_source("copy", {"length": 16}, None), device, None, ranks)
    held = state.checkpoint().tensors
    return list(held), list(share(held, ranks))


@pytest.mark.timeout(60)
def test_what_every_rank_has_is_copied_and_written_by_one() -> None:
    (held, first), (_, second) = on_ranks(2, shares, "ddp")
    assert sorted(first + second) == sorted(held)
    assert abs(len(first) - len(second)) <= 1
    (held, first), (_, second) = on_ranks(2, shares, "fsdp")
    assert first == second == held


def run_cli(arguments: list[str], out: Path) -> None:
    sys.argv = ["perceiver-ar", *arguments]
    with (
        out.with_name(f"{out.name}-{os.environ.get('RANK', 'alone')}").open("w") as file,
        redirect_stdout(file),
    ):
        cli.main()


@pytest.mark.timeout(100)
def test_what_the_docs_show_works_and_is_the_same_when_it_is_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[1] / "docs/scale.md").read_text()
    shown = re.findall(r"torchrun --standalone --nproc-per-node 2 -m perceiver_ar ([^`\n]*)", text)
    asked = [[*line.split(), "--device", "cpu"] for line in shown]
    assert [words[0] for words in asked] == ["train", "train", "evaluate", "generate"]
    monkeypatch.chdir(tmp_path)
    for words in asked[:2]:
        assert on_ranks(2, run_cli, words, tmp_path / "train") == [None, None]
    for words in asked[2:]:
        name = words[0]
        assert on_ranks(2, run_cli, [*words, "--json"], tmp_path / name) == [None, None]
        assert on_ranks(1, run_cli, [*words, "--json"], tmp_path / f"{name}-alone", RANK=0) == [None]
    found, nothing, wanted = ((tmp_path / f"evaluate-{x}").read_text() for x in ("0", "1", "alone-0"))
    assert not nothing
    report, alone = json.loads(found), json.loads(wanted)
    assert report["tokens"] == alone["tokens"]
    assert report["nats"] == pytest.approx(alone["nats"], rel=1e-6)
    assert report["by_distance"].keys() == alone["by_distance"].keys()
    found, nothing, wanted = ((tmp_path / f"generate-{x}").read_text() for x in ("0", "1", "alone-0"))
    assert not nothing
    report, alone = json.loads(found), json.loads(wanted)
    assert len(report["samples"]) == 3
    assert [x["tokens"] for x in report["samples"]] == [x["tokens"] for x in alone["samples"]]
    assert len({tuple(x["tokens"]) for x in report["samples"]}) == 3


def full_memory(out: Path, mode: str) -> None:
    accumulate = training_module.accumulate

    def fails(job: Any, run: Any, batch: Any) -> Any:
        if job.ranks.rank == 1 and run.step == 3:
            raise torch.OutOfMemoryError
        return accumulate(job, run, batch)

    training_module.accumulate = fails
    train(experiment(parallel=mode, checkpoint_every=2), out=out, device="cpu", show=False)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_rank_that_fails_ends_all_and_nothing_doubtful_is_kept(tmp_path: Path, mode: str) -> None:
    began = time.monotonic()
    first, second = on_ranks(2, full_memory, tmp_path / "run", mode)
    assert time.monotonic() - began < 20
    assert "6 sequences at once do not fit into memory: lower --train.micro-batch-size." in second
    assert first is None or "Connection" in first
    assert names(tmp_path / "run") == ["step-00000002"]


def signal_in_evaluation(out: Path) -> Any:
    add = evaluation_module.Totals.add

    def asked_to_stop(self: Any, *args: Any) -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        add(self, *args)

    evaluation_module.Totals.add = asked_to_stop
    return train(experiment(evaluate_every=4, micro_batch_size=2), out=out, device="cpu", show=False)


@pytest.mark.timeout(60)
def test_a_signal_to_one_rank_stops_all_in_an_evaluation_too(tmp_path: Path) -> None:
    found = on_ranks(2, signal_in_evaluation, tmp_path / "run")
    assert [(x["step"], x["signal"]) for x in found] == [(4, signal.SIGTERM)] * 2
    assert names(tmp_path / "run") == ["step-00000004"]


def hang(out: Path, how: str, which: int) -> None:
    collate = training_module.collate
    made: list[None] = []

    def stuck(*args: Any) -> Any:
        made.append(None)
        if int(os.environ["RANK"]) == which and len(made) == 5:
            os.kill(os.getpid(), signal.SIGSTOP) if how == "stopped" else time.sleep(60)
        return collate(*args)

    training_module.collate = stuck
    with out.with_name(f"said-{os.environ['RANK']}").open("w") as file, redirect_stderr(file):
        train(experiment(timeout_minutes=0.05), out=out, device="cpu", show=False)


@pytest.mark.timeout(60)
def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    cases = [("stopped", 0), ("stopped", 1), ("asleep", 1)]
    outs = [tmp_path / f"{how}-{which}" / "run" for how, which in cases]
    for out in outs:
        out.parent.mkdir()
    with ThreadPoolExecutor(3) as side_by_side:  # they do nothing but wait
        found = side_by_side.map(lambda out, case: on_ranks(2, hang, out, *case), outs, cases)
    for out, (_, which), ends in zip(outs, cases, found, strict=True):
        assert ends[1 - which] is None
        said = (out.parent / f"said-{1 - which}").read_text()
        assert f"perceiver-ar: rank {which} of 2, on " in said
        assert "has not gone on for 0.05 minutes, at step " in said


def started_again(out: Path, launch: str) -> Any:
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"/tmp/{launch}/attempt_1/0/error.json"
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    return train(experiment(steps=2), out=out, device="cpu", show=False)


@pytest.mark.timeout(60)
def test_only_the_launch_that_began_a_run_goes_on_with_it_unasked(tmp_path: Path) -> None:
    found = [on_ranks(2, started_again, tmp_path / "run", launch) for launch in ("one", "one", "two")]
    assert [x["step"] for x in found[0] + found[1]] == [2] * 4
    assert all("exists already: add --resume" in x for x in found[2])


def hang_before_the_first_step(out: Path) -> None:
    make = training_module.make_state

    def stuck(*args: Any) -> Any:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        return make(*args)

    training_module.make_state = stuck
    with out.with_name(f"said-{os.environ['RANK']}").open("w") as file, redirect_stderr(file):
        train(experiment(timeout_minutes=0.05), out=out, device="cpu", show=False)


@pytest.mark.timeout(60)
def test_a_rank_that_hangs_at_the_start_is_named_too(tmp_path: Path) -> None:
    on_ranks(2, hang_before_the_first_step, tmp_path / "run", seconds=40)
    said = (tmp_path / "said-0").read_text()
    assert f"perceiver-ar: rank 1 of 2, on {os.uname().nodename}, has not gone on for 0.05 minutes:" in said


def wait_for_one_that_works(out: Path) -> None:
    ranks, _ = join("cpu")
    with Watch(ranks, 0.01) as watch:
        for _ in range(40 if ranks.rank else 1):
            time.sleep(0.1)
            watch.beat()
        out.with_name(f"done-{ranks.rank}").write_text(str(ranks.gather(ranks.rank)))


@pytest.mark.timeout(60)
def test_one_that_waits_for_others_that_work_blames_nobody(tmp_path: Path) -> None:
    on_ranks(2, wait_for_one_that_works, tmp_path / "run")
    assert [(tmp_path / f"done-{rank}").read_text() for rank in (0, 1)] == ["[0, 1]"] * 2


def uneven(out: Path) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(1 + int(os.environ["RANK"]))
    train(experiment(parallel="hybrid"), out=out, device="cpu", show=False)


@pytest.mark.timeout(60)
def test_machines_with_different_numbers_of_processes_are_refused(tmp_path: Path) -> None:
    for found in on_ranks(2, uneven, tmp_path / "run"):
        assert "hybrid needs as many processes on every machine" in found


@pytest.mark.timeout(60)
def test_pieces_of_a_batch_are_as_large_as_the_number_of_ranks_allows(tmp_path: Path) -> None:
    asked = experiment(steps=4, checkpoint_every=2)
    on_ranks(3, train_all, [(tmp_path / "run", replace(asked, train=replace(asked.train, steps=2)))], None)
    assert micro(tmp_path / "run") == 4
    for size, pieces in ((1, 12), (2, 6)):
        shutil.copytree(tmp_path / "run", tmp_path / str(size))
        on_ranks(size, resume_one, asked, tmp_path / str(size))
        assert micro(tmp_path / str(size)) == pieces


def resume_one(asked: Experiment, out: Path) -> None:
    train(asked, out=out, resume=True, device="cpu", show=False)


def micro(run: Path) -> int:
    return reading.state(checkpoints(run / "checkpoints")[-1])["micro"]


@pytest.mark.timeout(60)
def test_a_batch_that_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    for found in on_ranks(2, train_all, [(tmp_path / "run", experiment(batch_size=9))], None):
        assert "batch_size must be a multiple of the 2 processes that have rows of their own" in found
    assert not (tmp_path / "run").exists()


def test_each_rank_asks_for_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, value in {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "99"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="device 'cuda:99' cannot be used here"):
        join("auto")


def test_rows_are_shared_out_to_the_last() -> None:
    for size in (1, 2, 3, 8):
        parts = [Ranks(rank, size).rows(7) for rank in range(size)]
        assert [row for part in parts for row in range(7)[part]] == list(range(7))


SETTINGS = [
    *("copy-32", "--device", "cpu", "--model.channels", "32", "--model.heads", "2"),
    *("--train.batch-size", "12", "--train.warmup-steps", "2", "--train.log-every", "1"),
    *("--train.checkpoint-every", "5", "--train.steps"),
]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_two_machines_find_each_other_and_begin_again_when_a_process_of_one_died(tmp_path: Path) -> None:
    run = tmp_path / "run"
    asked = command("train", *SETTINGS, 200, "--train.parallel", "hybrid", "--out", run)
    reached = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=1"]
    with (
        under_torchrun(asked, restarts=2, processes=1, reached=reached) as first,
        under_torchrun(asked, restarts=2, processes=1, reached=reached) as second,
    ):
        wait_until(lambda: checkpoints(run / "checkpoints"))
        time.sleep(1)
        os.kill(workers(second)[0], signal.SIGKILL)  # how often each machine began again may differ
        said = [finish(process)[1] for process in (first, second)]
    assert sum(text.count("A process had died: torchrun restarted the run from step ") for text in said) == 1
    assert sum(text.count("step 200: loss") for text in said) == 1


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_a_mistake_is_told_once(tmp_path: Path) -> None:
    asked = command("train", *SETTINGS, 2, "--train.context-parallel", "3", "--out", tmp_path / "run")
    with under_torchrun(asked) as process:
        _, said = process.communicate(timeout=60)
    assert said.count("context_parallel, 3, must divide the number of processes, 2.") == 1
    assert "exitcode  : 2" in said


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_nothing_is_lost_by_the_death_of_a_rank_or_of_the_launcher(tmp_path: Path) -> None:
    run, whole = tmp_path / "disturbed", tmp_path / "whole"
    asked = ["train", *SETTINGS, "100", "--out"]

    def reached(step: int) -> bool:
        return any(place.name >= f"step-{step:08d}" for place in checkpoints(run / "checkpoints"))

    with (
        under_torchrun(command(*asked, tmp_path / "never")) as early,
        under_torchrun(command(*asked, run), restarts=1) as process,
    ):
        wait_until(lambda: len(workers(early)) == 2)
        orphans = workers(early)
        early.kill()  # before they have found it
        wait_until(lambda: reached(5))
        os.kill(workers(process)[1], signal.SIGKILL)
        wait_until(lambda: reached(40))
        left = workers(process)
        process.kill()
        wait_until(lambda: all(map(gone, left)), 30)  # they notice it, and save
        wait_until(lambda: all(map(gone, orphans)), 60)
    assert len(left) == 2
    on_ranks(2, run_cli, [*asked, str(run), "--resume"], tmp_path / "said")
    on_ranks(2, run_cli, [*asked, str(whole)], tmp_path / "said")
    same(run, whole, exactly=True)


def ask_to_stop(arguments: list[str], out: Path) -> None:
    update = training_module.update

    def asked(job: Any, run: Any, batch: Any) -> Any:
        if run.step == 7 and job.ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(job, run, batch)

    training_module.update = asked
    run_cli(arguments, out)


@pytest.mark.timeout(60)
def test_a_signal_to_one_rank_makes_all_leave_and_torchrun_does_not_start_them_again(tmp_path: Path) -> None:
    for restarts, end in ((0, f"SystemExit: {128 + signal.SIGTERM}"), (2, None)):
        run = tmp_path / str(restarts)
        asked = ["train", *SETTINGS, "50", "--out", str(run)]
        found = on_ranks(2, ask_to_stop, asked, tmp_path / "said", TORCHELASTIC_MAX_RESTARTS=restarts)
        assert found == [end, end]
        assert names(run) == ["step-00000005", "step-00000008"]
