"""Launch: how many processes are started on which machines. Made by cli/launch.py, carried out by launch_agent.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEFAULT_LOGS = "erniekit_dist_log"
LAUNCH_NAME = "ERNIEKIT_LAUNCH"  # set for a rank: one name for all attempts of a launch, on all machines


@dataclass(frozen=True)
class Launch:
    """Who is started where. Without `node_rank` the machines get their numbers in the order they arrive."""

    nproc: int
    nnodes: int = 1
    node_rank: int | None = None
    address: str = "127.0.0.1"
    port: int = 0  # 0: any that is free
    run_id: str = "erniekit"
    log_dir: Path = Path(DEFAULT_LOGS)
    max_restarts: int = 3
    grace_s: float = 25.0  # a rank's time to save after a signal
    join_timeout_s: float = 600.0
    output: Path | None = None  # where checkpoints are
    saves_on_each_node: bool = False

    @property
    def world(self) -> int:
        return self.nproc * self.nnodes
