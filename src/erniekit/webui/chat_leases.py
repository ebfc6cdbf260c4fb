"""Chat leases: how long a chat model stays in memory - while a tab holds it and it is used, and never past the page.

Used by the chat page, which reports tabs and messages, and by app.py, which closes them all when the page stops.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Literal

from erniekit.errors import ErnieKitError
from erniekit.webui import process
from erniekit.webui.jobs import Jobs, WebJob

IDLE_S = 30 * 60.0  # without a message
RELOAD_S = 20.0  # after the last tab was closed: a page that is reloaded closes its tab too
CHECK_S = 1.0
STOP_S = 10.0  # for a server to end by itself
Released = Literal["", "idle", "closed"]


@dataclass
class Lease:
    sessions: set[str] = field(default_factory=set)  # tabs that show it
    used_at: float = field(default_factory=time.monotonic)
    closed_at: float = field(default_factory=time.monotonic)  # when the last tab was closed


class ChatLeases:
    """`idle_s`: 0 keeps an unused model until its tab is closed."""

    def __init__(self, jobs: Jobs, idle_s: float = IDLE_S, reload_s: float = RELOAD_S) -> None:
        self.jobs, self.idle_s, self.reload_s = jobs, idle_s, reload_s
        self._leases: dict[str, Lease] = {job.id: Lease() for job in self._orphans()}
        self._reasons: dict[str, Released] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look at the leases every second from now on."""
        self._thread = threading.Thread(target=self._watch, daemon=True, name="chat leases")
        self._thread.start()

    def hold(self, id: str, session: str) -> None:
        """A tab shows this server."""
        with self._lock:
            self._leases.setdefault(id, Lease()).sessions.add(session)

    def use(self, id: str) -> None:
        """A message is sent, or an answer has ended."""
        with self._lock:
            self._leases.setdefault(id, Lease()).used_at = time.monotonic()

    def close_tab(self, session: str) -> None:
        """A tab was closed or reloaded, or its connection was lost."""
        with self._lock:
            for lease in self._leases.values():
                if session in lease.sessions:
                    lease.sessions.discard(session)
                    lease.closed_at = time.monotonic()

    def release_reason(self, id: str) -> Released:
        """Why a server was stopped here; empty where it was not."""
        return self._reasons.get(id, "")

    def check(self) -> list[str]:
        """Stop servers without a lease or recent use; returns those that were stopped."""
        now = time.monotonic()
        with self._lock:
            due: dict[str, Released] = {}
            for id, lease in self._leases.items():
                if not lease.sessions and now - lease.closed_at >= self.reload_s:
                    due[id] = "closed"
                elif self.idle_s and now - lease.used_at >= self.idle_s:
                    due[id] = "idle"
            for id in due:
                del self._leases[id]
            self._reasons.update(due)
        for id in due:
            self._stop(id)
        return list(due)

    def close(self) -> None:
        """The page stops: every model it has loaded is unloaded, and its process has ended when this returns."""
        self._closing.set()
        with self._lock:
            held, self._leases = list(self._leases), {}
        for id in held:
            self._stop(id)
        end = time.monotonic() + STOP_S
        while time.monotonic() < end and any(self._is_running(id) for id in held):
            time.sleep(0.05)
        for id in held:
            if self._is_running(id):
                self._stop(id, force=True)

    def _watch(self) -> None:
        while not self._closing.wait(CHECK_S):
            self.check()

    def _stop(self, id: str, force: bool = False) -> None:
        try:
            self.jobs.stop(id, force=force)
        except ErnieKitError:  # deleted meanwhile
            return

    def _is_running(self, id: str) -> bool:
        try:
            job = self.jobs.get(id)
        except ErnieKitError:
            return False
        return process.is_same(job.pid, job.identity)

    def _orphans(self) -> list[WebJob]:
        """Servers of a page that was killed: another page that is running keeps its own."""
        return [job for job in self.jobs.list() if job.command == "server" and job.is_running and not _has_page(job)]


def _has_page(job: WebJob) -> bool:
    pid, _, identity = job.page.partition(" ")
    return pid.isdigit() and process.is_same(int(pid), identity)
