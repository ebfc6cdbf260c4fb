"""What to do about a folder that cannot be written, by the system's own reason. For every error of that kind."""

from __future__ import annotations

import errno

_WAYS = {
    errno.EACCES: "give this user the right to write there (ls -ld shows who has it)",
    errno.EPERM: "end what forbids it (lsattr shows an immutable folder, chattr -i ends that)",
    errno.EROFS: "mount its disk for writing",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space of this user's quota",
    errno.EMFILE: "raise the limit of open files (ulimit -n 4096)",
    errno.ENFILE: "close other programs: the machine has no file left to open",
    errno.ENOTDIR: "a part of this path is a file, where a folder is needed: check the path",
}


def way_out(error: OSError) -> str:
    """A clause without a full stop, to be followed by another way."""
    return _WAYS.get(error.errno or 0, "check the disk and the folder's permissions")
