"""Requests with pictures, and the proof that training and serving see the same."""

from __future__ import annotations

import base64
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from erniekit.data.media.frames import FrameRules
from erniekit.data.media.worker import MediaPool
from erniekit.data.types import IGNORE
from erniekit.data.vision.job import open_vision_source
from erniekit.data.vision.prompt_reader import PromptReader
from erniekit.data.vision.proof import STAGES, first_difference, proof_of
from erniekit.data.vision.rules import VisionRules
from erniekit.errors import DataError
from support.jsonl import write_jsonl
from support.seen import LIMITS, MEDIA, patches, tokenizer


def inline(name: str) -> str:
    return "data:image/png;base64," + base64.b64encode((MEDIA / name).read_bytes()).decode()


def user(*parts) -> dict:
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


def picture(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.fixture
def pool():
    with MediaPool(1, LIMITS) as made:
        yield made


def test_a_request_gets_the_tokens_and_pixels_its_training_row_had(tmp_path: Path, pool: MediaPool) -> None:
    shutil.copytree(MEDIA, tmp_path / "media")
    rules = VisionRules(max_pixels=9408)
    turns = [user(picture(inline("a.png")), "what?"), {"role": "assistant", "content": "a bar."}, user("and where?")]
    row = {"messages": [*turns, {"role": "assistant", "content": "at the edge."}]}
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    source = open_vision_source(path, None, tokenizer(), rules, max_seq_len=256, cache_dir=tmp_path / "c", num_proc=1)
    sample = source.sample(0)
    asked = PromptReader(tokenizer(), rules, pool).read(turns)
    first = int(np.flatnonzero(sample.labels != IGNORE)[0])
    assert asked.prompt.ids.tolist() == sample.ids[: first + 1].tolist()
    assert asked.prompt.media.positions.tolist() == sample.media.positions[: first + 1].tolist()
    assert np.array_equal(asked.patches, patches(sample.media.sources))


def test_a_request_that_may_think_ends_where_the_assistant_begins(pool: MediaPool) -> None:
    reader = PromptReader(tokenizer(), VisionRules(), pool)
    thinks, not_so = (reader.read([user("what?")], thinking).prompt.ids for thinking in (True, False))
    assert tokenizer().decode(thinks).endswith("Assistant: ")
    assert tokenizer().decode(not_so).endswith("<think>\n\n</think>\n\n")
    assert reader.read([user("what?")]).patches.shape == (0, 588)


def test_a_server_opens_no_files_and_says_what_is_wrong_with_a_picture(pool: MediaPool) -> None:
    reader = PromptReader(tokenizer(), VisionRules(), pool)
    for asked, said in (
        ([user(picture(str(MEDIA / "a.png")), "what?")], "only data: URLs"),
        ([user(picture("file:///etc/passwd"), "what?")], "only data: URLs"),
        ([user(picture("https://example.org/a.png"), "what?")], "only data: URLs"),
        ([user(picture(inline("broken.png")), "what?")], "damaged"),
        ([user(picture("data:image/png;base64,aGVsbG8="), "what?")], "no picture"),
        ([user("hi"), {"role": "assistant", "content": "x"}], "must be the user's"),
        ([{"role": "system", "content": [picture(inline("a.png"))]}, user("x")], "holds a picture"),
    ):
        with pytest.raises(DataError, match=said):
            reader.read(asked)


def test_a_difference_in_preprocessing_is_named_by_its_stage(tmp_path: Path) -> None:
    shutil.copytree(MEDIA, tmp_path / "media")
    row = {
        "messages": [
            user({"type": "video", "video": "media/v.mov"}, "what?"),
            {"role": "assistant", "content": "a bar."},
        ]
    }
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    frames = FrameRules(4, 4, 16)
    plain = VisionRules(max_pixels=9408, video_max_pixels=9408, render_timestamp=True, frames=frames)

    def proof(rules: VisionRules) -> dict[str, str]:
        options = dict(max_seq_len=512, cache_dir=tmp_path / "cache", num_proc=1)
        return proof_of(open_vision_source(path, None, tokenizer(), rules, **options).sample(0), LIMITS)

    told = proof(plain)
    assert set(told) == set(STAGES)
    assert first_difference(told, proof(plain)) is None
    assert first_difference(told, proof(replace(plain, render_timestamp=False))) == "time stamp"
    assert first_difference(told, proof(replace(plain, video_min_pixels=7000))) == "size"
    assert first_difference(told, proof(replace(plain, frames=replace(frames, sample="leading")))) == "frames"
    assert first_difference(told, proof(replace(plain, template=replace(plain.template, block="none")))) == "template"
    assert first_difference(told, proof(replace(plain, positions="transformers"))) == "position"
    shutil.copy(MEDIA / "odd.mov", tmp_path / "media/v.mov")
    assert first_difference(told, proof(plain)) == "file"
