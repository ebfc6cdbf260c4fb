"""Rows with pictures against the recording of ERNIEKit's own code: ids, labels, types, grids, positions, patches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from erniekit.data.assemble import Assembled, Dropped
from erniekit.data.formats.fields import BadRow
from erniekit.data.media.limits import MediaError
from erniekit.data.types import IGNORE
from erniekit.data.vision.chat_rows import read_chat_row
from erniekit.data.vision.rows import read_info_row
from erniekit.data.vision.rules import TEMPLATES, VisionRules
from erniekit.data.vision.tokens import VisionAssembler
from support.seen import FOLDER, header, new_stack, patches, recorded, rows, rules, sha, tokenizer

# FFmpeg converts the colours of these to RGB by code of its own for each kind of processor; see the last test.
LOSSY = {"video_mpeg4", "video_max_clamp", "too_long_video"}
REFUSED = {"strip", "mixed", "mixed_no_order", "missing", "answer_first", "too_long_one_turn", "no_media"}
VARIANTS = [(name, row) for name, variant in recorded()["variants"].items() for row in variant["rows"]]


def made_of(name: str, given: VisionRules, max_seq_len: int, folder: Path = FOLDER) -> Any:
    row = read_info_row(rows()[name], folder, given.compat)
    return VisionAssembler(tokenizer(), given).sample(row, max_seq_len, "drop", header)


def check(told: dict[str, Any], given: VisionRules, max_seq_len: int) -> None:
    made = made_of(told["name"], given, max_seq_len)
    assert isinstance(made, Assembled)
    sample, media = made.sample, made.sample.media
    assert media is not None
    # A row's last token is only a target: samples are shifted already.
    assert sample.ids.tolist() == told["input_ids"][:-1]
    assert sample.labels.tolist() == told["labels"][1:]
    assert media.modality.tolist() == told["token_type_ids"][:-1]
    assert media.grids.tolist() == told["grid_thw"]
    assert media.positions.tolist() == told["position_ids"][:-1]
    pixels = patches(media.sources)
    assert list(pixels.shape) == told["patches_shape"]
    if told["name"] not in LOSSY:
        assert sha(pixels) == told["patches_sha"]


@pytest.mark.parametrize("told", recorded()["rows"], ids=lambda told: told["name"])
def test_a_row_under_compat_is_the_recorded_one(told: dict[str, Any]) -> None:
    limit = recorded()["args"]["max_seq_length"]
    if told["name"] == "broken":  # its header is whole
        made = made_of("broken", rules(), limit)
        with pytest.raises(MediaError, match="damaged"):
            patches(made.sample.media.sources)
    elif told["name"] not in REFUSED:
        check(told, rules(), limit)
    else:
        try:
            made = made_of(told["name"], rules(), limit)
        except (BadRow, MediaError):
            return
        assert isinstance(made, Dropped)


@pytest.mark.parametrize(("name", "told"), VARIANTS, ids=[f"{name}-{row['name']}" for name, row in VARIANTS])
def test_a_row_under_other_keys_is_the_recorded_one(name: str, told: dict[str, Any]) -> None:
    args = recorded()["variants"][name]["args"]
    check(told, rules(**args), {**recorded()["args"], **args}["max_seq_length"])


def as_messages(row: dict[str, Any]) -> dict[str, Any]:
    """The same row as OpenAI parts."""
    said: list[dict[str, Any]] = []
    for i, entry in enumerate(row["text_info"]):
        role = "user" if entry["tag"] == "mask" else "assistant"
        if not said or said[-1]["role"] != role:
            said.append({"role": role, "content": []})
        for image in row["image_info"]:
            if image["matched_text_index"] == i:
                said[-1]["content"].append({"type": "image_url", "image_url": {"url": image["image_url"]}})
        said[-1]["content"].append({"type": "text", "text": entry["text"]})
        if "label" in entry:
            said[-1]["weight"] = entry["label"]
    return {"messages": said}


NEW = [(key, name) for key, told in new_stack()["rows"].items() for name in told if "text" in told[name]]


@pytest.mark.parametrize(("key", "name"), NEW, ids=[f"{key}-{name}" for key, name in NEW])
def test_messages_in_paddleformers_templates_are_the_recorded_ones(key: str, name: str) -> None:
    told = new_stack()["rows"][key][name]
    template, _, thinking = key.partition(" enable_thinking=")
    chosen = TEMPLATES[template.replace("ernie_vl", "paddleformers_vl")]
    chosen = replace(chosen, block_trained=thinking == "True")
    if template == "ernie_vl_nothink":
        chosen = replace(chosen, drop_thoughts=thinking == "False")
    given = replace(rules(), compat=False, template=chosen)
    row = read_chat_row(as_messages(rows()[name]), FOLDER, False)
    made = VisionAssembler(tokenizer(), given).sample(row, 256, "drop", header)
    assert made.sample.ids.tolist() == told["input_ids"][:-1]
    assert made.sample.labels.tolist() == told["labels_shifted"][:-1]
    assert told["labels_shifted"][-1] == IGNORE
    assert made.sample.media.grids.tolist() == told["grid_thw"]


def test_a_prompt_has_the_tokens_positions_and_pixels_of_the_recorded_processor() -> None:
    """It writes no begin token and no turn of the assistant around the user's words."""
    part = {"image": {"type": "image", "image": "media/a.png"}, "video": {"type": "video", "video": "media/short.mov"}}
    asked = {
        "image": [part["image"], "what?"],
        "image_video_image": [part["image"], "then ", part["video"], "and ", part["image"], "what?"],
        "text": ["what?"],
    }
    for name, parts in asked.items():
        told = new_stack()["processor"][name]
        content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
        row = read_chat_row(
            {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]}, FOLDER, False
        )
        row = replace(row, messages=row.messages[:1])
        prompt = VisionAssembler(tokenizer(), replace(rules(), compat=False)).prompt(row, header, thinking=True)
        tail = len(tokenizer().encode_text("\nAssistant: "))
        assert prompt.ids[1:-tail].tolist() == told["input_ids"], name
        assert prompt.media.modality[1:-tail].tolist() == told["token_type_ids"]
        assert (prompt.media.positions[1:-tail] - 1).tolist() == told["position_ids"]
        assert prompt.media.grids.tolist() == told["grid_thw"]
        assert prompt.next_position == prompt.media.positions.max() + 1
        if name == "image":
            assert sha(patches(prompt.media.sources)) == told["images"]


