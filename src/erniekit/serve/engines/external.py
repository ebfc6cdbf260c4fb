"""External engines: look for the program, start it, follow its log and end it. Used by serve/server.py.

Always an argument list, never a shell; supervisor.py runs between the two, so that the engine ends with the server
however the server ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import IO

from erniekit.config import RunConfig
from erniekit.errors import ConfigError, DeviceError
from erniekit.log import emit, warn
from erniekit.net.address import announce
from erniekit.net.listen import bind
from erniekit.serve.engines import EXTERNAL, supervisor
from erniekit.serve.engines.engine_program import DTYPES, EngineProgram, Target
from erniekit.serve.engines.vllm import check_vision
from erniekit.serve.shutdown import stopping

STARTED_LENGTH = 2048  # of the context where max_model_len is not given: these engines reserve memory for all of it
KILL_S = 10.0  # after the grace period, for processes that do not react


def is_installed(program: EngineProgram, python: str | None) -> bool:
    """Whether the Python that would run the engine can import it."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({program.package!r}) is None)"
    try:
        # Not from the current folder: one that is called like the package must not pass for it.
        done = subprocess.run([python or sys.executable, "-c", code], capture_output=True, timeout=60, cwd="/")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{python} does not run: {error}", where="engine_python", fix="check the path") from None
    return done.returncode == 0


def serve_external(cfg: RunConfig, name: str, key: str | None) -> int:
    program: EngineProgram = EXTERNAL.get(name)
    if not is_installed(program, cfg.serve.engine_python):
        raise ConfigError(
            f"engine {name} is not installed",
            where="engine" if cfg.serve.engine_python is None else f"engine_python: {cfg.serve.engine_python}",
            fix=f"{program.install}; or engine_python: the Python that has it; or engine: transformers, which is here",
        )
    target = make_target(cfg, program, key)
    if key is None:
        warn(f"{name} does not check the Host header: without a key, any page in a browser here can send it requests")
    with tempfile.TemporaryDirectory(prefix="erniekit-engine-") as folder:
        command = [cfg.serve.engine_python or sys.executable, "-m", program.module]
        command += [*program.arguments(target, Path(folder)), *cfg.serve.engine_args]
        return EngineProcess(name, command, program.environment(target), target, cfg.serve.drain_timeout).run()


def make_target(cfg: RunConfig, program: EngineProgram, key: str | None) -> Target:
    from erniekit.checkpoint.published import check_published
    from erniekit.lora.adapter_files import read_adapter
    from erniekit.lora.base import check_files
    from erniekit.lora.peft_files import CONFIG as PEFT_CONFIG
    from erniekit.serve.loaded_models import adapter_folders, find_models

    entries = find_models(cfg)
    weights = entries[0].found.weights
    if not weights.compared:  # no probe is run here: the engine loads them
        check_published(weights.path, weights.verify)
    named = adapter_folders(entries)
    if named and not program.adapters:
        raise ConfigError(
            f"{program.name} serves no adapters",
            where="engine",
            fix="merge first: erniekit export; or engine: transformers",
        )
    foreign = next((path for path in named.values() if not (path / PEFT_CONFIG).is_file()), None)
    if weights.layout == "paddle" and program.name != "fastdeploy":
        foreign = weights.path
    if foreign is not None:
        raise ConfigError(
            f"{program.name} does not read Paddle's files",
            where=str(foreign),
            fix="erniekit export ... save_format=hf first",
        )
    if program.name == "vllm" and weights.config.vision is not None:
        check_vision(weights.path, weights.config, cfg.serve.engine_args)
    for path in named.values():  # the engine loads them: only the files can be looked at here
        check_files(path, weights.path, cfg.lora.override_base)
    meta = weights.meta()
    adapters = {path: read_adapter(path, meta, weights.verify) for path in named.values()}
    if (dora := next((path for path, adapter in adapters.items() if adapter.dora), None)) is not None:
        raise ConfigError(
            f"{program.name} does not serve DoRA adapters",
            where=str(dora),
            fix="erniekit export merges it into its base",
        )
    rank = max((max(u.rank for u in adapter.updates.values()) for adapter in adapters.values()), default=0)
    if cfg.serve.num_speculative_tokens:
        warn(f"num_speculative_tokens is for the embedded engine; {program.name}'s own settings go into engine_args")
    sock = bind(cfg.serve.host, cfg.serve.port)  # a taken port is reported before a minute of loading
    port = sock.getsockname()[1]
    sock.close()
    base = next((o.name for o in entries if o.found.adapter is None), cfg.serve.served_model_name)
    return Target(
        model=weights.path.resolve(),
        name=base or weights.path.resolve().name,
        adapters={name: path.resolve() for name, path in named.items()},
        rank=rank,
        host=cfg.serve.host,
        port=port,
        longest=min(cfg.serve.max_model_len or STARTED_LENGTH, weights.config.max_positions),
        keys=asdict(cfg.serve),
        given=cfg.given,
        dtype=_dtype(cfg),
        device=cfg.train.device,
        secret=key,
    )


