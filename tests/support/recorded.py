"""What was recorded from ERNIEKit on Paddle, as files that a run can read: a model with its tokenizer, rows, runs.

Called by tests of runs, alone and on many ranks. No torch in here: a launcher's tests do without it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from support.jsonl import write_jsonl


def tiny_folder(paddle: Path, target: Path, family: str = "dense_old") -> Path:
    """A recorded tiny model with its tokenizer."""
    target.mkdir(parents=True, exist_ok=True)
    for source in (family, "tokenizer"):
        for file in (paddle / source).iterdir():
            shutil.copyfile(file, target / file.name)
    return target


def whole_rows(paddle: Path, target: Path) -> Path:
    """The recorded conversations that are whole: 16 samples of 10 to 79 tokens at max_seq_len 96."""
    recorded = json.loads((paddle / "data_sft.json").read_text())["sft_rows"]
    return write_jsonl(target, [r["row"] for r in recorded if "token_ids" in (r.get("result") or {})])


def whole_pairs(paddle: Path, target: Path) -> Path:
    """The recorded preferences that are whole."""
    recorded = json.loads((paddle / "data_dpo.json").read_text())["rows"]
    return write_jsonl(target, [r["row"] for r in recorded if "input_ids" in (r.get("result") or {})])


def recorded_run(paddle: Path, name: str) -> dict[str, Any]:
    return json.loads((paddle / "e2e.json").read_text())["runs"][name]


def train_from_rows(paddle: Path, name: str, place: Path, **keys: Any) -> list[dict[str, Any]]:
    """The recorded run `name` once more, by `erniekit train` under compat from the recorded rows: what it logged.

    `place` gets the model, rows.jsonl and the run's folder `out`.
    """
    import erniekit

    run = recorded_run(paddle, name)
    file, of = ("data_dpo.json", "rows") if name.startswith("dpo") else ("data_sft.json", "sft_rows")
    recorded = json.loads((paddle / file).read_text())
    lora = {"fine_tuning": "LoRA", "lora_path": paddle / "dense_lora"} if "lora" in name else {"fine_tuning": "Full"}
    erniekit.run(
        "train",
        model_name_or_path=tiny_folder(paddle, place / "model", run["model"]),
        train_dataset_path=write_jsonl(place / "rows.jsonl", [r["row"] for r in recorded[of]]),
        output_dir=place / "out",
        max_seq_len=recorded["max_seq_len"],
        compute_type="fp32",
        compat="erniekit",
        report_to="none",
        device="cpu",
        **lora,
        **run["hyper_parameters"],
        **keys,
    )
    return [json.loads(line) for line in (place / "out" / "metrics.jsonl").read_text().splitlines()]
