"""`erniekit server`: a model folder behind the OpenAI interface, until a signal ends it. Called by cli/main.py.

The embedded engine runs in this process; the others are programs that engines/started.py starts and watches.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import signal
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from erniekit.config import RunConfig, load, refuse_later
from erniekit.config.address import is_loopback
from erniekit.errors import ConfigError
from erniekit.extras import install_command
from erniekit.log import say, warn
from erniekit.net.address import KEY_VARIABLE, announce
from erniekit.net.hosts import Hosts
from erniekit.net.listen import bind
from erniekit.serve.engines import EMBEDDED

if TYPE_CHECKING:
    from erniekit.serve.gate import Gate
    from erniekit.serve.shelf import Shelf

ENGINE_S = 2.0  # for the engine's thread to end, once it is told to
LEFT_S = 5.0  # beyond drain_timeout, for the last words to be sent


def server_command(args: list[str]) -> int:
    """`erniekit server DIR | RECIPE.yaml [key=value ...]`."""
    cfg = load(args, "server")
    refuse_later(cfg, "server")
    key = read_key(cfg)
    check_address(cfg, key)
    name = choose_engine(cfg)
    if name != EMBEDDED:
        from erniekit.serve.engines.started import serve_started

        return serve_started(cfg, name, key)
    need_packages()
    return serve_embedded(cfg, key)


def choose_engine(cfg: RunConfig) -> str:
    """auto is the embedded engine, unless the model must be spread over devices: then whatever is installed."""
    s = cfg.serve
    if s.engine != "auto":
        if s.engine == EMBEDDED and s.server_tp_degree > 1:
            raise ConfigError(
                f"the embedded engine uses one device; {s.server_tp_degree} are asked for",
                where="tensor_parallel_degree",
                fix="engine: vllm, sglang or fastdeploy spread a model; or tensor_parallel_degree: 1",
            )
        return s.engine
    if s.server_tp_degree <= 1:
        return EMBEDDED
    from erniekit.serve.engines import STARTED
    from erniekit.serve.engines.started import present

    found = next((name for name in STARTED if present(STARTED.get(name), s.engine_python)), None)
    if found is None:
        raise ConfigError(
            f"no engine here can spread a model over {s.server_tp_degree} devices",
            where="tensor_parallel_degree",
            fix="install vllm, sglang or fastdeploy; or tensor_parallel_degree: 1 for the embedded engine",
        )
    return found


def need_packages(command: str = "erniekit server") -> None:
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the server needs {' and '.join(missing)}", where=command, fix=install_command("serve"))


def read_key(cfg: RunConfig) -> str | None:
    """From a file or the environment, never from the command line, where every user of the machine could read it."""
    path = cfg.serve.api_key_file
    if path is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        key = Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key cannot be read: {error}", where="api_key_file", fix="check the path") from None
    if not key:
        raise ConfigError("the file with the key is empty", where=f"api_key_file: {path}", fix="put a key into it")
    return key


def check_address(cfg: RunConfig, key: str | None) -> None:
    host = cfg.serve.host
    if key is None and not is_loopback(host):
        if not cfg.serve.allow_unauthenticated:
            raise ConfigError(
                f"host {host} would let other machines in, and there is no key",
                where="host",
                fix=f"set {KEY_VARIABLE} or api_key_file, keep host: 127.0.0.1, or say allow_unauthenticated: True",
            )
        warn(f"anybody who reaches {host}:{cfg.serve.port} can use this server: there is no key")


def serve_embedded(cfg: RunConfig, key: str | None) -> int:
    from erniekit.serve.shelf import fill, offers

    if cfg.serve.quantization:
        warn(f"quantization {cfg.serve.quantization}: the embedded engine uses the weights as they are stored")
    offered = offers(cfg)
    sock = bind(cfg.serve.host, cfg.serve.port)
    try:
        say(f"loading {offered[0].found.describe()}")
        shelf = fill(cfg, offered)
        quicken(shelf)
        if cfg.serve.use_warmup:
            asyncio.run(warm_up(shelf))
        try:
            return run(cfg, shelf, sock, key)
        finally:
            shelf.engine.stop("the server is stopping", ENGINE_S)
    finally:
        sock.close()


def quicken(shelf: Shelf) -> None:
    """On ARM, oneDNN takes fp32 products of 16 rows and more, and needs up to twice the time of torch's own for batches
    as small as ours."""
    import torch

    engine = shelf.engine
    fp32 = next(next(iter(engine.models.values())).parameters()).dtype == torch.float32
    if engine.device.type == "cpu" and fp32 and platform.machine() in ("aarch64", "arm64"):
        torch.backends.mkldnn.set_flags(False)


async def warm_up(shelf: Shelf) -> None:
    """One token from each model: what is compiled or cached on first use is then there."""
    from erniekit.serve.engines.base import Choosing, Job

    for served in shelf.models.values():
        job = Job((served.tokenizer.eos_id,), served.name, Choosing(1), frozenset(), served.vocab)
        async for _ in shelf.engine.submit(job):
            pass


def make_gate(cfg: RunConfig, shelf: Shelf, key: str | None) -> Gate:
    """The application with the keys of this run as what a request gets that does not say."""
    from erniekit.serve.api import Settings, make_app
    from erniekit.serve.asked import Defaults

    s = cfg.serve
    defaults = Defaults(
        s.max_new_tokens,
        s.min_tokens,
        s.temperature,
        s.top_p,
        s.top_k,
        s.frequency_penalty,
        s.presence_penalty,
        s.repetition_penalty,
        s.enable_thinking if cfg.given("enable_thinking") else None,
    )
    # With a key, no site that a browser shows can ask anything: it does not have the key.
    hosts = Hosts.of(s.host, s.server_names)
    settings = Settings(defaults, s.request_timeout, key, int(time.time()), hosts if key is None else None)
    return make_app(shelf.engine, shelf.models, settings)


def run(cfg: RunConfig, shelf: Shelf, sock: socket.socket, key: str | None) -> int:
    """Listens until SIGTERM or Ctrl-C; then running answers get drain_timeout to end, and the process a little more."""
    import uvicorn

    from erniekit.net.connections import limited
    from erniekit.serve.ending import AGAIN_S, Ending

    s, gate, ending = cfg.serve, make_gate(cfg, shelf, key), Ending()
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            announce(f"http://{shown}:{port}/v1", f"{', '.join(shelf.models)}; {shelf.about}")

        def handle_exit(self, sig: int, frame: Any) -> None:
            if self.should_exit:
                try:
                    asyncio.get_running_loop().call_soon_threadsafe(self._hurry)
                except RuntimeError:  # the loop has ended already
                    self.force_exit = True
            ending.within(AGAIN_S if self.should_exit else s.drain_timeout + LEFT_S + 1)
            gate.draining = True
            if not self.should_exit:
                super().handle_exit(sig, frame)

        def _hurry(self) -> None:
            """Asked twice: whoever still waits is told so, and has a second to read it."""
            gate.app.state.api.end_answers()
            asyncio.get_running_loop().call_later(AGAIN_S / 2, setattr, self, "force_exit", True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            telling = asyncio.ensure_future(self._end_answers())
            await super().shutdown(sockets)
            ending.told = not self.server_state.tasks
            telling.cancel()

        async def _end_answers(self) -> None:
            await asyncio.sleep(s.drain_timeout)
            # Not in asyncio's executor, whose threads are waited for at the end.
            stop = threading.Thread(target=shelf.engine.stop, args=("the server is stopping",), daemon=True)
            stop.start()
            await asyncio.sleep(LEFT_S / 2)
            gate.app.state.api.end_answers()  # for those whom a hanging engine does not tell

    # uvicorn raises the signal once more when it is done; the answer is the exit code, not a death by signal.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    config, sock = limited(gate, sock, lifespan="off", timeout_graceful_shutdown=int(s.drain_timeout + LEFT_S))
    server = Server(config)
    server.run(sockets=[sock])
    ending.within(ENGINE_S + LEFT_S)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.within(AGAIN_S))
    say("stopped")
    return 0 if ending.told else 1
