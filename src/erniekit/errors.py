"""Errors a user can cause or meet. Each has what, where and what to do; the CLI prints them without a traceback."""

from __future__ import annotations

import signal

from erniekit.printable import plain


class ErnieKitError(Exception):
    """`what` is one line; `where` names a file:line or a key; `fix` is the next thing to try. All may hold what a file
    gave: they are kept as they print."""

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = ("\n".join(map(plain, text.split("\n"))) for text in (what, where, fix))
        super().__init__(self.what)

    def lines(self) -> list[str]:
        """What a terminal shows: error, where and fix."""
        out = [f"error: {self.what}"]
        if self.where:
            out.append(f"where: {self.where}")
        if self.fix:
            out.append(f"fix:   {self.fix}")
        return out

    def __str__(self) -> str:
        return "\n".join(self.lines())


class ConfigError(ErnieKitError):
    """A key, a value or a combination of them."""


class DataError(ErnieKitError):
    """A dataset file, a row, or what is left after reading them."""


class CheckpointError(ErnieKitError):
    """A model or checkpoint folder: missing, damaged or of another model."""


class DeviceError(ErnieKitError):
    """The requested device is absent or too small."""


class PlanError(ErnieKitError):
    """A layout that does not fit the model, the world or the memory."""


class RankLost(ErnieKitError):
    """Another rank of the run exited. Not a user error: the launcher may restart all ranks."""

    exit_code = 1


class NotYetSupportedError(ConfigError):
    """Known, documented, and not in this version: refused by name rather than half done."""


class Preempted(Exception):
    """A signal stopped the run; its checkpoint is written. Exit code 75: run the same command to resume."""

    exit_code = 75


def stopped_unsaved(number: int, point: str | None) -> tuple[str, str]:
    """The two lines about a run that a signal ended before it could save; whoever ends it says them, rank or launcher.

    point: the checkpoint that the same command resumes from; "" where there is none, None where it is not known."""
    does = f"; it resumes from {point}" if point else "; it starts again, as there is no checkpoint yet"
    return (
        f"stopped by {signal.Signals(number).name} without a save",
        "next: run the same command" + (does if point is not None else ""),
    )
