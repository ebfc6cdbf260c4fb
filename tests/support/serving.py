"""A real server on a real port in this process, for tests: the routes, the engine and uvicorn as `erniekit server`."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import uvicorn

from erniekit.config import load
from erniekit.net.connections import ConnectionLimits, limited
from erniekit.net.listen import bind
from erniekit.serve.loaded_models import find_models, load_models
from erniekit.serve.server import make_application
from support.clock import comes_true, until
from support.recorded import tiny_folder as tiny_folder  # for those that serve it

# Of every server that tests start: `gpu` runs the attacks against a card.
DEVICE = os.environ.get("SERVE_DEVICE", "cpu")


class Live:
    """Words are those of the command line; requests go to `.url`."""

    def __init__(
        self, folder: Path | str, *words: str, key: str | None = None, limits: ConnectionLimits | None = None
    ) -> None:
        cfg = load([str(folder), f"device={DEVICE}", *words], "server")
        self.loaded = load_models(cfg, find_models(cfg))
        self.application = make_application(cfg, self.loaded, key)
        self._socket = bind("127.0.0.1", 0)
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config, self._socket = limited(self.application, self._socket, limits, lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        self.http = httpx.Client(timeout=60, limits=httpx.Limits(max_connections=None))
        until(lambda: self._server.started)

    @property
    def engine(self) -> Any:
        return self.loaded.engine

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(self.url + path, json=body, **options)

    def chat(self, text: str = "hello", **more: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 8, **more}
        return self.post("/v1/chat/completions", body)

    def idle(self, seconds: float = 60) -> bool:
        """Nothing runs or waits, and every block of the cache is free."""

        def free() -> bool:
            load = self.engine.load()
            return load.running == load.waiting == 0 and load.cache_used == 0

        return comes_true(free, seconds)

    def close(self) -> None:
        self.http.close()
        self.engine.stop()
        self._server.should_exit = True
        self._thread.join(10)


def stopping(url: str) -> bool:
    """Whether the server has heard a signal: until then a request without a prompt is refused for that."""
    try:
        return httpx.post(url + "/v1/completions", json={}, timeout=30).status_code == 503
    except httpx.TimeoutException:
        return False
    except httpx.TransportError:  # it does not listen any more
        return True


class Program:
    """`erniekit server` as a process of its own."""

    def __init__(
        self,
        folder: Path | str,
        *words: str,
        env: dict[str, str] | None = None,
        program: tuple[str, ...] = ("-m", "erniekit"),
        descriptors: int | None = None,
    ) -> None:
        def restrict() -> None:
            if descriptors is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

        command = [sys.executable, *program, "server", str(folder), f"device={DEVICE}", *words]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            preexec_fn=restrict,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.decode().rstrip())

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def ready(self, seconds: float = 120) -> str:
        """The address it listens at."""
        until(lambda: "ready: " in self.text or self.process.poll() is not None, seconds=seconds)
        found = re.search(r"ready: (http://\S+)/v1", self.text)
        assert found, self.text
        return found[1]

    def end(self, number: int, seconds: float = 60) -> int:
        self.process.send_signal(number)
        code = self.process.wait(seconds)
        self._reader.join(20)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
