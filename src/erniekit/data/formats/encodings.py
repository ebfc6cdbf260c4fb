"""Which encoding a text file has, and its text as UTF-8. Used by files.py and text_rows.py, reported by both commands.

A mark at the beginning decides; else UTF-8 if the text is UTF-8; else GB18030 (of which GBK and GB2312 are parts) if
every line is, strictly, and its characters are the frequent ones. Anything else is read as UTF-8 and gives bad rows.
"""

from __future__ import annotations

import codecs
import io
from dataclasses import dataclass
from typing import IO, Any

from erniekit.errors import DataError

UTF8 = "UTF-8"
_CHUNK = 1 << 20
_MARKS = {codecs.BOM_UTF16_LE: "UTF-16-LE", codecs.BOM_UTF16_BE: "UTF-16-BE", codecs.BOM_UTF8: UTF8}
_JUDGED = 20_000  # characters that decide whether text is Chinese or chance
_FREQUENT = 0.5  # share of them; running Chinese has above 0.95, UTF-8 misread as GB18030 below 0.2


@dataclass(frozen=True)
class TextEncoding:
    name: str = UTF8
    why: str = ""  # empty: plain UTF-8
    mark: int = 0  # bytes at the beginning that are no text

    def describe(self) -> str:
        """Empty for plain UTF-8."""
        return f"{self.name} ({self.why})" if self.why else ""


def encoding_of(head: bytes, path: str) -> TextEncoding:
    """head: how the file begins; its last character may be cut."""
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        raise DataError("dataset is UTF-32 text", where=path, fix="save it as UTF-8")
    for mark, name in _MARKS.items():
        if head.startswith(mark):
            return TextEncoding(name, "" if name == UTF8 else "by its byte order mark", len(mark))
    if (sixteen := _sixteen_bits(head)) is not None:
        return TextEncoding(sixteen, "every other byte of its beginning is 0")
    if _decoded(head, "utf-8") is not None:
        return TextEncoding()
    foreign = [line for line in head.split(b"\n") if not line.isascii()]
    as_utf8 = sum(_decoded(line, "utf-8") is not None for line in foreign)
    if 2 * as_utf8 < len(foreign):
        texts = [_decoded(line, "gb18030") for line in foreign]
        if None not in texts and _is_chinese("".join(filter(None, texts))):
            return TextEncoding("GB18030", "not UTF-8; all of it is valid GBK/GB18030")
    return TextEncoding()


def _sixteen_bits(head: bytes) -> str | None:
    """Without a mark: text that begins with four ASCII characters, as JSON and headers of tables do."""
    start = head[:8]
    if len(start) < 8 or not start.isascii():
        return None
    if all(start[::2]) and not any(start[1::2]):
        return "UTF-16-LE"
    return "UTF-16-BE" if all(start[1::2]) and not any(start[::2]) else None


def _decoded(data: bytes, codec: str) -> str | None:
    try:
        return codecs.getincrementaldecoder(codec)().decode(data)
    except UnicodeDecodeError:
        return None


def _is_chinese(text: str) -> bool:
    """Most characters are punctuation or the 3,755 frequent ones, rows 1-9 and 16-55 of GB 2312."""
    wide = [char for char in text if ord(char) > 127][:_JUDGED]
    codes = (char.encode("gb18030") for char in wide)
    frequent = sum(len(c) == 2 and c[1] >= 0xA1 and (0xA1 <= c[0] <= 0xA9 or 0xB0 <= c[0] <= 0xD7) for c in codes)
    return frequent >= _FREQUENT * len(wide)


class Recoded(io.RawIOBase):
    """Text in another encoding, as a stream of UTF-8. What is not valid there is not valid UTF-8 here either, so the
    row that holds it is a bad row."""

    def __init__(self, stream: IO[bytes], encoding: TextEncoding) -> None:
        self._stream, self._encoding = stream, encoding
        self._restart()

    def _restart(self) -> None:
        self._stream.seek(self._encoding.mark)
        # A lone half of a pair, or bytes outside of the encoding, become surrogates, which UTF-8 does not have.
        errors = "surrogatepass" if self._encoding.name.startswith("UTF-16") else "surrogateescape"
        self._decoder = codecs.getincrementaldecoder(self._encoding.name)(errors)
        self._ready, self._at = b"", 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Forwards by reading; backwards from the beginning again."""
        if whence == io.SEEK_CUR:
            offset += self._at
        elif whence != io.SEEK_SET:
            raise io.UnsupportedOperation("its length as UTF-8 is not known")
        if offset < self._at:
            self._restart()
        while self._at < offset and self.read(min(_CHUNK, offset - self._at)):
            pass
        return self._at

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._stream.read(_CHUNK)
            try:
                text = self._decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise OSError(f"it is not valid {self._encoding.name}: {error.reason}") from error
            self._ready = text.encode("utf-8", "surrogatepass")
            if not data:
                break
        part = self._ready[: len(buffer)]
        buffer[: len(part)] = part
        self._ready = self._ready[len(part) :]
        self._at += len(part)
        return len(part)


def as_utf8(stream: Any, path: str) -> tuple[Any, TextEncoding]:
    """The stream itself if it is UTF-8, from its beginning and with its mark."""
    encoding = encoding_of(stream.peek(_CHUNK)[:_CHUNK], path)
    if encoding.name == UTF8:
        return stream, encoding
    return io.BufferedReader(Recoded(stream, encoding), _CHUNK), encoding
