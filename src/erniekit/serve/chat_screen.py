"""What a terminal shows of an answer: its thoughts, its text, and notes behind it. Used by chat.py and
chat_session.py."""

from __future__ import annotations

from typing import TextIO

from erniekit.log import colour_on, paint
from erniekit.serve.chat_client import ChatAnswer
from erniekit.serve.output_parser import Delta

# Characters a terminal would act on rather than show: all control characters but tab and newline.
CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


class Screen:
    """An answer as it comes: its thoughts dimmed and under a heading, or on a stream of their own."""

    def __init__(self, output: TextIO, thoughts: TextIO) -> None:
        self.output, self.thoughts = output, thoughts
        self.last = ""  # the kind shown last

    def show(self, piece: Delta) -> None:
        text, kind = piece.text.translate(CONTROLS), piece.kind
        if kind == "reasoning":
            if self.last != kind:
                self._put("thinking:\n", self.thoughts)
            text = paint(text, "dim", on=colour_on(self.thoughts))
        elif self.last == "reasoning":
            self._put("\nanswer:\n" if self.thoughts is self.output else "\n", self.thoughts)
        self.last = kind
        self._put(text, self.thoughts if kind == "reasoning" else self.output)

    def ending(self, notes: str, output: TextIO) -> str:
        """Ends the line, with notes on the answer."""
        return f" {notes}" if notes and self.last and output is self.output else notes

    def end(self, notes: str, output: TextIO) -> None:
        self._put(self.ending(notes, output) + "\n", output)

    @staticmethod
    def _put(text: str, stream: TextIO) -> None:
        print(text, end="", file=stream, flush=True)


def notes_on(answer: ChatAnswer) -> str:
    known = {None: "", "stop": "", "tool_calls": "", "length": "[cut at the length limit]", "interrupt": "[stopped]"}
    notes = [known.get(answer.finish, f"[{answer.finish}]")]
    if answer.usage:
        prompt, generated = (answer.usage.get(name, "?") for name in ("prompt_tokens", "completion_tokens"))
        notes.append(f"[{prompt} prompt tokens, {generated} generated]")
    return " ".join(note for note in notes if note).translate(CONTROLS)
