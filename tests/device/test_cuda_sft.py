"""On one NVIDIA card: packed attention against its definition, and 0.3B SFT at 8K from the shipped recipe against the CPU.

`python tests/device/test_cuda_sft.py [cpu steps]` runs it without pytest and prints the curves.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "examples/configs/ERNIE-4.5-0.3B/sft/run_sft_8k.yaml"
SHAPE = dict(
    model_type="ernie4_5", vocab_size=103424, hidden_size=1024, intermediate_size=3072, num_hidden_layers=18,
    num_attention_heads=16, num_key_value_heads=2, head_dim=128, rms_norm_eps=1e-5, rope_theta=500000.0,
    tie_word_embeddings=True, max_position_embeddings=131072, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
# bf16 keeps 8 bits: a mean over thousands of token losses near 11 agrees to a few 1e-3.
BF16_LOSS = 2e-2

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]


def make_inputs(folder: Path) -> tuple[Path, Path]:
    """A 0.3B config with the test tokenizer, and rows of a few hundred tokens each."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPE))
    for file in (ROOT / "tests/data/paddle/tokenizer").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    rng = random.Random(0)
    words = "river stone lamp green seven quiet window orchard copper thunder careful follows paints lifts".split()
    text = lambda n: " ".join(rng.choice(words) for _ in range(rng.randint(n // 2, n)))  # noqa: E731
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"src": [text(80)], "tgt": [text(160)]}) + "\n" for _ in range(600)))
    return model, rows


def curve(folder: Path, model: Path, rows: Path, name: str, **keys: object) -> list[dict]:
    import erniekit

    values = dict(
        model_name_or_path=model, train_dataset_path=rows, eval_dataset_path="", do_eval=False,
        evaluation_strategy="no", output_dir=folder / name, continue_training=False, gradient_accumulation_steps=1,
        learning_rate=1e-4, warmup_steps=2, max_steps=5, report_to="none", save_strategy="no",
        logging_dir=folder / "logs", cache_dir=folder / "cache", ignore_save_lr_and_optim=True,
    )  # fmt: skip
    erniekit.run("train", RECIPE, **{**values, **keys})
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def test_packed_attention_on_the_card_equals_its_definition() -> None:
    from erniekit.kernels.attention import attention, reference

    generator = torch.Generator("cuda").manual_seed(0)
    for heads, kv in ((16, 2), (20, 4), (4, 4)):
        bounds = torch.tensor([0, 1, 130, 131, 512, 900, 1024], dtype=torch.int32, device="cuda")
        q, k, v = (
            torch.randn(2, 512, n, 128, device="cuda", dtype=torch.bfloat16, generator=generator, requires_grad=True)
            for n in (heads, kv, kv)
        )
        weight = torch.randn(2, 512, heads, 128, device="cuda", generator=generator)
        got = attention(q, k, v, bounds, 388)
        grads = torch.autograd.grad((got.float() * weight).sum(), (q, k, v))
        q32, k32, v32 = (t.detach().float().requires_grad_() for t in (q, k, v))
        want = reference(q32, k32, v32, bounds)
        want_grads = torch.autograd.grad((want * weight).sum(), (q32, k32, v32))
        for a, b in zip((got, *grads), (want, *want_grads)):
            error = float((a.float() - b).norm() / b.norm())
            assert error < 1e-2, f"{heads}/{kv} heads: relative error {error}"  # bf16 inputs: 2e-3 to 5e-3 is right


def test_the_curve_on_the_card_in_bf16_equals_the_cpu_in_fp32(tmp_path: Path, cpu_steps: int = 3) -> None:
    model, rows = make_inputs(tmp_path)
    card = curve(tmp_path, model, rows, "bf16", max_steps=20)
    exact = curve(tmp_path, model, rows, "fp32", max_steps=20, compute_type="fp32")
    cpu = curve_of_few(tmp_path, model, rows, cpu_steps)
    for name, run in (("card bf16", card), ("card fp32", exact), ("cpu fp32", cpu)):
        print(name, [round(r["loss"], 5) for r in run])
    print("tokens/s", [round(r["tokens_per_second"]) for r in card][-5:], "mfu", card[-1].get("mfu"))
    print("GiB", card[-1]["max_memory_allocated"], "seconds a step", card[-1]["interval_runtime"])
    for a, b in zip(card, cpu):
        assert abs(a["loss"] - b["loss"]) < BF16_LOSS
    for a, b in zip(exact, cpu):
        assert abs(a["loss"] - b["loss"]) < 1e-3  # the same arithmetic, summed in another order
    assert card[-1]["loss"] < card[0]["loss"] - 0.5, "it learns"


def curve_of_few(folder: Path, model: Path, rows: Path, steps: int) -> list[dict]:
    """The first steps of the same 20-step schedule: stopped by SIGTERM, as a cluster would."""
    import signal

    from erniekit.errors import Preempted
    from erniekit.train.metrics import LogHook

    plain = LogHook.after_step

    def after_step(self, trainer, result):  # type: ignore[no-untyped-def]
        plain(self, trainer, result)
        if result.step == steps:
            signal.raise_signal(signal.SIGTERM)

    LogHook.after_step = after_step  # type: ignore[method-assign]
    try:
        curve(folder, model, rows, "cpu", compute_type="fp32", device="cpu", max_steps=20, doctor="off")
    except Preempted:
        pass
    finally:
        LogHook.after_step = plain  # type: ignore[method-assign]
    return [json.loads(line) for line in (folder / "cpu" / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    test_packed_attention_on_the_card_equals_its_definition()
    print("attention ok")
    with tempfile.TemporaryDirectory() as folder:
        test_the_curve_on_the_card_in_bf16_equals_the_cpu_in_fp32(Path(folder), int(sys.argv[1]) if sys.argv[1:] else 3)
