"""Fixtures every test may use: the recorded Paddle numbers, and where the spec folder is in CI."""

from __future__ import annotations

import getpass
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
if not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anybody imports triton: its kernels then run on the CPU

# Torch's own default. The first run in this process would set it to its test's folder, and all others compile again.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the hub for a model: the one that downloads has its own hub

if "PYTEST_XDIST_WORKER" in os.environ:
    # As many workers as cores: a pool of threads in each would wait for one another in every small product.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from erniekit import capabilities  # noqa: E402
from support.disk import wait_for_no_disk  # noqa: E402
from support.frozen import freeze_what_stays  # noqa: E402
from support.ranks import Ranks  # noqa: E402

wait_for_no_disk()

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


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, object, object]:
    """One pool for the run: under xdist all tests that use it go to one worker, marked by hand or not."""
    for item in items:
        pooled = getattr(getattr(item, "module", None), "Ranks", None) is Ranks  # others may have ranks of their own
        if pooled and "ranks" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group("ranks"))
    result = yield
    for item in items:
        # xdist 3.8 puts a test's group where pytest 9.2 no longer looks for its name, and would deal all tests singly.
        grouped = vars(item).get("_nodeid")
        if grouped and item.nodeid != grouped:
            item._id = type(item.id).parse(grouped)
    return result


def pytest_collection_finish() -> None:
    freeze_what_stays()


@pytest.fixture(autouse=True)
def nothing_is_lacking() -> Iterator[None]:
    """What a test's device was found to lack holds for its process: not for the tests after it."""
    yield
    capabilities.set_lacks({})
    freeze_what_stays()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """One pool of gloo rank processes for the session."""
    pool = Ranks()
    yield pool
    pool.close()
