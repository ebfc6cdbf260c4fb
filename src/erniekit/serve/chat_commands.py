"""Commands of a conversation in the terminal: `/help`, `/clear`, `/file PATH` and others. Used by chat.py.

A line is a command if it begins with a slash and one word; `exit`, `quit` and `clear` are commands too.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from erniekit.errors import DataError
from erniekit.printable import counted
from erniekit.serve.chat_files import read_text_file
from erniekit.serve.chat_session import ChatSession

COMMANDS = {
    "/help": "list these commands",
    "/clear": "reset the conversation (or: clear)",
    "/exit": "quit (or: exit, quit, Ctrl-D)",
    "/file PATH": "put a text file into the next question",
    "/image PATH": "show a picture with the next question (or @PATH in it)",
    "/video PATH": "show a video with the next question",
    "/system [TEXT]": 'set the system text; without TEXT: show it; "": remove it',
    "/save PATH": "write the conversation to a new file, as one line of JSONL",
}
MULTILINE = 'A message of several lines: paste it, end a line with \\, or put """ before and after it.'
ALIASES = {"exit": "/exit", "quit": "/exit", "/quit": "/exit", "clear": "/clear"}  # other names
QUOTES = '"""'
_COMMAND = re.compile(r"/[a-z]+")


def command_in(line: str) -> tuple[str, str] | None:
    """(command, its argument); None: the line is a message, as pasted lines always are."""
    if "\n" in line.strip():
        return None
    command, _, rest = line.strip().partition(" ")
    if not rest and command in ALIASES:
        return ALIASES[command], ""
    if not _COMMAND.fullmatch(command):
        return None
    return ALIASES.get(command, command), rest.strip()


def run_command(session: ChatSession, name: str, rest: str) -> str:
    """What the screen shows. Raises ErnieKitError for what cannot be done."""
    if name == "/help":
        width = max(map(len, COMMANDS))
        return "\n".join([*(f"{usage:<{width}}  {about}" for usage, about in COMMANDS.items()), MULTILINE])
    if name == "/clear":
        session.clear()
        return "cleared"
    if name == "/system":
        return _system(session, rest)
    if name == "/file":
        file = read_text_file(_path(name, rest))
        session.files.append(file)
        return f"{file} goes with the next question"
    if name == "/save":
        return _save(session, Path(_path(name, rest)).expanduser())
    known = next((usage for usage in COMMANDS if usage.partition(" ")[0] == name), None)
    if known is None:
        raise DataError(f"there is no command {name}", where=name, fix="/help lists the commands")
    return f"{session.attach(f'{name} {rest}')} goes with the next question"


def _path(name: str, rest: str) -> str:
    path = rest.strip().strip("\"'")
    if not path:
        raise DataError(f"{name} needs a path", where=name, fix=f"{name} PATH")
    return path


def _system(session: ChatSession, text: str) -> str:
    if not text:
        return f"system: {session.system}" if session.system else "there is no system text"
    session.set_system("" if text in ('""', "''") else text)
    return "system text set" if session.system else "system text removed"


def _save(session: ChatSession, path: Path) -> str:
    """Never over a file that is there."""
    dialogue = [message for message in session.messages if message["role"] != "system"]
    if not dialogue:
        raise DataError("the conversation is empty", where="/save", fix="ask something first")
    line = json.dumps({"messages": session.messages}, ensure_ascii=False)
    try:
        with path.open("x", encoding="utf-8", errors="replace") as file:
            file.write(line + "\n")
    except FileExistsError:
        raise DataError("there is a file of that name", where=str(path), fix="save under another name") from None
    except OSError as error:
        raise DataError(
            f"it cannot be written: {error.strerror or error}", where=str(path), fix="check the path"
        ) from None
    return f"{counted(len(dialogue), 'message')} saved to {path}"
