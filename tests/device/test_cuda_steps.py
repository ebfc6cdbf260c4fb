"""On one NVIDIA card: training steps in which the host never waits, and what a NaN made on the card does to them.

`python tests/device/test_cuda_steps.py` runs it without pytest and prints the figures; a part that fails is told in a
line and the rest goes on.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import erniekit
from erniekit.checkpoint.state import TrainState
from erniekit.data.collate import collate
from erniekit.data.types import Batch, Pack, Sample
from erniekit.devices import pick
from erniekit.kernels.adamw import Slot
from erniekit.losses.causal import causal_loss
from erniekit.models.config import DecoderConfig
from erniekit.models.init import init_weights
from erniekit.models.layers.decoder import Decoder
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.schedule import Schedule
from erniekit.parallel.engine import Engine
from erniekit.parallel.mesh import World
from erniekit.train.guard import FiniteGuard, Signals
from erniekit.train.hooks import Hook
from erniekit.train.metrics import LogHook
from erniekit.train.step import StepResult, TrainStep
from erniekit.train.trainer import Trainer
from support.optimizer_steps import steps_taken

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]

ROOT = Path(__file__).resolve().parents[2]
CONFIG = DecoderConfig(
    family="ernie4_5", vocab_size=4096, hidden_size=256, intermediate_size=512, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=64, rms_norm_eps=1e-5, rope_theta=1e4, rope_style="pairs", tie_word_embeddings=True,
    max_positions=4096,
)  # fmt: skip


class AtOnce(TrainStep):
    late = False


class Strict(Hook):
    """From the launch of step `first` on, any wait of the host is an error; what it saw of the loop."""

    def __init__(self, first: int | None) -> None:
        self.first, self.seen = first, []
        self.late: list[bool] = []
        self.steps = 0

    def launched(self, trainer: Trainer, step: Any) -> None:
        self.steps += 1
        if self.steps == self.first:
            torch.cuda.set_sync_debug_mode("error")

    def waits_for(self, trainer: Trainer, step: int) -> bool:
        return False

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self.seen.append(result)
        self.late.append(trainer.ahead)


def rows(pack: int, documents: int, length: int, vocabulary: int) -> list[Sample]:
    rng = np.random.default_rng(pack)
    each = length // documents
    return [Sample(*(rng.integers(3, vocabulary, each).astype(np.int32) for _ in range(2))) for _ in range(documents)]


class Training:
    def __init__(
        self,
        kind: type[TrainStep] = TrainStep,
        config: DecoderConfig = CONFIG,
        steps: int = 8,
        micro: int = 1,
        documents: int = 1,
        length: int = 512,
        bad: Sequence[int] = (),
        strict: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.micro, self.documents, self.length, self.config = micro, documents, length, config
        self.model = Decoder(config)
        init_weights(self.model, 0, 0.02)
        self.model.to("cuda", dtype).train()
        self.optimizer = AdamW(make_groups(self.model.named_parameters(), config.num_layers, 0.1), (0.9, 0.95), 1e-8)
        spoilt = {k: torch.full((), float("nan"), device="cuda") for k in bad}
        nothing = torch.zeros((), device="cuda")

        def loss(model: torch.nn.Module, batch: Batch, *rest: Any, **more: Any) -> torch.Tensor:
            return causal_loss(model, batch, *rest, **more) + spoilt.get(batch.pack_indices[0], nothing)

        whole = loss if bad else causal_loss
        engine = Engine([(0, self.model)], World(device_type="cuda"), pick("gpu"), whole, dtype=dtype)
        self.notes = Strict(strict)
        self.trainer = Trainer(
            kind(engine, self.optimizer, Schedule("constant", 1e-3, 99)), TrainState(), self.batches, steps, micro,
            [self.notes], FiniteGuard(5), Signals(), lambda state: None,
        )  # fmt: skip

    def batches(self, pack: int) -> Iterator[list[Batch]]:
        while True:
            packs = [
                Pack(tuple(rows(p, self.documents, self.length, self.config.vocab_size)), p)
                for p in range(pack, pack + self.micro)
            ]
            yield [collate([each]) for each in packs]
            pack += self.micro

    def fit(self) -> list[StepResult]:
        try:
            self.trainer.fit()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return self.notes.seen


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
    print(f"late and at once, {micro} micro-batches: losses {gap:.1e} apart")
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


def test_the_clock_of_steps_at_once_and_late() -> None:
    config = DecoderConfig(
        family="ernie4_5", vocab_size=103424, hidden_size=1024, intermediate_size=3072, num_layers=18, num_heads=16,
        num_kv_heads=2, head_dim=128, rms_norm_eps=1e-5, rope_theta=5e5, rope_style="pairs", tie_word_embeddings=True,
        max_positions=131072,
    )  # fmt: skip
    for length in (2048, 8192):
        for kind, name in ((AtOnce, "at once"), (TrainStep, "late")):
            run = Training(kind, config, steps=4, length=length)
            run.fit()
            torch.cuda.synchronize()
            run.trainer.max_steps = 16
            began = time.perf_counter()
            run.fit()
            torch.cuda.synchronize()
            took = (time.perf_counter() - began) / 12
            print(f"  0.3B eager, 1 x {length}: {took * 1e3:6.1f} ms a step, results {name}")


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

        def after_step(hook: LogHook, trainer: Trainer, result: StepResult) -> None:
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


if __name__ == "__main__":
    from cases import run_all

    run_all(globals())
