"""The host a request is addressed to and where it comes from: Host, Origin, the client's address.

Used by serve/middleware.py and by the web page's guard. A site can make its own name resolve to this machine (DNS
rebinding) and then read what answers here; the Host header still holds that name.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from erniekit.config.address import is_loopback

LOCAL = ("localhost", "127.0.0.1", "::1")
ANY = "*"
_HOST = re.compile(r"(\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[^\[\]:@/?#\\\s]+))(:\d{1,5})?")


@dataclass(frozen=True)
class Hosts:
    """The names a server that listens at some address is reached by. addresses: any IP address is one of them."""

    names: frozenset[str]
    addresses: bool = False

    @classmethod
    def of(cls, host: str, names: Iterable[str] = ()) -> Hosts:
        """`host`: where it listens. An IP address cannot be rebound, so where other machines reach it any will do."""
        own = {host.strip("[]").lower(), *LOCAL, *(name.strip().lower() for name in names)}
        if is_loopback(host):
            return cls(frozenset(own))
        return cls(frozenset({*own, socket.gethostname().lower(), socket.getfqdn().lower()}), True)

    def allows(self, host: str, addresses: bool = False) -> bool:
        """host: a Host header's value. addresses: any IP address is right for this request."""
        name = host_name(host.lower())
        if ANY in self.names or name in self.names or name.removesuffix(".") in self.names:
            return True
        return is_address(name) and (self.addresses or addresses or is_loopback(name))


def host_name(host: str) -> str:
    """`[::1]:7860`, `localhost:7860` -> the name; empty for what is no Host."""
    found = _HOST.fullmatch(host)
    return (found["v6"] or found["name"]) if found else ""


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def from_another_site(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a page of another origin made the browser send this. Names in lower case. Programs send no Origin."""
    origin = headers.get(b"origin", b"").decode("latin-1").lower()
    if origin:
        try:
            site = urlsplit(origin).netloc if "://" in origin else ""
        except ValueError:
            site = ""
        return not site or site != headers.get(b"host", b"").decode("latin-1").lower()
    return headers.get(b"sec-fetch-site") == b"cross-site" and headers.get(b"sec-fetch-mode") != b"navigate"


def client_group(address: str) -> str:
    """What counts as one client: an IPv4 address, or the /64 that one IPv6 customer has."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        if not found.is_loopback:
            return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)
