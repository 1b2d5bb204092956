"""Nothing piles up, however long a training or a drawing lasts."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from perceiver_ar import ModelConfig, PerceiverAR, stream

CONFIG = ModelConfig(259, 256, 32, channels=32, heads=2, layers=2, cross_dropout=0.1)


def held(device: str) -> int:
    """Bytes of tensors."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    return sum(x.nbytes for x in gc.get_objects() if isinstance(x, torch.Tensor))


def check(step: Callable[[], object], device: str, begun: int, count: int) -> None:
    for _ in range(begun):
        step()
    before = held(device)
    for _ in range(count - begun):
        step()
    assert held(device) <= before + 1024


@pytest.mark.parametrize(
    ("device", "steps"), [("cpu", 20), pytest.param("cuda", 1000, marks=pytest.mark.gpu)]
)
def test_training_holds_no_more_after_many_steps(device: str, steps: int) -> None:
    model = PerceiverAR(CONFIG).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters())
    kinds = iter(range(steps))

    def step() -> None:
        kind = next(kinds)
        batch = torch.randint(259, (2 + kind % 2, 257), device=device)
        lengths = torch.full((len(batch),), 100) if kind % 4 > 1 else None
        model.nats(batch[:, :-1], batch[:, -32:], lengths=lengths).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    check(step, device, begun=8, count=steps)


@pytest.mark.gpu
def test_drawing_holds_no_more_after_many_tokens() -> None:
    """On a CPU, tests/test_generation.py."""
    model = PerceiverAR(CONFIG).cuda().eval()
    drawing: Iterator[object] = iter(stream(model, torch.randint(259, (2, 256)), 10_000))
    check(lambda: next(drawing), "cuda", begun=100, count=10_000)


def test_what_piles_up_is_noticed() -> None:
    pile: list[torch.Tensor] = []
    with pytest.raises(AssertionError):
        check(lambda: pile.append(torch.zeros(100)), "cpu", begun=3, count=20)
