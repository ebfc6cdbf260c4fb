"""ChatSession: a conversation in the terminal, and what goes with its next question. Made by chat.py;
chat_commands.py changes it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from erniekit.data.media.limits import MediaLimits
from erniekit.serve import chat_media
from erniekit.serve.chat_client import ChatAnswer, Client, NoAnswer
from erniekit.serve.chat_files import TextFile
from erniekit.serve.chat_media import Attachment
from erniekit.serve.chat_screen import Screen


@dataclass
class ChatSession:
    """A conversation so far. Thoughts are no part of it; what failed or was refused leaves no trace."""

    client: Client
    options: Mapping[str, Any]
    system: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    attached: list[Attachment] = field(default_factory=list)  # for the next question
    files: list[TextFile] = field(default_factory=list)  # for the next question, too
    pixels: int = MediaLimits.pixels  # most of a picture

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.messages = []
        self.set_system(self.system)
        self.attached, self.files = [], []
        self._files: dict[str, str] = {}  # place in the request -> the file that is there

    def set_system(self, text: str) -> None:
        """Replaces the system text; the messages so far stay."""
        dialogue = [message for message in self.messages if message["role"] != "system"]
        self.system = text
        self.messages = [*([{"role": "system", "content": text}] if text else []), *dialogue]

    def attach(self, line: str) -> Attachment | None:
        """What the line attaches to the next question, if it does."""
        found = chat_media.command(line, self.pixels)
        if found is not None:
            self.attached.append(found)
        return found

    def send(self, text: str, screen: Screen) -> ChatAnswer:
        """Ctrl-C closes the connection, which stops the server, and keeps the text so far."""
        text, named = chat_media.named_in(text, self.pixels)
        text = "\n".join([*(file.block for file in self.files), text])
        self.files = []
        shown, self.attached = [*self.attached, *named], []
        files = {f"messages[{len(self.messages)}].content[{k}]": str(one.path) for k, one in enumerate(shown)}
        messages = [*self.messages, {"role": "user", "content": chat_media.content(text, shown)}]
        answer = ChatAnswer()
        try:
            with closing(self.client.answer(messages, self.options, answer)) as pieces:
                for piece in pieces:
                    screen.show(piece)
        except KeyboardInterrupt:
            answer.finish = "interrupt"
        except NoAnswer as error:
            error.where = {**self._files, **files}.get(error.where, error.where)
            raise
        if answer.text or answer.finish != "interrupt":
            # Half a character may come of a cut answer, and no server takes it back.
            reply = answer.text.encode("utf-8", "replace").decode()
            self.messages = [*messages, {"role": "assistant", "content": reply}]
            self._files |= files
        return answer
