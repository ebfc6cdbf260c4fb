"""What a person reads when a command fails through a fault of ours, or of a plug-in's. Called by main.py."""

from __future__ import annotations

import os
import sys
import time

from erniekit.log import without_secrets
from erniekit.printable import plain
from erniekit.registry import foreign_code


def report_crash(args: list[str], error: Exception) -> int:
    """One line for the person, the traceback in a file for support."""
    import tempfile
    import traceback
    from pathlib import Path

    from erniekit.version import __version__

    trace = "".join(traceback.format_exception(error))
    if os.environ.get("ERNIEKIT_DEBUG") == "1":
        print(trace, file=sys.stderr)
    name = f"erniekit-crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    path = Path(tempfile.gettempdir()) / name
    what = plain(f"{type(error).__name__}: {error}".splitlines()[0])
    try:
        told = f"erniekit {__version__}\nerniekit {' '.join(without_secrets(args))}\n\n{trace}"
        path.write_text(told, encoding="utf-8", errors="backslashreplace")  # a path may be no text
        code = foreign_code(error)
        whose = "a fault of erniekit" if code is None else code.line
        print(f"error: {what}\nwhere: {whose}, written to {path}", file=sys.stderr)
    except OSError:
        print(f"error: {what}\n{trace}", file=sys.stderr)
    return 1
