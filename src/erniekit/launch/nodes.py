"""Several machines as one run: how their launchers meet, and what they exchange. Used by launch/agent.py."""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from erniekit.errors import ErnieKitError
from erniekit.launch import heartbeat
from erniekit.launch.failure import CRASH, Failure
from erniekit.launch.heartbeat import BEAT_INTERVAL_S, Heartbeat, Machine, notice_silence

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from erniekit.launch.plan import LaunchPlan

POLL_S = 1.0  # between two reads of the other launchers' failures
BLAME_WAIT_S = 2.0  # after a rank blames a peer: how long to wait for the failure of that peer
BEAT_S = 3  # a launcher that misses three of these is lost to those that are to restart
GOODBYE_S = 10.0  # how long a launcher waits for the others to have read its last failure
_SIOCGIFADDR = 0x8915  # ioctl: the IPv4 address of an interface


class Apart(ErnieKitError):
    """The machines did not find, or have lost, each other. Exit code 1: the same command may work later."""

    exit_code = 1


def rendezvous(launch: LaunchPlan) -> tuple[RendezvousHandler, str | None]:
    """torch's meeting point for this run, and the address of this machine that the others can reach."""
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    here, wait = own_address(launch.address), int(launch.join_timeout_s)

    def meet(backend: str, **keys: Any) -> RendezvousHandler:
        point, count = f"{launch.address}:{launch.port}", launch.nnodes
        given = RendezvousParameters(backend, point, launch.run_id, count, count, local_addr=here, **keys)
        return get_rendezvous_handler(given)

    if launch.node_rank is not None:
        return meet("static", rank=launch.node_rank, timeout=wait), here
    waits = dict(join_timeout=wait, last_call_timeout=1, read_timeout=wait, keep_alive_interval=BEAT_S)
    # torch decides by the host's name whether the address is ours; the routes are more reliable
    if here is not None and here in addresses(launch.address):
        try:
            return meet("c10d", is_host=True, **waits), here
        except RendezvousConnectionError:  # another launcher of this machine came first
            pass
    return meet("c10d", is_host=False, **waits), here


