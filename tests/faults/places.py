"""A model, rows and a run with checkpoints that a test may spoil, and the commands that open them, as typed."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from pathlib import Path

from erniekit.cli.main import main
from support.serving import tiny_folder


class Payload:
    """Creates the canary when unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return (Path.touch, (self.canary,))


@dataclass
class Place:
    """What a case may poison: a model, its data, a run with a checkpoint; all its own copy."""

    root: Path

    @property
    def canary(self) -> Path:
        return self.root / "canary"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def run(self) -> Path:
        return self.root / "out"

    def pickled(self) -> bytes:
        return pickle.dumps({"w": Payload(self.canary)})

    def recipe(self, text: str) -> Path:
        path = self.root / "recipe.yaml"
        path.write_text(text)
        return path


def words_of(command: str, place: Place) -> list[str]:
    recipe, model, rows = str(place.root / "recipe.yaml"), str(place.model), str(place.root / "rows.jsonl")
    run = ["--model_name_or_path", model, "--output_dir", str(place.run), "--max_seq_len", "96", "--max_steps", "4"]
    run += ["--train_dataset_path", rows, "--compute_type", "fp32", "--device", "cpu", "--report_to", "none"]
    adapter = str(place.root / "adapter")
    return {
        "chat": ["chat", model, "device=cpu", "max_new_tokens=2", "--prompt", "hello"],
        "server": ["server", model, "device=cpu", "port=0"],
        "eval": ["eval", model, "eval_dataset_path=" + rows, "device=cpu", f"output_dir={place.root}/eval"],
        "doctor": ["doctor", *run],
        "train": ["train", *run, "--overwrite_output_dir", "True"],
        "resume": ["train", *run, "--resume_from_checkpoint", str(place.run / "checkpoint-2")],
        "adapter": ["chat", adapter, "device=cpu", "--prompt", "hello"],
        "adapter export": ["export", adapter, "--model_name_or_path", model],
        "recipe": ["config", recipe],
        **{f"recipe {word}": [word, recipe] for word in ("train", "chat", "server", "export")},
    }[command]


def make_place(paddle: Path, root: Path) -> Place:
    """A model, rows and a run of four steps. The commands have run once: their imports are not part of any time."""
    place = Place(root)
    tiny_folder(paddle, place.model)
    recorded = json.loads((paddle / "data_sft.json").read_text())["sft_rows"]
    rows = [r["row"] for r in recorded if "token_ids" in (r.get("result") or {})]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*words_of("train", place), "--save_steps", "2"]) == 0
    assert main(words_of("chat", place)) == 0
    return place
