"""The HEALTHCHECK of the images: a container that runs `erniekit server` must answer /health; any other is healthy."""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path

PORT = "8188"  # the server's own default


def port_of(words: list[str]) -> str | None:
    """The port in a command line such as `python erniekit server DIR port=8000`; None: not a server."""
    if "server" not in words:
        return None
    found = PORT
    for word, following in zip(words, [*words[1:], ""]):
        key, equals, value = word.lstrip("-").partition("=")
        if key == "port":
            found = value if equals else following
    return found


def main(command_line: Path) -> int:
    port = port_of(command_line.read_bytes().decode(errors="replace").split("\0"))
    if port is None:
        return 0
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=4) as answer:
            return 0 if answer.status == 200 else 1
    except OSError as error:
        print(f"/health: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "/proc/1/cmdline")))
