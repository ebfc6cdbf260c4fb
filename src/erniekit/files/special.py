"""Named pipes, sockets and devices where a file belongs: opening one may wait for ever, so each is refused by name.

Called before a file that a user named is opened, in every package that reads such files.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from erniekit.errors import ErnieKitError

_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def refuse_special(path: str | Path, error: type[ErnieKitError]) -> None:
    """Raises `error` for what is there and neither file nor folder. Whatever else is wrong, opening it will show."""
    try:
        kind = _KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
    except OSError:
        return
    if kind:
        raise error(
            f"{Path(path).name} is {kind}; a plain file is needed, which can be read twice",
            where=str(path),
            fix="put its content into a file and name that one",
        )
