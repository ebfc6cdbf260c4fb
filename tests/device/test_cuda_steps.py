"""On one NVIDIA card: training steps in which the host never waits, and what a NaN made on the card does to them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from device_cases.steps import AtOnce, Training

import erniekit
from erniekit.kernels.adamw_slot import Slot
from erniekit.train.hooks import TrainingLoop
from erniekit.train.metrics import LogHook
from erniekit.train.step import StepResult
from support.optimizer_steps import steps_taken

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("micro", "documents"), [(1, 1), (1, 4), (3, 1), (2, 4)])
def test_no_step_waits_for_the_card(micro: int, documents: int) -> None:
    run = Training(micro=micro, documents=documents, strict=3)
    seen = run.fit()
    assert [r.step for r in seen] == list(range(1, 9))
    assert run.notes.late == [True] * 7 + [False]
    assert all(r.applied and r.loss > 0 for r in seen)


@pytest.mark.parametrize("micro", [1, 2])
def test_a_nan_made_on_the_card_skips_exactly_one_update(micro: int) -> None:
    bad = (3 * micro,)  # the first pack of step 4
    late, at_once = Training(bad=bad, micro=micro), Training(AtOnce, bad=bad, micro=micro)
    results = [run.fit() for run in (late, at_once)]
    for seen, run in zip(results, (late, at_once)):
        assert [r.applied for r in seen] == [k != 4 for k in range(1, 9)]
        assert steps_taken(run.optimizer) == 7
        assert run.trainer.state.updates == 7
        assert run.trainer.state.skipped_steps == 1
    assert [r.loss for r in results[0][:3]] == [r.loss for r in results[1][:3]]
    gap = max(abs(a.loss - b.loss) for a, b in zip(*results) if a.applied)
    assert gap < 1e-2  # attention's backward sums in no fixed order on this card
    assert all(bool(p.isfinite().all()) for p in late.model.parameters())


def test_bf16_gradients_of_one_micro_batch_are_never_copied_to_fp32() -> None:
    run = Training(steps=3)
    kinds = set()
    plain = run.optimizer.fused
    assert plain is not None

    class Spy:
        norm = staticmethod(plain.norm)

        def update(self, key: str, slots: Sequence[Slot], *rest: Any) -> None:
            kinds.update((s.grad.dtype, s.master.dtype) for s in slots)
            plain.update(key, slots, *rest)

    run.optimizer.fused = Spy()  # type: ignore[assignment]
    run.fit()
    assert (torch.bfloat16, torch.float32) in kinds
    assert (torch.float32, torch.float32) not in kinds


def test_a_whole_run_of_the_product_waits_for_nothing_between_two_steps() -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "model").mkdir()
        shape = dict(
            model_type="ernie4_5", vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-5, rope_theta=1e4,
            tie_word_embeddings=True, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        (folder / "model" / "config.json").write_text(json.dumps(shape))
        for file in (ROOT / "tests/data/paddle/tokenizer").iterdir():
            (folder / "model" / file.name).write_bytes(file.read_bytes())
        words = " river stone lamp green" * 12
        lengths = range(20, 300, 10)
        made_rows = ({"src": [words[:n]], "tgt": [words[: n // 2]]} for n in lengths)
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made_rows))
        plain, seen = LogHook.after_step, []

        def after_step(hook: LogHook, trainer: TrainingLoop, result: StepResult) -> None:
            plain(hook, trainer, result)
            seen.append(trainer.ahead)
            torch.cuda.set_sync_debug_mode("error" if 3 <= result.step < 10 else "default")

        LogHook.after_step = after_step  # type: ignore[method-assign]
        try:
            erniekit.run(
                "train", model_name_or_path=folder / "model", train_dataset_path=folder / "rows.jsonl", max_steps=12,
                output_dir=folder / "out", continue_training=False, fine_tuning="Full", max_seq_len=512,
                report_to="none", logging_steps=1, save_strategy="no", doctor="off", cache_dir=folder / "cache",
                gradient_accumulation_steps=1,
            )  # fmt: skip
        finally:
            torch.cuda.set_sync_debug_mode("default")
            LogHook.after_step = plain  # type: ignore[method-assign]
        assert seen == [True] * 11 + [False]
