"""Optional libraries of kernels that are installed and do not work: one short line on the screen, the traceback for
the run's record (run.json). Called by the files that try such a library; read by recipes/run_summary.py."""

from __future__ import annotations

import traceback

from erniekit.extras import install_command
from erniekit.log import warn_once
from erniekit.printable import plain

MOST = 80  # characters of a problem on the screen

_tracebacks: dict[str, str] = {}  # library -> what happened, with where


def report(library: str, problem: Exception, extra: str = "flash4") -> None:
    """extra: that installs the versions which were measured."""
    first = (str(problem).strip().splitlines() or [""])[0]
    _tracebacks.setdefault(library, "".join(traceback.format_exception(problem)).strip())
    warn_once(
        f"{library} does not work here ({plain(f'{type(problem).__name__}: {first}'.removesuffix(': '), MOST)}); "
        f"slower without it. Versions that do: {install_command(extra)}"
    )


def tracebacks() -> list[str]:
    return [f"{library} does not work here: {traceback_text}" for library, traceback_text in _tracebacks.items()]
