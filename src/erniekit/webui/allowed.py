"""What a form may not set: keys that are the command line's alone, and numbers that would start too many processes.

Called by forms.check for every value, so also for those of an uploaded recipe.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from erniekit.devices import DEVICES
from erniekit.errors import ConfigError

# These run programs, open the machine or read a secret: only the command line may set them.
NEVER = {
    "engine_python": "it names a program to run",
    "engine_args": "it is handed to a program as it is",
    "host": "the page's server listens only on this machine",
    "server_names": "the page's server listens only on this machine",
    "allow_unauthenticated": "the page's server listens only on this machine",
    "api_key_file": "it names a secret",
    "wandb_api_key": "a secret; set WANDB_API_KEY before starting the page",
    "wandb_http_proxy": "a secret",
    "eval_tasks": "a task may be a file that runs a program",
    "master": "several machines are started from their command lines",
    "nnodes": "several machines are started from their command lines",
    "node_rank": "several machines are started from their command lines",
}


def limit_of(name: str) -> int | None:
    """The largest value of a key that counts processes, threads or what they keep in memory; None for other keys."""
    cores = os.cpu_count() or 1
    limits = {
        "nproc_per_node": max(_cards(), cores),
        "devices": max(_cards(), cores),
        "dataset_num_proc": max(64, cores),
        "dataloader_num_workers": max(64, cores),
        "media_num_proc": max(64, cores),
        "prefetch_factor": 1000,
        "buffer_size": 1_000_000,
        "max_restarts": 100,
        "max_num_seqs": 1024,
        "max_queue": 10_000,
    }
    return limits.get(name)


def check_number(name: str, value: Any) -> None:
    """A list is counted: each entry of `devices` becomes a process."""
    limit = limit_of(name)
    if limit is None or value is None:
        return
    count = len(value) if isinstance(value, (list, tuple)) else value
    if count > limit:
        raise ConfigError(f"{name} is {count:,}; the page allows {limit:,}", where=name, fix=f"at most {limit:,}")


def _cards() -> int:
    """The most devices of one kind on this machine, by their files, without asking a driver."""
    return max(len(list(Path("/dev").glob(entry.files))) for entry in DEVICES.values() if entry.files)
