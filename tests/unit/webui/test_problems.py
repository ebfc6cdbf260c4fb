"""What is wrong, in both languages: real mistakes of a form come out in Chinese, and nothing is lost of the others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from erniekit.config.flat import KEYS
from erniekit.webui.forms import check
from erniekit.webui.paths import Roots
from erniekit.webui.problems import problem_text
from erniekit.webui.translations import translate

CHINESE = re.compile(r"[\u4e00-\u9fff]")
SENTENCE = re.compile(r"[A-Za-z][a-z']+ [a-z']{2,} [a-z']{2,}")
MISTAKES: list[dict[str, Any]] = [
    {"model_name_or_path": ""}, {"learning_rate": "abc"}, {"max_steps": "x"}, {"lora_rank": -1}, {"device": "tpu"},
    {"sharding": ["x"]}, {"compute_type": "int3"}, {"load_best_model_at_end": True}, {"packing": "zz"},
    {"max_seq_len": 0}, {"output_dir": "/etc/x"}, {"zzz": 1}, {"host": "0"}, {"nproc_per_node": 100_000},
    {"model_name_or_path": "a\x01"},
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: next(iter(mistake)))
def test_a_mistake_in_the_form_is_said_in_chinese(mistake: dict[str, Any], tmp_path: Path) -> None:
    good = {"model_name_or_path": "model", "train_dataset_path": ["a.jsonl"]}
    problems = check({**good, **mistake}, "train.sft", Roots([tmp_path]))
    assert problems
    for problem in problems:
        text = problem_text(problem.key, problem.what, problem.fix, "zh")
        assert CHINESE.search(text.what)
        assert not SENTENCE.search(f"{text.what} {text.fix}"), text
        assert not text.original, "the sentence says all of it"
        english = problem_text(problem.key, problem.what, problem.fix, "en")
        assert problem.what.endswith(english.what)


def test_an_error_nobody_has_translated_is_said_in_general_and_kept_word_for_word() -> None:
    text = problem_text("learning_rate", "the moon is in the way", "wait a month", "zh")
    assert text.what == "学习率：此项有误"
    assert text.original == "the moon is in the way (wait a month)"
    assert problem_text("", "odd", "", "zh").what == "操作未能完成"


def test_a_missing_key_is_explained_as_the_field_of_its_page_is() -> None:
    key, what, fix = "output_dir", "output_dir must be given", KEYS["output_dir"].help
    assert "LoRA" in problem_text(key, what, fix, "zh", "export").fix
    assert problem_text(key, what, fix, "zh", "export").what.startswith("训练结果")
    assert problem_text(key, what, fix, "en", "export").fix == translate("export.output_dir.info", "en")
    assert problem_text(key, what, fix, "en").fix == fix
