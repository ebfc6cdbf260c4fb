"""Runs from the shipped recipes on a card, with random weights of real shapes and rows of made-up words."""

from __future__ import annotations

import gc
import json
import random
import signal
from functools import cached_property
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
SMALL_RECIPES = ROOT / "examples/configs/ERNIE-4.5-0.3B/sft"
LARGE_RECIPES = ROOT / "examples/configs/ERNIE-4.5-21B-A3B"
TOKENIZER = ROOT / "tests/data/paddle/tokenizer"
SMALL = dict(
    model_type="ernie4_5", vocab_size=103424, hidden_size=1024, intermediate_size=3072, num_hidden_layers=18,
    num_attention_heads=16, num_key_value_heads=2, head_dim=128, rms_norm_eps=1e-5, rope_theta=500000.0,
    tie_word_embeddings=True, max_position_embeddings=131072, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
WORDS = ("river", "stone", "lamp", "green", "seven", "quiet", "window", "orchard", "copper", "thunder", "careful")
ONE_RANK: dict[str, object] = dict(tensor_parallel_degree=1, pipeline_parallel_degree=1, sharding_parallel_degree=1)


def model_folder(folder: Path, name: str, shape: dict) -> Path:
    path = folder / name
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(shape))
    for file in TOKENIZER.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def rows(folder: Path) -> tuple[Path, Path, Path]:
    """Conversations, pairs and plain text of a few hundred to a few thousand tokens."""
    rng = random.Random(0)

    def text(most: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(most // 2, most)))

    chats, pairs, texts = (folder / name for name in ("chats.jsonl", "pairs.jsonl", "texts.jsonl"))
    made = [{"src": [text(80)], "tgt": [text(160)]} for _ in range(400)]
    chats.write_text("".join(json.dumps(row) + "\n" for row in made))
    made = [{"src": [text(300)], "tgt": [], "response": [text(90), text(90)], "sort": [1, 0]} for _ in range(200)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in made))
    texts.write_text("".join(json.dumps({"text": text(900)}) + "\n" for _ in range(400)))
    return chats, pairs, texts


def train(name: str, folder: Path, *words: object, **keys: object) -> list[dict]:
    """The logged steps of a run from a recipe."""
    import erniekit

    gc.collect()
    torch.cuda.empty_cache()
    values = dict(
        eval_dataset_path="", do_eval=False, evaluation_strategy="no", output_dir=folder / name, max_steps=8,
        continue_training=False, gradient_accumulation_steps=1, warmup_steps=2, report_to="none", save_strategy="no",
        logging_dir=folder / "logs", cache_dir=folder / "cache", offload_optim=False, ignore_save_lr_and_optim=True,
        doctor="off", probe_tokens=0, verify="size",
    )  # fmt: skip
    erniekit.run("train", *words, **{**values, **keys})
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


class Bench:
    """A 0.3B model of random weights with the test tokenizer, rows of a few hundred tokens, and runs on them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rows = folder, folder / "rows.jsonl"
        self.model = model_folder(folder, "model", SMALL)
        rng = random.Random(0)

        def text(most: int) -> str:
            return " ".join(rng.choice(WORDS) for _ in range(rng.randint(most // 2, most)))

        made = ({"src": [text(80)], "tgt": [text(160)]} for _ in range(600))
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in made))

    @cached_property
    def trained(self) -> dict[str, object]:
        """Keys of a run that starts from a model with weights: random ones differ from device to device."""
        self.run("base", max_steps=2, learning_rate=1e-9)
        return dict(model_name_or_path=self.folder / "base", continue_training=True)

    def run(self, name: str, recipe: str = "run_sft_8k.yaml", stop_after: int = 0, **keys: object) -> list[dict]:
        """The logged steps of a run; stop_after ends it by SIGTERM, as a cluster would."""
        import erniekit
        from erniekit.errors import Preempted
        from erniekit.train.metrics import LogHook

        values = dict(
            model_name_or_path=self.model, train_dataset_path=self.rows, eval_dataset_path="", do_eval=False,
            evaluation_strategy="no", output_dir=self.folder / name, continue_training=False, max_steps=20,
            gradient_accumulation_steps=1, learning_rate=1e-4, warmup_steps=2, report_to="none", save_strategy="no",
            logging_dir=self.folder / "logs", cache_dir=self.folder / "cache",
        )  # fmt: skip
        plain = LogHook.after_step

        def after_step(hook, trainer, result):  # type: ignore[no-untyped-def]
            plain(hook, trainer, result)
            if result.step == stop_after:
                signal.raise_signal(signal.SIGTERM)

        LogHook.after_step = after_step  # type: ignore[method-assign]
        try:
            erniekit.run("train", SMALL_RECIPES / recipe, **{**values, **keys})
        except Preempted:
            assert stop_after
        finally:
            LogHook.after_step = plain  # type: ignore[method-assign]
        return [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]
