"""Folders for tests of the page in a browser: the demo's model and data, runs of another terminal, pictures to keep."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from erniekit.demo.tiny import make_tiny_model
from erniekit.webui.app import HOME
from erniekit.webui.jobs import Jobs
from erniekit.webui.paths import Roots

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "src" / "erniekit" / "demo" / "data"
TABS = {"en": ("Train", "Runs", "Evaluate", "Chat", "Export"), "zh": ("训练", "运行记录", "评估", "对话", "导出")}


def make_room(folder: Path) -> None:
    """The demo's model and data, an adapter, and beside them runs of another terminal in `others`."""
    make_tiny_model(folder / "demo" / "model")
    (folder / "demo" / "data").mkdir()
    rows = (DEMO / "sft-train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "demo" / "data" / "sft.jsonl").write_text("".join(rows[:40]), encoding="utf-8")
    shutil.copyfile(DEMO / "persona.jsonl", folder / "demo" / "data" / "persona.jsonl")
    write_run(folder.parent / "others" / "first", 1e-3)
    write_run(folder.parent / "others" / "second", 2e-3)
    (folder / "demo" / "adapter").mkdir()
    (folder / "demo" / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "demo/model"}')
    (folder / "demo" / "adapter" / "adapter_model.safetensors").touch()


def end_jobs(folder: Path) -> None:
    """Jobs outlive their page: what a failed test left running is ended here."""
    jobs = Jobs(folder / HOME, Roots([folder]))
    for job in jobs.list():
        jobs.stop(job.id, force=True)


def write_run(folder: Path, rate: float) -> None:
    """An adapter's run of another terminal, as training leaves it, with samples of an evaluation."""
    folder.mkdir(parents=True)
    given = {"model_name_or_path": "demo/model", "learning_rate": rate, "max_steps": 30}
    config = [{"key": key, "value": value, "origin": "key=value"} for key, value in given.items()]
    times = {"started": "2026-11-17T09:00:00+00:00", "finished": "2026-11-17T09:01:00+00:00"}
    (folder / "run.json").write_text(json.dumps({"status": "finished", "total_steps": 30, "config": config, **times}))
    steps = [{"global_step": n, "loss": 50 * rate + 3.0 / n, "learning_rate": rate} for n in range(1, 31)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    sample = {"global_step": 30, "prompt": "2 + 2?", "answer": "<think>easy</think><b>4</b>", "reference": "4"}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "demo/model"}')
    (folder / "adapter_model.safetensors").touch()


def kept_pictures(tmp_path: Path) -> Path:
    """Where screenshots of the docs go: beside the docs when `make test-full` asks for it."""
    kept = ROOT / "docs" / "images" if os.environ.get("FAULT_TABLE") == "1" else tmp_path
    kept.mkdir(parents=True, exist_ok=True)
    return kept


def album(pictures: Path) -> Path:
    """Where pictures go that no page of the docs shows."""
    kept = ROOT / "build" / "webui-pictures" if pictures.is_relative_to(ROOT) else pictures
    kept.mkdir(parents=True, exist_ok=True)
    return kept
