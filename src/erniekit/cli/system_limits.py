"""What the system refuses a command: descriptors, permissions, space. Said as an error of three lines, by its own name.

Called by cli/main.py around every command and by train.py before ranks are started. No torch in here.
"""

from __future__ import annotations

import errno
import os

from erniekit.errors import ConfigError, ErnieKitError
from erniekit.files.descriptors import raise_descriptors
from erniekit.files.unwritable import way_out
from erniekit.printable import plain

NEEDED = 64  # descriptors of one process: libraries, a model's files, a socket or two
NEEDED_BY_RANKS = 128  # where ranks communicate: some connections for each group of them
_SHOWN = 80  # characters of a path that is too long
_FULL = (errno.EMFILE, errno.ENFILE)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def require_descriptors(needed: int = NEEDED) -> None:
    """Raises this process's own limit as far as the system lets it; refuses where that is not enough. Libraries below
    us wait or retry for ever when they run out."""
    soft = raise_descriptors()
    if soft < needed:
        raise ConfigError(
            f"this process may have {soft} files open at a time; {needed} at least are needed",
            where="ulimit -n (RLIMIT_NOFILE)",
            fix="raise it: ulimit -n 4096, or LimitNOFILE= of the service, or --ulimit nofile= of the container",
        )


def explained(error: OSError) -> ErnieKitError | None:
    """A system error that the user can fix, as an error of three lines; None for any other."""
    named = os.fspath(error.filename) if isinstance(error.filename, str | os.PathLike) else ""
    if error.errno in _FULL:
        return ConfigError(
            f"{error.strerror}: this process or this machine may open no more",
            where=named or "ulimit -n (RLIMIT_NOFILE)",
            fix="raise it: ulimit -n 4096; lsof -p PID shows what is open",
        )
    if error.errno in _FORBIDDEN and named:
        return ConfigError(f"{error.strerror}: {named}", where=named, fix=f"{way_out(error)}, or choose another folder")
    if error.errno == errno.ENAMETOOLONG:
        return ConfigError(
            f"{error.strerror}: a path of {len(os.fsencode(named)):,} bytes; a name in it may have 255 on most disks",
            where=plain(named, _SHOWN),
            fix="give a shorter one; where text stands in the place of a path, put it into a file",
        )
    if error.errno in _NO_SPACE:
        return ConfigError(
            f"{error.strerror or 'no space left'}",
            where=named or "the disk of the output or of ERNIEKIT_CACHE",
            fix="free some space, or choose a folder on another disk",
        )
    return None
