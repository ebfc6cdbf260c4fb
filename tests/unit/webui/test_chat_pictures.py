"""Uploads in the Chat tab: sent as data: URLs, shown before their text, and nothing but uploads is read."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path

import pytest

from erniekit.errors import DataError
from erniekit.webui.chat_pictures import MAX_FILES, as_displayed, as_request, message, part
from support.seen import MEDIA


@pytest.fixture
def uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "uploads"
    folder.mkdir()
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(folder))
    return folder


def test_an_upload_goes_with_its_question_and_stays_in_the_history(uploads: Path) -> None:
    file = shutil.copy(MEDIA / "a.png", uploads)
    history = [message("what?", [file]), {"role": "assistant", "content": "a bar"}, message("sure?", [])]
    asked = [as_request(turn) for turn in history]
    shown, text = asked[0]["content"]
    assert base64.b64decode(shown["image_url"]["url"].partition(",")[2]) == (MEDIA / "a.png").read_bytes()
    assert text == {"type": "text", "text": "what?"}
    assert asked[1:] == [{"role": "assistant", "content": "a bar"}, {"role": "user", "content": "sure?"}]
    assert part(shutil.copy(MEDIA / "v.mp4", uploads))["type"] == "video_url"


def test_the_window_shows_pictures_before_their_text(uploads: Path) -> None:
    gr = pytest.importorskip("gradio", reason='the page needs gradio: pip install "erniekit-torch[webui]"')
    file = shutil.copy(MEDIA / "a.png", uploads)
    turns = as_displayed([message("what?", [file]), message("", [file]), message("gone?", [str(uploads / "gone.png")])])
    assert [turn["content"] for turn in turns] == [{"path": file}, "what?", {"path": file}, "gone?"]
    with gr.Blocks():
        assert len(gr.Chatbot().postprocess(turns).root) == 4


def test_nothing_but_uploads_is_read(uploads: Path, tmp_path: Path) -> None:
    outside = shutil.copy(MEDIA / "a.png", tmp_path)
    (uploads / "link.png").symlink_to(outside)
    (uploads / "notes.txt").write_text("x")
    for file, said in ((outside, "not uploaded"), (uploads / "link.png", "not uploaded"),
                       (uploads / "notes.txt", "neither a picture"), (uploads / "gone.png", "is gone")):  # fmt: skip
        with pytest.raises(DataError, match=said):
            part(str(file))
    with pytest.raises(DataError, match="too many"):
        message("?", ["a.png"] * (MAX_FILES + 1))
