"""Two answers about a picture in one row give the loss of two rows, each with the picture of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import erniekit
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.config import load
from erniekit.data.formats.fields import BadRow
from erniekit.data.preference import PairRules, PairSample
from erniekit.data.preference_collate import collate_pairs
from erniekit.data.types import IGNORE, Pack, Sample, SampleMedia
from erniekit.data.vision.pairs import read_vision_pair
from erniekit.losses.dpo import pair_log_probs
from erniekit.recipes.vision_data import vision_collate, vision_rules
from erniekit.recipes.vision_pairs import pair_sources
from support.jsonl import write_jsonl
from support.seen import MEDIA, tiny_seeing, tokenizer

SEEN = ("a.png", "b.png", "tiny.png", "v.mov")


def picture(name: str) -> dict[str, Any]:
    kind = "video" if name.endswith("mov") else "image"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"media/{name}"}}


def row(number: int) -> dict[str, Any]:
    name = SEEN[number % len(SEEN)]
    asked = {"role": "user", "content": [picture(name), {"type": "text", "text": f"how many bars are {number}?"}]}
    return {
        "messages": [asked],
        "chosen": "the red bar at the edge",
        "rejected": "a blue star hides " * (1 + number % 2),
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    tiny_seeing(folder / "model")
    shutil.copytree(MEDIA, folder / "media")
    whole = {"role": "user", "content": [picture("a.png"), {"type": "text", "text": "which?"}]}
    said = [{"role": "assistant", "content": text} for text in ("a ring", "a cross")]
    as_conversations = {"chosen": [whole, said[0]], "rejected": [whole, said[1]]}
    text = {"messages": [{"role": "user", "content": "say"}], "chosen": "a star", "rejected": "no bar"}
    write_jsonl(folder / "pairs.jsonl", [*(row(k) for k in range(4)), as_conversations, text])
    return folder


def words(place: Path) -> dict[str, Any]:
    return dict(
        stage="DPO", model_name_or_path=place / "model", train_dataset_path=place / "pairs.jsonl", max_seq_len=512,
        max_prompt_len=256, cache_dir=place / "cache", max_pixels=9408, video_min_frames=4, video_max_frames=4,
        dataset_num_proc=1, media_num_proc=1, compute_type="fp32", device="cpu", report_to="none",
    )  # fmt: skip


def opened(place: Path) -> tuple[Any, Any]:
    cfg = load([f"{key}={value}" for key, value in words(place).items()])
    rules = vision_rules(cfg, place / "model")
    (source,) = pair_sources(cfg, "train", tokenizer(), rules, PairRules(256), None)
    return source, vision_collate(cfg, tokenizer(), rules, 1, rows=collate_pairs)


def alone(pair: PairSample, rejected: bool) -> Sample:
    """One of the two sequences, its own prompt and picture in front."""
    here = np.arange(len(pair.ids))
    keep = (here < pair.shared) | (here >= pair.rejected) if rejected else here < pair.rejected
    other = (here < pair.scored) if rejected else (here >= pair.scored)
    labels = np.where(other, IGNORE, pair.labels)[keep]
    media = pair.media
    assert media is not None
    return Sample(
        pair.ids[keep],
        labels,
        media=SampleMedia(media.modality[keep], media.positions[keep], media.grids, media.sources),
    )


def test_the_log_probabilities_of_a_pair_are_those_of_two_rows(place: Path) -> None:
    source, collate = opened(place)
    cfg = load([f"{key}={value}" for key, value in (words(place) | dict(stage="VL-SFT")).items()])
    assert len(source) == 6
    assert source.report.pictures == 4
    model = ModelFolder(place / "model").build(dtype=torch.float32)
    pairs = [source.sample(k) for k in range(6)]
    with collate, torch.no_grad(), vision_collate(cfg, tokenizer(), collate.rules, 1) as single:
        batch = collate([Pack(tuple(pairs))])
        together = pair_log_probs(model, batch)
        for k, pair in enumerate(pairs):
            for side in (0, 1):
                one = single([Pack((alone(pair, bool(side)),))])
                logits = model(one.input_ids, one.positions, more=one.more())
                shown = one.labels != IGNORE
                want = logits.log_softmax(-1)[shown].gather(-1, one.labels[shown][:, None]).sum()
                assert float(together[2 * k + side]) == pytest.approx(float(want), abs=2e-4)
    assert not torch.equal(batch.positions[0, :, 0], batch.positions[0, :, 2]), "positions are of three dimensions"


def test_the_second_sequence_goes_on_where_the_prompt_ended(place: Path) -> None:
    source, collate = opened(place)
    collate.close()
    for k in range(4):
        pair = source.sample(k)
        places = pair.media.positions
        assert places[pair.rejected].tolist() == places[pair.shared].tolist()
        assert pair.ids[pair.rejected] == pair.ids[pair.shared]
        assert (pair.media.modality[pair.rejected :] == 0).all()


@pytest.mark.parametrize(
    "keys",
    [
        dict(fine_tuning="LoRA", lora_rank=4, reference_logps="cached"),
        pytest.param(dict(fine_tuning="Full"), marks=pytest.mark.full),
    ],
    ids=["LoRA", "full"],
)
def test_preferences_on_pictures_train(place: Path, tmp_path: Path, keys: dict[str, Any]) -> None:
    steps = 3
    erniekit.run(
        "train", **words(place), **keys, output_dir=tmp_path / "out", max_steps=steps, learning_rate=1e-3,
        logging_steps=1, gradient_accumulation_steps=1, lr_scheduler_type="constant",
    )  # fmt: skip
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-4), "the policy is the reference"
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rejected": None}, "rejected"),
        ({"messages": [{"role": "user", "content": "<image><image>look"}], "images": ["a.png"]}, "more <image>"),
        ({"chosen": [{"role": "assistant", "content": [picture("a.png")]}]}, "belong in the prompt"),
        ({"tools": [{"type": "function"}]}, "tool calls"),
    ],
)
def test_a_pair_that_cannot_be_used_is_a_bad_row_that_says_why(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRow) as error:
        read_vision_pair(row(0) | changed, Path(), "messages")
    assert said in error.value.reason
