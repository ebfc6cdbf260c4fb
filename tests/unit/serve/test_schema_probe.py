"""Schemas that llguidance compiles for ever: refused in time, by a process that is ended."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from erniekit.serve.output_grammar import JsonPart
from erniekit.serve.schema_probe import SchemaProbe, TooComplex
from erniekit.serve.work_queue import QueuedTask

pytest.importorskip("llguidance")

# Whether a text fits all of them takes llguidance a time that grows with two to the power of their number.
ENDLESS = {"allOf": [{"type": "string", "pattern": f"(a|b)*{letter}(a|b){{15}}"} for letter in "abcdefghijklmnopqrst"]}


@pytest.fixture
def probe() -> Iterator[SchemaProbe]:
    probe = SchemaProbe(seconds=0.5)
    yield probe
    probe.reap()


@pytest.fixture
def task() -> QueuedTask:
    loop = asyncio.new_event_loop()
    loop.close()
    return QueuedTask(None, None, loop, None, 0.0)  # type: ignore[arg-type]


def part(schema: Any) -> JsonPart:
    return JsonPart("", json.dumps(schema), "", "schema")


def test_a_schema_that_takes_for_ever_is_refused_and_the_next_one_is_looked_at(probe: SchemaProbe, task: QueuedTask):
    with pytest.raises(TooComplex):
        probe.first_wrong([part(ENDLESS)], task)
    assert probe.first_wrong([part({"type": "integer"})], task) is None


def test_an_endless_part_of_a_schema_that_is_wrong_elsewhere_is_refused_as_well(probe: SchemaProbe, task: QueuedTask):
    """It would be compiled alone to find the part that is wrong."""
    with pytest.raises(TooComplex):
        probe.first_wrong([part({"properties": {"a": ENDLESS, "b": {"type": "none"}}})], task)


def test_a_wrong_schema_is_named_by_its_place(probe: SchemaProbe, task: QueuedTask):
    found = probe.first_wrong([part({"type": "integer"}), part({"properties": {"b": {"type": "none"}}})], task)
    assert found is not None
    assert found[0] == "schema.properties.b"


def test_a_client_that_leaves_ends_the_work(task: QueuedTask):
    probe = SchemaProbe(seconds=60)
    timer = threading.Timer(1.0, probe.kill, [task])
    timer.start()
    began = time.monotonic()
    with pytest.raises(TooComplex):
        probe.first_wrong([part(ENDLESS)], task)
    assert time.monotonic() - began < 30
    timer.join()
