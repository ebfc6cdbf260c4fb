"""torch's elastic agent, extended: shows the failed rank's own error first, leaves no process behind, lets ranks save.

Used by start.py. torch meets the other machines, numbers the ranks, starts and restarts them; this decides when.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError

from erniekit.errors import ConfigError, stopped_unsaved
from erniekit.launch.error_folder import error_folder
from erniekit.launch.failure import CRASH, LAUNCHED, PREEMPTED, Failure, first, read
from erniekit.launch.heartbeat import Machine, newest_checkpoint, notice_silence
from erniekit.launch.logs import LAUNCHER_LOG, Relay, own_folder
from erniekit.launch.nodes import BLAME_WAIT_S, Apart, Nodes, addresses, interface_of, own_address, rendezvous
from erniekit.launch.plan import LAUNCH_NAME, LaunchPlan
from erniekit.log import emit

LEAVE_S = 8.0  # from SIGTERM to SIGKILL for the ranks whose peer is gone
SLACK_S = 5.0  # beyond a rank's grace to save: it has to get to the end of its step as well
BACK_OFF_S = 1.0  # before the first restart; doubled for each after it
LONGEST_BACK_OFF_S = 60.0
NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
TORCH_HANDLES = "TORCHELASTIC_SIGNALS_TO_HANDLE"
ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def run_ranks(launch: LaunchPlan, command: list[str]) -> int:
    """Start `command` in every rank of this machine and see it through; the exit code for the shell."""
    try:
        logs = own_folder(launch.log_dir)
    except OSError as e:
        fix = "give another log_dir"
        raise ConfigError(f"no logs of the ranks: {e.strerror}", where=str(launch.log_dir), fix=fix) from e
    if logs != launch.log_dir:
        emit(f"note     {launch.log_dir} holds logs of another program: this run's are in {logs}")
    relay = Relay(logs)
    agent = None
    try:
        with error_folder() as errors, _remarks_to_a_file(logs), _environment(launch), _signals_end_us():
            handler, here = rendezvous(launch)
            if launch.nnodes > 1:
                notice_silence(launch.port)
            spec = WorkerSpec(
                role="rank",
                local_world_size=launch.nproc,
                rdzv_handler=handler,
                entrypoint=command[0],
                args=tuple(command[1:]),
                max_restarts=launch.max_restarts,
                monitor_interval=0.1,
                local_addr=here,
            )
            agent = Agent(spec, RankLogs(relay, errors), launch, relay, here)
            if agent.run() is None:
                raise Apart("the run ended without this machine", where="nnodes", fix="start one launcher per machine")
            handler.shutdown()
            return agent.exit_code
    except SignalException as e:  # between two attempts
        return (agent.exit_code if agent else 0) or 128 + e.sigval
    except (RendezvousError, DistError) as e:
        raise (agent.apart(e) if agent is not None and agent.met else _apart(launch, e)) from e
    finally:
        relay.close()


class RankLogs(LogsSpecs):
    """Where torch lets each rank write: output into our relay, its error into a file of its own."""

    def __init__(self, relay: Relay, errors: Path) -> None:
        super().__init__(str(relay.folder))
        self.relay, self.errors = relay, errors
        self.launch_name = ""

    @property
    def root_log_dir(self) -> str:
        return str(self.relay.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        outs, errs, files = {}, {}, {}
        for local, env in envs.items():
            rank = int(env["RANK"])
            outs[local], errs[local] = self.relay.open(rank)
            files[local] = str(self.errors / f"{rank}.json")
            Path(files[local]).unlink(missing_ok=True)
            env["TORCHELASTIC_ERROR_FILE"] = files[local]
            env[LAUNCHED] = str(os.getpid())
            env[LAUNCH_NAME] = self.launch_name
        return LogsDest(outs, errs, {}, {}, files)


class Agent(LocalElasticAgent):
    """One per machine. torch's loop calls `_monitor_workers` ten times a second; a FAILED from it restarts or ends."""

    def __init__(self, spec: WorkerSpec, logs: RankLogs, launch: LaunchPlan, relay: Relay, here: str | None) -> None:
        super().__init__(spec, logs)
        self.launch, self.relay, self.here, self.logs = launch, relay, here, logs
        self.exit_code, self.met = 0, False
        self._nodes: Nodes | None = None
        self._launcher = secrets.token_hex(4)  # distinguishes this launcher from another that takes its place
        self._signals: list[int] = []  # that came for us
        self._passed_on = 0  # how many of them the ranks have
        self._ignored = {n for n in (signal.SIGHUP,) if signal.getsignal(n) == signal.SIG_IGN}  # nohup erniekit ...
        self._leave_by = float("inf")  # monotonic: when those that are still saving have had their time
        self._blamed_at: float | None = None  # monotonic: since when a rank blames another that has not failed yet
        self._failure: Failure | None = None

    # --- meeting and starting

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        wait = self.launch.join_timeout_s
        # torch would keep the store of the first round, and never pass it to a machine that joins later
        os.environ[NO_SHARED_STORE] = "1"
        super()._rendezvous(worker_group)
        os.environ[NO_SHARED_STORE] = "0"  # the ranks, though, meet at one that a launcher holds
        store = worker_group.store
        assert store is not None
        number, count = worker_group.group_rank, worker_group.group_world_size
        ranks = tuple(worker.global_rank for worker in worker_group.workers)
        host = socket.gethostname()
        if self._nodes:
            self._nodes.close()
        self._nodes = Nodes(store, Machine(number, count, host, self.here or host, ranks), self.launch, self._launcher)
        spec = worker_group.spec
        attempt = self._nodes.agree(spec.max_restarts - self._remaining_restarts, wait)
        self._remaining_restarts = max(0, spec.max_restarts - attempt)
        self.logs.launch_name = self._nodes.launch_name()
        worker_group.master_addr, worker_group.master_port = self._nodes.meeting_point(wait)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._failure, self._blamed_at, self._leave_by = None, None, float("inf")
        os.environ[TORCH_HANDLES] = "SIGQUIT"  # of the others its handlers would raise wherever we happen to be
        for number in ASKING:  # before there is a rank: one that comes while they are started is passed on to them
            signal.signal(number, signal.SIG_IGN if number in self._ignored else self._on_signal)
        started = super()._start_workers(worker_group)
        if not self.met:
            self._introduce(worker_group)
        self.exit_code, self.met = 0, True
        return started

    def _introduce(self, group: WorkerGroup) -> None:
        ranks = [worker.global_rank for worker in group.workers]
        of = f" of {group.workers[0].world_size} on {self.launch.nnodes} machines" if self.launch.nnodes > 1 else ""
        names = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        self.relay.emit(f"{names}{of}; output of each: {self.relay.folder}/workerlog.N")

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """torch restarts us: after a failure, or because a machine that was away is waiting to join."""
        if self._failure is None and self._nodes and (failure := self._nodes.elsewhere(at_once=True)):
            self._failure = failure  # the machine that waits is the one that failed: this counts for all of us
            self._remaining_restarts = max(0, self._remaining_restarts - 1)
            self.relay.emit(*failure.lines)
        done = self.launch.max_restarts - self._remaining_restarts
        wait = min(LONGEST_BACK_OFF_S, BACK_OFF_S * 2 ** max(0, done - 1)) if self._failure else 0.0
        self.relay.emit(self._next_attempt(done, wait))
        until = time.monotonic() + wait
        while time.monotonic() < until:
            if self._signals:
                name = signal.Signals(self._signals[0])
                self.relay.emit(f"stopped by {name.name} between two attempts; run the same command to resume")
                self.exit_code = 75
                raise SignalException("while waiting to restart", name)
            time.sleep(0.05)
        self._stop_workers(worker_group)
        with _signals_end_us():
            self._initialize_workers(worker_group)

    def _next_attempt(self, done: int, wait: float) -> str:
        if self._failure is None:
            return "a machine has joined: all start again"
        number = f"restart {done} of {self.launch.max_restarts}"
        if not self._failure.lost:
            return f"{number} in {wait:.0f} s"
        return f"{number} as soon as all machines are there, from {self._point()}"

    def _point(self) -> str:
        """The checkpoint a restart goes on from, as found on this machine's disk."""
        return self._newest() or "the newest checkpoint"

    def _newest(self) -> str:
        """Its name; "" where this machine has none of them, or cannot read them now."""
        launch, ranks = self.launch, [worker.global_rank for worker in self._worker_group.workers]
        has_them = 0 in ranks or launch.saves_on_each_node
        return newest_checkpoint(launch.output) if has_them and launch.output is not None else ""

    def apart(self, error: Exception) -> Apart:
        """The others are out of reach: the machine where all meet is gone, or one that was lost did not come back."""
        assert self._nodes is not None
        if self._failure and self._failure.lost and isinstance(error, RendezvousTimeoutError):
            return self._nodes.late(self._failure.lost)
        launch, machines = self.launch, self._nodes.machines
        there, numbered = addresses(launch.address), launch.node_rank is not None
        host = next((f", {m}" for m in machines if m.address in there or (numbered and m.number == 0)), "")
        return Apart(
            f"the other machines are gone: no answer from the rendezvous address{host}",
            where=f"{launch.address}:{launch.port}, {launch.nnodes} machines: {_first_line(error)}",
            fix=f"run the same command on every machine; the run resumes from {self._point()}",
        )

    def _exit_barrier(self) -> None:
        if self._nodes:
            self._nodes.done()
        with _signals_end_us():
            super()._exit_barrier()

    # --- watching

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _codes(self) -> dict[int, int | None]:
        """Exit code by local rank; None while it runs."""
        assert isinstance(self._pcontext, SubprocessContext)
        return {local: h.proc.poll() for local, h in self._pcontext.subprocess_handlers.items()}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._pass_signals_on()
        codes = self._codes()
        failed = {local: code for local, code in codes.items() if code}
        running = [worker_group.workers[local].global_rank for local, code in codes.items() if code is None]
        elsewhere = self._nodes.elsewhere() if self._nodes and running else None
        preempted = {*failed.values()} == {75} or (elsewhere is not None and elsewhere.kind == PREEMPTED)
        if preempted and running:  # not a moment to stop those that are still saving
            self._leave_within(self.launch.grace_s + SLACK_S)
        elif failed:
            cause = self._cause(worker_group, failed)
            if not (cause.peer and running and self._wait_for_a_better()):
                return self._end(self._publish(cause))
        elif elsewhere is not None:
            return self._end(elsewhere)
        elif running and self._nodes and not self._signals and (lost := self._nodes.lost(self._may_restart)):
            return self._end(self._publish(lost))  # after a stop signal machines leave one by one, and ranks save
        elif not running:
            return super()._monitor_workers(worker_group)  # all is well: torch waits for the other machines
        if running and time.monotonic() > self._leave_by:
            return self._end(self._overdue(running, preempted))
        return RunResult(state=WorkerState.HEALTHY)

    @property
    def _may_restart(self) -> bool:
        return self._remaining_restarts > 0 and not self._signals

    def _publish(self, cause: Failure) -> Failure:
        return cause if self._nodes is None else self._nodes.publish(cause, self._may_restart)

    def _leave_within(self, seconds: float) -> None:
        self._leave_by = min(self._leave_by, time.monotonic() + seconds)

    def _wait_for_a_better(self) -> bool:
        """True for a moment after a rank reports only a lost peer: that peer's own failure may still come."""
        self._blamed_at = self._blamed_at or time.monotonic()
        return time.monotonic() < self._blamed_at + BLAME_WAIT_S

    def _pass_signals_on(self) -> None:
        """To the ranks themselves, not to the loaders they started: those must live for the save."""
        for number in self._signals[self._passed_on :]:
            self._passed_on += 1
            self._send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
            self._leave_within(self.launch.grace_s + SLACK_S if self._passed_on == 1 else 1.0)

    def _send_signal(self, number: int) -> None:
        assert isinstance(self._pcontext, SubprocessContext)
        for handler in self._pcontext.subprocess_handlers.values():
            if handler.proc.poll() is None:
                handler.proc.send_signal(number)

    # --- ending

    def _cause(self, group: WorkerGroup, failed: dict[int, int]) -> Failure:
        assert self._pcontext is not None
        ranks = {local: group.workers[local].global_rank for local in failed}
        if 0 not in ranks.values():
            self.relay.mute()
        self.relay.catch_up()  # what rank 0 printed before it failed belongs on the screen, and all of it into the logs
        self.relay.mute()
        files = {local: Path(self._pcontext.error_files[local]) for local in failed}
        return first(read(ranks[at], failed[at], files[at], self.relay.path(ranks[at])) for at in failed)

    def _overdue(self, ranks: list[int], preempted: bool) -> Failure:
        """Some never got to the end of their step. Those that left before them have saved what there is to save."""
        names = ", ".join(map(str, ranks))
        what = f"error: rank {names} did not leave within {self.launch.grace_s + SLACK_S:.0f} s of the signal"
        # after two signals they had no time to save, which is no fault of theirs: as if they had obeyed
        code, kind = (75, PREEMPTED) if preempted else (-self._signals[0] if self._passed_on > 1 else 1, CRASH)
        return Failure(ranks[0], code, kind, (what, "fix:   raise preempt_grace_s"))

    def _end(self, cause: Failure) -> RunResult:
        """Shows the cause, stops the other ranks, and decides whether there will be another attempt."""
        self._failure = cause
        self.exit_code = cause.exit_code
        lines = cause.lines
        if self._signals and cause.kind == CRASH:
            self.exit_code = 128 + self._signals[0]
            if cause.exit_code in (130, self.exit_code):  # it obeyed: nothing to save yet, or a second signal
                lines = stopped_unsaved(self._signals[0], self._newest() or None)
        elif cause.code < 0 and not self._signals and not self._may_restart:  # it had no word of its own
            lines = (*lines, f"fix:   run the same command; it resumes from {self._point()}")
        self.relay.mute()
        self.relay.emit(*lines)
        if cause.rank in {worker.global_rank for worker in self._worker_group.workers}:
            self.relay.note(cause.rank, *lines)
        self._shutdown()
        if self._signals or not cause.restartable:
            self._remaining_restarts = 0
        if self._remaining_restarts == 0 and self._nodes:
            self._nodes.goodbye(missing=len(cause.lost))
        return RunResult(state=WorkerState.FAILED)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        """SIGTERM, a moment, SIGKILL to a rank and what it has started. Called by torch and by `_end`."""
        if not isinstance(self._pcontext, SubprocessContext):
            return
        self._send_signal(death_sig)
        until = time.monotonic() + LEAVE_S
        while any(code is None for code in self._codes().values()) and time.monotonic() < until:
            time.sleep(0.02)
        for handler in self._pcontext.subprocess_handlers.values():
            if handler.proc.poll() not in (0, 75):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(handler.proc.pid, signal.SIGKILL)
        self._pcontext.close(signal.SIGKILL, 5)
        self._pcontext = None
        self.relay.release()


