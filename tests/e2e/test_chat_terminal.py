"""`erniekit chat` as people use it: a process on a terminal of its own, keys pressed, and what is left when it ends."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.clock import until
from support.serving import Live, tiny_folder

pytestmark = pytest.mark.xdist_group("server")

# Ctrl-C reaches a process through its controlling terminal.
PROGRAM = (
    "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "from erniekit.cli.main import main; sys.exit(main())"
)
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    def __init__(self, *words: str, kind: str = "dumb") -> None:
        self._ours, theirs = os.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "chat", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": kind},
        )
        os.close(theirs)
        self.shown = ""

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait_for(self, word: str, count: int = 1, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while self.shown.count(word) < count:
            assert self._read(end), f"no {word!r} in {self.shown!r}"

    def wait_for_prompt(self, seconds: float = 60) -> None:
        """A key that comes before the prompt is not the prompt's: the terminal is still that of the answer."""
        end = time.monotonic() + seconds
        while not self.shown.endswith("User: "):
            assert self._read(end), f"no prompt after {self.shown!r}"

    def _read(self, end: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], max(0.0, end - time.monotonic()))
        try:
            self.shown += os.read(self._ours, 65536).decode(errors="replace") if ready else ""
        except OSError:  # the other side is closed
            return False
        return bool(ready)

    def end(self) -> int:
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)


@pytest.fixture(scope="module")
def live(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Slow, and by its random weights never at an end by itself."""
    server = Live(tiny_folder(paddle, tmp_path_factory.mktemp("served") / "tiny"), "max_model_len=512")
    (model,) = server.engine.models.values()
    model.layers[0].register_forward_pre_hook(lambda *_: time.sleep(0.05))
    yield server
    server.close()


def test_ctrl_c_stops_the_answer_and_the_server_and_the_next_one_leaves(live):
    terminal = Terminal(live.url, "temperature=0", "min_tokens=400")
    try:
        terminal.wait_for("User: ")
        assert f"tiny at {live.url}/v1" in terminal.shown
        before = live.engine.load().steps
        terminal.press("hello\n")
        until(lambda: live.engine.load().running == 1, seconds=60)
        terminal.press(CTRL_C)
        terminal.wait_for("[stopped]")
        assert live.idle()
        assert live.engine.load().steps - before < 400, "not to the answer's end"
        terminal.wait_for_prompt()
        terminal.press(CTRL_C)
        assert terminal.end() == 0
        assert "Traceback" not in terminal.shown
    finally:
        terminal.close()


def test_pasted_lines_are_one_message_and_one_too_long_is_refused_once(live, tmp_path):
    terminal = Terminal(live.url, "max_new_tokens=2", "temperature=0", kind="xterm")
    pasted = "\x1b[200~{}\x1b[201~\n".format
    try:
        terminal.wait_for("User: ")
        terminal.press(pasted("/clear it\n  then\nexit"))
        terminal.wait_for("length limit]")
        terminal.press(f"/save {tmp_path}/talk.jsonl\n")
        terminal.wait_for("messages saved")
        said = json.loads((tmp_path / "talk.jsonl").read_text())["messages"]
        assert [message["content"] for message in said][:1] == ["/clear it\n  then\nexit"]
        terminal.press(pasted("\n".join(f"line {k}" for k in range(300))))
        terminal.wait_for("fix:   send less text")
        assert terminal.shown.count("Assistant: ") == 2, "one for each paste"
        terminal.wait_for_prompt()
        terminal.press(CTRL_D)
        assert terminal.end() == 0
    finally:
        terminal.close()


def test_an_end_of_input_leaves(live):
    terminal = Terminal(live.url)
    try:
        terminal.wait_for("User: ")
        terminal.press(CTRL_D)
        assert terminal.end() == 0
    finally:
        terminal.close()


@pytest.mark.full
def test_a_folder_opened_for_a_conversation_ends_with_it(paddle, tmp_path):
    terminal = Terminal(str(tiny_folder(paddle, tmp_path / "tiny")), "device=cpu", "temperature=0", "min_tokens=400")
    try:
        terminal.wait_for("User: ", seconds=120)
        terminal.press("hello\n")
        terminal.wait_for("Assistant: ")
        terminal.press(CTRL_C)
        terminal.wait_for("[stopped]")
        terminal.wait_for_prompt()
        terminal.press("clear\n")
        terminal.wait_for("cleared")
        terminal.wait_for_prompt()
        terminal.press("again\n")
        terminal.wait_for("Assistant: ", 2)
        terminal.press(CTRL_C)
        terminal.wait_for("[stopped]", 2)
        terminal.wait_for_prompt()
        began = time.monotonic()
        terminal.press(CTRL_C)
        assert terminal.end() == 0
        assert time.monotonic() - began < 30
        assert "Traceback" not in terminal.shown
    finally:
        terminal.close()
