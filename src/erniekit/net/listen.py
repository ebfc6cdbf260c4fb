"""A socket at an address a user named, or one line on why not. Used by serve/ for its own servers and the engines', and
by webui/."""

from __future__ import annotations

import errno
import socket

from erniekit.errors import ConfigError

_PORT_FIXES = {
    errno.EADDRINUSE: "another program has it: choose another port, or 0 for a free one",
    errno.EACCES: "ports below 1024 may need rights that you lack: choose another port, or 0 for a free one",
}


def bind(host: str, port: int) -> socket.socket:
    """Bind without listening, so that an address error is reported before the model is loaded."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise _cannot_listen(host, port, error) from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _cannot_listen(host, port, error) from None
    return sock


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    what = f"cannot listen at {host}:{port}: {error.strerror or error}"
    fix = _PORT_FIXES.get(error.errno or 0)
    if fix is not None:
        return ConfigError(what, where="port", fix=fix)
    return ConfigError(what, where="host", fix="an address of this machine; 127.0.0.1 = this machine only")
