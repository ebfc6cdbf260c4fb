"""Draws docs/faults.md at the end of a run that asks for it by FAULT_TABLE=1."""

from __future__ import annotations

import os

import pytest

from faults import results


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Every worker draws what is collected by then; the last one to end has it all."""
    if os.environ.get("FAULT_TABLE") == "1" and results.COLLECTED.exists():
        results.write_table(of_this_run=True)
