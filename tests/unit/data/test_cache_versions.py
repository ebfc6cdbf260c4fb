"""What is derived from fixed data, under each version's number: whoever changes a result raises the number, and whoever
changes anything else raises nothing."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from erniekit.data import cache_versions
from erniekit.data.compat import CompatOrder, CompatPackStream
from erniekit.data.documents import DocumentRows
from erniekit.data.index import index_text
from erniekit.data.mix import STRATEGIES, SampleOrder
from erniekit.data.mmap_files import open_files
from erniekit.data.pack import PackStream
from erniekit.data.preference import PairRules
from erniekit.data.pretrain import PretrainData
from erniekit.data.text_job import TextJob
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.vision.job import open_vision_source
from support import seen
from support.jsonl import write_jsonl
from support.sources import open_source

# Never edit a line: add one, with the raised number.
RECORDED = {
    "SAMPLES": {1: "b40f17d405cd7a57", 2: "d699ab3f082d5233", 3: "23a8e5ba3c730eb5"},
    "DOCUMENTS": {1: "97d0db3d9bce0404"},
    "ORDER": {1: "2b324ad75325eae8"},
    "VISION": {1: "992e068d43ddff18", 2: "992e068d43ddff18"},
}

CHATS: dict[str, list[dict]] = {
    "erniekit": [
        {"src": ["How far is the harbor?", "And the river?"], "tgt": ["Two miles.", "Three."], "label": [0, 1]},
        {"src": ["Name a colour."], "tgt": ["Blue."], "system": "Be brief."},
        {"src": ["word " * 200], "tgt": ["too long to fit"]},
        {"src": ["Indent it. "], "tgt": ["    x = 1\n"]},
    ],
    "alpaca": [
        {"instruction": "Add.", "input": "1 and 2", "output": "3", "history": [["Hi", "Hello"]]},
        {"instruction": "Add.", "input": "2 and 2", "output": "4", "reasoning_content": "Count."},
    ],
    "messages": [
        {
            "messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "Hi <mask:0> there"},
                {"role": "assistant", "content": "Hello."},
            ]
        }
    ],
    "sharegpt": [{"conversations": [{"from": "human", "value": "Hi "}, {"from": "gpt", "value": " Hello.\n"}]}],
    "prompt_completion": [{"question": "1 + 1?", "answer": " 2", "reasoning_content": "Count."}],
}
PAIRS = [
    {"src": ["Name a bird.", "Another?"], "tgt": ["Owl."], "response": [["Wren."], ["A stone."]], "sort": [1, 0]},
]
TEXTS = [{"text": "The river runs to the harbor."}, {"text": ["Two parts", "of one document"]}, {"text": "x" * 50}]


def digest(arrays: Iterable[np.ndarray]) -> str:
    out = hashlib.sha256()
    for array in arrays:
        out.update(np.ascontiguousarray(array, "<i8").tobytes() + b"|")
    return out.hexdigest()[:16]


def samples(tmp_path: Path, tokenizer: Tokenizer) -> str:
    made: list[np.ndarray] = []
    for compat in (False, True):
        for overlong in ("drop", "truncate"):
            for format, rows in CHATS.items():
                path = write_jsonl(tmp_path / f"{format}.jsonl", rows)
                options = dict(max_seq_len=96, overlong=overlong, compat=compat, num_proc=1, max_bad_fraction=1.0)
                source = open_source(path, format, tokenizer, cache_dir=tmp_path / "cache", **options)
                kept = [source.sample(i) for i in range(len(source.lengths))]
                assert kept, format
                made += [part for sample in kept for part in (sample.ids, sample.labels)]
    path = write_jsonl(tmp_path / "pairs.jsonl", PAIRS)
    options = dict(max_seq_len=96, num_proc=1, pairs=PairRules(64, True))
    pairs = open_source(path, "erniekit", tokenizer, cache_dir=tmp_path / "cache", **options)
    made += [part for i in range(len(pairs)) for part in (pairs.sample(i).ids, pairs.sample(i).labels)]
    assert sum(len(part) for part in made) > 300
    return digest(made)


def documents(tmp_path: Path, tokenizer: Tokenizer) -> str:
    index_text([write_jsonl(tmp_path / "text.jsonl", TEXTS)], tmp_path / "text", TextJob(tokenizer))
    files = open_files(str(tmp_path / "text"))
    return digest([files.tokens(0, files.num_tokens), files.sizes, files.docs])


def order(tmp_path: Path, tokenizer: Tokenizer) -> str:
    sizes, drawn = [7, 30, 11], []
    lengths = [np.arange(n) * 7 % 40 + 3 for n in sizes]
    for shuffle in (True, False):
        for strategy in STRATEGIES:
            plain = SampleOrder(sizes, [0.5, 0.3, 0.2], seed=2**33 + 5, shuffle=shuffle, strategy=strategy)
            drawn += list(plain.take(0, 300))
            for greedy in (True, False):
                stream = PackStream(plain, lengths, 64, greedy=greedy, buffer_size=10)
                drawn += [np.array(stream[k]) for k in range(20)]
    forms = [np.stack([np.arange(n), np.arange(n)], axis=1) for n in sizes]
    old = CompatOrder(forms, [0.5, 0.3, 0.2], seed=5, num_samples_each_epoch=40, shuffle=True, backwards=True)
    drawn += [np.array(CompatPackStream(old, lengths, 64, greedy=True, buffer_size=10)[k]) for k in range(20)]
    index_text([write_jsonl(tmp_path / "text.jsonl", TEXTS * 9)], tmp_path / "text", TextJob(tokenizer))
    files = open_files(str(tmp_path / "text"))
    for masked in (True, False):
        rows = DocumentRows(files, range(20), 16, seed=9, masked=masked)
        drawn += [np.array(rows.members(j)) for j in range(2 * rows.rows)]
        blended = PretrainData([files, files], [0.7, 0.3], max_seq_len=16, seed=9, masked=masked)
        drawn += [np.array(blended.stream[j]) for j in range(60)]
    return digest(drawn)


def vision(tmp_path: Path, tokenizer: Tokenizer) -> str:
    """Lossless media alone: what FFmpeg makes of others depends on the processor."""
    lossless = [row for row in seen.rows().values() if "mp4" not in str(row)]
    path = write_jsonl(tmp_path / "rows.jsonl", lossless)
    shutil.copytree(seen.MEDIA, tmp_path / "media")
    made: list[np.ndarray] = []
    for rules in (seen.rules(), replace(seen.rules(), compat=False, upright=True, positions="transformers")):
        options = dict(max_seq_len=256, num_proc=1, max_bad_fraction=1.0, cache_dir=tmp_path / "cache")
        source = open_vision_source(path, None, seen.tokenizer(), rules, **options)
        for i in range(len(source)):
            sample = source.sample(i)
            made += [sample.ids, sample.labels, sample.media.modality, sample.media.positions, sample.media.grids]
            made += [seen.patches(sample.media.sources)] if sample.media.sources else []
    assert sum(len(part) for part in made) > 5000
    return digest(made)


@pytest.mark.parametrize("name", RECORDED)
def test_a_changed_result_has_another_number(name: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    made: dict[str, Callable[[Path, Tokenizer], str]] = {
        "SAMPLES": samples, "DOCUMENTS": documents, "ORDER": order, "VISION": vision
    }  # fmt: skip
    number, got = getattr(cache_versions, name), made[name](tmp_path, tokenizer)
    assert number == max(RECORDED[name]), "a raised number is recorded here"
    assert got == RECORDED[name][number], f"results changed: raise cache_versions.{name} and record {got!r} under it"
