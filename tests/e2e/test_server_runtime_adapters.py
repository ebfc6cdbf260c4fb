"""Adapters that come and go while a server answers: by vLLM's routes, from allowed folders alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from erniekit.checkpoint.model_folder import ModelFolder
from support.clock import comes_true, until
from support.engine_jobs import make_adapter
from support.serving import Live, Program, tiny_folder

pytestmark = pytest.mark.xdist_group("server")

WORDS = ("max_model_len=256", "max_num_seqs=4", "block_size=8", "temperature=0", "served_model_name=base")


@pytest.fixture(scope="module")
def place(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("adapters")
    weights = ModelFolder(tiny_folder(paddle, place / "base"))
    for seed, name in enumerate(("allowed/style", "allowed/facts", "secret/other")):
        make_adapter(weights, place / name, seed)
    (place / "allowed" / "link").symlink_to(place / "secret" / "other")
    (place / "allowed" / "circle").symlink_to("circle")
    (place / "allowed" / "empty").mkdir()
    broken = place / "allowed" / "broken"
    shutil.copytree(place / "allowed" / "style", broken)
    next(broken.glob("*.safetensors")).write_bytes(b"no weights")
    return place


@pytest.fixture(scope="module")
def live(place: Path) -> Iterator[Live]:
    server = Live(place / "base", *WORDS, f"lora_dirs={place / 'allowed'}")
    yield server
    server.close()


def said(server: Live, model: str, **more: object) -> str:
    return server.chat("tell me more", model=model, max_tokens=24, **more).json()["choices"][0]["message"]["content"]


def load(server: Live, name: str, path: object, **more: object) -> tuple[int, str]:
    answer = server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more})
    return answer.status_code, answer.text


def unload(server: Live, name: str) -> int:
    return server.post("/v1/unload_lora_adapter", {"lora_name": name}).status_code


def test_a_loaded_adapter_says_what_one_of_the_start_says(live: Live, place: Path):
    start = Live(place / "base", *WORDS, f"lora_modules=style={place}/allowed/style,facts={place}/allowed/facts")
    try:
        expected = {name: said(start, name) for name in ("base", "style", "facts")}
    finally:
        start.close()
    assert len(set(expected.values())) == 3
    assert load(live, "style", place / "allowed" / "style")[0] == 200
    assert load(live, "facts", "facts")[0] == 200, "a path below the allowed folder"
    assert {model.id: model.parent for model in live.client().models.list().data} == {
        "base": None, "style": "base", "facts": "base",
    }  # fmt: skip
    assert {name: said(live, name) for name in expected} == expected
    # The same name with other weights: no prefix of the first one's cache is taken.
    assert load(live, "style", "facts", load_inplace=True)[0] == 200
    assert said(live, "style") == expected["facts"]
    assert unload(live, "style") == unload(live, "facts") == 200
    assert live.chat(model="style").status_code == 404
    assert said(live, "base") == expected["base"]


def test_a_reloaded_adapter_takes_no_cached_prefix_of_the_one_before_it(live: Live):
    """Unloaded and loaded, replaced, and the same files again: equal to a server that has never had another."""
    prompt = "the same long prompt " * 8

    def ask() -> tuple[str, int]:
        told = live.post("/v1/completions", {"model": "style", "prompt": prompt, "max_tokens": 16, "temperature": 0})
        return told.json()["choices"][0]["text"], told.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    first: dict[str, str] = {}
    for folder, replaces in (("style", False), ("facts", True), ("style", True), ("facts", False)):
        if not replaces and "style" in live.loaded.models:
            assert unload(live, "style") == 200
        assert load(live, "style", folder, load_inplace=replaces)[0] == 200
        text, cached = ask()
        assert cached == 0, "blocks of other weights"
        assert text == first.setdefault(folder, text)
        again, cached = ask()
        assert (again, cached > 0) == (text, True), "its own blocks are shared"
    assert first["style"] != first["facts"]
    assert unload(live, "style") == 200


def test_running_streams_go_on_while_adapters_come_and_go(live: Live, place: Path):
    assert load(live, "style", "style")[0] == 200
    asked = {"max_tokens": 80, "temperature": 0, "extra_body": {"ignore_eos": True}}
    client, ask = live.client(), [{"role": "user", "content": "go on"}]

    def whole(model: str) -> str:
        return client.chat.completions.create(model=model, messages=ask, **asked).choices[0].message.content

    expected = {name: whole(name) for name in ("base", "style")}
    streams = {
        name: client.chat.completions.create(model=name, messages=ask, stream=True, **asked) for name in expected
    }
    began = {name: next(iter(stream)).choices[0].delta.content or "" for name, stream in streams.items()}
    assert live.engine.load().running == 2
    assert load(live, "facts", "facts")[0] == 200
    assert unload(live, "style") == 200
    assert live.chat(model="style").status_code == 404, "no new answer"
    for name, stream in streams.items():
        rest = "".join(part.choices[0].delta.content or "" for part in stream if part.choices)
        assert began[name] + rest == expected[name]
    # Its weights are gone with its last answer.
    assert comes_true(lambda: not any(name.startswith("style") for name in live.engine.models))
    assert unload(live, "facts") == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "status", "says"),
    [("unloaded", 404, "there is no model 'style' here"), ("replaced", 409, "send the request again")],
)
def test_a_request_whose_adapter_goes_while_it_is_prepared_is_refused(
    live: Live, change: str, status: int, says: str, stream: bool
):
    assert load(live, "style", "style")[0] == 200
    grammars = live.application.app.state.api.grammars
    form = {"type": "json_schema", "json_schema": {"schema": {"const": f"{change} {stream}"}}}
    with ThreadPoolExecutor(1) as pool:
        with grammars._building:  # the prompt is ready, the schema is not
            waiting = pool.submit(live.chat, model="style", response_format=form, stream=stream)
            assert comes_true(lambda: grammars._queue.counts()[0] == 1)
            assert change == "replaced" or unload(live, "style") == 200
            assert change == "unloaded" or load(live, "style", "facts", load_inplace=True)[0] == 200
            assert comes_true(lambda: len(live.engine.models) == len(live.loaded.models)), "the engine has dropped it"
        answer = waiting.result(30)
    assert (answer.status_code, says in answer.json()["error"]["message"]) == (status, True)
    assert answer.json()["error"]["param"] == "model"
    assert said(live, "base")
    assert change == "unloaded" or unload(live, "style") == 200


@pytest.mark.parametrize("path", ["../secret/other", "link", "circle", "empty", "broken", "absent", "/etc", "", "a\0b"])
def test_nothing_else_than_adapters_of_allowed_folders_is_loaded(live: Live, place: Path, path: str):
    status, text = load(live, "x", path)
    assert (status, '"param":"lora_path"' in text) == (400, True)
    assert "Traceback" not in text
    assert load(live, "x", place / "secret" / "other")[0] == 400
    assert list(live.loaded.models) == ["base"]


def test_names_that_are_taken_or_none_are_refused(live: Live, place: Path):
    assert load(live, "base", "style")[0] == load(live, "default", "style")[0] == load(live, "a b", "style")[0] == 400
    assert load(live, "base", "style", load_inplace=True)[0] == 400, "the base is not replaced"
    assert unload(live, "base") == 400
    assert unload(live, "nobody") == 404


def test_without_allowed_folders_nothing_is_loaded(place: Path):
    server = Live(place / "base", *WORDS)
    try:
        status, text = load(server, "style", place / "allowed" / "style")
        assert (status, "lora_dirs" in text) == (403, True)
    finally:
        server.close()


def test_an_allowed_folder_that_is_none_is_refused_before_anything_is_loaded(place: Path):
    file = place / "base" / "config.json"
    for name in ("nowhere", str(file)):
        server = Program(place / "base", *WORDS, "port=0", f"lora_dirs={place / 'allowed'},{name}")
        try:
            until(lambda program=server: "ready: " in program.text or program.process.poll() is not None, seconds=60)
            assert server.process.poll() == 2, server.text
            until(lambda program=server: "fix:" in program.text)
            assert server.lines[0] == f"error: lora_dirs names {name!r}, which is not a folder here"
            assert server.lines[1] == "where: lora_dirs: key=value"
            assert server.lines[2].startswith("fix:   check the path, or make the folder first")
        finally:
            server.close()


def test_an_allowed_folder_may_be_empty_at_the_start(place: Path, tmp_path: Path):
    server = Program(place / "base", *WORDS, "port=0", f"lora_dirs={tmp_path}")
    try:
        server.ready()
    finally:
        server.close()
