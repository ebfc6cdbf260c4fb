"""The `erniekit` command: looks a command up in commands.py, runs it, and shows an error to the person who typed it.

Nothing heavy is imported before a command is chosen, so help and mistakes answer at once.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType

from erniekit.cli.commands import COMMANDS
from erniekit.cli.crash import report_crash
from erniekit.cli.idle_threads import let_threads_sleep
from erniekit.cli.installation import check_installation
from erniekit.cli.interrupts import interrupts_wait_for_imports
from erniekit.cli.system_limits import explained, require_descriptors
from erniekit.errors import ConfigError, ErnieKitError, Preempted
from erniekit.launch.failure import record
from erniekit.log import drop_stray_rank


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 2 the user's mistake, 75 preempted, 1 ours."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv is None:
            interrupts_wait_for_imports()
            let_threads_sleep()
            check_installation()
        return _dispatch(args)
    except ErnieKitError as e:
        return _refused(e)
    except Preempted as e:
        if not record(e, e.exit_code):
            print(str(e) or "stopped by a signal; run the same command to resume", file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `erniekit config recipe.yaml | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as e:
        explanation = explained(e) if isinstance(e, OSError) else None
        if explanation is not None:
            return _refused(explanation)
        return 1 if record(e, 1) else report_crash(args, e)


def _refused(error: ErnieKitError) -> int:
    if not record(error, error.exit_code):
        print("\n".join(error.lines()), file=sys.stderr)
    return error.exit_code


class _Callable(ModuleType):
    """The console script of the other project called erniekit runs `from erniekit.cli import main; main()`. Installed
    over ours it finds this module, and a person should read what is wrong rather than "not callable"."""

    def __call__(self) -> int:
        return main()


sys.modules[__name__].__class__ = _Callable


def _dispatch(args: list[str]) -> int:
    command = args[0] if args else "help"
    command = {"-h": "help", "--help": "help", "-v": "version", "--version": "version"}.get(command, command)
    rest = args[1:]
    if command not in COMMANDS:
        raise _unknown(command)
    if command not in ("help", "version", "config"):
        require_descriptors()
        if command != "train":  # which may read RANK as the number of a machine
            drop_stray_rank()
    part = dict(COMMANDS[command].parts).get(rest[0]) if rest else None
    if part:
        return call(part, rest[1:])
    help_requested = command != "help" and rest[:1] != ["--words"]  # after --words come arguments to complete
    if help_requested and any(w in ("-h", "--help") for w in rest):
        at = next(i for i, w in enumerate(rest) if w in ("-h", "--help"))
        command, rest = "help", [command, *rest[at + 1 :]]
    return call(COMMANDS[command].target, rest)


def call(target: str, args: list[str]) -> int:
    module, _, attr = target.partition(":")
    return int(getattr(import_module(module), attr)(args) or 0)


def _unknown(command: str) -> ConfigError:
    from erniekit.registry import nearest

    near = nearest(command, list(COMMANDS))
    fix = f"did you mean erniekit {near[0]}?" if near else "erniekit help lists the commands"
    if command.endswith((".yaml", ".yml", ".json")):
        fix = f"did you mean erniekit train {command}?"
    return ConfigError(f"unknown command {command!r}", where="command line", fix=fix)


def version_command(args: list[str]) -> int:
    from erniekit.version import __version__

    line = "-" * 60
    print(f"{line}\n| Welcome to ErnieKit\n| version : {__version__}\n| commit : {_commit()}\n{line}")
    return 0


def _commit() -> str:
    """The commit of a source checkout, with .dirty when it was changed; an installed wheel has none."""
    import subprocess
    from pathlib import Path

    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return "unknown"
    git = ["git", "-C", str(root)]
    try:
        sha = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return sha.stdout.strip() + (".dirty" if changes.stdout.strip() else "")