@contextlib.contextmanager
def _remarks_to_a_file(folder: Path) -> Iterator[None]:
    """torch's own remarks go to a file: the failing rank reports what happened."""
    log, handler = logging.getLogger("torch.distributed"), logging.FileHandler(folder / LAUNCHER_LOG, "w", delay=True)
    before = log.propagate, log.handlers
    log.propagate, log.handlers = False, [handler]
    try:
        yield
    finally:
        handler.close()
        log.propagate, log.handlers = before


@contextlib.contextmanager
def _environment(launch: LaunchPlan) -> Iterator[None]:
    """What every rank of this machine inherits; ours again afterwards."""
    before = dict(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // launch.nproc)))
    # gloo would take the address of the host's name, which on many machines is 127.0.1.1
    if launch.nnodes > 1 and (name := interface_of(own_address(launch.address) or "")):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _signals_end_us() -> Iterator[None]:
    """While nothing runs that could save, a signal ends the launcher at once: waiting for machines is not in Python."""
    before = {number: signal.getsignal(number) for number in ASKING}
    for number in ASKING:
        if not (number == signal.SIGHUP and before[number] == signal.SIG_IGN):
            signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _first_line(error: Exception) -> str:
    return str(error.__cause__ or error).splitlines()[0]


def _apart(launch: LaunchPlan, error: Exception) -> Apart:
    what = _first_line(error)
    if launch.nnodes == 1:
        return Apart(
            f"the ranks cannot connect: {what}", where=f"port {launch.port}", fix="unset MASTER_PORT and master"
        )
    return Apart(
        f"the machines could not connect: {what}",
        where=f"{launch.address}:{launch.port}, {launch.nnodes} machines",
        fix="the same command on every machine, MASTER_ADDR reachable from each, and a free port there",
    )
