"""Shared by all tests: seeds, and where the real data lie."""

from pathlib import Path

import pytest
import torch

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
