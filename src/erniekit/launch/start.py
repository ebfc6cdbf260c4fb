"""Start the ranks of a launch plan and wait for them. Used by cli/train.py.

torch is imported here and not earlier, so that errors in keys are reported at once.
"""

from __future__ import annotations

from erniekit.launch.plan import LaunchPlan, import_torch


def start(launch: LaunchPlan, command: list[str]) -> int:
    """Run `command` in every rank until all are done; returns the exit code for the shell."""
    import_torch()
    from erniekit.launch.agent import run_ranks

    return run_ranks(launch, command)
