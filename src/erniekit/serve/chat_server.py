"""A server for one conversation: a folder behind the OpenAI routes on a free port of this machine, in this process.

Used by chat.py, which connects to it as to any other server.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from erniekit.config import RunConfig
from erniekit.errors import ConfigError
from erniekit.net.listen import bind
from erniekit.serve.chat_client import Address, Client
from erniekit.serve.engines import EMBEDDED
from erniekit.serve.server import make_application, need_packages

START_S = 30.0


def check_engine(cfg: RunConfig) -> None:
    """A folder is opened by the embedded engine; any other engine runs as a server of its own."""
    s, source = cfg.serve, " ".join(cfg.files) or cfg.model.model_name_or_path or "DIR"
    if s.engine not in ("auto", EMBEDDED):
        raise ConfigError(
            f"chat opens a folder with the embedded engine, and engine is {s.engine}",
            where=cfg.origin("engine"),
            fix=f"start it: erniekit server {source} --engine {s.engine}; then erniekit chat --port {s.port}",
        )


@contextmanager
def embedded(cfg: RunConfig) -> Iterator[tuple[Client, str]]:
    """A client of the folder that `cfg` means, and what was opened. At the end the server is gone, threads and all."""
    check_engine(cfg)
    need_packages("erniekit chat")
    import uvicorn

    from erniekit.net.connections import limited
    from erniekit.serve.folder import choose_folder
    from erniekit.serve.loaded_models import find_models, load_models

    cfg = cfg.replace(max_num_seqs=1)  # one person: the cache holds one conversation
    entries = find_models(cfg)
    loaded = load_models(cfg, entries[:1])
    key = secrets.token_urlsafe(24)  # other users of this machine can reach the port
    try:
        sock = bind("127.0.0.1", 0)
        config, sock = limited(make_application(cfg, loaded, key), sock, lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="chat server", daemon=True)
        thread.start()
        try:
            _wait(server, thread)
            address = Address("127.0.0.1", sock.getsockname()[1])
            client = Client(address, key, cfg.serve.request_timeout, entries[0].name, place=choose_folder(cfg)[0])
            yield client, f"{entries[0].found.describe()}, {loaded.about.partition(',')[0]}"
        finally:
            server.should_exit = server.force_exit = True
            thread.join(START_S)
            sock.close()
    finally:
        loaded.engine.stop()


def _wait(server: object, thread: threading.Thread) -> None:
    end = time.monotonic() + START_S
    while not getattr(server, "started", False):
        if not thread.is_alive() or time.monotonic() > end:
            raise ConfigError("the embedded server did not start", where="erniekit chat", fix="try erniekit server DIR")
        time.sleep(0.005)
