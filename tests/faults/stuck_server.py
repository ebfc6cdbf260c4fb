"""`erniekit server` with a tokenizer that never comes back from a text with HANG in it, and an engine that never ends a
step for a prompt whose first id is 7. Run as a script by test_server_prompts.py."""

from __future__ import annotations

import sys
import threading

from erniekit.cli.main import main
from erniekit.data.tokenizer import Tokenizer
from erniekit.serve.engines.embedded import EmbeddedEngine

encode, forward = Tokenizer._encode_runs, EmbeddedEngine._forward


def hang(what: str) -> None:
    print(f"hangs: {what}", file=sys.stderr, flush=True)
    threading.Event().wait()


def encode_or_hang(self, runs):
    if any("HANG" in text for text, _ in runs):
        hang("tokenizer")
    return encode(self, runs)


def forward_or_hang(self, name, group):
    if any(run.ids[0] == 7 for run, _ in group):
        hang("engine")
    return forward(self, name, group)


if __name__ == "__main__":
    Tokenizer._encode_runs = encode_or_hang
    EmbeddedEngine._forward = forward_or_hang
    sys.exit(main(sys.argv[1:]))