def addresses(host: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return set()


def own_address(peer: str) -> str | None:
    """The address this machine has on the way to `peer`; nothing is sent."""
    try:
        kind, _, _, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                raw = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # down, or without an IPv4 address
                continue
            if socket.inet_ntoa(raw[20:24]) == address:
                return name
    return None


class Nodes:
    """What the launchers of one attempt write into the store they met at. One node needs no store."""

    def __init__(self, store: Store, me: Machine, launch: LaunchPlan, launcher: str) -> None:
        from torch.distributed import PrefixStore, TCPStore

        self.store, self.me, self.count, self.launch = store, me.number, me.of, launch
        self._launcher = launcher
        self.attempt = 0
        self.machines = [me]
        self._polled_at = 0.0
        self._published: Failure | None = None
        self._server: Any = None
        self._heartbeat: Heartbeat | None = None
        if self.count > 1:
            notice_silence(launch.port)
            wait = timedelta(seconds=launch.join_timeout_s)
            own = TCPStore(launch.address, launch.port, None, False, wait, wait_for_workers=False)
            notice_silence(launch.port)
            self._heartbeat = Heartbeat(PrefixStore(f"erniekit/{launch.run_id}", own), self.me, self.count, launcher)
            store.set(f"erniekit/machine/{self.me}", me.to_json())

    def agree(self, attempt: int, timeout: float) -> int:
        """The number of this attempt: the highest that any launcher is at. Returns when all are there.

        A launcher that was started again gets it from the others; none goes on by itself.
        """
        until = time.monotonic() + timeout
        names = [f"erniekit/attempt/{node}" for node in range(self.count)]
        while True:
            if self._heartbeat:
                self._heartbeat.announce(attempt)
            self.store.set(names[self.me], str(attempt))
            there = [int(self.store.get(name)) if self.store.check([name]) else -1 for name in names]
            attempt = max(there)
            if min(there) == attempt:
                self.attempt = attempt
                self._begin()
                return attempt
            if time.monotonic() > until:
                raise self.late([node for node, at in enumerate(there) if at < attempt])
            time.sleep(0.1)

    def _begin(self) -> None:
        if self._heartbeat:
            entries = self.store.multi_get([f"erniekit/machine/{node}" for node in range(self.count)])
            self.machines = [Machine.from_json(entry) for entry in entries]
            self._heartbeat.start()

    def late(self, numbers: Sequence[int]) -> Apart:
        """The error of waiting for these in vain; who they are, the last attempt has left in the store."""
        by_number = {m.number: m for m in self.machines}
        for n in numbers:
            if n not in by_number and self.store.check([key := f"erniekit/machine/{n}"]):
                by_number[n] = Machine.from_json(self.store.get(key))
        names = [str(by_number.get(n) or f"machine {n} of {self.count}") for n in numbers]
        return Apart(
            f"not back within {self.launch.join_timeout_s:.0f} s: {'; '.join(names)}",
            where="join_timeout_s",
            fix="run the same command on every machine, or raise join_timeout_s",
        )

    def launch_name(self) -> str:
        """One for all attempts and machines: the id of the launcher that was first to call this."""
        return self._heartbeat.launch_name() if self._heartbeat else self._launcher

    def meeting_point(self, timeout: float) -> tuple[str, int]:
        """Host and port of a store for this attempt's ranks: an old one holds addresses of ranks that are gone."""
        from torch.distributed import TCPStore

        name = f"erniekit/store/{self.attempt}"
        if self.me == 0:
            host = self.machines[0].address
            self._server = TCPStore(host, 0, None, True, timedelta(seconds=timeout), wait_for_workers=False)
            self.store.set(name, json.dumps([host, self._server.port]))
        host, port = json.loads(self.store.get(name))
        return str(host), int(port)

    def publish(self, failure: Failure, again: bool = False) -> Failure:
        """Shares it with the others; returns the failure that counts, which may be another machine's, or its loss."""
        if self.count == 1:
            return failure
        name = f"erniekit/failed/{self.attempt}"
        if failure.peer:
            failure = self._lost_rather_than(failure, name, again)
        published = Failure.from_json(self.store.compare_set(name, "", failure.to_json()))
        if published.peer and not failure.peer:  # they saw our rank go before we did
            self.store.set(name, failure.to_json())
            return failure
        return published if failure.peer or failure.lost else failure

    def _lost_rather_than(self, failure: Failure, name: str, again: bool) -> Failure:
        """The loss of a machine, where that is why a rank lost its peer; waits for another machine's failure first.

        Counted in looks at the beats, not in seconds: a launcher that stood still did not listen meanwhile.
        """
        assert self._heartbeat is not None
        enough = self._heartbeat.looks + round(heartbeat.QUIET_S / BEAT_INTERVAL_S) + 2
        until = time.monotonic() + heartbeat.QUIET_S + heartbeat.LOST_S  # where no beats come any more
        while not self.store.check([name]):
            listened = self._heartbeat.looks >= enough or time.monotonic() > until
            if lost := self.lost(again, heartbeat.QUIET_S):
                return lost
            if listened:
                break
            time.sleep(0.05)
        return failure

    def lost(self, again: bool, seconds: float = 0.0) -> Failure | None:
        """The loss of machines whose launchers are silent for so long, or were restarted. again: we may restart."""
        if self._heartbeat is None:
            return None
        back = self._heartbeat.replaced()
        silent = [n for n in self._heartbeat.silent(seconds or heartbeat.LOST_S) if n not in back]
        lines = [f"error: lost, and back: {self.machines[n]}" for n in back]
        lines += [f"error: lost: {self.machines[n]}" for n in silent]
        if not lines:
            return None
        if silent:
            wait = f"; the others wait {self.launch.join_timeout_s:.0f} s for it (join_timeout_s)"
            there = "there" if again else "on every machine, to resume from the newest checkpoint"
            lines += [
                "where: its launcher is silent: switched off, out of reach, or ended by force",
                f"fix:   run the same command {there}{wait if again else ''}",
            ]
        numbers = (*back, *silent)
        first = self.machines[numbers[0]]
        return Failure(first.ranks[0], 1, CRASH, tuple(lines), first.host, at=time.time(), lost=numbers)

    def elsewhere(self, at_once: bool = False) -> Failure | None:
        """A failure another launcher published; reads the store at most once a second, until there is one."""
        due = self._published is None and (at_once or time.monotonic() - self._polled_at >= POLL_S)
        if self.count > 1 and due:
            self._polled_at = time.monotonic()
            if self.store.check([name := f"erniekit/failed/{self.attempt}"]):
                self._published = Failure.from_json(self.store.get(name))
        return self._published

    def done(self) -> None:
        """The ranks of this machine have finished."""
        if self._heartbeat:
            self._heartbeat.done()

    def close(self) -> None:
        if self._heartbeat:
            self._heartbeat.close()

    def goodbye(self, missing: int = 0) -> None:
        """Stays until all have read the last failure, as one of us is the host of the store."""
        if self.count == 1:
            return
        name, until = f"erniekit/left/{self.attempt}", time.monotonic() + GOODBYE_S
        try:
            self.store.add(name, 1)
            while self.store.add(name, 0) < self.count - missing and time.monotonic() < until:
                time.sleep(0.1)
        except RuntimeError:  # the host has left: it has seen us
            return
