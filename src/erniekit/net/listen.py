"""A socket at an address a user named, or one line on why not. Used by serve/ for its own servers and the engines'."""

from __future__ import annotations

import socket

from erniekit.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """Bind without listening, so that an address error is reported before the model is loaded."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {host}:{port}: {error.strerror or error}",
            where="port",
            fix="another program has it: choose another port, or 0 for a free one",
        ) from None
    return sock
