"""A vision model, behind `erniekit server`: pictures and videos as data: URLs, limits, and others meanwhile."""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from erniekit.cli.main import main
from support.processes import wait_until_gone
from support.seeing import inline, picture, seeing_folder, user, video
from support.seen import MEDIA
from support.serving import Live, Program, tiny_folder

pytestmark = pytest.mark.xdist_group("server")

WORDS = ("max_model_len=512", "temperature=0", "max_new_tokens=6", "block_size=16", "max_pixels=9408",
         "video_min_frames=4", "video_max_frames=8", "media_num_proc=1")  # fmt: skip
LIMITS = ("limit_mm_per_prompt={image: 3, video: 1}", "media_max_pixels=100000", "media_max_seconds=5",
          "media_timeout=3")  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    made = Program(seeing_folder(tmp_path_factory.mktemp("seeing") / "eyes"), "port=0", *WORDS, *LIMITS)
    made.ready()
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(server: Program) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.ready() + "/v1", api_key="none", max_retries=0, timeout=120)


def ask(client: openai.OpenAI, *messages: Any, **more: Any) -> Any:
    return client.chat.completions.create(model="eyes", messages=list(messages), **more)


def refused(client: openai.OpenAI, *messages: Any, **more: Any) -> list[str]:
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, *messages, **more)
    return error.value.body["message"].splitlines()


