"""The reference a preference is measured against: a second model, the model without its adapters, or log-probabilities
computed once and kept on disk. Called by recipes/dpo.py while the policy still has its first weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from erniekit import heartbeat
from erniekit.checkpoint.published import check_published
from erniekit.config import RunConfig
from erniekit.config.flat import KEYS
from erniekit.data import cache_versions, sealed
from erniekit.data.loader import BatchLoader
from erniekit.data.mix import SampleOrder
from erniekit.data.pack import PackStream
from erniekit.data.token_cache import PairSource
from erniekit.data.types import Batch
from erniekit.errors import DataError
from erniekit.files.cache_folder import default_cache_dir
from erniekit.log import emit, warn
from erniekit.lora.adapters_off import adapters_off
from erniekit.losses.dpo import pair_log_probs
from erniekit.models.layers.rounding import StaticRounding
from erniekit.parallel.engine import Engine
from erniekit.parallel.gradients import local
from erniekit.recipes.build import build
from erniekit.recipes.built import Built
from erniekit.recipes.fp8_training import rounded_layers, scales_of
from erniekit.recipes.weights import Fill
from erniekit.train.hooks import Hook, TrainingLoop
from erniekit.train.step import StepResult

if TYPE_CHECKING:
    from erniekit.recipes.datasets import TrainData
    from erniekit.recipes.stage import TrainingStage

LOG_PROBS = "log_probs.npy"
SumOverRanks = Callable[[torch.Tensor], torch.Tensor]
# A sum of log-probabilities over a thousand bf16 tokens moves so much between two kernels; another model moves it more.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2.0}


class Reference:
    """Fills in each pair's reference log-probabilities; those a batch has already are kept."""

    def __init__(
        self,
        engine: Engine,
        sum_over_cp: SumOverRanks | None,
        chunk: int,
        off: Callable[[], AbstractContextManager[None]] = nullcontext,
        own: Built | None = None,
    ) -> None:
        """off: what makes the engine's model the reference. own: the second model, where it is one."""
        self.engine, self.off, self.own = engine, off, own
        self.kept = False  # the data brings all of it
        self._measure = partial(pair_log_probs, sum_over_cp=sum_over_cp, chunk=chunk)

    def __call__(self, batches: Sequence[Batch]) -> list[Batch]:
        return [self._with_reference(batch) for batch in batches]

    def _with_reference(self, batch: Batch) -> Batch:
        pairs = batch.pairs
        if pairs is None or pairs.reference is not None:
            return batch
        if self.kept and not pairs.count:  # a rank's filler: the others, whose pairs are known, run no model now
            return replace(batch, pairs=replace(pairs, reference=torch.zeros(0)))
        return replace(batch, pairs=replace(pairs, reference=self.log_probs(batch)))

    def log_probs(self, batch: Batch) -> torch.Tensor:
        """[2 * pairs]. Of a batch with mismatched sequences each part has one of the two and zeros for the other."""
        assert batch.pairs is not None
        was_training = self.engine.model.training
        self.engine.train(False)
        with self.off():
            out = self.engine.score(batch, self._measure, 2 * batch.pairs.count)
            if batch.mismatched is not None:
                out = out + self.engine.score(batch.mismatched, self._measure, 2 * batch.pairs.count)
        self.engine.train(was_training)
        return out


def make_reference(
    cfg: RunConfig, built: Built, data: TrainData, stage: TrainingStage, sum_over_cp: SumOverRanks | None
) -> Reference:
    chunk = cfg.memory.loss_subbatch_seqlen
    policy = Reference(built.engine, sum_over_cp, chunk, partial(adapters_off, built.engine.parts))
    if cfg.dpo.reference_logps == "cached":
        keep(cfg, built, data, policy)
        policy.kept = True
        return policy
    if built.lora:
        emit("reference the model without its adapters")
        return policy
    other = frozen_copy(built, stage)
    if cfg.precision.compute_type == "fp8":  # its products are rounded as the policy's were at first
        scales_of(cfg, other, data.first_batch())
    emit("reference a second copy of the model, frozen")
    return Reference(other.engine, sum_over_cp, chunk, own=other)


def frozen_copy(built: Built, stage: TrainingStage, fill: Fill | None = None) -> Built:
    """A second model, spread as the first. fill: as build has it."""
    other = build(built.plan, stage, fill=fill)
    for _, param in other.parameters():
        param.requires_grad_(False)
    return other


class RefreshReference(Hook):
    """Copies the policy into the reference at every interval of ref_model_update_steps."""

    def __init__(self, reference: Built, policy: Built, every: int, output: Path) -> None:
        self.reference, self.policy, self.every, self.output = reference, policy, every, output

    def on_start(self, trainer: TrainingLoop) -> None:
        """A resumed run has the reference of the run that was stopped, where a checkpoint still holds it."""
        step = trainer.state.step
        last = step - step % self.every
        if not last:
            return  # the model the run began with, which it is
        saved = self.output / f"checkpoint-{last}"
        if last < step and all(self.policy.world.gather(saved.is_dir())):
            if self.policy.world.rank == 0:
                check_published(saved)
            self.reference.read_weights(saved)
            emit(f"reference the policy of step {last}, from {saved.name}")
            return
        self._copy()
        if last < step:
            warn(
                f"the reference was the policy of step {last}, and {saved.name} is gone: from here on it is the policy "
                f"of step {step}, so this is not the run that was stopped. save_steps: {self.every} would keep it"
            )

    def waits_for(self, trainer: TrainingLoop, step: int) -> bool:
        return step % self.every == 0

    def after_step(self, trainer: TrainingLoop, result: StepResult) -> None:
        if self.waits_for(trainer, result.step):
            self._copy()

    @torch.no_grad()
    def _copy(self) -> None:
        for (_, weight), (_, other) in zip(self.policy.parameters(), self.reference.parameters()):
            local(other).copy_(local(weight))


