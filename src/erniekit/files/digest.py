"""The digest that a file is known again by: its sha256; or, of a file that several processes wrote at once, each some
stretches of it, the sha256 of the sha256s of the stretches: `1024+4096:<sha256>`. One sha256 takes all bytes in order,
and none of those processes has them. Used by record.py and checkpoint/ (manifest.py, writer.py, one_file.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

_LONGEST = 1 << 20  # characters of a form: a manifest may be anyone's
_STRETCHES = re.compile(r"[1-9][0-9]{0,17}(\+[1-9][0-9]{0,17})*")  # bytes of each
_SHA256 = re.compile(r"[0-9a-f]{64}")


def is_sha256(text: object) -> bool:
    return isinstance(text, str) and bool(_SHA256.fullmatch(text))


def is_digest(text: object) -> bool:
    """Whether it is a sha256, or that of stretches, as `Digest` tells them."""
    if not isinstance(text, str):
        return False
    form, mark, sha256 = text.rpartition(":")
    return is_sha256(sha256) and (not mark or _is_form(form))


def _is_form(text: str) -> bool:
    return len(text) <= _LONGEST and bool(_STRETCHES.fullmatch(text))


class Digest:
    def __init__(self, like: str = "") -> None:
        """like: a digest whose form this one has, to be compared with it."""
        form = like.rpartition(":")[0]
        self._sizes = [int(size) for size in form.split("+")] if _is_form(form) else []
        self._left = list(reversed(self._sizes))
        self._done: list[bytes] = []
        self._now: Any = hashlib.sha256()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        while self._left and len(view) >= self._left[-1]:
            size = self._left.pop()
            self._now.update(view[:size])
            self._done.append(self._now.digest())
            self._now, view = hashlib.sha256(), view[size:]
        if self._left:
            self._left[-1] -= len(view)
        elif self._sizes and view:
            self._done = [b"longer"]
        self._now.update(view)

    def text(self) -> str:
        if not self._sizes:
            return str(self._now.hexdigest())
        # A file of another size than these stretches has a digest that no file of theirs has.
        return joined(self._sizes, self._done if not self._left else [b"shorter"])


def joined(sizes: Sequence[int], digests: Sequence[bytes]) -> str:
    """Of a file of stretches: the bytes of each, and their sha256s."""
    return f"{'+'.join(map(str, sizes))}:{hashlib.sha256(b''.join(digests)).hexdigest()}"
