"""What tests of launchers share."""

from __future__ import annotations

import pytest

from erniekit.launch import heartbeat
from support.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of every listener: heartbeats are real, silence is what the test lets pass."""
    made = Clock()
    monkeypatch.setattr(heartbeat, "time", made)
    return made
