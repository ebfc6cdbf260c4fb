"""The launch plan: how many ranks on which machines, from the keys and the environment, before torch is imported.

Used by cli/train.py, start.py and agent.py.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from erniekit.config import RunConfig
from erniekit.config.machines import machines, whole_number
from erniekit.devices import AUTO, entry_of, named_one
from erniekit.errors import ConfigError, DeviceError
from erniekit.printable import counted

DEFAULT_PORT = 8080
DEFAULT_LOGS = "erniekit_dist_log"
LAUNCH_NAME = "ERNIEKIT_LAUNCH"  # set for a rank: one name for all attempts of a launch, on all machines


@dataclass(frozen=True)
class LaunchPlan:
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


def inside(env: Mapping[str, str] | None = None) -> bool:
    """Whether this process is a rank already: ours, torchrun's, or one numbered by hand."""
    env = os.environ if env is None else env
    return "TORCHELASTIC_RUN_ID" in env or all(name in env for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def launch_name(env: Mapping[str, str] | None = None) -> str:
    """Of the launcher that started this rank and starts it again after a crash; "" where nothing restarts it.

    A command that is typed or requeued again gets another name: only the launcher's own restarts share one.
    """
    env = os.environ if env is None else env
    if LAUNCH_NAME in env:
        return env[LAUNCH_NAME]
    if "TORCHELASTIC_RUN_ID" in env:  # torchrun, whose own name may be the same every day
        return f"{env['TORCHELASTIC_RUN_ID']}-{socket.gethostname()}-{os.getppid()}"
    return ""


def needed(launch: LaunchPlan, cfg: RunConfig) -> bool:
    """One process needs no launcher, unless it is to be started again when it crashes."""
    return launch.world > 1 or (cfg.given("max_restarts") and launch.max_restarts > 0)


def plan(cfg: RunConfig, env: Mapping[str, str] | None = None) -> LaunchPlan:
    env = os.environ if env is None else env
    nnodes = machines(cfg, env)
    node_rank = _node_rank(cfg, env, nnodes)
    address, port = _master(cfg, env)
    if nnodes > 1 and not address:
        raise ConfigError(
            f"{nnodes} machines need a rendezvous address",
            where="MASTER_ADDR",
            fix="set MASTER_ADDR (and MASTER_PORT, default 8080) or master=host:port to the first machine, on each",
        )
    if nnodes == 1:  # any free port, or the one that was named: torch's fixed meeting point takes it as it is
        address, node_rank = "127.0.0.1", 0 if port else None
    return LaunchPlan(
        nproc=_processes(cfg, env),
        nnodes=nnodes,
        node_rank=node_rank,
        address=address,
        port=port or (DEFAULT_PORT if nnodes > 1 else 0),
        run_id="erniekit" if nnodes > 1 else f"erniekit-{uuid.uuid4().hex[:8]}",
        log_dir=Path(cfg.launch.log_dir or env.get("ERNIEKIT_DIST_LOG") or DEFAULT_LOGS),
        max_restarts=cfg.launch.max_restarts,
        grace_s=cfg.train.preempt_grace_s,
        join_timeout_s=cfg.launch.join_timeout_s,
        output=Path(cfg.train.output_dir or "output").expanduser(),
        saves_on_each_node=cfg.checkpoint.save_on_each_node,
    )


def choose_devices(cfg: RunConfig) -> None:
    """`devices` as the variables that torch and the ranks read; without it those that are set, cleared of blanks."""
    if wrong := [d for d in cfg.launch.devices if not (d.isdecimal() or d.startswith(("GPU-", "MIG-")))]:
        fix = "numbers with commas between, such as 0,1"
        raise ConfigError(f"{wrong[0]!r} is not a device", where=cfg.origin("devices"), fix=fix)
    chosen = cfg.launch.devices or named_one(cfg.train.device, os.environ)
    os.environ.update(entry_of(cfg.train.device, os.environ).show(os.environ, chosen))


def _processes(cfg: RunConfig, env: Mapping[str, str]) -> int:
    """One per device that torch sees; on CPUs nproc_per_node."""
    nproc, device = cfg.launch.nproc_per_node, cfg.train.device
    if device == "cpu" or cfg.train.no_cuda:
        return nproc or 1
    entry = entry_of(device, env)
    there = entry.count_visible(env)
    if there > 1:  # then torch counts them, which is imported next anyway
        import_torch()
        found = entry.count()
        # A named vendor that is absent is reported by the ranks; what is planned is what the variable lists.
        there = there if not found and device not in (AUTO, "gpu") else min(there, found)
    each = cfg.launch.ranks_per_device
    if there and nproc and nproc > there * each:
        shared = f" for {each} ranks each" if each > 1 else ""
        raise DeviceError(
            f"nproc_per_node is {nproc} and {counted(there, 'device is', 'devices are')} visible here{shared}",
            where=cfg.origin("nproc_per_node"),
            fix=f"nproc_per_node={there * each}, or device=cpu; to try a layout, ranks_per_device={-(-nproc // there)} "
            "lets ranks share a device: they take turns and communicate over sockets: speed is not representative",
        )
    return nproc or max(1, there) * each


def import_torch() -> None:
    """Into the launcher, where its C++ remarks on lost connections would hide the rank's own error."""
    before = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch  # noqa: F401

    if before is None:
        del os.environ["TORCH_CPP_LOG_LEVEL"]  # read once, at import; the ranks keep theirs


def _node_rank(cfg: RunConfig, env: Mapping[str, str], nnodes: int) -> int | None:
    number, where = cfg.launch.node_rank, cfg.origin("node_rank")
    if number is None and nnodes > 1:
        where = next((name for name in ("NODE_RANK", "RANK") if env.get(name)), "")
        number = whole_number(env, where, 0) if where else None
    if number is not None and not 0 <= number < nnodes:
        fix = f"0 to {nnodes - 1}, or leave it out to have the numbers dealt out on arrival"
        raise ConfigError(f"machine {number} of {nnodes}: there is no such number", where=where, fix=fix)
    return number


def _master(cfg: RunConfig, env: Mapping[str, str]) -> tuple[str, int]:
    """Address and port, empty and 0 where they are not set."""
    text, where = cfg.launch.master, cfg.origin("master")
    if text is None:
        address, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
        where = "MASTER_PORT"
    else:
        address, _, port = text.rpartition(":") if ":" in text else (text, "", "")
    if port and not (port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"{port!r} is not a port", where=where, fix="a number from 1 to 65535, such as 8080")
    return address, int(port or 0)
