"""A shell script as text -> its assignments and commands, variables filled in as far as the script itself says them.

Nothing is run: what only a shell could know ($1, $(...)) stays as written and is marked. Called by runs.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from erniekit.config.migrate.expansion import MOST_STEPS, Piece, expanded, name_of
from erniekit.errors import ConfigError

LONGEST_VALUE = 100_000  # a variable that doubles itself line by line would fill the memory
_DEEPEST = 8  # ${a:-${b:-...}}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=")
# Words before a command that are not its name; their own words are reported once.
KEYWORDS = ("if", "then", "else", "elif", "fi", "for", "while", "until", "do", "done", "case", "esac", "!", "{", "}")

ASSIGNING = ("export", "declare", "typeset", "local", "readonly")  # commands whose words are assignments, too


@dataclass(frozen=True)
class ShellWord:
    text: str
    line: int
    open: bool = False  # holds something that is known only when the script runs


@dataclass(frozen=True)
class Statement:
    """One command with the assignments before it; without words the assignments are the script's own."""

    line: int
    words: tuple[ShellWord, ...]
    assigned: tuple[tuple[str, ShellWord], ...] = ()
    piped: bool = False  # reads what the command before it writes


@dataclass
class _Reader:
    text: str
    name: str
    at: int = 0
    line: int = 1
    variables: dict[str, ShellWord] = field(default_factory=dict)
    here: list[str] = field(default_factory=list)  # ends of the here-documents that follow this line
    depth: int = 0  # of ${...} within ${...}
    steps: list[int] = field(default_factory=lambda: [MOST_STEPS])  # left for patterns

    def peek(self, ahead: int = 0) -> str:
        at = self.at + ahead
        return self.text[at] if at < len(self.text) else ""

    def take(self) -> str:
        char = self.peek()
        self.at += 1
        self.line += char == "\n"
        return char

    def fail(self, what: str, line: int) -> ConfigError:
        return ConfigError(what, where=f"{self.name}:{line}", fix="is this a shell script? try it with bash -n")

    # ---- pieces of a word: (text, split at blanks, open)

    def single(self) -> str:
        began, out = self.line, ""
        while (char := self.take()) != "'":
            if not char:
                raise self.fail("a quote is never closed", began)
            out += char
        return out

    def double(self) -> tuple[str, bool]:
        began, out, is_open = self.line, "", False
        while (char := self.peek()) != '"':
            if not char:
                raise self.fail("a quote is never closed", began)
            if char == "\\" and self.peek(1) in '"$`\\\n':
                self.take()
                follows = self.take()
                out += "" if follows == "\n" else follows
            elif char in "$`":
                text, opened = self.expansion(in_double=True)
                out, is_open = out + text, is_open or opened
            else:
                out += self.take()
        self.take()
        return out, is_open

    def expansion(self, in_double: bool = False, whole: bool = False) -> tuple[str, bool]:
        """What $name, ${name}, ${name:-text}, $(...) or `...` expands to; as written where its value is not known.

        whole: it is not cut at blanks."""
        start = self.at
        if self.take() == "`":
            while self.peek() and self.peek() != "`":
                self.take()
            self.take()
            return self.text[start : self.at], True
        if self.peek() == "(":
            self.until_closed("(", ")")
            return self.text[start : self.at], True
        if self.peek() == "{":
            self.until_closed("{", "}")
            return self.parameter(self.text[start : self.at], in_double, whole or in_double)
        if found := _NAME.match(self.text, self.at):
            self.at = found.end()
            return self.value(found[0]) if found[0] in self.variables else (self.text[start : self.at], True)
        if self.peek() and (self.peek().isdigit() or self.peek() in "@*#?$!-"):
            self.take()
            return self.text[start : self.at], True
        return "$", False

    def parameter(self, written: str, in_double: bool, whole: bool) -> tuple[str, bool]:
        """What ${...} expands to."""
        inside = written[2:-1]
        name, _, _ = inside.partition(":-")
        if name in self.variables and (self.variables[name].text or name == inside):
            return self.value(name)
        name = name_of(inside)
        word = self.variables.get(name)
        if word is not None and word.open:  # nor is a part of it known
            return written, True

        def read(text: str, as_pattern: bool) -> list[Piece] | None:
            inner = _Reader(text, self.name, line=self.line, variables=self.variables, steps=self.steps)
            inner.depth = self.depth + 1
            try:
                pieces = inner.pieces(in_double, as_pattern, whole)
            except ConfigError:  # the brace that closes it was in quotes
                return None
            cut = not whole and not as_pattern and any(" " in text for text, quoted in pieces or () if quoted)
            return None if cut else pieces

        def assign(value: str) -> None:
            self.variables[name] = ShellWord(value, self.line)

        value = None if word is None else word.text
        text = None if self.depth >= _DEEPEST else expanded(inside, value, read, assign, self.steps)
        return (written, True) if text is None else (text, False)

    def pieces(self, in_double: bool, as_pattern: bool, whole: bool) -> list[Piece] | None:
        """The whole text as a word within ${...}: blanks belong to it. None where a part is known to a shell only."""
        out: list[Piece] = []
        opened = False
        while char := self.peek():
            if char == "\\" and self.peek(1):
                self.take()
                follows = self.take()
                bare = in_double and not as_pattern and follows not in '"$`\\\n}'
                out.append(("\\" + follows if bare else "" if follows == "\n" else follows, True))
            elif char == "'" and (as_pattern or not in_double):
                self.take()
                out.append((self.single(), True))
            elif char == '"':
                self.take()
                text, opened = self.double()
                out.append((text, True))
            elif char in "$`":
                text, opened = self.expansion(in_double, whole)
                out.append((text, False))
            else:
                out.append((self.take(), False))
            if opened:
                return None
        return out

    def value(self, name: str) -> tuple[str, bool]:
        word = self.variables[name]
        return word.text, word.open

    def until_closed(self, opens: str, closes: str) -> None:
        began, depth = self.line, 0
        while char := self.take():
            if char == "\\":
                self.take()
            depth += (char == opens) - (char == closes)
            if not depth:
                return
        raise self.fail(f"a {opens} is never closed", began)

    def word(self, splits: bool = True) -> list[ShellWord]:
        """The next word; several where a variable that is not in quotes holds several, none where it is empty.

        splits: not in an assignment, whose value is not cut at blanks."""
        line, out, is_open, kept = self.line, [""], False, False
        while (char := self.peek()) and char not in " \t\n;&|<>()":
            if char == "\\":
                self.take()
                follows = self.take()
                out[-1] += "" if follows == "\n" else follows
            elif char == "'":
                self.take()
                out[-1], kept = out[-1] + self.single(), True
            elif char == '"':
                self.take()
                text, opened = self.double()
                out[-1], is_open, kept = out[-1] + text, is_open or opened, True
            elif char in "$`":
                text, opened = self.expansion(whole=not splits)
                is_open = is_open or opened
                first, *more = [text] if opened or not splits else (re.split(r"[ \t\n]+", text) or [""])
                out[-1] += first
                out += more
            else:
                out[-1] += self.take()
        if sum(map(len, out)) > LONGEST_VALUE:
            raise self.fail(f"a word is longer than {LONGEST_VALUE:,} characters", line)
        return [ShellWord(text, line, is_open) for text in out if text or kept]


