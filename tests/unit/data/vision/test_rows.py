"""Reading rows with pictures: what is taken, and what is named as wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from erniekit.data.formats.fields import BadRow
from erniekit.data.vision.chat_rows import read_chat_row
from erniekit.data.vision.pairs import read_vision_pair
from erniekit.data.vision.read import read_vision_row
from erniekit.data.vision.rows import read_info_row, rewritten_table
from erniekit.data.vision.rules import TEMPLATES
from erniekit.data.vision.template import VisionRenderer
from erniekit.data.vision.vision_row import media_in
from support.seen import tokenizer

HERE = Path("/data")


def info(**changed: Any) -> dict[str, Any]:
    row = {
        "text_info": [{"text": "what?", "tag": "mask"}, {"text": "a bar.", "tag": "no_mask"}],
        "image_info": [{"image_url": "a.png", "matched_text_index": 0}],
    }
    return {**row, **changed}


def said(*content: Any, answer: Any = "a bar.", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}, {"role": "assistant", "content": answer}], **more}


IMAGE = {"type": "image_url", "image_url": {"url": "a.png"}}


@pytest.mark.parametrize(
    ("part", "video", "path"),
    [
        (IMAGE, False, "/data/a.png"),
        ({"type": "image_url", "image_url": "b/a.png"}, False, "/data/b/a.png"),
        ({"type": "image", "image": "/x/a.png"}, False, "/x/a.png"),
        ({"type": "image", "url": "a.png"}, False, "/data/a.png"),
        ({"type": "video_url", "video_url": {"url": "v.mp4"}}, True, "/data/v.mp4"),
        ({"type": "video", "video": "v.mp4"}, True, "/data/v.mp4"),
    ],
)
def test_parts_of_a_message_name_a_file_in_every_usual_way(part: dict, video: bool, path: str) -> None:
    row = read_chat_row(said(part, {"type": "text", "text": "what?"}), HERE, False)
    [medium] = row.media
    assert (medium.video, medium.sources[0].path) == (video, path)
    assert media_in(row.messages[0]) == [0]


def test_frames_given_as_a_list_are_one_video_with_its_times() -> None:
    row = read_chat_row(said({"type": "video", "video": ["0.png", "1.png", "2.png"], "fps": 4}), HERE, False)
    [medium] = row.media
    assert medium.video
    assert medium.stamps == (0.0, 0.25, 0.5)
    assert [place.path for place in medium.sources] == [f"/data/{i}.png" for i in range(3)]


TAGGED = {"role": "user", "content": "<image>what?"}
WRONG = {
    "a tag without a picture": ({"messages": [TAGGED, {"role": "assistant", "content": "a bar."}]}, "length_mismatch"),
    "a tag in a part beside a picture": (said(IMAGE, {"type": "text", "text": "<image>what?"}), "length_mismatch"),
    "a tag in a text row": ({"src": ["<video>what?"], "tgt": ["a bar."]}, "length_mismatch"),
    "a tag in an answer": (said("what?", answer="<image>"), "length_mismatch"),
    "pictures of a text row": ({"instruction": "what?", "output": "a bar.", "images": ["a.png"]}, "no_place"),
    "a picture before all": (info(image_info=[{"image_url": "a", "matched_text_index": -1}]), "length_mismatch"),
    "an order beyond the pictures": (info(order={"type": ["image"], "index": [1]}), "length_mismatch"),
    "an image without a file": (said({"type": "image_url"}), "wrong_type"),
    "a picture in an answer": (said("x", answer=[IMAGE]), "not_text"),
    "a remote picture": (said({"type": "image", "image": "https://x/a.png"}), "remote"),
    "frames that are no pictures": (said({"type": "video", "video": [1, 2]}), "wrong_type"),
    "a video without a frame": (said({"type": "video", "video": []}), "missing_media"),
    "sound": (said({"type": "input_audio", "input_audio": {"data": "a"}}), "not_text"),
    "a rate of frames that is none": (said({"type": "video", "video": ["a.png"], "fps": 0}), "wrong_type"),
    "noncharacters in a text": (said({"type": "text", "text": "\ufdd00\ufdd1"}), "bad_text"),
    "no answer": ({"messages": [{"role": "user", "content": [IMAGE]}]}, "no_answer"),
    "a pair": ({"chosen": "a", "rejected": "b", "messages": []}, "preference"),
    "texts that are no list": (info(text_info="x"), "wrong_type"),
    "no texts": ({"image_info": [], "text_info": []}, "role_order"),
    "a tag that is none": (info(text_info=[{"text": "x", "tag": "user"}]), "wrong_type"),
    "an empty answer": (
        info(text_info=[{"text": "x", "tag": "mask"}, {"text": " ", "tag": "no_mask"}]),
        "empty_text",
    ),
    "a picture beyond the texts": (info(image_info=[{"image_url": "a", "matched_text_index": 2}]), "length_mismatch"),
    "a picture without a file": (info(image_info=[{"matched_text_index": 0}]), "missing_field"),
    "frames without times": (info(is_video=True), "wrong_type"),
    "an order that is none": (info(order=[1]), "wrong_type"),
    "an order without a picture": (info(order={"type": ["text", "text"], "index": [0, 1]}), "length_mismatch"),
    "an order without a text": (info(order={"type": ["image", "text"], "index": [0, 1]}), "length_mismatch"),
    "an order cut short": (info(order={"type": ["image", "text", "text"], "index": [0, 0]}), "length_mismatch"),
    "frames that are no list": (
        info(image_info=[], video_info=[{"image_url": "v.mp4", "extracted_frame_indices": 5}]),
        "wrong_type",
    ),
    "a frame's time that is no number": (
        info(image_info=[{"image_url": "a.png", "time_stamp": float("nan")}], is_video=True),
        "wrong_type",
    ),
    "an order beyond the texts": (info(order={"type": ["text"], "index": [5]}), "length_mismatch"),
    "a system text alone": (info(is_system=1), "no_answer"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_row_that_cannot_be_used_says_why(name: str) -> None:
    row, kind = WRONG[name]
    with pytest.raises(BadRow) as bad:
        read_vision_row(row, HERE, "erniekit", False)
    assert bad.value.kind == kind
    assert bad.value.reason


def test_a_label_of_0_is_read_and_not_learnt() -> None:
    texts = [*info()["text_info"], {"text": "and?", "tag": "mask"}, {"text": "b", "tag": "no_mask", "label": 0}]
    row = read_info_row(info(text_info=texts), HERE, False)
    assert [m.trained for m in row.messages if m.role == "assistant"] == [True, False]
    old = read_info_row(info(text_info=texts), HERE, True)  # there the last answer is trained whatever they say
    assert [m.trained for m in old.messages if m.role == "assistant"] == [True, True]


def test_texts_of_one_answer_may_have_labels_of_their_own() -> None:
    texts = [info()["text_info"][0], {"text": "a", "tag": "no_mask", "label": 0}, {"text": "b", "tag": "no_mask"}]
    row = read_info_row(info(text_info=texts), HERE, False)
    pieces = VisionRenderer(TEMPLATES["ernie_vl"], tokenizer(), [False]).sample(row.messages)
    assert [(p.text, p.trained) for p in pieces if p.answer >= 0][-3:] == [
        ("a", False), ("b", True), (tokenizer().end_token, True)
    ]  # fmt: skip


def test_a_prefix_stands_before_the_last_answer_untrained() -> None:
    texts = [*info()["text_info"], {"text": "and?", "tag": "mask"}, {"text": "a ring.", "tag": "no_mask"}]
    row = read_info_row(info(text_info=texts, prefix="In short: "), HERE, False)
    pieces = VisionRenderer(TEMPLATES["ernie_vl"], tokenizer(), [False], prefix=row.prefix).sample(row.messages)
    said = [(piece.text, piece.trained) for piece in pieces if piece.answer >= 0]
    end = tokenizer().end_token
    assert said == [("a bar.", False), (end, False), ("In short: ", False), ("a ring.", True), (end, True)]
    assert read_info_row(info(text_info=texts, prefix="In short: "), HERE, True).prefix == ""


def test_only_the_old_reader_rewrites_tables() -> None:
    table = "| a | b |\n|------|:-------:|\n| 1 |   2|"
    assert rewritten_table(table) == "| a | b |\n| --- | :-: |\n| 1 | 2 |"
    assert rewritten_table("a | b\nno table") == "a | b\nno table"
    texts = [{"text": "what?", "tag": "mask"}, {"text": table, "tag": "no_mask"}]
    assert read_info_row(info(text_info=texts), HERE, False).messages[1].content == table


def test_fields_that_nobody_reads_are_named() -> None:
    assert read_info_row(info(source="web"), HERE, False).unused == ("source",)


PROMPT = {"messages": [{"role": "user", "content": "<image>what?"}], "images": ["a.png"]}


@pytest.mark.parametrize(
    "changed",
    [{"images": []}, {"chosen": "<image>"}, {"rejected": [{"role": "assistant", "content": "<image>"}]},
     {"images": ["a.png", "b.png"]}],
)  # fmt: skip
def test_a_tag_of_a_pair_is_a_picture_of_its_prompt_or_a_bad_row(changed: dict[str, Any]) -> None:
    pair = {**PROMPT, "chosen": "a bar.", "rejected": "a star."}
    assert len(read_vision_pair(pair, HERE, "messages").media) == 1
    with pytest.raises(BadRow):
        read_vision_pair({**pair, **changed}, HERE, "messages")


def test_pictures_of_a_pair_whose_question_is_a_plain_text_are_seen() -> None:
    pair = {"instruction": "<image>what?", "images": ["a.png"], "chosen": "a bar.", "rejected": "a star."}
    read = read_vision_pair(pair, HERE, "alpaca")
    assert [media_in(message) for message in read.messages] == [[0]]


def test_a_thought_beside_a_text_is_that_of_a_message() -> None:
    asked = info()["text_info"][0]
    beside = {"text": "a bar.", "tag": "no_mask", "reasoning_content": "it is long"}
    rows = [info(text_info=[asked, beside]), info(thinking="it is long")]
    like = read_chat_row(said(IMAGE, {"type": "text", "text": "what?"}, reasoning_content="it is long"), HERE, False)
    for row in rows:
        found = read_info_row(row, HERE, False)
        assert (found.messages[-1], found.unused) == (like.messages[-1], ())
    old = read_info_row(rows[1], HERE, True)
    assert (old.messages[-1].thought, old.unused) == ("", ("thinking",))


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (said(IMAGE, tools=[{"type": "function"}]), "tools"),
        ({"src": ["q"], "tgt": ["a"], "tools": [{"type": "function"}]}, "tools"),
        ({"instruction": "q", "output": "", "tool_calls": [{"name": "f"}]}, "tools"),
        (info(tool_calls=[{"name": "f"}]), "tools"),
        (
            info(
                text_info=[
                    {"text": "what?", "tag": "mask"},
                    {"text": "a", "tag": "no_mask"},
                    {"text": "b", "tag": "no_mask", "reasoning": "r"},
                ]
            ),
            "bad_thought",
        ),
    ],
)
def test_tools_and_misplaced_thoughts_are_bad_rows(row: dict, kind: str) -> None:
    with pytest.raises(BadRow) as refused:
        read_vision_row(row, HERE, "erniekit", False)
    assert refused.value.kind == kind
