"""Shared by all tests: one seed, one thread per worker."""

import os

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # one worker per core


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked gpu on machines without one."""
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
