"""How many processes on how many machines, and how they find each other. Read by launch/plan.py before torch is."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key


@dataclass(frozen=True)
class LaunchSection:
    nproc_per_node: int | None = key(
        None, "Processes on this machine; default: one per visible device, one on CPUs.", low=1
    )
    ranks_per_device: int = key(
        1, "Ranks per device. Above 1 only to try layouts on few cards: they share it and are never faster.", low=1
    )
    devices: tuple[str, ...] = key(
        (), "Devices of this machine to use, such as 0,1; default: *_VISIBLE_DEVICES.", also=("gpus", "npus", "xpus")
    )
    nnodes: int | None = key(None, "Number of machines, each given the same command; default: NNODES, else 1.", low=1)
    node_rank: int | None = key(
        None,
        "This machine's number from 0; default: NODE_RANK or RANK, else in order of arrival.",
        also=("rank",),
        low=0,
    )
    master: str | None = key(None, "Rendezvous host:port; default: MASTER_ADDR and MASTER_PORT (8080).")
    join_timeout_s: float = key(600.0, "Seconds to wait for the other machines.", low=1)
    max_restarts: int = key(
        3, "Maximum restarts of a crashed multi-process run; user errors are never restarted.", low=0
    )
    log_dir: str | None = key(None, "Folder for workerlog.N, one per rank; default: ERNIEKIT_DIST_LOG.", path="out")
