"""The temporary folder into which the ranks of a launch write their errors, and those of launchers that were killed.

Used by agent.py. A launcher holds a lock on a file in its folder; the system lets go of it however the launcher ends.
The file names its machine: on some shared file systems others do not see the lock.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "erniekit-ranks-"
LOCK = "launcher.lock"
_OURS = re.compile(rf"\d+\.json|{re.escape(LOCK)}")


@contextmanager
def error_folder() -> Iterator[Path]:
    """A new folder, for as long as the block lasts."""
    remove_orphans(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        # Locked before it has its name: another launcher that sees the name finds the lock held.
        with (folder / "new").open("w") as lock:
            # Where files cannot be locked it gets no lock file, and no other launch removes the folder.
            with suppress(OSError):
                lock.write(socket.gethostname())
                lock.flush()
                fcntl.flock(lock, fcntl.LOCK_EX)
                os.rename(folder / "new", folder / LOCK)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_orphans(parent: Path) -> None:
    """Folders whose launcher was killed. One without a lock file, of another user or machine, or with a file that no
    launch writes is left alone."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            found = folder.lstat()
            if folder.is_symlink() or found.st_uid != os.getuid():
                continue
            with (folder / LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its launcher is running
                if lock.read() != socket.gethostname():
                    continue
                names = os.listdir(folder)
                if all(_OURS.fullmatch(name) for name in names):
                    for name in sorted(names, key=LOCK.__eq__):  # the lock last
                        (folder / name).unlink()
                    folder.rmdir()
