"""Which processes a launch starts on which machines, and what to type on each of them. Called by runs.py."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from erniekit.config.migrate.launcher import Launch
from erniekit.config.migrate.shell import ShellWord

MOST_LINES = 16  # of machines that are printed one by one
PORT = "8080"  # the launcher's, when none is named


@dataclass
class Machines:
    nnodes: str = ""
    devices: str = ""
    device_flag: str = "gpus"
    nproc: str = ""
    master: str = ""  # host:port
    port: str = ""
    log_dir: str = ""
    addresses: list[str] = field(default_factory=list)  # of --ips
    before: list[str] = field(default_factory=list)  # lines to type first, such as source set_env.sh
    exported: dict[str, ShellWord] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)  # keys of the launch that stay keys

    def take_options(self, launch: Launch) -> None:
        """Options of Paddle's launcher, which win over variables."""
        given = {name: word.text for name, word in launch.options.items()}
        self.nnodes = given.get("nnodes", self.nnodes)
        self.master = given.get("master", self.master)
        self.nproc = given.get("nproc_per_node", self.nproc)
        self.log_dir = given.get("log_dir", self.log_dir)
        if "devices" in given:
            self.devices = given["devices"].replace(" ", "")
            self.device_flag = launch.device_flag
        if "ips" in given:
            self.addresses = [address.strip() for address in given["ips"].split(",") if address.strip()]
            self.nnodes = str(len(self.addresses))
            self.master = self.master or f"{self.addresses[0]}:{PORT}"

    def take_variable(self, name: str, word: ShellWord) -> None:
        if name == "nnodes":
            self.nnodes = word.text
        elif name == "master_addr":
            self.master = word.text
        elif name == "master_port":
            self.port = word.text

    def take_keys(self, launch: Mapping[str, Any]) -> None:
        """Keys that were given behind the command: nnodes=2, --gpus 0,1."""
        self.nnodes = str(launch.get("nnodes") or self.nnodes)
        self.master = launch.get("master") or self.master
        self.nproc = str(launch.get("nproc_per_node") or self.nproc)
        self.log_dir = launch.get("log_dir") or self.log_dir
        self.devices = ",".join(launch.get("devices", ())) or self.devices
        self.others = {k: v for k, v in launch.items() if k in ("join_timeout_s", "max_restarts")}

    @property
    def count(self) -> int | None:
        """Machines; None where only the shell has the value."""
        return int(self.nnodes) if self.nnodes.isdecimal() else (None if self.nnodes else 1)

    @property
    def ranks(self) -> int | None:
        """Processes in all; None where the script has no number."""
        each = int(self.nproc) if self.nproc.isdecimal() else len(self.devices.split(",")) if self.devices else 0
        visible = next((w for n, w in self.exported.items() if n.endswith("_VISIBLE_DEVICES")), None)
        if not each and visible is not None and not visible.open:
            each = len(visible.text.split(","))
        return each * self.count if each and self.count else None

    def setup(self) -> list[str]:
        """What to type first, on every machine."""
        lines = list(self.before)
        for name, word in self.exported.items():
            value = f'"{word.text}"' if word.open else shlex.quote(word.text)
            lines.append(f"export {name}={value}")
        return lines

    def lines(self, command: str, recipe: str) -> list[tuple[str, str]]:
        """(machine, what to type there); one line without a machine where there is one, or all are the same."""
        line = f"erniekit {command} {shlex.quote(recipe)}"
        if self.devices:
            line += f" --{self.device_flag} {self.devices}"
        elif self.nproc:
            line += f" --nproc_per_node {self.nproc}"
        if self.log_dir:
            line += f" --log_dir {shlex.quote(self.log_dir)}"
        line += "".join(f" {name}={value}" for name, value in self.others.items())
        if self.count == 1:
            return [("", line)]
        line += f" --nnodes {self.nnodes} --master {self._meeting()}"
        if self.count is None or self.count > MOST_LINES:
            return [("every node", line)]
        return [(self._machine(i), f"{line} --rank {i}") for i in range(self.count)]

    def _meeting(self) -> str:
        if ":" in self.master:
            return self.master
        return f"{self.master or 'ADDRESS_OF_NODE_0'}:{self.port or PORT}"

    def _machine(self, number: int) -> str:
        host = self._meeting().rpartition(":")[0]
        address = self.addresses[number] if number < len(self.addresses) else host if not number else ""
        return f"node {number}" + (f", {address}" if address else "")
