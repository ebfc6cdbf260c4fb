"""Another rank of the run has ended: which one, at what, and how to go on. Used by training.py.

Under a launcher that is not ours, or a scheduler, what each rank prints is all that a person has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from erniekit.checkpoint.collective import CollectiveSaves, named_ranks
from erniekit.checkpoint.manager import CheckpointManager
from erniekit.errors import RankLost
from erniekit.log import typed, without_secrets
from erniekit.parallel.mesh import World
from erniekit.train.watchdog import Watchdog

# In errors of gloo, of the store and of NCCL; there is no class for them.
_CLOSED = ("by peer", "Broken pipe", "Socket closed", "remote process exited")


@contextmanager
def explained(manager: CheckpointManager, world: World, dog: Watchdog, command: Sequence[str]) -> Iterator[None]:
    """Around a run: the end of another rank becomes an error with the checkpoint that is whole and the way on."""
    try:
        yield
    except RankLost as lost:
        raise _complete(lost.what, manager, command) from lost
    except RuntimeError as error:
        if world.size == 1 or not _is_closed(error):
            raise
        ended = world.ended()
        who = named_ranks(ended) if ended else "another rank"
        raise _complete(f"{who} ended while {dog.doing}", manager, command) from error


def blame_save(error: BaseException, saves: CollectiveSaves) -> None:
    """Raises the loss of a rank that a save in the background met first, where `error` is no more than that."""
    if isinstance(error, RuntimeError) and _is_closed(error) and (lost := saves.lost_rank()):
        raise lost from error


def _is_closed(error: RuntimeError) -> bool:
    return any(text in str(error) for text in _CLOSED)


def _complete(what: str, manager: CheckpointManager, command: Sequence[str]) -> RankLost:
    whole = manager.newest_whole()
    standing = f"{whole.name} is the newest whole checkpoint" if whole else "no whole checkpoint there yet"
    again = f"resume from {whole.name}" if whole else "start again"
    if command and command[0] == "erniekit":
        again += f" with the same command: {typed(*without_secrets(command[1:]))}"
    return RankLost(
        what,
        where=f"{manager.output_dir}: {standing}",
        # Others leave because of it, and this rank may have noticed several.
        fix=f"see why in the output of the rank that ended first (killed: memory? dmesg), then {again}",
    )
