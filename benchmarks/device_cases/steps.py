"""A training loop on a card, without files: a small decoder, random rows, results late or at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from erniekit.checkpoint.state import TrainState
from erniekit.data.collate import collate
from erniekit.data.types import Batch, Pack, Sample
from erniekit.devices import pick
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
from erniekit.train.hooks import Hook, TrainingLoop
from erniekit.train.step import StepResult, TrainStep
from erniekit.train.trainer import Trainer

ERNIE_03B = DecoderConfig(
    family="ernie4_5", vocab_size=103424, hidden_size=1024, intermediate_size=3072, num_layers=18, num_heads=16,
    num_kv_heads=2, head_dim=128, rms_norm_eps=1e-5, rope_theta=5e5, rope_style="pairs", tie_word_embeddings=True,
    max_positions=131072,
)  # fmt: skip
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

    def launched(self, trainer: TrainingLoop, step: Any) -> None:
        self.steps += 1
        if self.steps == self.first:
            torch.cuda.set_sync_debug_mode("error")

    def waits_for(self, trainer: TrainingLoop, step: int) -> bool:
        return False

    def after_step(self, trainer: TrainingLoop, result: StepResult) -> None:
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
