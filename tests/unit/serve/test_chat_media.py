"""Pictures typed in the terminal: which words name one, what is sent, and what is refused in three lines."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path

import pytest
from PIL import Image

from erniekit.errors import DataError
from erniekit.serve import chat_media
from erniekit.serve.chat_media import command, content, named_in
from support.seen import MEDIA


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(MEDIA / "a.png", tmp_path / "a.png")
    shutil.copy(MEDIA / "a.png", tmp_path / "two words.png")
    shutil.copy(MEDIA / "v.mp4", tmp_path / "v.mp4")
    (tmp_path / "notes.txt").write_text("x")
    return tmp_path


def test_a_command_names_one_file_and_its_kind(folder: Path) -> None:
    assert command("what is it?") is None
    shown = command('/image "two words.png"')
    assert base64.b64decode(shown.part["image_url"]["url"].partition(",")[2]) == (MEDIA / "a.png").read_bytes()
    assert str(shown) == f"picture two words.png ({(MEDIA / 'a.png').stat().st_size:,} bytes)"
    assert command("/video v.mp4").part["video_url"]["url"].startswith("data:video/mp4;base64,")


def test_a_path_behind_an_at_sign_is_shown_if_it_is_a_picture(folder: Path) -> None:
    text, found = named_in("is @a.png like @'two words.png'? ask me@a.png, @someone, @notes.txt or @gone.png")
    assert text == "is  like ? ask me@a.png, @someone, @notes.txt or @gone.png"
    assert [one.path.name for one in found] == ["a.png", "two words.png"]
    assert [part["type"] for part in content(text, found)] == ["image_url", "image_url", "text"]
    assert content("plain", []) == "plain"


@pytest.mark.parametrize(
    ("name", "kind", "what", "fix"),
    [
        ("notes.txt", "image", "no picture", "PNG"),
        ("notes.txt", "video", "no video", "MP4"),
        ("v.mp4", "image", "a video, not a picture", "/video"),
        ("a.png", "image", "more than media_max_pixels=99", "scale"),
        ("empty.png", "image", "empty", "another"),
        ("jpeg.mp4", "video", "no video", "/image"),
        ("plays.gif", "image", "animated", "/video"),
    ],
)
def test_a_file_that_is_not_what_it_passes_for_is_refused_as_it_is_named(
    folder: Path, name: str, kind: str, what: str, fix: str
) -> None:
    (folder / "empty.png").touch()
    picture = Image.open(folder / "a.png").convert("RGB")
    picture.save(folder / "jpeg.mp4", "JPEG")
    picture.save(folder / "plays.gif", save_all=True, append_images=[picture.transpose(Image.Transpose.ROTATE_180)])
    with pytest.raises(DataError, match=what) as error:
        command(f"/{kind} {name}", 99 if "pixels" in what else 10**8)
    assert error.value.where == name
    assert fix in error.value.fix
    assert command("/video plays.gif").kind == "video"


@pytest.mark.parametrize("line", ["/image gone.png", "/image", "/image .", "/video /dev/zero"])
def test_what_cannot_be_sent_is_refused_in_three_lines(folder: Path, line: str) -> None:
    with pytest.raises(DataError) as error:
        command(line)
    assert len(error.value.lines()) == 3


def test_too_many_bytes_are_refused_before_they_are_sent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (folder / "a.png").stat().st_size
    monkeypatch.setattr(chat_media, "MAX_BYTES", size + 1)
    one = command("/image a.png")
    with pytest.raises(DataError, match="more than"):
        content("?", [one, one])
    monkeypatch.setattr(chat_media, "MAX_BYTES", size - 1)
    with pytest.raises(DataError, match="too many"):
        command("/image a.png")
