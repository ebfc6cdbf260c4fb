"""Many ranks recorded in parallel, a process for each core; one bar for all. For rehearse_command.py."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from multiprocessing import get_context, parent_process
from pathlib import Path

import torch
from tqdm import tqdm

from erniekit.devices import generic
from erniekit.errors import ErnieKitError
from erniekit.recipes.rehearsal import Rehearsal, recorded
from erniekit.rehearse.calls import Trace
from erniekit.rehearse.compare import Mismatch
from erniekit.rehearse.shapes import shapes_only

# Seconds until further processes work: copies of this one do so at once, others import torch and its compiler first.
STARTS = {"fork": 0.5, "spawn": 10.0}
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"  # a user's folders may have its name, too


def record_all(job: Rehearsal, ranks: Sequence[int], quiet: bool = False) -> tuple[dict[int, Trace], list[Mismatch]]:
    """Each rank's trace; or, of ranks that did not come to the end of a step, why."""
    traces: dict[int, Trace] = {}
    findings: list[Mismatch] = []
    hidden = quiet or not sys.stderr.isatty()
    with tqdm(total=len(ranks), desc="ranks", unit=" ranks", leave=False, disable=hidden) as bar:
        for rank, found in _each(job, ranks):
            if isinstance(found, Trace):
                traces[rank] = found
            else:
                findings.append(found)
            bar.update()
    return traces, findings


def _each(job: Rehearsal, ranks: Sequence[int]) -> Iterator[tuple[int, Trace | Mismatch]]:
    """The first here; if the others take longer than processes do to start, they go to those."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    first, *rest = ranks
    with shapes_only():
        began = time.perf_counter()  # after the imports
    yield first, attempt(job, first)
    workers, method = min(len(rest), cores), start_method()
    if workers < 2 or len(rest) * (time.perf_counter() - began) < STARTS[method]:
        for rank in rest:
            yield rank, attempt(job, rank)
        return
    with ProcessPoolExecutor(workers, get_context(method), _prepare_worker) as pool:
        with warnings.catch_warnings():
            # Python warns of locks that other threads may hold: those of torch's pools and of the bar are not used.
            warnings.simplefilter("ignore", DeprecationWarning)
            given = {pool.submit(attempt, job, rank): rank for rank in rest}
        for done in as_completed(given):
            yield given[done], done.result()


def start_method() -> str:
    """fork: a copy has all that is imported, and shape rules that torch has cached. Not with an accelerator, whose
    driver and backward threads do not survive it; nor on macOS, whose own libraries do not."""
    forks = sys.platform == "linux" and not generic.any_kind()
    return "fork" if forks else "spawn"


def attempt(job: Rehearsal, rank: int) -> Trace | Mismatch:
    """A refusal is the user's to read; any other error is what this rank would stop with."""
    try:
        with redirect_stdout(io.StringIO()):  # the notes of a plan: the command has printed them
            return recorded(job, rank)
    except ErnieKitError:
        raise
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(_PACKAGE)]
        where = f"{frames[-1].filename.removeprefix(_PACKAGE)}:{frames[-1].lineno}" if frames else "an unknown line"
        what = str(error).splitlines()[0] if str(error) else ""
        return Mismatch((rank,), f"rank {rank} stops: {type(error).__name__}: {what}", (f"at {where}",))


def _prepare_worker() -> None:
    """One thread: there is a worker for each core. And an end with the command, however that is ended: what a worker
    waits for would never come."""
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
