"""The token cache of rows with pictures: what is kept, what is bad, and what makes it anew."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from erniekit.data.media.limits import MediaLimits
from erniekit.data.report import BadRowsFile
from erniekit.data.vision import job
from erniekit.data.vision.job import VisionJob, VisionSource, decoder, open_vision_source
from erniekit.data.vision.rules import VisionRules
from erniekit.errors import DataError
from support.clock import PATIENCE_S
from support.jsonl import write_jsonl
from support.seen import FOLDER, MEDIA, patches, recorded, rules, sha, tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(MEDIA, tmp_path / "media")
    return tmp_path


def opened(path: Path, given: VisionRules, **options) -> VisionSource:
    options = {
        "max_seq_len": 256,
        "cache_dir": path.parent / "cache",
        "num_proc": 1,
        "max_bad_fraction": 1.0,
        **options,
    }
    return open_vision_source(path, None, tokenizer(), given, **options)


def chat(*urls: str, answer: str = "a red bar.") -> dict:
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {
        "messages": [
            {"role": "user", "content": [*content, {"type": "text", "text": "what is it?"}]},
            {"role": "assistant", "content": answer},
        ]
    }


def test_the_cache_holds_the_recorded_rows_and_is_only_read_the_second_time(folder: Path) -> None:
    shutil.copy(FOLDER / "rows.jsonl", folder / "rows.jsonl")
    for number_of_processes in (1, 2):
        source = opened(folder / "rows.jsonl", rules(), num_proc=number_of_processes)
        assert source.report.from_cache is (number_of_processes == 2)
        told = {i: row for i, row in enumerate(recorded()["rows"], 1)}
        assert len(source) == 29
        for i in range(len(source)):
            sample, row = source.sample(i), told[source.row(i)]
            assert sample.ids.tolist() == row["input_ids"][:-1]
            assert sample.labels.tolist() == row["labels"][1:]
            assert sample.media.positions.tolist() == row["position_ids"][:-1]
            assert sample.media.modality.tolist() == row["token_type_ids"][:-1]
            assert source.patches[i] == sample.media.patches == row["patches_shape"][0]
    assert source.report.pictures == 21
    assert any("21 pictures, 11 videos" in line for line in source.report.lines())


def test_a_broken_picture_is_a_bad_row_with_its_line_and_the_rest_goes_on(folder: Path) -> None:
    path = write_jsonl(
        folder / "rows.jsonl",
        [
            chat("media/a.png"),
            chat("media/broken.png"),
            chat("media/none.png"),
            chat("http://x/y.png"),
            chat("media/b.png"),
        ],
    )
    listed = folder / "bad_rows.jsonl"
    source = opened(path, VisionRules(), bad_rows=BadRowsFile(listed))
    assert [source.row(i) for i in range(len(source))] == [1, 5]
    told = [json.loads(line) for line in listed.read_text().splitlines()]
    assert [(row["line"], row["kind"]) for row in told] == [(2, "bad_picture"), (3, "missing_media"), (4, "remote")]
    with pytest.raises(DataError) as error:
        opened(path, VisionRules(), max_bad_fraction=0.1)
    assert f"{path}:2  bad_picture" in error.value.where


def test_a_header_check_leaves_damage_to_be_found_later(folder: Path) -> None:
    path = write_jsonl(folder / "rows.jsonl", [chat("media/broken.png"), chat("media/a.png")])
    assert len(opened(path, VisionRules(check="header"))) == 2


def test_inline_pictures_are_kept_with_the_tokens(folder: Path) -> None:
    inline = "data:image/png;base64," + base64.b64encode((MEDIA / "b.png").read_bytes()).decode()
    path = write_jsonl(folder / "rows.jsonl", [chat("media/b.png"), chat(inline), chat(inline, "media/a.png")])
    source = opened(path, VisionRules())
    pixels = [patches(source.sample(i).media.sources) for i in range(3)]
    assert sha(pixels[0]) == sha(pixels[1]) == sha(pixels[2][: len(pixels[0])])
    (folder / "media/b.png").unlink()
    assert sha(patches(source.sample(1).media.sources)) == sha(pixels[0])


def test_a_changed_picture_makes_the_cache_anew(folder: Path) -> None:
    path = write_jsonl(folder / "rows.jsonl", [chat("media/a.png")])
    before = opened(path, VisionRules()).sample(0)
    shutil.copy(MEDIA / "tiny.png", folder / "media/a.png")
    after = opened(path, VisionRules())
    assert not after.report.from_cache
    assert after.sample(0).media.grids.tolist() != before.media.grids.tolist()


@pytest.mark.parametrize("fault", ["missing", "damaged", "missing archive", "missing folder"])
def test_a_picture_that_was_added_or_repaired_is_looked_at_again(fault: str, folder: Path) -> None:
    name = {"missing archive": "shard.zip/a.png", "missing folder": "later/a.png"}.get(fault, "new.png")
    path = write_jsonl(folder / "rows.jsonl", [chat("media/a.png"), chat(name)])
    if fault == "damaged":
        (folder / name).write_bytes((MEDIA / "a.png").read_bytes()[:200])
    assert opened(path, VisionRules()).report.bad_rows == 1
    assert opened(path, VisionRules()).report.from_cache
    if fault == "missing archive":
        with zipfile.ZipFile(folder / "shard.zip", "w") as archive:
            archive.write(MEDIA / "a.png", "a.png")
    else:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(MEDIA / "a.png", folder / name)
    source = opened(path, VisionRules())
    assert (len(source), source.report.bad_rows) == (2, 0)


def test_a_timeout_counts_for_the_run_that_saw_it_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = VisionRules(limits=MediaLimits(timeout=1))
    path = write_jsonl(folder / "rows.jsonl", [chat("media/a.png"), chat("media/b.png")])
    opened(write_jsonl(folder / "other.jsonl", [chat("media/b.png")]), rules)  # the decoder runs
    os.kill(decoder().workers[0].pid, signal.SIGSTOP)
    assert opened(path, rules).report.bad == {"timeout": 1}
    assert opened(path, rules).report.bad == {"timeout": 1}  # other ranks see what the first saw
    later = time.time() + 1
    monkeypatch.setattr(job, "started", lambda: later)
    source = opened(path, rules)
    assert (len(source), source.report.bad) == (2, {})


def test_every_rule_that_can_change_a_sample_is_part_of_the_key(folder: Path) -> None:
    plain = VisionRules()

    def key(rules: VisionRules) -> str:
        made = VisionJob(str(folder / "rows.jsonl"), "messages", tokenizer(), 256, "drop", False, rules=rules)
        return json.dumps(made.more_key())

    others = [
        replace(plain, max_pixels=9408), replace(plain, use_pic_id=False), replace(plain, positions="transformers"),
        replace(plain, render_timestamp=True), replace(plain, frames=replace(plain.frames, fps=1)),
        replace(plain, template=replace(plain.template, train="all")), replace(plain, upright=False),
        replace(plain, limits=MediaLimits(pixels=10**6)),
    ]  # fmt: skip
    assert len({key(rules) for rules in (plain, *others)}) == len(others) + 1
    assert key(replace(plain, limits=MediaLimits(timeout=1), check="header")) == key(plain)


def test_rows_without_pictures_are_text(folder: Path) -> None:
    path = write_jsonl(folder / "rows.jsonl", [{"src": ["what?"], "tgt": ["a red bar."]}, chat("media/a.png")])
    source = opened(path, VisionRules())
    assert [len(source.sample(i).media.sources) for i in range(2)] == [0, 1]
    assert source.sample(0).media.positions[:, 0].tolist() == list(range(source.lengths[0]))


def test_images_and_tags_beside_the_messages_are_read_in_order(folder: Path) -> None:
    said = [{"role": "user", "content": "<image>one, <image>two: which?"}, {"role": "assistant", "content": "one."}]
    rows = [
        {"messages": said, "images": ["media/a.png", "media/b.png"]},
        {"messages": said, "images": ["media/a.png"]},
        {"messages": said, "images": ["media/a.png"] * 3},
    ]
    source = opened(write_jsonl(folder / "rows.jsonl", rows), VisionRules())
    assert len(source) == 1
    names = [os.path.basename(m.places[0].path) for m in source.sample(0).media.sources]
    assert names == ["a.png", "b.png"]
    assert source.report.bad == {"length_mismatch": 2}


def test_a_hung_clip_is_a_bad_row_with_its_line_as_soon_as_its_time_is_over(folder: Path) -> None:
    clip = {"type": "video", "video": "media/v.mov"}
    row = {"messages": [{"role": "user", "content": [clip]}, {"role": "assistant", "content": "a bar."}]}
    rules = VisionRules(limits=MediaLimits(timeout=1))
    made = VisionJob(str(folder / "rows.jsonl"), "messages", tokenizer(), 2048, "drop", False, rules=rules)
    assert not made.work([(1, row)]).bad
    os.kill(decoder().workers[0].pid, signal.SIGSTOP)  # what a decoder that hangs looks like from outside
    began = time.monotonic()
    chunk = made.work([(2, row), (3, row)])
    assert time.monotonic() - began < PATIENCE_S, "for ever where nobody ends it"
    assert [(line, kind) for line, kind, _ in chunk.bad] == [(2, "timeout")]
    assert "media/v.mov" in chunk.bad[0][2]
    assert chunk.main.lines.tolist() == [3]


def test_preference_rows_name_the_stage_that_learns_them(folder: Path) -> None:
    row = {**chat("media/a.png"), "chosen": "a bar.", "rejected": "a star."}
    row["messages"] = row["messages"][:1]
    with pytest.raises(DataError) as refused:
        opened(write_jsonl(folder / "rows.jsonl", [row]), VisionRules())
    assert "stage: DPO" in refused.value.fix


def test_a_fault_in_reading_a_row_costs_that_row_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(folder / "rows.jsonl", [chat("media/a.png", answer=f"answer {n}") for n in range(3)])
    shutil.copy(next(MEDIA.glob("*.png")), folder / "media" / "a.png")
    read = VisionJob.vision_row

    def odd(self: VisionJob, row: dict) -> object:
        if row["messages"][1]["content"] == "answer 1":
            raise TypeError("an odd row")
        return read(self, row)

    monkeypatch.setattr(VisionJob, "vision_row", odd)
    source = opened(path, rules())
    assert len(source) == 2
    assert source.report.bad_rows == 1