def _dtype(cfg: RunConfig) -> str | None:
    """wint8 and similar formats are how a run was trained; `quantization` sets how weights are served."""
    kind = cfg.precision.compute_type
    return kind if cfg.compute_type_given and kind in DTYPES else None


class EngineProcess:
    """One run of an engine."""

    def __init__(
        self, name: str, command: list[str], environment: dict[str, str], target: Target, grace: float
    ) -> None:
        self.name, self.command, self.environment, self.target = name, command, environment, target
        self.grace = grace
        self.last: deque[str] = deque(maxlen=20)
        self.stop_requested = threading.Event()
        self.end_requested = threading.Event()  # asked twice: the engine's answers are not waited for

    def run(self) -> int:
        """Until it ends, or a signal ends it; the exit code."""
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in before:
            signal.signal(number, self._on_signal)
        emit(f"starting {self.name}: {self.target.model}")
        process = subprocess.Popen(
            [sys.executable, supervisor.__file__, str(self.grace), *self.command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **self.environment},
        )
        assert process.stdout is not None
        following = threading.Thread(target=self._follow, args=(process.stdout,), daemon=True)
        following.start()
        try:
            self._watch(process)
        finally:
            self._end(process)
            following.join(5)
            for number, handler in before.items():
                signal.signal(number, handler)
        if not self.stop_requested.is_set():
            raise DeviceError(
                f"{self.name} ended by itself with exit code {process.returncode}",
                where=self.last[-1] if self.last else self.name,
                fix="see its log above",
            )
        emit("stopped")
        return 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        (self.end_requested if self.stop_requested.is_set() else self.stop_requested).set()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        ready = False
        while process.poll() is None and not self.stop_requested.wait(0.5):
            if not ready and self._healthy():
                ready = True
                names = ", ".join([self.target.name, *self.target.adapters])
                announce(f"http://{self.target.host}:{self.target.port}/v1", f"{names}; {self.name}")

    def _healthy(self) -> bool:
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.target.host, self.target.host)
        request = urllib.request.Request(f"http://{host}:{self.target.port}/health")
        if self.target.secret:
            request.add_header("Authorization", f"Bearer {self.target.secret}")
        try:
            with urllib.request.urlopen(request, timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, ValueError, urllib.error.URLError):
            return False

    def _follow(self, stream: IO[bytes]) -> None:
        for line in stream:
            text = line.decode("utf-8", "replace").rstrip()
            self.last.append(text)
            emit(f"{self.name} | {text}")

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """The guard ends the engine within the grace, and everything in its group after it."""
        assert process.stdin is not None
        if process.poll() is None:
            emit(stopping(f"{self.name} may finish its answers", self.grace))
            process.terminate()
        process.stdin.close()
        deadline = time.monotonic() + self.grace + KILL_S
        while process.poll() is None and time.monotonic() < deadline and not self.end_requested.is_set():
            time.sleep(0.1)
        if process.poll() is None:
            warn(f"{self.name} is killed" if self.end_requested.is_set() else f"{self.name} does not end: killed")
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
