"""Fixtures every test may use: the recorded Paddle numbers, and where the spec folder is in CI."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def paddle() -> Path:
    """Weights, logits, curves and whole runs recorded from ERNIEKit on Paddle (float32, CPU)."""
    return ROOT / "tests" / "data" / "paddle"


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT
