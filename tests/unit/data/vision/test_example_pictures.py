"""The example pictures are what their program makes, and every row of them is usable."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from erniekit.data.media.decode import Medium, ReadPatches
from erniekit.data.media.place import located
from erniekit.data.vision.job import open_vision_source
from erniekit.data.vision.rules import VisionRules
from support.seen import LIMITS, tokenizer

EXAMPLES = Path(__file__).resolve().parents[4] / "examples" / "data"


def pixels(folder: Path, name: str) -> np.ndarray:
    place = located(name, folder)
    return ReadPatches(Medium((place,), (1, 4, 4)), LIMITS).work(lambda: None)


def test_the_program_makes_the_files_beside_it(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_pictures", EXAMPLES / "make_pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.make(tmp_path)
    for part in ("train", "eval"):
        made = (tmp_path / f"shapes-{part}.jsonl").read_text(encoding="utf-8")
        assert made == (EXAMPLES / f"shapes-{part}.jsonl").read_text(encoding="utf-8")
        for number in range(0, 64, 13):
            name = f"shapes-{part}.tar/{number}.png"
            assert np.array_equal(pixels(tmp_path, name), pixels(EXAMPLES, name))
    assert not np.array_equal(pixels(EXAMPLES, "shapes-train.tar/0.png"), pixels(EXAMPLES, "shapes-eval.tar/0.png"))


def test_every_row_is_usable_from_the_archive(tmp_path: Path) -> None:
    options = dict(max_seq_len=128, cache_dir=tmp_path, num_proc=1, max_bad_fraction=0.0)
    source = open_vision_source(EXAMPLES / "shapes-eval.jsonl", None, tokenizer(), VisionRules(), **options)
    assert len(source) == 192
    assert set(source.patches) == {16}


def test_erniekits_vl_recipes_have_rows_about_these_pictures(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_vl_demo", EXAMPLES / "make_vl_demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.make(tmp_path)
    made = (tmp_path / module.NAME).read_text(encoding="utf-8")
    assert made == (EXAMPLES / module.NAME).read_text(encoding="utf-8"), "run python examples/data/make_vl_demo.py"
    options = dict(max_seq_len=128, cache_dir=tmp_path, num_proc=1, max_bad_fraction=0.0)
    source = open_vision_source(EXAMPLES / module.NAME, None, tokenizer(), VisionRules(), **options)
    assert len(source) == 192
