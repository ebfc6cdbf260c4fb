"""${name##*/}, ${name:-text}, ${name//a/b} and their relatives: what bash makes of them, where the variable is known.

Called by shell.py. What is not one of these forms, or would take long, is left to the shell: None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

Piece = tuple[str, bool]  # text, and whether it was in quotes: there * is a star
ReadWord = Callable[
    [str, bool], "list[Piece] | None"
]  # (text, as a pattern) -> its pieces; None: known to a shell only
LONGEST = 100_000  # characters of a result
MOST_STEPS = 1_000_000  # of all patterns of a script over their values: no script takes long
_FORM = re.compile(r"(#?)([A-Za-z0-9_]+)(.*)", re.DOTALL)
_NUMBER = "(?:0|[1-9][0-9]{0,8})"  # bash reads 010 as eight
_SLICE = re.compile(rf":\s*({_NUMBER}|\s-{_NUMBER}|\(-{_NUMBER}\))\s*(?::\s*(-?{_NUMBER})\s*)?")
_Token = Callable[[str], bool] | None  # None: any number of characters


class _TooLong(Exception):
    """More work than a launch script is worth."""


def name_of(inside: str) -> str:
    """The variable that ${inside} is about."""
    found = _FORM.fullmatch(inside.removeprefix("!"))
    return found[2] if found else ""


def expanded(
    inside: str, value: str | None, read: ReadWord, assign: Callable[[str], None], steps: list[int]
) -> str | None:
    """inside: what stands between ${ and }. value: the variable's, where it is known. assign: what ${name:=text} does.
    steps: one number, what is left of MOST_STEPS."""
    found = _FORM.fullmatch(inside)
    if found is None:
        return None
    length, _, rest = found.groups()
    if length:
        return None if value is None or rest else str(len(value))
    if word := re.match(r":?[-=+?]", rest):
        return _with_default(value, word[0], rest[word.end() :], read, assign)
    if value is None:
        return None
    try:
        return _changed(value, rest, read, steps)
    except _TooLong:
        return None


def _with_default(value: str | None, sign: str, text: str, read: ReadWord, assign: Callable[[str], None]) -> str | None:
    there = value is not None and (bool(value) or ":" not in sign)
    if sign[-1] == "+":
        return (_joined(read(text, False)) if there else "") if value is not None else None
    if there or sign[-1] == "?":
        return value if there else None
    default = _joined(read(text, False))
    if sign[-1] == "=" and default is not None:
        assign(default)
    return default


def _changed(value: str, rest: str, read: ReadWord, steps: list[int]) -> str | None:
    if not rest:
        return value
    if sliced := _SLICE.fullmatch(rest):
        return _slice(value, int(sliced[1].strip("() \t")), sliced[2])
    if cased := re.fullmatch(r"\^\^?|,,?", rest):
        end = len(value) if len(cased[0]) == 2 else 1
        return "".join(_cased(char, rest[0] == "^") for char in value[:end]) + value[end:]
    if cut := re.match(r"##?|%%?", rest):
        pattern = read(rest[cut.end() :], True)
        return None if pattern is None else _without(value, cut[0], pattern, steps)
    return _replaced(value, rest[1:], read, steps) if rest[0] == "/" else None


def _cased(char: str, upper: bool) -> str:
    """One character, as in C: not the two that some become."""
    changed = char.upper() if upper else char.lower()
    return changed if len(changed) == 1 else char


def _joined(pieces: Sequence[Piece] | None) -> str | None:
    return None if pieces is None else "".join(text for text, _ in pieces)


def _slice(value: str, first: int, count: str | None) -> str | None:
    begin = first if first >= 0 else len(value) + first
    if begin < 0:
        return ""
    end = len(value) if count is None else begin + int(count) if int(count) >= 0 else len(value) + int(count)
    return value[begin:end] if end >= begin or begin > len(value) else None  # bash: substring expression < 0


def _without(value: str, sign: str, pattern: list[Piece], steps: list[int]) -> str | None:
    """Its beginning (#) or end (%) gone, the longest that fits where the sign stands twice."""
    tokens = _tokens(pattern)
    if tokens is None:
        return None
    backwards = sign[0] == "%"
    text = value[::-1] if backwards else value
    ends = list(_ends(tokens[::-1] if backwards else tokens, text, 0, steps))
    if not ends:
        return value
    left = text[ends[-1] if len(sign) == 2 else ends[0] :]
    return left[::-1] if backwards else left


def _replaced(value: str, rest: str, read: ReadWord, steps: list[int]) -> str | None:
    where = rest[:1] if rest[:1] in ("/", "#", "%") else ""
    written, text = _halves(rest[len(where) :], where == "/")
    pattern, put = read(written, True), read(text, True)
    if pattern is None or put is None or "&" in text:  # since bash 5.2 & stands for what was found
        return None
    tokens, new = _tokens(pattern), "".join(piece for piece, _ in put)
    if tokens is None or (not tokens and where not in ("#", "%")):
        return None if tokens is None else value
    if where == "%":
        ends = list(_ends(tokens[::-1], value[::-1], 0, steps))
        return value[: len(value) - ends[-1]] + new if ends else value
    if where == "#" or not value:
        ends = list(_ends(tokens, value, 0, steps))
        return new + value[ends[-1] :] if ends else value
    out, at, size = [], 0, 0
    while at < len(value):
        end = max(_ends(tokens, value, at, steps), default=at)
        out.append(new if end > at else value[at])
        at = max(end, at + 1)
        size += len(out[-1])
        if size > LONGEST:
            raise _TooLong
        if where != "/" and end == at and out[-1] is new:
            break
    return "".join(out) + value[at:]


def _halves(text: str, every: bool) -> tuple[str, str]:
    """PATTERN/TEXT at the first slash that is not quoted nor within braces. every: of //, where PATTERN may begin with
    one."""
    at, depth, quote = int(every and text[:1] == "/"), 0, ""
    while at < len(text):
        char = text[at]
        if char == "\\" and quote != "'":
            at += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "/" and not depth:
            return text[:at], text[at + 1 :]
        else:
            depth += (char == "{") - (char == "}")
        at += 1
    return text, ""


# ---- patterns


def _tokens(pattern: Sequence[Piece]) -> list[_Token] | None:
    """One test for each character; None for a pattern that is not understood, as [[:alpha:]]."""
    chars = [(char, quoted) for text, quoted in pattern for char in text]
    out: list[_Token] = []
    at = 0
    while at < len(chars):
        char, quoted = chars[at]
        at += 1
        if quoted or char not in "*?[":
            out.append(char.__eq__)
        elif char == "*":
            out += [None] if not out or out[-1] is not None else []
        elif char == "?":
            out.append(_any)
        else:
            end = next((k for k in range(at + 1, len(chars)) if chars[k] == ("]", False)), None)
            if end is None:
                out.append(char.__eq__)
                continue
            one_of = _one_of("".join(c for c, _ in chars[at:end]))
            if one_of is None:
                return None
            out.append(one_of)
            at = end + 1
    return out


def _any(char: str) -> bool:
    return True


def _one_of(listed: str) -> _Token:
    """[a-z], [!a] and [^a] by their inner text."""
    if "[" in listed:
        return None
    wanted = listed[:1] not in ("!", "^")
    listed = listed if wanted else listed[1:]
    ranges, at = [], 0
    while at < len(listed):
        last = listed[at + 2] if listed[at + 1 : at + 2] == "-" and at + 2 < len(listed) else listed[at]
        ranges.append((listed[at], last))
        at += 3 if at + 2 < len(listed) and listed[at + 1] == "-" else 1
    return lambda char: any(low <= char <= high for low, high in ranges) is wanted


def _ends(tokens: Sequence[_Token], text: str, start: int, steps: list[int]) -> Iterator[int]:
    """Where a match that begins at `start` can end, the shortest first. All ways at once: no pattern takes long."""
    states = _behind_stars(tokens, {0})
    for at in range(start, len(text) + 1):
        if len(tokens) in states:
            yield at
        if not states or at == len(text):
            return
        steps[0] -= len(states)
        if steps[0] < 0:
            raise _TooLong
        after = set()
        for state in states:
            if state < len(tokens):
                token = tokens[state]
                if token is None:
                    after.add(state)
                elif token(text[at]):
                    after.add(state + 1)
        states = _behind_stars(tokens, after)


def _behind_stars(tokens: Sequence[_Token], states: set[int]) -> set[int]:
    """A star may stand for nothing; two never follow each other."""
    return states | {state + 1 for state in states if state < len(tokens) and tokens[state] is None}
