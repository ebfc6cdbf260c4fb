"""A limit on how long a chat template may render: it is a program from the model's folder, and programs may loop.

compiled_template.py and prefix_renderer.py compile through `limited`, template.py renders within `deadline`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jinja2
from jinja2 import nodes

RENDER_S = 30.0  # of this thread's processor time, for one rendering: it takes milliseconds
_EVERY = 4  # ticks between two looks at the clock


class TookTooLong(Exception):
    """The template was still rendering at its deadline."""


class _Clock(threading.local):
    deadline, ticks = float("inf"), 0


_clock = _Clock()


def _tick() -> str:
    _clock.ticks += 1
    if _clock.ticks % _EVERY == 0 and time.thread_time() > _clock.deadline:
        raise TookTooLong
    return ""


def limited(env: jinja2.Environment, tree: nodes.Template) -> jinja2.Template:
    """The template with a tick at the start of every loop's and every macro's body: nothing else can go on for long,
    as the sandbox bounds `range`."""
    env.extend(tick=_tick)
    bodies: Any = tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))
    for node in bodies:
        call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
    tree.set_environment(env)
    template = env.from_string(tree)
    # A render copies its globals; jinja2's ChainMap of them makes that copy half of the cost of a short row.
    template.globals = dict(template.globals)
    return template


@contextmanager
def deadline(seconds: float | None = None) -> Iterator[None]:
    """For everything that this thread renders inside; a deadline around this one holds too."""
    outer = _clock.deadline
    _clock.deadline = min(outer, time.thread_time() + (RENDER_S if seconds is None else seconds))
    try:
        yield
    finally:
        _clock.deadline = outer
