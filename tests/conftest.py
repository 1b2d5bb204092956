"""Shared by all tests: one seed, one thread a worker."""

import os

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # one worker a core


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
