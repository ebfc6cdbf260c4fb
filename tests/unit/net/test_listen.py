"""A socket at an address that a user named: bound at once, or an error that says which key to change."""

from __future__ import annotations

import socket

import pytest

from erniekit.errors import ConfigError
from erniekit.net.listen import bind


def test_a_taken_port_is_an_error_of_the_port():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen") as error:
        bind("127.0.0.1", taken.getsockname()[1])
    assert error.value.where == "port"
    assert "0 for a free one" in error.value.fix


@pytest.mark.parametrize("host", ["192.0.2.1", "not a name"])
def test_an_address_of_no_interface_here_is_an_error_of_the_host(host):
    """192.0.2.0/24 is for documentation: no machine has it."""
    with pytest.raises(ConfigError, match=f"cannot listen at {host}:0") as error:
        bind(host, 0)
    assert error.value.where == "host"
    assert "127.0.0.1" in error.value.fix


def test_a_port_is_free_again_at_once():
    first = bind("127.0.0.1", 0)
    port = first.getsockname()[1]
    first.listen()
    with socket.create_connection(("127.0.0.1", port)) as client:
        link, _ = first.accept()
        link.close()  # the server's side closes first and waits out its TIME_WAIT
        client.recv(1)
    first.close()
    bind("127.0.0.1", port).close()
