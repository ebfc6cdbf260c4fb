"""A training run in a process of its own, killed with SIGKILL between two checkpoints and then started again.

Used by recipes/demo.py. The process is the real `erniekit train`, with the arguments a person would type.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from erniekit.log import typed
from erniekit.track import jsonl

POLL_S = 0.01  # a step of the tiny model takes several of these


class KilledRun:
    def __init__(self, arguments: list[str], output: Path, log: Path) -> None:
        self.arguments, self.output, self.log = arguments, output, log
        self.killed_at = 0  # the last step it had logged
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("a", encoding="utf-8") as log:
            print(f"$ {typed(*self.arguments)}", file=log, flush=True)
            command = [sys.executable, "-m", "erniekit", *self.arguments]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        return self._process

    def start_and_kill(self, after_step: int) -> threading.Thread:
        """Starts it now; the thread ends when the process is dead."""
        thread = threading.Thread(target=self._kill, args=(self.start(), after_step), daemon=True)
        thread.start()
        return thread

    def checkpoint(self) -> int:
        """The step of its newest checkpoint; 0 when there is none."""
        return max((int(path.name.split("-")[1]) for path in self.output.glob("checkpoint-*")), default=0)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _kill(self, process: subprocess.Popen[bytes], after_step: int) -> None:
        while process.poll() is None and self._logged() < after_step:
            time.sleep(POLL_S)
        process.send_signal(signal.SIGKILL)
        if process.wait() == -signal.SIGKILL:
            self.killed_at = self._logged()

    def _logged(self) -> int:
        return max((record["global_step"] for record in jsonl.read(self.output / jsonl.FILE)), default=0)
