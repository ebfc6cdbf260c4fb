"""`erniekit server` as a process of its own, for the benchmarks that talk to it: serve.py and serve_speed.py."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def running(model: str, words: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Host and port, once it is ready. Its lines go to stderr."""
    began = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-m", "erniekit", "server", model, *words], stdout=subprocess.PIPE, text=True
    )
    try:
        yield _address(server, began)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def _address(server: subprocess.Popen[str], began: float) -> tuple[str, int]:
    assert server.stdout is not None
    for line in server.stdout:
        print(line.rstrip(), file=sys.stderr)
        if line.startswith("ready: "):
            print(f"started in {time.perf_counter() - began:.1f} s", file=sys.stderr)
            host, _, port = line.split("/")[2].partition(":")
            return host, int(port)
    raise SystemExit("the server did not start")
