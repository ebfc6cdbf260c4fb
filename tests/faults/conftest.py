"""The ranks that fault tests share, and docs/faults.md, drawn at the end of a run that asks for it by FAULT_TABLE=1."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults import results
from faults.places import make_place
from faults.rank_runs import TP, RankServer, Reference, undisturbed


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Every worker draws what is collected by then; the last one to end has it all."""
    if os.environ.get("FAULT_TABLE") == "1" and results.COLLECTED.exists():
        small = "not full" in session.config.option.markexpr
        results.write_table(True, "the size of every commit" if small else "every commit's size and the larger ones")


@pytest.fixture(scope="session")
def server(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    server = RankServer(tmp_path_factory.mktemp("ranks"), paddle)
    yield server
    server.close()


@pytest.fixture(scope="session")
def dp(server: RankServer) -> Reference:
    """Two ranks of data parallelism that nobody disturbs."""
    return undisturbed(server, "dp")


@pytest.fixture(scope="session")
def tp(server: RankServer) -> Reference:
    """Two ranks of tensor parallelism that nobody disturbs."""
    return undisturbed(server, "tp", **TP)


@pytest.fixture(scope="session")
def place_once(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ERNIEKIT_CACHE", str(root / "cache"))
        make_place(paddle, root)
    return root


@pytest.fixture
def sound(place_once: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, rows and a run (places.py), to be copied before they are spoiled."""
    monkeypatch.setenv("ERNIEKIT_CACHE", str(place_once / "cache"))
    return place_once
