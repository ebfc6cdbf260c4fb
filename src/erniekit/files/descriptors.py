"""How many files and sockets this process may have open. Used by the command line and by net/."""

from __future__ import annotations

WANTED = 4096  # enough for a server's connections and for ranks with many groups


def raise_descriptors(wanted: int = WANTED) -> int:
    """The soft limit, raised towards `wanted` as far as the hard one lets it. Without a limit: `wanted`."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
        except (OSError, ValueError):
            pass  # then with what there is
    return soft
