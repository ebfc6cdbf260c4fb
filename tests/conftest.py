"""Fixtures every test may use: the recorded Paddle numbers, and where the spec folder is in CI."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from ranks import Ranks  # noqa: E402

# A shell ignores Ctrl-C for what it runs in the background, and children inherit that; tests press it for real.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def paddle() -> Path:
    """Weights, logits, curves and whole runs recorded from ERNIEKit on Paddle (float32, CPU)."""
    return ROOT / "tests" / "data" / "paddle"


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """One pool of gloo rank processes for the session; tests that use it share xdist_group("ranks")."""
    pool = Ranks()
    yield pool
    pool.close()