def test_a_prompt_is_what_its_training_sample_begins_with() -> None:
    given = replace(rules(), compat=False)
    assembler = VisionAssembler(tokenizer(), given)
    row = read_info_row(rows()["two_turns"], FOLDER, False)
    sample = assembler.sample(row, 256, "drop", header).sample
    prompt = assembler.prompt(replace(row, messages=row.messages[:-1]), header)
    first = int(np.flatnonzero(sample.labels != IGNORE)[0])
    assert prompt.ids.tolist() == sample.ids[: first + 1].tolist()
    assert prompt.media.positions.tolist() == sample.media.positions[: first + 1].tolist()


def test_without_compat_rows_with_a_video_keep_system_text_and_thought_block_and_mixed_rows_are_read() -> None:
    given = replace(rules(), compat=False)
    text = tokenizer().decode(made_of("video_system", given, 256).sample.ids, skip_special=False)
    assert "User: You count" not in text
    assert "<think>\n\n</think>" in text
    for name in ("mixed", "mixed_no_order"):
        media = made_of(name, given, 256).sample.media
        assert [medium.video for medium in media.sources] == [False, True]
    two = made_of("two_videos", given, 256).sample.media
    assert two.grids[:, 0].tolist() == [4, 6]  # each video by its own length


def test_thoughts_are_trained_masked_or_left_out_by_key() -> None:
    row = read_info_row(rows()["thinking"], FOLDER, False)
    given = replace(rules(), compat=False)
    made = {
        rule: VisionAssembler(tokenizer(), given, rule).sample(row, 256, "drop", header).sample
        for rule in ("all", "mask", "drop")
    }
    trained = {rule: tokenizer().decode(sample.labels[sample.labels != IGNORE]) for rule, sample in made.items()}
    assert trained["all"].startswith("<think>\nthe blue circle")
    assert trained["mask"].lstrip() == trained["drop"].lstrip() == "the grey bar turns at the left."
    assert made["mask"].ids.tolist() == made["all"].ids.tolist()
    assert "blue circle" not in tokenizer().decode(made["drop"].ids)


def test_a_turned_picture_is_upright_and_a_declared_size_is_not_believed() -> None:
    given = replace(rules(), compat=False, upright=True)
    turned = made_of("exif_rotated", given, 256).sample.media
    lying = made_of("exif_rotated", replace(given, upright=False), 256).sample.media
    assert turned.grids[0].tolist() == [1, *lying.grids[0, :0:-1].tolist()]
    assert not np.array_equal(patches(turned.sources), patches(lying.sources))
    declared = made_of("declared_size", given, 256).sample.media
    assert declared.grids.tolist() == made_of("one_image", given, 256).sample.media.grids.tolist()


def test_a_row_that_is_too_long_loses_its_oldest_turns_with_their_pictures() -> None:
    given = replace(rules(), compat=False)
    whole = made_of("two_turns", given, 256)
    short = made_of("two_turns", given, len(whole.sample.ids) - 1)
    assert short.dropped_turns == 1
    assert [m.places[0].path for m in short.sample.media.sources] == [str(FOLDER / "media/tiny.png")]
    assert "Picture 1:" in tokenizer().decode(short.sample.ids)
    none = made_of("one_image", given, 20)
    assert isinstance(none, Dropped)
    assert none.kind == "overlong"


def test_a_video_too_long_for_the_sequence_loses_resolution_and_then_frames() -> None:
    given = replace(rules(), compat=False, video_min_pixels=784, squeeze=True)
    grids = [made_of("video_max_clamp", given, n).sample.media.grids[0].tolist() for n in (256, 61, 47)]
    assert grids[0] == [8, 4, 6]
    assert grids[1][0] == 8
    assert np.prod(grids[1]) < np.prod(grids[0])
    assert grids[2][0] < 8
    assert all(grid[0] % 2 == 0 for grid in grids)


def test_colours_of_lossy_video_are_within_four_levels_of_another_processor() -> None:
    """Recorded on another kind of processor: FFmpeg's code for MPEG-4 and for colours is not the same on all."""
    told = load_file(FOLDER / "patches.safetensors")
    for name in ("video_mpeg4", "video_max_clamp"):
        pixels = patches(made_of(name, rules(), 256).sample.media.sources)
        assert np.abs(pixels.astype(int) - told[name]).max() <= 4
    still = patches(made_of("video_lossless", rules(render_timestamp=False), 256).sample.media.sources)
    assert np.array_equal(still, told["no_timestamp.video_lossless"])


def test_positions_by_the_other_rule_are_those_transformers_was_recorded_with() -> None:
    told = load_file(FOLDER / "vl.safetensors")["video_max_clamp.position_ids_transformers"]
    media = made_of("video_max_clamp", replace(rules(), positions="transformers"), 256).sample.media
    assert media.positions.tolist() == told.tolist()
    ours = made_of("video_max_clamp", rules(), 256).sample.media
    assert media.positions.tolist() != ours.positions.tolist()
