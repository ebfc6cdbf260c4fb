"""Long work shows how far it is, also where nobody sees a bar."""

from __future__ import annotations

import io

from erniekit.progress import WorkProgress


def test_a_pipe_gets_lines_with_the_time_left_and_no_terminal_codes() -> None:
    out = io.StringIO()
    with WorkProgress("tokenising a.jsonl", 40, "rows", out=out, every=0) as progress:
        for _ in range(4):
            progress.add(10)
    lines = out.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("tokenising a.jsonl: 10 of 40 rows in 0 s, about 0 s left")
    assert lines[-1] == "tokenising a.jsonl: 40 of 40 rows in 0 s"
    assert "\r" not in out.getvalue()


def test_short_work_says_nothing() -> None:
    out = io.StringIO()
    with WorkProgress("tokenising a.jsonl", None, "rows", out=out) as progress:
        progress.add(10)
    assert out.getvalue() == ""
