"""Jobs: recipes run through the CLI as children of their own session; they outlive the page and are found again.

The pages start, watch and stop runs here. A job is a folder `<root>/jobs/<id>/`: recipe.yaml, command.txt, log.txt,
job.json. Nothing is started that forms.checked has not passed, and never through a shell.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from erniekit.errors import ConfigError
from erniekit.files import OwnedFiles
from erniekit.files.record import some
from erniekit.files.walk import foreign_files
from erniekit.net.address import ADDRESS_VARIABLE, KEY_VARIABLE
from erniekit.webui import forms, process
from erniekit.webui.job_log import LogPart, read_log
from erniekit.webui.paths import KEY_FILE, Roots
from erniekit.webui.private_files import append, create, private_folder, read_secret, replace_text
from erniekit.webui.recipe_files import MAX_RECIPE

State = Literal["running", "ended", "failed", "stopped", "lost"]
PREEMPTED = 75  # exit code of a run that saved itself on SIGTERM
OWN_OUTPUT = ("train", "eval", "doctor")  # write to output_dir: in the job's folder unless the recipe names one
ADDRESS_FILE = "server.address"  # where it answers, written by itself
JOB_FILES = ("recipe.yaml", "command.txt", "log.txt", "job.json", KEY_FILE, ADDRESS_FILE)
TOKEN_VARIABLE = "ERNIEKIT_WEBUI_TOKEN"
MAX_RUNNING = 16  # jobs at once
# Fields of job.json as versions before 2026-11-17 wrote them.
EARLIER_NAMES = {"word": "command", "who": "owner", "asked_to_stop": "stop_requested"}

_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")


class JobError(ConfigError):
    """A job that is not there, is not in a state for it, or cannot be started."""


class ChildProcess(Protocol):
    """What Jobs needs of a started process; subprocess.Popen is one."""

    pid: int

    def wait(self) -> int: ...


Launch = Callable[[list[str], Path, Path], ChildProcess]  # argv, the log to append to, the working directory


@dataclass(frozen=True)
class WebJob:
    id: str
    command: str  # train, eval, export, split, server, doctor
    owner: str  # the browser that started it; a label, no protection
    argv: list[str]
    created: float  # seconds since 1970
    began: float  # of the last start: a resumed job has several
    output_dir: str = ""
    pid: int = 0
    identity: str = ""  # of the process: see process.py
    state: State = "running"
    code: int | None = None
    stop_requested: bool = False
    ended: float | None = None
    starts: int = 1
    folder: str = ""
    page: str = ""  # pid and identity of the page's process

    @property
    def recipe(self) -> Path:
        return Path(self.folder) / "recipe.yaml"

    @property
    def log(self) -> Path:
        return Path(self.folder) / "log.txt"

    @property
    def command_line(self) -> str:
        """What a person would type to do the same."""
        return f"erniekit {self.command} {self.recipe}"

    @property
    def is_running(self) -> bool:
        return self.state == "running"


class Jobs:
    def __init__(self, root: str | Path, roots: Roots | None = None, launch: Launch | None = None) -> None:
        """`root`: where jobs are kept; `roots`: further folders that recipes may name paths in."""
        self.root = Path(os.path.realpath(root))
        self.folder = private_folder(private_folder(self.root) / "jobs")
        self.base = roots or Roots()
        self.roots = self.base.with_folder(self.root)
        self._launch = launch or partial(start_process, roots=self.roots)
        self._lock = threading.RLock()
        self._children: set[str] = set()  # children of this process, whose exit code will be known

    # ---- start, stop, resume

    def start(self, command: str, recipe: str, owner: str = "") -> WebJob:
        """Run `erniekit COMMAND` on this recipe (YAML text). Raises a ConfigError with everything wrong with it."""
        if command not in forms.COMMANDS:
            raise JobError(f"{command!r} is not a job", where="command", fix="one of " + ", ".join(forms.COMMANDS))
        if len(recipe) > MAX_RECIPE:
            raise JobError("the recipe is too long", where="recipe", fix=f"at most {MAX_RECIPE:,} characters")
        values = forms.checked(recipe, command, self.roots)
        with self._lock:
            id = time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(3)
            folder = self.folder / id
            if command in OWN_OUTPUT and not values.get("output_dir"):
                values["output_dir"] = str(folder / "output")
            output = str(values.get("output_dir") or "")
            self._refuse_shared(command, output)
            self._refuse_many()
            private_folder(folder)
            OwnedFiles(folder).open("job").claim(*JOB_FILES)
            argv = [sys.executable, "-m", "erniekit", command, str(folder / "recipe.yaml")]
            now = time.time()
            page = f"{os.getpid()} {process.identity(os.getpid())}"
            job = WebJob(id, command, _label(owner), argv, now, now, output, folder=str(folder), page=page)
            self._write_recipe(job, values)
            if command == "server":
                with create(folder / KEY_FILE) as file:
                    file.write(secrets.token_urlsafe(24).encode())
            return self._run(job)

    def stop(self, id: str, force: bool = False) -> WebJob:
        """Ask it to end: training saves first. `force` ends it and what it started at once."""
        with self._lock:
            job = self.get(id)
            if not job.is_running:
                return job
            self._write(replace(job, stop_requested=True))
        # To the process alone: a launcher signals its ranks itself, and a second signal ends a rank unsaved.
        process.send(job.pid, job.identity, signal.SIGKILL if force else signal.SIGTERM, group=force)
        return self.get(id)

    def resume(self, id: str) -> WebJob:
        """The same recipe in the same folder once more: training goes on from its newest checkpoint."""
        with self._lock:
            job = self.get(id)
            if job.is_running:
                raise JobError("this job is still running", where=id, fix="stop it first")
            if job.command != "train":
                raise JobError(f"a job of `{job.command}` cannot be resumed", where=id, fix="start it again")
            values = forms.checked(job.recipe.read_text(encoding="utf-8"), job.command, self.roots)
            self._refuse_shared(job.command, job.output_dir)
            self._refuse_many()
            if values.pop("overwrite_output_dir", False):  # it would start from the beginning
                self._write_recipe(job, values)
            fresh: dict[str, Any] = dict(
                state="running", code=None, stop_requested=False, ended=None, pid=0, identity=""
            )
            return self._run(replace(job, **fresh, began=time.time(), starts=job.starts + 1))

    def delete(self, id: str) -> None:
        """Remove the job's folder, and its output if that is inside; anything elsewhere stays."""
        with self._lock:
            job = self.get(id)
            if job.is_running:
                raise JobError("this job is still running", where=id, fix="stop it first")
            folder = self.folder / job.id
            if folder.is_symlink() or Path(os.path.realpath(folder)).parent != self.folder:
                raise JobError("this is not the folder of a job", where=id, fix="remove it by hand")
            for other in self.list():
                if other.is_running and Path(os.path.realpath(other.output_dir or os.sep)).is_relative_to(folder):
                    raise JobError(f"job {other.id} is writing into this one's folder", where=id, fix="stop it first")
                if (
                    other.id != id
                    and other.command == "train"
                    and Path(other.output_dir or os.sep).is_relative_to(folder)
                ):
                    raise JobError(
                        f"job {other.id} has its result in this one's folder", where=id, fix="delete that job first"
                    )
            foreign = [str(path.relative_to(folder)) for path in foreign_files(folder, frozenset(JOB_FILES))]
            if foreign:
                raise JobError(
                    f"the job's folder holds {some(foreign)}, not written by the job",
                    where=str(folder),
                    fix="move it away first, or remove the folder by hand",
                )
            shutil.rmtree(folder)

    # ---- read

    def list(self, owner: str | None = None) -> list[WebJob]:
        """All jobs, newest first; those of one browser with `owner`."""
        ids = sorted((p.name for p in self.folder.iterdir() if _ID.fullmatch(p.name)), reverse=True)
        jobs = [job for id in ids if (job := self._read(id))]
        return [self._refreshed(job) for job in jobs if owner is None or job.owner == owner]

    def get(self, id: str) -> WebJob:
        job = self._read(id) if isinstance(id, str) and _ID.fullmatch(id) else None
        if job is None:
            raise JobError("there is no such job", where=str(id)[:40], fix="choose one of the list")
        return self._refreshed(job)

    def recipe(self, id: str) -> str:
        return self.get(id).recipe.read_text(encoding="utf-8")

    def log_tail(self, id: str, after: int = -1) -> LogPart:
        """The log from offset `after` on; -1, or more than TAIL_BYTES behind, gives its end."""
        return read_log(self.get(id).log, after)

    def server_url(self, id: str) -> str:
        """Where a job of `server` answers (`http://127.0.0.1:PORT/v1`); empty until it is ready, and when it is not."""
        job = self.get(id)
        if job.command != "server" or not job.is_running:
            return ""
        # Not from the log: the names of models and adapters in it are whatever their authors chose.
        try:
            return (Path(job.folder) / ADDRESS_FILE).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return ""

    def server_key(self, id: str) -> str:
        return read_secret(Path(self.get(id).folder) / KEY_FILE)

    # ---- inside

    def _refuse_many(self) -> None:
        if sum(job.is_running for job in self.list()) >= MAX_RUNNING:
            raise JobError(f"{MAX_RUNNING} jobs are running", where="jobs", fix="stop one, or wait for one to end")

    def _refuse_shared(self, command: str, output: str) -> None:
        """Two trainings in one folder: the second would be refused by the trainer, later and less plainly. A result in
        another job's folder would be deleted with that job."""
        for job in self.list() if command == "train" and output else ():
            if output != job.output_dir and Path(os.path.realpath(output)).is_relative_to(job.folder):
                raise JobError(f"output_dir lies in the folder of job {job.id}", where="output_dir", fix="another one")
            if job.is_running and job.command == "train" and job.output_dir == output:
                raise JobError(
                    f"job {job.id} is training into the same folder",
                    where=f"output_dir: {output}",
                    fix="choose another output_dir, or leave it empty for a folder of its own",
                )

    def _run(self, job: WebJob) -> WebJob:
        """Under the lock. What is known is on disk before the process is, so that it cannot be lost unseen."""
        replace_text(Path(job.folder) / "command.txt", job.command_line + "\n")
        self._write(job)
        try:
            child = self._launch(job.argv, job.log, self.base.folders[0])
        except OSError as error:
            self._write(replace(job, state="failed", code=-1, ended=time.time()))
            raise JobError(f"the job could not be started: {error}", where=job.id, fix="see the log") from None
        job = replace(job, pid=child.pid, identity=process.identity(child.pid))
        self._write(job)
        self._children.add(job.id)
        threading.Thread(target=self._wait, args=(job.id, child), daemon=True, name=f"job {job.id}").start()
        return job

    def _wait(self, id: str, child: ChildProcess) -> None:
        code = child.wait()
        with self._lock:
            self._children.discard(id)
            job = self._read(id)
            if job is not None:  # else deleted
                state = _state(job, code)
                self._write(replace(job, state=state, code=code, ended=time.time()))

    def _refreshed(self, job: WebJob) -> WebJob:
        """The job with the state it is in; that of one without a parent process is read from the files it left."""
        if job.state != "running" or process.is_same(job.pid, job.identity):
            return job
        with self._lock:
            fresh = self._read(job.id) or job
            if fresh.state != "running" or fresh.id in self._children:  # the thread that waits will write its state
                return fresh
        return replace(fresh, state=_state_from_files(fresh))

    def _write_recipe(self, job: WebJob, values: dict[str, Any]) -> None:
        text = forms.to_yaml(values, forms.page_of(job.command, values))
        replace_text(job.recipe, text)

    def _write(self, job: WebJob) -> None:
        stored = {name: value for name, value in asdict(job).items() if name != "folder"}
        replace_text(self.folder / job.id / "job.json", json.dumps(stored, indent=1, ensure_ascii=False) + "\n")

    def _read(self, id: str) -> WebJob | None:
        try:
            stored = json.loads((self.folder / id / "job.json").read_text(encoding="utf-8"))
            current = {EARLIER_NAMES.get(name, name): value for name, value in stored.items()}
            return WebJob(**{**current, "id": id, "folder": str(self.folder / id)})
        except (OSError, ValueError, TypeError):
            return None


