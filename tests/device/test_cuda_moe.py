"""On one NVIDIA card: the expert path against its definition, and the 21B-A3B and Llama-13B shapes from recipes.

Random weights of the real shapes. `python tests/device/test_cuda_moe.py` runs it without pytest and prints the figures.
"""

from __future__ import annotations

import gc
import json
import random
import tempfile
import time
from pathlib import Path

import pytest
import torch

from erniekit.bench.workloads import ERNIE_21B, LLAMA_13B

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "examples/configs/ERNIE-4.5-21B-A3B"
WORDS = ("river", "stone", "lamp", "green", "seven", "quiet", "window", "orchard", "copper", "thunder", "careful")

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shapes")


def model_folder(folder: Path, name: str, shape: dict) -> Path:
    path = folder / name
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(shape))
    for file in (ROOT / "tests/data/paddle/tokenizer").iterdir():
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
    began = time.perf_counter()
    erniekit.run("train", *words, **{**values, **keys})
    steps = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    last = steps[-1]
    print(
        f"== {name}: {[round(s['loss'], 4) for s in steps]} {last['tokens_per_second']:.0f} tok/s "
        f"mfu {last.get('mfu')} {last.get('max_memory_allocated', 0):.1f} GiB {last['interval_runtime']:.3f} s/step, "
        f"all in {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    return steps


def test_sorting_and_combining_on_the_card_equal_the_cpu() -> None:
    from erniekit.kernels.moe_permute import by_expert, combine, gather

    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(16, generator=generator)[:3] for _ in range(50)])
    x, weights = (torch.randn(50, n, generator=generator) for n in (8, 3))
    results = []
    for device in ("cpu", "cuda"):
        tokens, shares = (t.detach().to(device).requires_grad_() for t in (x, weights))
        order = by_expert(ids.to(device), 16)
        y = combine(2 * gather(tokens, order, 3), shares, order)
        results.append([y, *torch.autograd.grad(y.pow(2).sum(), (tokens, shares))])
    for a, b in zip(*results):
        assert torch.allclose(a, b.cpu(), atol=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_21b_lora_at_8k_trains_from_its_recipe(folder: Path, recompute: bool) -> None:
    model, (chats, _, _) = model_folder(folder, "21b", ERNIE_21B), rows(folder)
    recipe, keys = CONFIGS / "sft/run_sft_lora_8k.yaml", dict(model_name_or_path=model, train_dataset_path=chats)
    steps = train(f"21b-lora-{recompute}", folder, recipe, **keys, recompute=recompute)
    assert abs(steps[0]["loss"] - 11.55) < 0.6  # ln 103424
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_21b_dpo_lora_at_8k_trains_from_its_recipe(folder: Path) -> None:
    model, (_, pairs, _) = model_folder(folder, "21b", ERNIE_21B), rows(folder)
    recipe, keys = CONFIGS / "dpo/run_dpo_lora_8k.yaml", dict(model_name_or_path=model, train_dataset_path=pairs)
    steps = train("21b-dpo-lora", folder, recipe, **keys, learning_rate=1e-4, recompute=False, **alone())
    assert abs(steps[0]["loss"] - 0.6931) < 1e-3


def test_the_llama_13b_shape_trains_on_text(folder: Path) -> None:
    model, (_, _, texts) = model_folder(folder, "llama", LLAMA_13B), rows(folder)
    words = dict(stage="PT", fine_tuning="Full", max_seq_len=4096, batch_size=4, learning_rate=1e-4, recompute=False)
    keys = dict(model_name_or_path=model, train_dataset_path=texts, compute_type="bf16", split="100")
    steps = train("llama-13b-8-layers", folder, **words, **keys)
    assert abs(steps[0]["loss"] - 11.4) < 0.4  # ln 32000, and half the variance of logits that normal(0, 0.02) gives
    assert steps[-1]["loss"] < steps[0]["loss"]


def alone() -> dict[str, object]:
    return dict(tensor_parallel_degree=1, pipeline_parallel_degree=1, sharding_parallel_degree=1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        test_sorting_and_combining_on_the_card_equal_the_cpu()
        test_21b_lora_at_8k_trains_from_its_recipe(here, recompute=False)
        test_21b_dpo_lora_at_8k_trains_from_its_recipe(here)
        test_the_llama_13b_shape_trains_on_text(here)