def read_script(text: str, name: str) -> list[Statement]:
    """The statements of a script in order; assignments are applied as they come."""
    reader = _Reader(text.replace("\r\n", "\n"), name)
    return list(_statements(reader))


def _statements(reader: _Reader) -> Iterator[Statement]:
    words: list[ShellWord] = []
    piped = False
    while True:
        char = reader.peek()
        if char and char in " \t":
            reader.take()
        elif char == "\\" and reader.peek(1) == "\n":
            reader.take()
            reader.take()
        elif char == "#":
            while reader.peek() and reader.peek() != "\n":
                reader.take()
        elif (char and char in "<>") or re.match(r"&>|\d+[<>]", reader.text[reader.at : reader.at + 4]):
            _redirection(reader)
        elif not char or char in "\n;&|()":
            if words and (made := _statement(words, piped, reader)):
                yield made
            words, piped = [], char == "|" and reader.peek(1) != "|"
            if not char:
                return
            reader.take()
            if char == "\n":
                _skip_here_documents(reader)
            if char in "&|" and reader.peek() == char:
                reader.take()
        else:
            before = reader.at
            whole = _ASSIGNMENT.match(reader.text, reader.at) and _assigns(words)
            words += _assignment(reader) if whole else reader.word()
            assert reader.at > before


def _assigns(words: list[ShellWord]) -> bool:
    """Whether a word like an assignment is one behind these: behind others, or `export`."""
    first = next((w.text for w in words if w.text not in KEYWORDS and not _ASSIGNMENT.match(w.text)), "")
    return not first or first in ASSIGNING


def _redirection(reader: _Reader) -> None:
    """Skips `> file`, `2>&1`, `<<< text`; where output goes is no part of a run, nor is a text that is handed in."""
    start = reader.at
    while reader.peek() and (reader.peek().isdigit() or reader.peek() in "<>&"):
        reader.take()
    sign = reader.text[start : reader.at].lstrip("0123456789")
    while reader.peek() and reader.peek() in (" \t-" if sign == "<<" else " \t"):
        reader.take()
    words = reader.word()
    if sign == "<<" and words:
        reader.here.append(words[0].text)


def _skip_here_documents(reader: _Reader) -> None:
    while reader.here:
        end = reader.here.pop(0)
        while reader.peek():
            line, newline, _ = reader.text[reader.at :].partition("\n")
            reader.at += len(line) + len(newline)
            reader.line += len(newline)
            if line.strip() == end:
                break


def _assignment(reader: _Reader) -> list[ShellWord]:
    """`name=value`, one word: its value is not cut at blanks."""
    name, line = _NAME.match(reader.text, reader.at), reader.line
    assert name is not None
    reader.at = name.end() + 1
    parts = reader.word(splits=False)
    value = "".join(p.text for p in parts)
    return [ShellWord(f"{name[0]}={value}", line, any(p.open for p in parts))]


def _statement(words: list[ShellWord], piped: bool, reader: _Reader) -> Statement | None:
    line = words[0].line
    while words and words[0].text in KEYWORDS:
        words = words[1:]
    assigned = []
    while words and (found := _ASSIGNMENT.match(words[0].text)):
        assigned.append((found[1], ShellWord(words[0].text[found.end() :], words[0].line, words[0].open)))
        words = words[1:]
    if words and words[0].text in ASSIGNING:
        given = [w for w in words[1:] if _ASSIGNMENT.match(w.text)]
        pairs = [(w.text.partition("=")[0], ShellWord(w.text.partition("=")[2], w.line, w.open)) for w in given]
        reader.variables |= dict(pairs)
        return Statement(line, (words[0],), tuple(pairs)) if pairs else None
    if not words:
        reader.variables |= dict(assigned)
        return Statement(line, (), tuple(assigned)) if assigned else None
    return Statement(line, tuple(words), tuple(assigned), piped)
