"""Config -> token sources -> order -> packs -> loader, for training and evaluation. For the stages in recipes/."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from erniekit.config import RunConfig
from erniekit.data.collate import collate
from erniekit.data.compat import CompatOrder, CompatPackStream
from erniekit.data.loader import BatchLoader
from erniekit.data.mix import SampleOrder
from erniekit.data.pack import PackStream
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.tokens import TokenSource, open_sources
from erniekit.data.types import Batch, Pack
from erniekit.errors import ConfigError
from erniekit.parallel.mesh import World


@dataclass
class TrainData:
    sources: list[TokenSource]
    stream: PackStream
    evaluation: list[TokenSource]
    packs_per_step: int
    packs_per_epoch: int
    max_steps: int
    log_every: int
    save_every: int
    eval_every: int
    pad_id: int
    world: World
    length_multiple: int = 1  # what a row's length must divide by, in this layout

    def fingerprints(self) -> list[str]:
        return [source.folder.name for source in self.sources]

    def pack(self, number: int) -> Pack:
        return Pack(tuple(self.sources[s].sample(i) for s, i in self.stream[number]), number)

    def first_batch(self) -> Batch:
        """The run's very first pack, the same on every rank."""
        return collate([self.pack(0)], pad_id=self.pad_id)

    def padding(self, cfg: RunConfig) -> dict[str, Any]:
        """Rows as long as their longest, or all of one length where shapes are fixed: a compiled model recompiles
        for none of them, and pipeline stages agree on them beforehand."""
        multiple = math.lcm(8, self.length_multiple)
        whole = -(-cfg.data.max_seq_len // self.length_multiple) * self.length_multiple
        fixed = cfg.model.compile or self.world.layout.pp > 1
        return {"pad_id": self.pad_id, "pad_multiple": multiple, "pad_to": whole if fixed else None}

    def loader(self, cfg: RunConfig, start_pack: int) -> BatchLoader:
        return BatchLoader(
            self.stream,
            self.sources,
            cfg.train.per_device_train_batch_size,
            cfg.train.gradient_accumulation_steps,
            dp_rank=self.world.layout.data_rank(self.world.rank),
            dp_size=self.world.layout.data_ranks,
            start_pack=start_pack,
            num_workers=max(1, cfg.data.dataloader_num_workers),
            prefetch=cfg.data.prefetch_factor,
            **self.padding(cfg),
        )


def open_data(cfg: RunConfig, tokenizer: Tokenizer, output: Path, world: World) -> TrainData:
    d, t = cfg.data, cfg.train
    if not d.train_dataset_path:
        raise ConfigError("no training data", where="train_dataset_path", fix="name a file, e.g. --data my.jsonl")
    compat = t.compat == "erniekit"
    # One rank tells of bad rows; all read the same cache, made by whoever comes first.
    bad = output / "bad_rows.jsonl" if world.is_main else None
    sources = sources_for(cfg, "train", tokenizer, bad)
    lengths = [source.lengths for source in sources]
    options: dict[str, Any] = dict(packing=d.packing, greedy=d.greedy_intokens, buffer_size=d.buffer_size)
    probs = list(d.train_dataset_prob) or [1.0] * len(sources)
    if compat:
        order = CompatOrder(
            [source.forms() for source in sources],
            probs,
            seed=t.seed,
            num_samples_each_epoch=d.num_samples_each_epoch,
            shuffle=d.random_shuffle,
        )
        stream: PackStream = CompatPackStream(order, lengths, d.max_seq_len, **options)
    else:
        plain = SampleOrder(
            [len(s) for s in sources], probs, seed=t.seed, shuffle=d.random_shuffle, strategy=d.mix_strategy
        )
        stream = PackStream(plain, lengths, d.max_seq_len, **options)
    per_step = t.per_device_train_batch_size * t.gradient_accumulation_steps * world.layout.data_ranks
    wants_eval = bool(d.eval_dataset_path) and (t.do_eval or t.evaluation_strategy != "no")
    bad_eval = output / "bad_eval_rows.jsonl" if world.is_main else None
    evaluation = sources_for(cfg, "eval", tokenizer, bad_eval) if wants_eval else []
    per_epoch = max(1, stream.count_packs(1))
    steps_per_epoch = max(1, math.ceil(per_epoch / per_step))
    max_steps = t.max_steps
    if max_steps <= 0:
        max_steps = max(1, math.ceil(stream.count_packs(t.num_train_epochs) / per_step))
    return TrainData(
        sources,
        stream,
        evaluation,
        per_step,
        per_epoch,
        max_steps,
        every(cfg.tracking.logging_strategy, cfg.tracking.logging_steps, steps_per_epoch),
        every(cfg.checkpoint.save_strategy, cfg.checkpoint.save_steps, steps_per_epoch),
        every(t.evaluation_strategy, t.eval_steps or max_steps, steps_per_epoch),
        tokenizer.pad_id if tokenizer.pad_id is not None else 0,
        world,
    )


def every(strategy: str, steps: int, steps_per_epoch: int) -> int:
    """Steps between two of something; 0 means never on schedule."""
    return {"no": 0, "steps": steps, "epoch": steps_per_epoch}[strategy]


def sources_for(cfg: RunConfig, which: str, tokenizer: Tokenizer, bad_rows: Path | None) -> list[TokenSource]:
    """The train or eval files, tokenised; their bad rows listed in one file."""
    d = cfg.data
    paths, formats = cfg[f"{which}_dataset_path"], cfg[f"{which}_dataset_type"]
    if formats and len(formats) != len(paths):
        raise ConfigError(
            f"{len(paths)} files but {len(formats)} formats",
            where=f"{which}_dataset_path, {which}_dataset_type",
            fix="give one format for each file, or none: they are detected",
        )
    return open_sources(
        [Path(path).expanduser() for path in paths],
        [None if name == "auto" else name for name in formats] or [None] * len(paths),
        tokenizer,
        max_seq_len=d.max_seq_len,
        overlong=d.overlong,
        compat=cfg.train.compat == "erniekit",
        cache_dir=d.cache_dir,
        num_proc=d.dataset_num_proc,
        # ERNIEKit never stops for bad rows.
        max_bad_fraction=1.0 if cfg.train.compat == "erniekit" else d.max_bad_fraction,
        bad_rows_path=bad_rows,
    )


def eval_batches(cfg: RunConfig, sources: list[TokenSource], world: World, padding: dict[str, Any]) -> Iterator[Batch]:
    """One pass in file order, packed in sequence; every call starts anew. Each data rank has its share of it."""
    sizes = [len(source) for source in sources]
    order = SampleOrder(sizes, seed=cfg.train.seed, shuffle=False, strategy="concat")
    lengths = [source.lengths for source in sources]
    stream = PackStream(order, lengths, cfg.data.max_seq_len, packing=cfg.data.packing, greedy=False, epochs=1)
    loader = BatchLoader(
        stream,
        sources,
        cfg.train.per_device_eval_batch_size,
        dp_rank=world.layout.data_rank(world.rank),
        dp_size=world.layout.data_ranks,
        **padding,
    )
    for micro in loader:
        yield from micro
