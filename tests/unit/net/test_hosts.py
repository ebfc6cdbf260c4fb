"""Which Host and Origin a server answers to, and what counts as one client."""

from __future__ import annotations

import socket

import pytest

from erniekit.net.hosts import Hosts, client_group, from_another_site

OWN = ["localhost", "localhost:8188", "LocalHost:1", "localhost.", "127.0.0.1", "127.0.0.1:80", "127.9.9.9", "[::1]:80"]
FOREIGN = [
    "evil.example", "evil.example:8188", "localhost.evil.example", "127.0.0.1.nip.io", "evil@localhost", "", ":80",
    "localhost:80:80", "0x7f.1", "127.1", "[::1", "xn--localhost", "localhost\x00", "evil.example#localhost",
    "[::1].evil.example:80", "[::1]evil.example", "localhost:80@evil.example", "localhost:evil.example",
]  # fmt: skip


def test_a_loopback_server_answers_to_loopback_names_only():
    hosts = Hosts.of("127.0.0.1")
    assert [host for host in OWN if not hosts.allows(host)] == []
    assert [host for host in [*FOREIGN, "10.0.0.5", "[2001:db8::1]:80"] if hosts.allows(host)] == []
    assert hosts.allows("10.0.0.5:80", addresses=True), "a health check by address"
    assert not hosts.allows("evil.example", addresses=True)


def test_an_open_server_answers_to_any_address_and_to_the_machines_own_name():
    hosts = Hosts.of("0.0.0.0")
    for host in (*OWN, "10.0.0.5:80", "[2001:db8::1]:80", f"{socket.gethostname()}:80".upper()):
        assert hosts.allows(host), host
    assert not any(hosts.allows(host) for host in FOREIGN)


def test_further_names_are_allowed_by_hand_and_a_star_allows_all():
    hosts = Hosts.of("127.0.0.1", ["gpu.lan", " Other.Lan "])
    assert hosts.allows("GPU.lan:8188")
    assert hosts.allows("other.lan")
    assert not hosts.allows("evil.example")
    assert Hosts.of("127.0.0.1", ["*"]).allows("evil.example")


@pytest.mark.parametrize(
    ("headers", "foreign"),
    [
        ({}, False),
        ({b"host": b"localhost:1", b"origin": b"http://localhost:1"}, False),
        ({b"host": b"LOCALHOST:1", b"origin": b"http://localhost:1"}, False),
        ({b"host": b"localhost:1", b"origin": b"http://localhost:2"}, True),
        ({b"host": b"localhost:1", b"origin": b"https://evil.example"}, True),
        ({b"host": b"localhost:1", b"origin": b"null"}, True),
        ({b"host": b"localhost:1", b"origin": b"http://["}, True),
        ({b"host": b"localhost:1", b"origin": b"://"}, True),
        ({b"origin": b"http://evil.example"}, True),
        ({b"host": b"localhost:1", b"sec-fetch-site": b"cross-site", b"sec-fetch-mode": b"no-cors"}, True),
        ({b"host": b"localhost:1", b"sec-fetch-site": b"cross-site", b"sec-fetch-mode": b"navigate"}, False),
        ({b"host": b"localhost:1", b"sec-fetch-site": b"same-origin", b"sec-fetch-mode": b"cors"}, False),
    ],
)
def test_a_page_of_another_origin_is_told_by_its_headers(headers: dict[bytes, bytes], foreign: bool):
    assert from_another_site(headers) is foreign


def test_one_client_is_an_address_or_the_network_one_customer_has():
    assert client_group("192.0.2.7") == client_group("::ffff:192.0.2.7") == "192.0.2.7"
    assert client_group("2001:db8:1:2::3") == client_group("2001:db8:1:2:ffff::9") != client_group("2001:db8:1:3::3")
    assert client_group("::1") == "::1"
    assert client_group("fe80::1%eth0") == client_group("fe80::2%eth0")
    assert client_group("testclient") == "testclient"
