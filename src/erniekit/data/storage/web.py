"""A dataset file behind an http or https URL, streamed: nothing of it is kept but the tokens it becomes."""

from __future__ import annotations

import hashlib
import io
import re
import time
from base64 import b64encode
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from erniekit import heartbeat
from erniekit.data.storage.base import Identity, StoredFile, Unchanged
from erniekit.errors import DataError
from erniekit.printable import public

_BUFFER = 1 << 20
_TRIES = 4  # for one part, each after a longer wait
_TIMEOUT = 60.0  # seconds
_FIX = "check the address and the connection"
_DIGITS = re.compile("[0-9]{1,18}")
_PART = re.compile(r"bytes ([0-9]{1,18})-[0-9]{0,18}/([0-9]{1,18}|\*)")  # its first byte, and the size of the whole


class WebFile(StoredFile):
    def __init__(self, url: str) -> None:
        try:
            path = urlsplit(url).path
        except ValueError as error:
            raise DataError(f"this is no address: {error}", where=public(url), fix="check its host") from None
        self.url, self.name = url, unquote(path.rpartition("/")[2])
        self._headers: Any = None

    def __str__(self) -> str:
        return public(self.url)

    def open(self) -> io.BufferedReader:
        self._asked()
        return io.BufferedReader(_WebStream(self), _BUFFER)

    def size(self) -> int:
        told = self._asked().get("Content-Length") or ""
        return int(told) if _DIGITS.fullmatch(told) else 0  # 0: not known

    def stamp(self) -> Any:
        """Version headers of the file, from a new request."""
        self._headers = None
        headers = self._asked()
        tag, modified = headers.get("ETag"), headers.get("Last-Modified")
        self.names_version = bool(tag or modified)
        return tag, modified, headers.get("Content-Length")

    def identity(self) -> Identity:
        """By address and version where the server names one; else by content, which reads all of it once more."""
        tag, modified, size = stamp = self.stamp()
        if not tag and not modified:
            return self.identity_by_content(stamp)
        told = f"{public(self.url)}\n{tag}\n{modified}\n{size}"
        return Identity(hashlib.blake2b(told.encode(), digest_size=20).hexdigest(), 0, Unchanged(self, stamp))

    def version(self) -> str | None:
        """For If-Range: a file that was replaced is not continued in its middle."""
        return _version_of(self._asked())

    def _asked(self) -> Any:
        if self._headers is None:
            try:
                self._headers = _headers_of(self.url)
            except (OSError, HTTPException, ValueError) as error:
                raise DataError(f"dataset cannot be read: {_said(error)}", where=self.url, fix=_FIX) from error
        return self._headers


def _version_of(headers: Any) -> str | None:
    tag = headers.get("ETag")
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified")


class _WebAlone(HTTPRedirectHandler):
    """A server may not send its readers to files here or to other protocols, nor their password to other hosts."""

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Request | None:
        if urlsplit(newurl).scheme not in ("http", "https"):
            raise OSError(f"the server redirects to {newurl}, and only http and https are followed")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is None:
            return None
        if req.get_method() == "HEAD":
            request.method = "HEAD"
        if request.host != req.host or (req.type == "https" and request.type == "http"):
            request.remove_header("Authorization")
        return request


_OPENER = build_opener(_WebAlone)


def _ask(url: str, headers: Mapping[str, str] | None = None, method: str = "GET") -> Any:
    """user:password@ in front of the host goes into a header, as browsers do."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    request = Request(urlunsplit(parts._replace(netloc=host)), headers=dict(headers or {}), method=method)
    if at:
        request.add_header("Authorization", "Basic " + b64encode(unquote(user).encode()).decode())
    return _OPENER.open(request, timeout=_TIMEOUT)


def _headers_of(url: str) -> Any:
    """Those of HEAD; where that is refused, as for addresses signed for GET alone, of a GET of one byte."""
    try:
        with _ask(url, method="HEAD") as answer:
            return answer.headers
    except HTTPError as error:
        if error.code not in (403, 405, 501):
            raise
    with _ask(url, {"Range": "bytes=0-0"}) as answer:
        headers = answer.headers
        if answer.status == 206:  # its length is that of the part
            whole = re.fullmatch(r"bytes 0-0/([0-9]{1,18})", headers.get("Content-Range") or "")
            del headers["Content-Length"]
            headers["Content-Length"] = whole[1] if whole else ""
        return headers


class _WebStream(io.RawIOBase):
    """Reads on after a lost connection, from the byte it was lost at.

    Size and version are those of the answer that brought the first bytes: a HEAD may tell neither, or others."""

    def __init__(self, file: WebFile) -> None:
        self._file, self._at = file, 0
        self._answer: Any = None
        self._size, self._version = file.size(), file.version()
        self._begun = False  # some of the file has been sent

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if at != self._at:
            self._hang_up()
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        if self._begun and self._size and self._at >= self._size:
            return 0
        reason: Exception | None = None
        for turn in range(_TRIES):
            if turn:
                time.sleep(0.2 * 4**turn / 4)
            try:
                data = self._opened().read1(len(buffer))  # what has come so far: a slow server is not a silent one
                heartbeat.beat()
            except HTTPError as error:
                reason = error
                if error.code < 500:
                    break
            except (OSError, HTTPException) as error:
                reason = error
            else:
                if data or not self._size:
                    buffer[: len(data)] = data
                    self._at += len(data)
                    return len(data)
                reason = OSError(f"the connection ended after {self._at:,} of {self._size:,} bytes")
            self._hang_up()
        raise OSError(_said(reason)) from reason

    def _opened(self) -> Any:
        if self._answer is None:
            headers = {"Range": f"bytes={self._at}-"} if self._at else {}
            if self._at and self._version:
                headers["If-Range"] = self._version
            answer = self._answer = _ask(self._file.url, headers)
            try:
                self._check(answer.status, answer.headers)
            except OSError:
                self._hang_up()
                raise
        return self._answer

    def _check(self, status: int, headers: Any) -> None:
        """Whether an answer is the asked part of the file that was begun."""
        if self._at and status != 206:
            raise OSError("the server sends no parts of files, or the file was replaced meanwhile")
        part = _PART.fullmatch(headers.get("Content-Range") or "") if status == 206 else None
        if part and int(part[1]) != self._at:
            raise OSError("the server sends another part of the file than was asked for")
        length, version = headers.get("Content-Length") or "", _version_of(headers)
        size = 0
        if status == 206:
            size = int(part[2]) if part and part[2] != "*" else 0
        elif _DIGITS.fullmatch(length):
            size = int(length)
        if not self._begun:
            self._begun, self._size, self._version = True, size or self._size, version or self._version
        elif (size and self._size and size != self._size) or (version and self._version and version != self._version):
            raise OSError("the file was replaced meanwhile")

    def _hang_up(self) -> None:
        if self._answer is not None:
            self._answer.close()
        self._answer = None

    def close(self) -> None:
        self._hang_up()
        super().close()


def _said(error: Exception | None) -> str:
    return " ".join(str(getattr(error, "reason", None) or error).split())  # a redirect's has several lines
