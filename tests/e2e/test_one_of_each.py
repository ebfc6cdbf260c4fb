"""A run of one step on one row: what is printed counts one thing as one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from erniekit.cli.main import main
from erniekit.demo.tiny import make_tiny_model

THINGS = "answer|checkpoint|document|file|key|layer|pair|projection|rank|row|sample|sequence|step|tensor|turn"
WRONG = re.compile(rf"(?<![\d.,/-])1 (?:[a-z-]+ )?(?:{THINGS})s\b.*")


def test_nothing_is_printed_as_one_of_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    model = make_tiny_model(tmp_path / "model", layers=1)
    rows, output = tmp_path / "rows.jsonl", tmp_path / "run"
    said = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}]
    rows.write_text(json.dumps({"messages": said, "unread": 1}) + "\n")
    keys = [f"model_name_or_path={model}", "device=cpu", "report_to=none"]
    train = [*keys, f"train_dataset_path={rows}", f"eval_dataset_path={rows}", f"output_dir={output}", "max_steps=1"]
    more = ["save_steps=1", "save_total_limit=1", "batch_size=1", "gradient_accumulation_steps=1", "eval_generate=1"]
    assert main(["data", str(rows)]) == 0
    assert main(["train", *train, *more, "lora_target_modules=q_proj"]) == 0
    assert main(["export", *keys, f"output_dir={output}"]) == 0
    text = "".join(capsys.readouterr())
    assert "1 step, 1 sequence each" in text, "there is something to find"
    assert "1 layer, " in text
    assert [found[0] for found in WRONG.finditer(text)] == []
