"""World: this process among the ranks of a layout, their groups, and decisions made on the host together.

Made by world.py; everything else is handed one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from datetime import timedelta
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from erniekit.parallel.islands import Islands
from erniekit.parallel.layout import AXES, EXPERT_AXES, Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# Of groups for decisions on the host, where ranks may wait for one that reads or copies a large checkpoint. A process
# that dies closes its connections at once, one that hangs is its watchdog's to end, a lost machine the launcher's.
HOST_TIMEOUT = timedelta(days=1)
ENDED_S = 2.0  # for the end of a process to show in every group: the system closes its connections one by one


class World:
    """This process among the ranks. With one rank there is no process group, and a reduction is the value itself."""

    def __init__(
        self,
        layout: Layout | None = None,
        rank: int = 0,
        device_type: str = "cpu",
        islands: Islands | None = None,
    ) -> None:
        """islands: of a job on unlike devices; the default group then carries tensors of the host only."""
        self.layout, self.islands = layout or Layout(), islands
        self.rank, self.size, self.device_type = rank, self.layout.size, device_type
        self.at = self.layout.coords(rank)
        self.leaders = [0]  # the first rank of each node

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @cached_property
    def mesh(self) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        shape = tuple(getattr(self.layout, axis) for axis in AXES)
        return init_device_mesh(self.device_type, shape, mesh_dim_names=AXES)

    @cached_property
    def control(self) -> ProcessGroup | None:
        """A gloo group over all ranks for decisions made on the host."""
        return self.new_host_group()

    def new_host_group(self) -> ProcessGroup | None:
        """Another such group, for work parallel to the training; all ranks must call it together."""
        if self.size == 1:
            return None
        from erniekit.parallel import comm

        return comm.new_group(backend="gloo", timeout=HOST_TIMEOUT)

    def group(self, axis: str) -> ProcessGroup | None:
        """The ranks that differ from this one in `axis` only; None where there is no other."""
        if getattr(self.layout, axis) == 1:
            return None
        return self.mesh.get_group(axis) if self.islands is None else self._axis_groups[axis]

    @cached_property
    def _axis_groups(self) -> dict[str, ProcessGroup | None]:
        """Where a mesh cannot make them, as it has one backend for all; of all axes at once, as all ranks must call
        it."""
        return {axis: self.joined(axis) for axis in AXES}

    def island_group(self) -> ProcessGroup | None:
        """Pipeline ranks of one column that share an island; None where there is no other. All ranks must call it."""
        assert self.islands is not None
        over = self.islands.interconnects
        mine = self._parted(lambda rank: (over[rank], *(v for a, v in self.layout.coords(rank).items() if a != "pp")))
        return mine if mine is not None and mine.size() > 1 else None

    def joined(self, *axes: str, only: tuple[int, ...] = ()) -> ProcessGroup | None:
        """The ranks that differ from this one in `axes` only; None where there is no other.

        only: for one axis, just these coordinates along it. Every rank makes every group, in one order, as
        new_group requires. So all ranks must call this with the same arguments.
        """
        if prod(getattr(self.layout, a) for a in axes) == 1:
            return None

        def others(rank: int) -> Hashable:
            at = self.layout.coords(rank)
            return tuple(at[a] for a in AXES if a not in axes) if not only or at[axes[0]] in only else None

        return self._parted(others)

    def _parted(self, key: Callable[[int], Hashable]) -> ProcessGroup | None:
        """The ranks with this one's key; None is the key of those in no group."""
        from erniekit.parallel import comm

        mine = None
        for ranks in self._parts(key):
            backend = None if self.islands is None else self.islands.backend(ranks)
            group = comm.new_group(ranks, backend=backend)
            mine = group if self.rank in ranks else mine
        return mine

    def _parts(self, key: Callable[[int], Hashable]) -> list[list[int]]:
        parts: dict[Hashable, list[int]] = {}
        for rank in range(self.size):
            parts.setdefault(key(rank), []).append(rank)
        parts.pop(None, None)
        return list(parts.values())

    def expert_group(self) -> ProcessGroup | None:
        """The ranks that together hold every expert once; all ranks must call it."""
        if self.layout.experts_over == "tp":
            return self.group("tp")
        return self._parted(self._expert_key("copy")) if self.layout.experts_over_data else None

    def copies_group(self) -> ProcessGroup | None:
        """Those with the same experts, where they are spread over data ranks; all ranks must call it."""
        one = not self.layout.experts_over_data or self.layout.expert_copies == 1
        return None if one else self._parted(self._expert_key("place"))

    def copies_mesh(self) -> DeviceMesh:
        """The same ranks as a mesh of one dim, be it of one rank."""
        from torch.distributed.device_mesh import DeviceMesh

        rows = self._parts(self._expert_key("place"))
        return DeviceMesh(self.device_type, rows, mesh_dim_names=("others", "copies"))["copies"]

    def _expert_key(self, same: str) -> Callable[[int], Hashable]:
        """Ranks alike outside the experts' pool, and in their `same` in it: place or copy."""
        inside = EXPERT_AXES[self.layout.experts]

        def key(rank: int) -> Hashable:
            at = self.layout.coords(rank)
            place, copy = self.layout.expert_place(rank)
            return (*(at[a] for a in AXES if a not in inside), place if same == "place" else copy)

        return key

    # --- host decisions ---

    def ended(self, ranks: Iterable[int] | None = None) -> list[int]:
        """Those of these ranks (None: of all others) whose process is no more, once a connection of theirs was found
        closed. In the control group a connection closes only when its process exits."""
        if self.control is None:
            return []
        from erniekit.parallel import comm

        until, found = time.monotonic() + ENDED_S, list[int]()
        while not (found := comm.closed_to(self.control, ranks)) and time.monotonic() < until:
            time.sleep(0.05)
        return found

    def max(self, value: float) -> float:
        if self.control is None:
            return value
        import torch

        from erniekit.parallel import comm

        tensor = torch.tensor([value], dtype=torch.float64)
        comm.all_reduce(tensor, self.control, "max")
        return float(tensor)

    def gather(self, value: Any) -> list[Any]:
        if self.control is None:
            return [value]
        from erniekit.parallel import comm

        return comm.gather_objects(value, self.control)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        if self.control is None:
            return value
        from erniekit.parallel import comm

        return comm.broadcast_object(value, source, self.control)
