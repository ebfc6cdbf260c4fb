"""What each fault test did and found, collected over the workers of one run, and the table in docs/faults.md from it.
Tests say `with fault("K3", "...") as row:`; `python tests/faults/results.py` draws the table again."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]
COLLECTED = ROOT / "build" / "faults.json"
TABLE = ROOT / "docs" / "faults.md"
ROWS = {  # reliability rows and what a passing one promises
    "K1": "kill -9 at random times",
    "K2": "kill -9 at every system call of a save",
    "K3": "kill -9 of one rank of two, of both, of the launcher",
    "K4": "the background writer fails",
    "K5": "kill -9 of one rank within a save of two files a rank: what the others say",
    "T1": "SIGTERM at a random step",
    "T2": "SIGTERM to one rank of two; twice",
    "T3": "SIGTERM during an evaluation",
    "D1": "disk full",
    "D2": "disk fails, is read-only, gone or slow",
    "C1": "checkpoint files damaged",
    "C2": "checkpoint files that cannot be read for a moment",
    "R1": "stopped at every step",
    "R2": "other layouts and numbers of ranks",
    "R3": "resumed with other settings or data",
    "R4": "nodes of one job that were given different settings, data or weights",
    "N1": "NaN in loss, gradients or weights",
    "N2": "one bit changed on one rank",
    "H1": "a hang",
    "H2": "a slow rank",
    "H3": "work that takes longer than the hang limit",
    "S1": "requests that are no requests",
    "S2": "prompts around and over the limit",
    "S3": "clients that leave in mid-stream",
    "S4": "more clients than there is room for",
    "S5": "wrong keys and open addresses",
    "S6": "the server killed or asked to leave in mid-stream",
    "S7": "prompt work: long conversations, special-token look-alikes, looping templates at once",
    "S8": "SIGTERM while prompt work and engine are stuck",
    "S9": "idle connections, slow headers, stalled readers with few descriptors",
    "S10": "one client's 256 sequences while others ask",
    "S11": "sampling values at the edges of float32",
    "S12": "foreign Host and Origin at the server",
    "S13": "a long mixed load of well-behaved and hostile clients",
    "W1": "commands, flags and foreign paths typed into the web page",
    "W2": "requests to the web page from elsewhere",
    "W3": "files of others named to the web page: paths, links and URLs",
    "W4": "bodies beyond the web page's limits, slow ones, many at once",
    "W5": "lists, weights and links that lead out of the web page's folders",
    "P1": "files made to run a program or to eat memory",
    "P2": "malformed values in config.json and its brothers",
    "P3": "deep, bombing and lying data files",
    "P4": "files the manifest does not list",
    "L1": "few file descriptors, folders that cannot be written",
}
# The workers of one run under xdist share its name; a run without xdist makes one for itself.
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID") or os.environ.setdefault("ERNIEKIT_FAULT_RUN", uuid.uuid4().hex)


@dataclass
class Row:
    row: str
    what: str
    count: int = 0  # faults that were to happen
    hits: int = 0  # that did, where they were to
    lost: int | None = None  # published checkpoints that were gone
    torn: int | None = None  # that did not verify, or held other bits
    differing: int | None = None  # losses and final weights that are not those of the undisturbed run
    note: str = ""
    seconds: float = 0.0
    passed: bool = False


@contextmanager
def fault(row: str, what: str) -> Iterator[Row]:
    """Booked at the end, also of a failing test. Seconds are those of the block unless the test knows better."""
    assert row in ROWS, row
    entry, began = Row(row, what), time.perf_counter()
    try:
        yield entry
        entry.passed = True
    finally:
        entry.seconds = round(entry.seconds or time.perf_counter() - began, 1)
        _book(entry)


def _book(entry: Row) -> None:
    COLLECTED.parent.mkdir(exist_ok=True)
    with COLLECTED.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        found = _read(file.read())
        if found.get("run") != RUN:
            found = {"run": RUN, **_where(), "rows": []}
        found["rows"].append(asdict(entry))
        _replace(file, found)


def _read(text: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError:  # none yet, or cut short by a kill
        return {}


def _where() -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": version("torch"),
        "cores": os.cpu_count(),
        "machine": f"{platform.system()} {platform.machine()}",
    }


def draw(collected: dict[str, Any]) -> str:
    rows = _merged(collected["rows"])
    missing = [name for name in ROWS if name not in {r["row"] for r in rows}]
    failed = [r for r in rows if not r["passed"]]
    total = {key: sum(r[key] or 0 for r in rows) for key in ("count", "hits", "lost", "torn", "differing", "seconds")}
    lines = [
        "# Faults",
        "",
        "What was broken on purpose, how often it really broke, and what it cost. This page is written by a run of the",
        "tests: `make test-full`, or `FAULT_TABLE=1 make test` for the size of every commit. The tests are in",
        "`tests/faults` (with their README), `tests/e2e` and `tests/distributed`.",
        "",
        f"This one: {collected.get('size', 'some of the tests')}; {collected['date']}, {collected['machine']}, Python "
        f"{collected['python']}, torch {collected['torch']}, {collected['cores']} cores at a load average of",
        f"{collected.get('load', 'unknown')} (where that is more than the cores, other work made it slower). The rows "
        f"took {total['seconds']:.0f} s in all; their numbers",
        "are in `build/faults.json` after a run.",
        "",
        f"**{total['hits']} faults: {total['lost']} checkpoints lost, {total['torn']} torn, {total['differing']} "
        "losses or final weights that differ from those of an undisturbed run.**",
        "",
    ]
    if failed:
        lines += [f"**Failed: {', '.join(sorted({r['row'] for r in failed}))}.**", ""]
    if missing:
        lines += [f"Not run this time: {', '.join(missing)}.", ""]
    lines += [
        "| row | fault | injected | hit | lost | torn | differing | s | seen |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
        *(_line(r) for r in rows),
        "",
        "- hit: the fault happened where it was meant to; each test asserts that, and how often at least.",
        "- lost: published checkpoints that were gone afterwards, except those that rotation deletes.",
        "- torn: published checkpoints that did not verify, or whose tensors are not the bits of the undisturbed run.",
        "- differing: losses and final weights that are not bit for bit the undisturbed run's (R2: beyond 2e-6).",
        "- -: the row promises nothing of the kind.",
        "",
        "Killing a process tests its death, not a power cut: that files and folders are fsynced in the right order is",
        "checked by the trace of system calls in `tests/unit/checkpoint/test_writer.py`.",
    ]
    return "\n".join(lines) + "\n"


def _merged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each fault, in the order of ROWS: cases of one parametrised test are added up."""
    out: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        line = out.get((row["row"], row["what"]))
        if line is None:
            out[row["row"], row["what"]] = dict(row)
            continue
        for key in ("count", "hits", "lost", "torn", "differing", "seconds"):
            line[key] = None if line[key] is row[key] is None else (line[key] or 0) + (row[key] or 0)
        line["passed"] = line["passed"] and row["passed"]
    return sorted(out.values(), key=lambda line: (list(ROWS).index(line["row"]), line["what"]))


def _line(row: dict[str, Any]) -> str:
    numbers = ["-" if row[key] is None else str(row[key]) for key in ("lost", "torn", "differing")]
    seen = row["note"] if row["passed"] else f"FAILED {row['note']}"
    words = [row["row"], row["what"], str(row["count"]), str(row["hits"]), *numbers, f"{row['seconds']:.1f}", seen]
    return f"| {' | '.join(words)} |"


def write_table(of_this_run: bool = False, size: str = "") -> None:
    """Under the lock: workers end one after another, and the last one has all the rows. size: which tests ran."""
    with COLLECTED.open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = _read(file.read())
        if found and (found["run"] == RUN or not of_this_run):
            found |= {"size": size, "load": round(os.getloadavg()[1])} if size else {}
            TABLE.write_text(draw(found), encoding="utf-8")
            _replace(file, found)


def _replace(file: TextIO, found: dict[str, Any]) -> None:
    file.seek(0)
    file.truncate()
    file.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    write_table()
