"""`erniekit webui` before it serves: its words, its address, its refusals; and the page as it is put together."""

from __future__ import annotations

import inspect
import re
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest

from erniekit.errors import ConfigError
from erniekit.webui import app
from erniekit.webui.app import PageSettings, address, settings_from, webui_command

PAGES = Path(app.__file__).parent


def test_words_are_taken_with_an_equals_sign_or_as_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADIO_SERVER_PORT", raising=False)
    assert settings_from([]) == PageSettings()
    assert settings_from(["host=0.0.0.0", "--port", "8080", "root=a,b", "--root=c", "lang=zh"]) == PageSettings(
        "0.0.0.0", 8080, ("a", "b", "c"), "zh"
    )


def test_the_token_is_left_out_when_asked_and_on_this_machine_alone() -> None:
    assert settings_from(["--no-token"]).no_token
    assert settings_from(["host=::1", "--no-token", "port=1"]).port == 1
    for words in (["--no-token", "host=0.0.0.0"], ["host=192.168.1.5", "--no-token"]):
        with pytest.raises(ConfigError, match="need a token") as refused:
            settings_from(words)
        assert refused.value.where == "--no-token"


@pytest.mark.parametrize("words", [[], ["host=127.0.0.1"], ["--no-token"]])
def test_a_page_of_this_machine_has_a_token_unless_it_is_left_out(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gradio")
    made: list[object] = []
    monkeypatch.setattr(app, "make_app", lambda settings, token: made.append(token))
    monkeypatch.setattr(app, "serve", lambda page, listening, url: (made.append(url), listening.close()))
    monkeypatch.delenv("ERNIEKIT_WEBUI_TOKEN", raising=False)
    assert app.webui_command(["port=0", *words]) == 0
    token, url = made
    assert (token is None) == ("--no-token" in words)
    assert token is None or (len(str(token)) >= 32 and str(url).endswith(f"/?token={token}"))
    monkeypatch.setenv("ERNIEKIT_WEBUI_TOKEN", "mine")
    app.webui_command(["port=0"])
    assert made[2] == "mine"


def test_a_gradio_without_the_switch_of_its_check_is_refused() -> None:
    class Renamed:
        pass

    with pytest.raises(RuntimeError, match="has_launched"):
        app.check_paths(Renamed())


def test_the_port_may_come_from_the_variable_of_the_old_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIO_SERVER_PORT", "8001")
    assert settings_from([]).port == 8001
    assert settings_from(["port=9"]).port == 9


@pytest.mark.parametrize(
    "words", [["share=True"], ["port=x"], ["port=70000"], ["lang=fr"], ["recipe.yaml"], ["--host"], ["--no-token=1"]]
)
def test_what_it_does_not_know_is_refused_with_the_way_out(words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        settings_from(words)
    assert refused.value.fix


def test_a_port_in_use_is_told_as_that() -> None:
    pytest.importorskip("gradio", reason='the page needs gradio: pip install "erniekit-torch[webui]"')
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen"):
        webui_command([f"port={taken.getsockname()[1]}"])


def test_the_address_holds_the_token_and_a_name_others_can_use() -> None:
    assert address(PageSettings(port=80), None) == "http://127.0.0.1:80/"
    assert address(PageSettings("0.0.0.0", 80), "t") == f"http://{socket.gethostname()}:80/?token=t"
    assert address(PageSettings("::1", 80), None) == "http://[::1]:80/"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("gradio", reason='the page needs gradio: pip install "erniekit-torch[webui]"')
    return app.build(PageSettings(roots=(str(tmp_path_factory.mktemp("root")),), lang="zh"))


def test_the_page_is_put_together_in_the_language_asked_for(page: Any) -> None:
    named = {block.elem_id: block for block in page.blocks.values() if getattr(block, "elem_id", None)}
    assert named["train-learning_rate"].label == "学习率"
    assert {"train-start", "train-curves", "chat-load", "export-start", "split-start", "runs-compare"} <= set(named)


def test_every_handler_of_the_page_can_take_what_gradio_hands_it(page: Any) -> None:
    """Gradio puts request and event among the positional words: a handler that wants them as keywords never runs."""
    from gradio.helpers import EventData, special_args

    handlers = [handler for handler in page.fns.values() if handler.fn is not None]
    assert len(handlers) > 50
    for handler in handlers:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # where words are missing gradio warns, and fills in None
            words, *_ = special_args(handler.fn, [None] * len(handler.inputs), event_data=EventData(None, {}))
        try:
            inspect.signature(handler.fn).bind(*words)
        except TypeError as error:
            raise AssertionError(f"{handler.name}: {error}") from None


def test_the_page_asks_no_other_machine_for_fonts_styles_or_scripts() -> None:
    for file in (PAGES / "static").iterdir():
        assert "//" not in re.sub(r"^\s*//.*$", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE), file
    pytest.importorskip("gradio")
    assert not app.theme()._stylesheets
