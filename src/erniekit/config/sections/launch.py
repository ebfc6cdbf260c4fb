"""How many processes on how many machines, and how they find each other. Read by launch/plan.py before torch is."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key


@dataclass(frozen=True)
class LaunchSection:
    nproc_per_node: int | None = key(None, "Processes on this machine; one per visible device, one on CPUs.", low=1)
    ranks_per_device: int = key(
        1, "Ranks that share a device. Above 1 only to try layouts on few cards: they take turns, never faster.", low=1
    )
    devices: tuple[str, ...] = key(
        (), "Devices of this machine to use, such as 0,1; else *_VISIBLE_DEVICES.", also=("gpus", "npus", "xpus")
    )
    nnodes: int | None = key(None, "Machines, each given the same command; else NNODES, else 1.", low=1)
    node_rank: int | None = key(
        None, "This machine's number from 0; else NODE_RANK or RANK, else dealt out on arrival.", also=("rank",), low=0
    )
    master: str | None = key(None, "host:port where the machines meet; else MASTER_ADDR and MASTER_PORT (8080).")
    join_timeout_s: float = key(600.0, "Seconds to wait for the other machines.", low=1)
    max_restarts: int = key(3, "Times a crashed run of several processes is started again; user errors never.", low=0)
    log_dir: str | None = key(None, "Folder of workerlog.N, one per rank; else ERNIEKIT_DIST_LOG.", path="out")