def start_process(argv: list[str], log: Path, folder: Path, roots: Roots) -> subprocess.Popen[bytes]:
    """A session of its own: neither the page's end nor Ctrl-C in its terminal reaches it."""
    env = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE} | roots.environment
    env |= {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    if key := read_secret(log.with_name(KEY_FILE)):  # never an argument: those are seen by every account
        env |= {KEY_VARIABLE: key, ADDRESS_VARIABLE: str(log.with_name(ADDRESS_FILE))}
    with append(log) as out:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=folder, env=env, start_new_session=True
        )


def _state(job: WebJob, code: int) -> State:
    if code == PREEMPTED:
        return "stopped"
    if code == 0:
        return "stopped" if job.stop_requested and job.command == "server" else "ended"
    return "stopped" if job.stop_requested and (code < 0 or code in (130, 137, 143)) else "failed"


def _state_from_files(job: WebJob) -> State:
    """State of a process that ended while no page was running: from its run.json, else from the end of its log."""
    if job.command == "train":
        run_status = _run_status(Path(job.output_dir) / "run.json", job.began)
        if run_status in ("finished", "stopped", "failed"):
            return {"finished": "ended", "stopped": "stopped", "failed": "failed"}[run_status]  # type: ignore[return-value]
    try:
        with job.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            end = file.read().decode("utf-8", errors="replace")
    except OSError:
        return "lost"
    if re.search(r"^error: ", end, re.MULTILINE):
        return "failed"
    return "stopped" if job.stop_requested else "lost"


def _run_status(path: Path, since: float) -> str:
    """The status a run wrote down, if it did so after `since`."""
    try:
        if path.stat().st_mtime < since:
            return ""
        return str(json.loads(path.read_text(encoding="utf-8")).get("status", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def _label(owner: str) -> str:
    return "".join(c for c in str(owner) if c.isprintable())[:80]
