"""Tests here share their inputs with the scripts of benchmarks/: benchmarks/device_cases."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.ranks import Ranks

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(forked=False)
    yield pool
    pool.close()
