"""Text of files, rows and strangers as a terminal may show it: errors, log lines and bad rows pass through here.

What is stored of addresses passes through `public`."""

from __future__ import annotations

import re
import struct

LONGEST_LINE = 1000  # characters of a message
# What a terminal takes for an order, what ends a line, what turns the reading direction, and halves of characters.
_UNPRINTED = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_ORDERS = re.compile("(?![\n\t])" + _UNPRINTED.pattern)
_COLOUR = re.compile("(\x1b\\[[0-9;]*m)")

_LONGEST_MESSAGE = 160
# Messages of these errors are about the code, not about what is wrong with a file.
_OF_CODE = (TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, NameError, struct.error)
_MEMBER = re.compile(r"<\w+ filename='([^']*)'[^>]*>")
_CODE = re.compile(r"<|>|\b0x[0-9a-fA-F]+|\w\.[A-Za-z_]|\w_\w|\w\(\)")


# Texts, not patterns: they are needed where an address is shown, and compiling them at every start is felt.
_SCHEME = "[A-Za-z][A-Za-z0-9+.-]*://"
_NEXT = f"(?!,{_SCHEME})"  # several addresses may be joined by commas
# Addresses: their scheme, a user and password, host and path, and the query.
_ADDRESS = rf"\b({_SCHEME})(?:([^/\s?#'\"]*)@)?((?:{_NEXT}[^\s?#'\"])*)(?:\?((?:{_NEXT}[^\s#'\"])*))?"
# Parameters that let their holder in, by their last word: X-Amz-Signature, access_token, sig.
_SECRET = "(?:^|[-_.])(?:sig|signature|token|key|apikey|secret|password|passwd|pwd|auth|credential)$"
_SIGNING = "x-(?:amz|goog|oss|cos|ms)-|q-(?:sign|ak|key|header|url)"  # all that goes with a signature
_SIGNED = ("awsaccesskeyid", "ossaccesskeyid", "googleaccessid", "key-pair-id", "policy", "expires", "hmac")
_OF_AZURE = ("sv", "st", "se", "sr", "sp", "sip", "spr", "ss", "srt", "skoid", "sktid", "skt", "ske", "sks", "skv")
HIDDEN = "***"


def public(text: str) -> str:
    """The text without passwords and signatures of the addresses in it. Addresses that differ in those alone, such as
    two that were signed on different days, become the same."""
    return re.sub(_ADDRESS, _public_address, text) if "://" in text else text


def _public_address(found: re.Match[str]) -> str:
    scheme, user, rest, query = found.groups()
    if user is not None:  # other schemes have names in front of an @ that are no secrets: abfs://container@account
        rest = f"{HIDDEN if ':' in user or scheme.lower().startswith('http') else user}@{rest}"
    if not query:
        return scheme + rest + ("" if query is None else "?")
    parts = query.split("&")
    names = [part.partition("=")[0].lower() for part in parts]
    azure = _OF_AZURE if "sig" in names else ()
    kept = [part for part, name in zip(parts, names) if not _is_signing(name) and name not in azure and part != HIDDEN]
    return f"{scheme}{rest}?{'&'.join([*kept, HIDDEN] if len(kept) < len(parts) else kept)}"


def _is_signing(name: str) -> bool:
    return name in _SIGNED or bool(re.search(_SECRET, name) or re.match(_SIGNING, name))


def is_utf8(text: str) -> bool:
    """Whether it can be written as UTF-8: half a surrogate pair, or a byte of a name that is none, cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def plain(text: str, most: int = LONGEST_LINE) -> str:
    """One line: what would not print as escapes, and the middle of a long text left out."""
    text = _UNPRINTED.sub(_escaped, public(text))
    return text if len(text) <= most else f"{text[: (most - 3) // 2]}...{text[len(text) - (most - 2) // 2 :]}"


def plain_lines(text: str) -> str:
    """As `plain`, of a text whose lines, tabs and colours are ours."""
    text = public(text)
    if not _ORDERS.search(text):
        return text
    pieces = _COLOUR.split(text)
    return "".join(piece if i % 2 else _ORDERS.sub(_escaped, piece) for i, piece in enumerate(pieces))


def counted(number: int, noun: str, several: str = "") -> str:
    """1 step, 2 steps. several: where an s does not make it: "entries", "files are missing"."""
    return f"{number:,} {noun if number == 1 else several or noun + 's'}"


def every(number: float, noun: str) -> str:
    """every step, every 2 steps."""
    return f"every {noun}" if number == 1 else f"every {number:,g} {noun}s"


def error_text(error: BaseException) -> str:
    """The readable message of a library's error, without classes, addresses or objects of its code, so that the same
    fault reads the same each time. Empty where nothing else is left."""
    if isinstance(error, _OF_CODE):
        return ""
    message = (getattr(error, "strerror", None) or str(error)).strip()
    message = _MEMBER.sub(r"'\1'", message.splitlines()[0]) if message else ""
    return "" if _CODE.search(message) else plain(message, _LONGEST_MESSAGE)


def error_line(error: BaseException, most: int = 300) -> str:
    """The class of another program's error and the first line of its message, of which `most` characters."""
    message = (str(error).strip().splitlines() or [""])[0][:most]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def fault_of(error: BaseException) -> str:
    """Of our own code, for a report: the same each time it is met."""
    return plain(re.sub(r" at 0x[0-9a-fA-F]+", "", f"a fault of erniekit: {type(error).__name__}: {error}"))


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
