"""What a user reads when something went wrong."""

from __future__ import annotations

import signal

from erniekit.errors import stopped_unsaved


def test_a_run_that_ended_unsaved_says_what_the_same_command_does_as_far_as_it_is_known():
    said = [stopped_unsaved(signal.SIGTERM, point) for point in ("checkpoint-8", "", None)]
    assert {first for first, _ in said} == {"stopped by SIGTERM without a save"}
    assert [second for _, second in said] == [
        "next: run the same command; it resumes from checkpoint-8",
        "next: run the same command; it starts again, as there is no checkpoint yet",
        "next: run the same command",
    ]