# --- computed once ---


def keep(cfg: RunConfig, built: Built, data: TrainData, policy: Reference) -> None:
    """Gives every pair of the data its reference, from the cache or computed now; the first pack is compared live."""
    sources = [source for source in (*data.sources, *data.evaluation) if isinstance(source, PairSource)]
    cache = Path(cfg.data.cache_dir or default_cache_dir()) / "reference"
    for source in sources:
        folder = cache / _key(cfg, built, source)
        found = built.world.broadcast(_read(folder) if built.world.is_main else None)
        if found is None or found.shape != (len(source.lengths), 2):
            emit(f"reference log-probabilities of {Path(source.path).name}: computed once, kept in {cache}")
            found = _compute(cfg, built, data, source, policy)
            if built.world.is_main:
                _write(folder, found)
        source.reference = found
    _compare(built, data, policy)


def _read(folder: Path) -> np.ndarray | None:
    if not sealed.is_sealed(folder):
        return None  # none, or damaged: it is made again
    try:
        found: np.ndarray = np.load(folder / LOG_PROBS, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return found


def _write(folder: Path, values: np.ndarray) -> None:
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        np.save(temporary / LOG_PROBS, values)
        sealed.seal(temporary)
        if folder.exists():  # damaged, or of other pairs
            sealed.clear(folder, (LOG_PROBS, sealed.SEAL))
        sealed.publish(temporary, folder)
    except OSError as error:  # this run has them; the next one will have to compute them again
        warn(f"the reference's log-probabilities could not be kept in {folder.parent}: {error.strerror or error}")
        shutil.rmtree(temporary, ignore_errors=True)


def _key(cfg: RunConfig, built: Built, source: PairSource) -> str:
    """Of the data's tokens, the model and how it computes: by the numbers of a run whose products are rounded otherwise
    this one would not start at ln 2."""
    layout = built.world.layout
    settings = {
        "version": cache_versions.REFERENCE,
        "data": source.fingerprint,
        "model": built.base,
        "config": str(built.folder.config),
        "dtype": str(built.dtype),
        "products": {name: cfg[name] for name, k in KEYS.items() if k.section in ("precision", "quant") and k.fixed},
        "scales": _scales(built) if cfg.precision.compute_type == "fp8" else None,
        "device": built.device.name.partition(",")[0],  # of a CPU without its cores
        "kernels": [cfg.model.attention, *cfg.model.kernels],
        "layout": [layout.tp, layout.cp, layout.sequence_parallel, layout.experts_over],
        **({"frozen_base": f"{cfg.lora.frozen_base}, {cfg.lora.frozen_products}"} if cfg.lora.packed_base else {}),
    }
    return hashlib.blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _scales(built: Built) -> dict[str, float]:
    """Of FP8 training, of all ranks' layers. They come from the run's first tokens: from its data, seed and packing."""
    here = {
        name: float(layer.rounding.input_scale)
        for part in built.engine.parts
        for name, layer in rounded_layers(part)
        if isinstance(layer.rounding, StaticRounding) and layer.weight is not None
    }
    return {name: scale for rank in built.world.gather(here) for name, scale in rank.items()}


def _compute(cfg: RunConfig, built: Built, data: TrainData, source: PairSource, policy: Reference) -> np.ndarray:
    """One pass in file order; each data rank has its share, and all get the whole."""
    count = len(source.lengths)
    order = SampleOrder([count], seed=0, shuffle=False, strategy="concat")
    stream = PackStream(order, [source.lengths], data.stream.max_seq_len, greedy=False, epochs=1)
    world = built.world
    loader = BatchLoader(
        stream,
        [source],
        1,
        dp_rank=world.layout.data_rank(world.rank),
        dp_size=world.layout.data_ranks,
        collate=data.collate,
        **data.padding(cfg),
    )
    table = np.zeros((count, 2), np.float32)
    for batch in heartbeat.each(batch for step in loader for batch in step):
        values = policy.log_probs(batch)
        members = [index for pack in batch.pack_indices for _, index in stream[pack]]
        if batch.pairs is not None and batch.pairs.count:
            table[members] = values.view(-1, 2).float().cpu().numpy()
    total: np.ndarray = sum(world.gather(table)) / (world.size // world.layout.data_ranks)
    return total.astype(np.float32)


def _compare(built: Built, data: TrainData, policy: Reference) -> None:
    """The kept numbers of the first pack against the model as it is: an error is another model's cache."""
    batch = data.first_batch()
    if batch.pairs is None or batch.pairs.reference is None:
        return
    live = policy.log_probs(batch).float().cpu()
    apart = float((live - batch.pairs.reference).abs().max())
    if apart > TOLERANCE[built.dtype]:
        raise DataError(
            f"kept reference log-probabilities differ from the model's by {apart:.3g}",
            where="reference_logps: cached",
            fix="delete the folder `reference` in the cache, or use reference_logps: live",
        )
    emit(f"reference kept log-probabilities equal the live ones to {apart:.1e}")