def workers(program: Program) -> list[int]:
    """Processes that decode, of this server."""
    children = [file.read_text().split() for file in Path(f"/proc/{program.process.pid}/task").glob("*/children")]
    found = [int(pid) for pids in children for pid in pids]
    return [pid for pid in found if b"media.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_pictures_and_videos_are_answered_and_counted(client):
    asked = user(picture(inline("a.png")), picture(inline("b.png")), "which?")
    whole = ask(client, asked)
    assert whole.usage.completion_tokens == 6
    details = whole.usage.prompt_tokens_details.model_dump()
    assert details["image_tokens"] > 0 == details["video_tokens"]
    assert whole.usage.prompt_tokens > details["image_tokens"]
    stream = ask(client, asked, stream=True)
    assert "".join(p.choices[0].delta.content or "" for p in stream) == whole.choices[0].message.content
    clip = ask(client, user(video(inline("v.mp4", "video/mp4")), "what?")).usage.prompt_tokens_details.model_dump()
    assert clip["video_tokens"] > 0 == clip["image_tokens"]
    text = ask(client, user("which?"))
    assert text.usage.prompt_tokens < whole.usage.prompt_tokens - details["image_tokens"]


@pytest.mark.parametrize(
    "url", ["https://example.org/a.png", "http://127.0.0.1:1/a.png", "file:///etc/passwd", "/etc/passwd", "a.png"]
)
def test_nothing_is_fetched_and_no_file_is_opened(client, url):
    what, where, fix = refused(client, user("look", picture(url)))
    assert (what, where) == (
        f"error: {url} is not opened: this server reads data: URLs only",
        "where: messages[0].content[1].image_url",
    )
    assert "data:image/" in fix


def test_what_is_too_much_or_damaged_is_refused_with_its_reason(client):
    many = refused(client, user(*[picture(inline("a.png"))] * 4, "which?"))
    assert "4 images; the limit is 3" in many[0]
    assert "limit_mm_per_prompt" in many[2]
    assert "damaged" in refused(client, user(picture(inline("broken.png")), "?"))[0]
    assert "media_max_pixels" in refused(client, user(picture(inline("big.jpg", "image/jpeg")), "?"))[0]
    assert "media_max_seconds" in refused(client, user(video(inline("long.mp4", "video/mp4")), "?"))[0]
    assert "no picture" in refused(client, user(picture("data:image/png;base64,aGVsbG8="), "?"))[0]
    assert "names no image" in refused(client, user({"type": "image_url", "image_url": {}}, "?"))[0]
    assert "tools are not supported" in refused(
        client, user("?"), tools=[{"type": "function", "function": {"name": "f"}}]
    )[0]  # fmt: skip
    long = refused(client, user(*[picture(inline("a.png"))] * 3, "?"), max_tokens=490)
    assert "context is 512 tokens" in long[0]


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


HALF = (MEDIA / "v.mp4").read_bytes()[: (MEDIA / "v.mp4").stat().st_size // 2]


@pytest.mark.parametrize(
    ("part", "what", "fix"),
    [
        (picture("data:image/png;base64,"), "empty", "content of the file"),
        (picture("data:image/png;base64,%%"), "base64", "base64"),
        (picture("data:image/png;base64,aGVsbG8="), "no picture", "PNG, JPEG or WebP"),
        (picture(data_url((MEDIA / "a.png").read_bytes()[:60])), "damaged", "PNG, JPEG or WebP"),
        (picture(inline("big.jpg", "image/jpeg")), "media_max_pixels", "scaled down"),
        (picture(inline("v.mp4", "video/mp4")), "no picture", "video_url"),
        (video(data_url(HALF, "video/mp4")), "no video", "MP4"),
        (video(inline("long.mp4", "video/mp4")), "media_max_seconds", "a part of it"),
    ],
)
def test_a_refusal_says_what_is_wrong_which_part_it_is_and_what_helps(client, part, what, fix):
    lines = refused(client, user("first"), {"role": "assistant", "content": "yes"}, user("look", part, "?"))
    assert what in lines[0]
    assert lines[1] == "where: messages[2].content[1]"
    assert fix in lines[2]
    assert not re.search(r"Error|Errno|0x|<|object at", "".join(lines))


def test_a_picture_outside_the_users_messages_is_refused_there(client):
    shown = {"role": "system", "content": [picture(inline("a.png"))]}
    lines = refused(client, shown, user("?"))
    assert lines[1] == "where: messages[0]"
    assert "message of the user" in lines[2]


def test_too_many_parts_are_told_as_that(client):
    for parts in (["x"] * 1025, [picture(inline("a.png"))] * 10_000):
        with pytest.raises(openai.UnprocessableEntityError) as error:
            ask(client, user(*parts))
        assert error.value.body["message"].endswith("a message may have 1,024")
        assert error.value.body["param"] == "messages[0].content"


def test_a_decoder_that_hangs_is_cut_off_and_others_are_answered_meanwhile(client, server):
    """Stopped processes stand for a decoder that hangs."""
    ask(client, user(picture(inline("a.png")), "warm?"))
    (worker,) = workers(server)
    os.kill(worker, signal.SIGSTOP)
    told: list[str] = []
    waits = threading.Thread(target=lambda: told.extend(refused(client, user(picture(inline("alpha.png")), "?"))))
    waits.start()
    assert ask(client, user("meanwhile?")).usage.completion_tokens == 6
    waits.join(60)
    assert "nothing was read for 3 s (media_timeout)" in told[0]
    assert ask(client, user(picture(inline("alpha.png")), "again?")).usage.completion_tokens == 6
    assert worker not in workers(server)


def test_a_picture_that_is_sent_again_is_not_computed_again(client, server):
    def looks() -> int:
        page = httpx.get(server.ready() + "/metrics").text
        return next(
            int(line.split()[1]) for line in page.splitlines() if line.startswith("erniekit_vision_looks_total")
        )

    asked = user(picture(inline("f1.png")), "what?")
    before = looks()
    first = ask(client, asked)
    assert looks() == before + 1
    again = ask(client, asked, {"role": "assistant", "content": "a bar."}, user("where?"), n=3)
    assert looks() == before + 1
    assert len(again.choices) == 3
    assert ask(client, asked).choices[0].message.content == first.choices[0].message.content


def test_the_terminal_shows_a_picture_with_a_question(server, tmp_path):
    lines = f"/image {MEDIA / 'a.png'}\nwhat?\nand @{MEDIA / 'b.png'} ?\n/image {tmp_path}/gone.png\nclear\nexit\n"
    done = subprocess.run(
        [sys.executable, "-m", "erniekit", "chat", server.ready(), "stream_options={include_usage: true}"],
        input=lines, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "picture a.png (" in done.stdout
    assert "goes with the next question" in done.stdout
    asked = [int(line.split("[")[-1].split()[0]) for line in done.stdout.splitlines() if "prompt tokens" in line]
    assert len(asked) == 2
    assert asked[1] > asked[0] + 12, "the history keeps the first picture"
    assert "gone.png" in done.stdout
    assert "cleared" in done.stdout


@pytest.mark.parametrize(("name", "code"), [("a.png", 0), ("broken.png", 2)])
def test_one_question_with_pictures_is_answered_or_refused_with_the_name_of_the_file(server, capsys, name, code):
    words = ["chat", server.ready(), "--prompt", "what?", "--image", str(MEDIA / "b.png"), "--image", str(MEDIA / name)]
    assert main(words) == code
    said = capsys.readouterr()
    if code:
        lines = said.err.splitlines()
        assert [line.split(":")[0] for line in lines] == ["error", "where", "fix"]
        assert "damaged" in lines[0]
        assert lines[1] == f"where: {MEDIA / name}"
    else:
        assert said.out.strip()


def test_the_server_ends_with_its_decoders(client, server):
    ask(client, user(picture(inline("palette.png")), "?"))
    found = workers(server)
    assert found
    assert server.end(signal.SIGTERM) == 0
    wait_until_gone(*found)


def test_a_text_model_refuses_pictures_by_its_name(paddle: Path, tmp_path: Path):
    live = Live(tiny_folder(paddle, tmp_path / "words"), "max_model_len=64")
    try:
        body = {"messages": [user(picture(inline("a.png")), "?")]}
        told: httpx.Response = live.post("/v1/chat/completions", body)
        assert told.status_code == 400
        assert told.json()["error"]["message"].startswith("error: words takes text only, no images")
    finally:
        live.close()


def test_enable_mm_false_refuses_pictures(tmp_path: Path):
    live = Live(seeing_folder(tmp_path / "eyes"), *WORDS, "enable_mm=False")
    try:
        told = live.post("/v1/chat/completions", {"messages": [user(picture(inline("a.png")), "?")]})
        assert (told.status_code, "enable_mm is False" in told.text) == (400, True)
        assert live.post("/v1/chat/completions", {"messages": [user("?")]}).status_code == 200
    finally:
        live.close()
