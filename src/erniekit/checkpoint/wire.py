"""Bytes between two ranks of a gloo group. Used by gather.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from erniekit import heartbeat
from erniekit.errors import CheckpointError
from erniekit.parallel import comm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TIMEOUT = 1800.0  # seconds of silence; a dead process is noticed at once, this is for a network that lost it


class Wire:
    """Bytes between two ranks of a gloo group, with a time-out and errors a person can read."""

    def __init__(self, group: ProcessGroup | None, timeout: float = TIMEOUT, tag: int = 0) -> None:
        """tag: of messages that others between the same ranks must not be taken for."""
        self.group, self.timeout, self.tag = group, timeout, tag
        self.lost: set[int] = set()  # ranks that failed to reply once; gloo closes the connection then
        self.closed: set[int] = set()  # those of them that closed it: ended, or tired of waiting for this one

    def send(self, rank: int, data: torch.Tensor) -> None:
        if data.numel():
            self._finish(rank, comm.isend, data)

    def receive(self, rank: int, room: torch.Tensor) -> torch.Tensor:
        if room.numel():
            self._finish(rank, comm.irecv, room)
        return room

    def send_numbers(self, rank: int, *numbers: int) -> None:
        self.send(rank, torch.tensor(numbers))

    def receive_numbers(self, rank: int, count: int) -> list[int]:
        return self.receive(rank, torch.zeros(count, dtype=torch.int64)).tolist()

    def send_json(self, rank: int, value: Any, command: int = 0) -> None:
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        self.send_numbers(rank, command, data.numel())
        self.send(rank, data)

    def receive_json(self, rank: int, size: int | None = None) -> Any:
        """size: when its announcement was received already."""
        size = self.receive_numbers(rank, 2)[1] if size is None else size
        return json.loads(self.receive(rank, torch.zeros(size, dtype=torch.uint8)).numpy().tobytes())

    @contextmanager
    def sending(self, rank: int, data: torch.Tensor) -> Iterator[None]:
        """Send while the block runs."""
        with self._readable(rank):
            work = comm.isend(data, rank, self.group, self.tag)
        try:
            yield
        finally:
            with self._readable(rank):
                work.wait(timedelta(seconds=self.timeout))

    def _finish(self, rank: int, start: Callable[..., Any], data: torch.Tensor) -> None:
        with self._readable(rank):
            start(data, rank, self.group, self.tag).wait(timedelta(seconds=self.timeout))
        heartbeat.beat()

    @contextmanager
    def _readable(self, rank: int) -> Iterator[None]:
        try:
            if rank in self.lost:
                raise RuntimeError("the connection was lost before")
            yield
        except RuntimeError as error:
            silent = "Timed out" in str(error)
            if not silent and rank not in self.lost:
                self.closed.add(rank)
            self.lost.add(rank)
            reason = f"did not answer within {self.timeout:g} s" if silent else "is gone"
            raise CheckpointError(
                f"rank {rank} {reason}",
                where=str(error).splitlines()[0],
                fix=f"look at the log of rank {rank}",
            ) from error
