"""Many ranks recorded beside each other, a process for each core; one bar for all. For rehearse_command.py."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from multiprocessing import get_context

from tqdm import tqdm

from erniekit.errors import ErnieKitError
from erniekit.recipes.rehearsal import Rehearsal, recorded
from erniekit.rehearse.calls import Trace
from erniekit.rehearse.compare import Mismatch

FEW = 4  # ranks that are done before further processes have imported torch


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
    workers = min(len(ranks), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if len(ranks) <= FEW or workers == 1:
        for rank in ranks:
            yield rank, attempt(job, rank)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), _one_thread) as pool:
        given = {pool.submit(attempt, job, rank): rank for rank in ranks}
        for done in as_completed(given):
            yield given[done], done.result()


def attempt(job: Rehearsal, rank: int) -> Trace | Mismatch:
    """A refusal is the user's to read; any other error is what this rank would stop with."""
    try:
        with redirect_stdout(io.StringIO()):  # the notes of a plan: the command has said them
            return recorded(job, rank)
    except ErnieKitError:
        raise
    except Exception as error:
        ours = [f for f in traceback.extract_tb(error.__traceback__) if "/erniekit/" in f.filename]
        where = f"{ours[-1].filename.rpartition('/erniekit/')[2]}:{ours[-1].lineno}" if ours else "an unknown line"
        what = str(error).splitlines()[0] if str(error) else ""
        return Mismatch((rank,), f"rank {rank} stops: {type(error).__name__}: {what}", (f"at {where}",))


def _one_thread() -> None:
    """In a worker: there is one for each core."""
    import torch

    torch.set_num_threads(1)
