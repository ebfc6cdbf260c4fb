"""Bodies within their limit come through whole; files that a request names are uploads or nothing."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from erniekit.webui import limits
from erniekit.webui.limits import Refused, RequestLimits, check_files, is_uploaded, read_body, trim


def receiver(*parts: bytes) -> Any:
    left = list(parts)

    async def receive() -> dict[str, Any]:
        if not left:
            return {"type": "http.disconnect"}
        part = left.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    return receive


def read(*parts: bytes, limit: int = 10, **headers: bytes) -> bytes:
    scope = {"headers": [(name.replace("_", "-").encode(), value) for name, value in headers.items()]}
    return asyncio.run(read_body(scope, receiver(*parts), limit))


def test_a_body_up_to_the_limit_comes_through_and_one_byte_more_does_not() -> None:
    assert read(b"01234", b"56789") == b"0123456789"
    for parts, headers in (([b"01234", b"567890"], {}), ([b""], {"content_length": b"11"})):
        with pytest.raises(Refused) as refused:
            read(*parts, **headers)
        assert refused.value.status == 413


@pytest.mark.parametrize("told", [b"-1", b"1e9", b"", b"9" * 5000])
def test_a_length_that_is_none_is_refused(told: bytes) -> None:
    with pytest.raises(Refused):
        read(b"x", content_length=told)


def test_a_client_that_leaves_in_the_middle_is_no_error_of_ours() -> None:
    with pytest.raises(Refused, match="ended early"):
        read()


def test_the_app_gets_the_body_once_more_and_then_what_the_client_does() -> None:
    heard: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.extend([await receive(), await receive()])

    scope = {"type": "http", "method": "POST", "path": limits.POSTS[1], "headers": []}
    inside = RequestLimits(app)
    asyncio.run(inside(scope, receiver(b'{"a"', b": 1}"), None))  # type: ignore[arg-type]
    assert heard == [{"type": "http.request", "body": b'{"a": 1}', "more_body": False}, {"type": "http.disconnect"}]
    assert (inside.open_requests, inside.open_bodies, inside.open_uploads) == (0, 0, 0)


def test_places_are_given_back_when_the_app_fails() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError

    inside = RequestLimits(app)
    scope = {"type": "http", "method": "POST", "path": limits.UPLOAD, "headers": []}
    for _ in range(limits.MAX_UPLOADS + 2):
        with pytest.raises(RuntimeError):
            asyncio.run(inside(scope, receiver(b"x"), None))  # type: ignore[arg-type]


def test_only_uploaded_files_may_be_named_at_any_depth(tmp_path: Path) -> None:
    uploads = Path(os.path.realpath(tmp_path / "uploads"))
    uploads.mkdir()
    (uploads / "a.yaml").write_text("")
    (tmp_path / "b.yaml").write_text("")
    (uploads / "link").symlink_to(tmp_path / "b.yaml")
    (uploads / "inner").symlink_to(uploads / "a.yaml")
    assert is_uploaded(str(uploads / "a.yaml"), [uploads])
    wrong = [str(tmp_path / "b.yaml"), str(uploads / "link"), str(uploads / "inner"), str(uploads), "a.yaml", "",
             None, 1, f"{uploads}/../b.yaml", "http://127.0.0.1/x", "\x00", str(uploads / "none")]  # fmt: skip
    for path in wrong:
        assert not is_uploaded(path, [uploads]), path
        with pytest.raises(Refused):
            check_files(json.dumps({"data": [1, [{"x": {"path": path}}]]}).encode(), [uploads])
    check_files(json.dumps({"data": [{"path": str(uploads / "a.yaml")}, "path", ["path"]]}).encode(), [uploads])
    check_files(b"", [uploads])


def test_the_oldest_uploads_go_first_and_their_folders_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "KEPT_FILES", 3)
    for number in range(5):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "a.yaml").write_text("x")
        os.utime(tmp_path / str(number) / "a.yaml", (number, number))
    trim(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"], "there is room for one more"
