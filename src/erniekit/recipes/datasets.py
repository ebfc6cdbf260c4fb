"""Config -> token sources -> order -> packs -> loader, for training and evaluation. For the stages in recipes/."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.config import RunConfig
from erniekit.data import buckets
from erniekit.data.collate import collate
from erniekit.data.compat import CompatEvalOrder, CompatOrder, CompatPackStream, CompatPairStream
from erniekit.data.embedding_noise import NoiseMaker
from erniekit.data.loader import BatchLoader
from erniekit.data.mix import SampleOrder
from erniekit.data.pack import PackStream
from erniekit.data.preference_collate import collate_pairs
from erniekit.data.report import BadRowsFile
from erniekit.data.staged import LENGTH, StagedPacks, difficulties
from erniekit.data.stream_source import StreamSource
from erniekit.data.token_cache import TokenSource, open_sources
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import Batch, Pack
from erniekit.errors import ConfigError
from erniekit.log import emit
from erniekit.parallel.mesh import World
from erniekit.recipes.data_rows import DataRows, row_rules, rules_under
from erniekit.recipes.dataset_files import dataset_files, file_shares, one_of_several
from erniekit.recipes.run_plan import RunPlan

MICRO_BATCHES = 8  # of a run for each length that is compiled
EVAL_LENGTHS = 3  # of evaluation, whose programs have no backward pass and are others


@dataclass(frozen=True)
class TrainData:
    """What a run trains on, and what follows from counting it: steps, packs, how often it logs, saves, evaluates."""

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
    accumulation: int  # micro-batches a step
    collate: Callable[..., Batch] = collate  # packs -> Batch; stage DPO has its own
    mtp_tokens: int = 0  # further tokens the model learns to predict
    lengths: tuple[int, ...] = ()  # that joined rows are padded to; none: rows are not joined
    noise: NoiseMaker | None = None  # on embeddings (NEFTune)
    sizes: np.ndarray | None = None  # tokens of the first micro-batches, padding apart, where rows are joined

    @property
    def is_streamed(self) -> bool:
        """Whether its rows are read while the run trains."""
        return any(isinstance(source, StreamSource) for source in self.sources)

    @property
    def filled(self) -> float:
        """The share of full rows that is tokens; 1 where rows are still being read."""
        if self.is_streamed:
            return 1.0
        tokens = sum(source.report.tokens for source in self.sources)
        return min(1.0, tokens / max(1, self.packs_per_epoch * self.stream.max_seq_len))

    @property
    def usual_size(self) -> float:
        """Tokens of a joined micro-batch, padding too."""
        assert self.sizes is not None
        return float(self.sizes.mean()) + buckets.padding(self.sizes, self.lengths) / len(self.sizes)

    @property
    def padded_share(self) -> float:
        """Of all tokens of joined rows, padding too, those that are padding: 0 to 1."""
        assert self.sizes is not None
        added = buckets.padding(self.sizes, self.lengths)
        return added / max(1, int(self.sizes.sum()) + added)

    @property
    def length_multiple(self) -> int:
        """What a row's length must divide by, in this layout."""
        return self.world.layout.length_multiple

    def fingerprints(self, keys: Mapping[str, Any] | None = None) -> list[str]:
        """Of what is trained: content, and all that turns it into samples; with other values of row_rules' `keys`."""
        return [source.fingerprint_under(rules_under(keys or {})) for source in self.sources]

    def eval_fingerprints(self) -> list[str]:
        return [source.fingerprint for source in self.evaluation]

    def compared(self) -> dict[str, Any]:
        """What must be the same on all ranks, besides what is trained (same_run.py)."""
        return {
            "evaluation data": self.eval_fingerprints(),
            "steps between logs, saves and evaluations": [self.log_every, self.save_every, self.eval_every],
        }

    def written(self) -> dict[str, int]:
        """When files were last written of which a fingerprint covers only samples: none of these."""
        return {}

    def pack(self, number: int) -> Pack:
        return Pack(tuple(self.sources[s].sample(i) for s, i in self.stream[number]), number)

    def first_batch(self) -> Batch:
        """The run's very first pack, the same on every rank."""
        return self.collate([self.pack(0)], pad_id=self.pad_id, pad_multiple=math.lcm(8, self.length_multiple))

    def close(self) -> None:
        """Processes that decode pictures, and sources that are still being read, end with the run."""
        for source in self.sources:
            if isinstance(source, StreamSource):
                source.close()
        close = getattr(self.collate, "close", None)
        if close is not None:
            close()

    def padding(self, cfg: RunConfig) -> dict[str, Any]:
        """Rows as long as their longest, or all of one length where shapes are fixed: layers that are compiled or
        replayed know no other, and pipeline stages agree on them beforehand. ERNIEKit's rows are, and its router losses
        read their padding."""
        multiple = math.lcm(8, self.length_multiple)
        whole = -(-cfg.data.max_seq_len // self.length_multiple) * self.length_multiple
        fixed = cfg.model.compile or cfg.model.cuda_graph or self.world.layout.pp > 1 or cfg.compat.rows_of_one_length
        return {"pad_id": self.pad_id, "pad_multiple": multiple, "pad_to": whole if fixed else None}

    def eval_batches(self, cfg: RunConfig, number: int = 0) -> Iterator[Batch]:
        """number: of evaluations before; ERNIEKit goes through pairs in another order each time."""
        return eval_batches(cfg, self.evaluation, self.world, self.padding(cfg), self.collate, number)

    def _collate(self, cfg: RunConfig) -> Callable[..., Batch]:
        if self.collate is not collate:
            return self.collate
        return partial(collate, ahead=self.mtp_tokens, one_count=cfg.compat.positions_span_rows)

    def loader(self, cfg: RunConfig, start_pack: int, steps: int | None = None) -> BatchLoader:
        """steps: that are left to train; no more are prepared."""
        return BatchLoader(
            self.stream,
            self.sources,
            cfg.train.per_device_train_batch_size,
            self.accumulation,
            dp_rank=self.world.layout.data_rank(self.world.rank),
            dp_size=self.world.layout.data_ranks,
            start_pack=start_pack,
            steps=steps,
            num_workers=max(1, cfg.data.dataloader_num_workers),
            prefetch=cfg.data.prefetch_factor,
            collate=self._collate(cfg),
            lengths=self.lengths,
            noise=self.noise,
            **self.padding(cfg),
        )


def open_data(plan: RunPlan, tokenizer: Tokenizer, output: Path, rows: DataRows | None = None) -> TrainData:
    """rows: None for conversations."""
    cfg, world = plan.config, plan.world
    d, t = cfg.data, cfg.train
    need_training_data(cfg)
    # One rank reports bad rows; all read the same cache, made by the first that comes.
    sources = sources_for(cfg, "train", tokenizer, BadRowsFile(output / "bad_rows.jsonl", world.is_main), rows)
    lengths = [source.lengths for source in sources]
    options: dict[str, Any] = dict(packing=d.packing, greedy=d.greedy_intokens, buffer_size=d.buffer_size)
    probs = file_shares(cfg, "train", [len(source) for source in sources])
    if cfg.compat.erniekit_order and (rows is None or rows.kind is None):
        order = CompatOrder(
            [source.forms() for source in sources],
            probs,
            seed=t.seed,
            num_samples_each_epoch=d.num_samples_each_epoch,
            shuffle=d.random_shuffle,
            backwards=rows is None,
        )
        kind = CompatPackStream if rows is None else CompatPairStream
        stream: PackStream = kind(order, lengths, d.max_seq_len, **options)
    else:
        stream = plain_stream(plan, sources, probs, options)
    evaluation = evaluation_sources(plan, tokenizer, output, rows)
    made = collate if rows is None else rows.collate
    data = counted(plan, tokenizer, sources, stream, evaluation, steps_accumulated(plan, sources, stream), made)
    return with_buckets(cfg, data)


def need_training_data(cfg: RunConfig) -> None:
    if not cfg.data.train_dataset_path:
        raise ConfigError("no training data", where="train_dataset_path", fix="name a file, e.g. --data my.jsonl")


def evaluation_sources(
    plan: RunPlan, tokenizer: Tokenizer, output: Path, rows: DataRows | None = None
) -> list[TokenSource]:
    cfg, t = plan.config, plan.config.train
    if not cfg.data.eval_dataset_path or not (t.do_eval or t.evaluation_strategy != "no"):
        return []
    return sources_for(cfg, "eval", tokenizer, BadRowsFile(output / "bad_eval_rows.jsonl", plan.world.is_main), rows)


def plain_stream(
    plan: RunPlan, sources: Sequence[TokenSource], probs: Sequence[float], options: dict[str, Any]
) -> PackStream:
    """In an order of its own, with what mix_schedule and curriculum make of it."""
    cfg, d = plan.config, plan.config.data
    lengths, sizes = [source.lengths for source in sources], [len(source) for source in sources]
    keys: list[np.ndarray] = []
    if d.curriculum:
        keys = [difficulty_of(source, d.curriculum) for source in sources]

    def order_of(shares: Sequence[float], drawn: Sequence[int]) -> SampleOrder:
        return SampleOrder(
            sizes, shares, seed=cfg.train.seed, shuffle=d.random_shuffle, strategy=d.mix_strategy, drawn=drawn,
            keys=keys, ordered_passes=d.curriculum_epochs or None,
        )  # fmt: skip

    stream = PackStream(order_of(probs, ()), lengths, d.max_seq_len, **options)
    if not d.mix_stages:
        return stream
    accumulation = steps_accumulated(plan, sources, stream)
    per_step = cfg.train.per_device_train_batch_size * plan.world.layout.data_ranks * accumulation
    stages = [(per_step * (step - 1), tuple(file_shares(cfg, "train", sizes, shares))) for step, shares in d.mix_stages]
    if stages[0][0]:
        stages.insert(0, (0, tuple(probs)))
    return StagedPacks(stages, order_of, lengths, d.max_seq_len, **options)


def difficulty_of(source: TokenSource, curriculum: str) -> np.ndarray:
    if curriculum == LENGTH:
        return source.lengths[: len(source)]
    return difficulties(source.path, curriculum, [source.row(i) for i in range(len(source))])


def with_buckets(cfg: RunConfig, data: TrainData) -> TrainData:
    """Rows are joined where the run's plan has it; a short run is not worth many compilations."""
    if not cfg.data.joins_rows:
        return data
    rows = cfg.train.per_device_train_batch_size
    most = max(1, data.max_steps * data.accumulation // MICRO_BATCHES)
    sizes = buckets.sizes_of(data.stream, rows)
    lengths = bucket_lengths(cfg, data.stream, sizes, rows, data.length_multiple, min(most, buckets.MOST))
    return replace(data, lengths=lengths, sizes=sizes)


def with_data(plan: RunPlan, data: TrainData) -> RunPlan:
    """The plan with what the lengths of the data's rows and the steps decide; its notes are printed."""
    settled = plan.with_lengths(data.lengths, usual_tokens(plan, data), data.max_steps)
    for note in settled.config.notes[len(plan.config.notes) :]:
        if not note.quiet:
            emit(f"note     {note}")
    return settled


def usual_tokens(plan: RunPlan, data: TrainData) -> float:  # of a micro-batch, padding too
    return data.usual_size if data.lengths else plan.full_size * (data.filled if plan.config.data.packing else 1.0)


def bucket_lengths(
    cfg: RunConfig, stream: PackStream, sizes: np.ndarray, rows: int, multiple: int, most: int
) -> tuple[int, ...]:
    """The recipe's own, or by the data's. sizes: of micro-batches. multiple: of the layout."""
    largest = rows * max(int(source.max()) for source in stream.lengths if len(source))
    if not cfg.data.written_lengths:
        return buckets.choose(sizes, largest, multiple, most)
    step = math.lcm(buckets.ALIGNED, multiple)
    whole = -(-largest // step) * step
    lengths = sorted({-(-length // step) * step for length in cfg.data.written_lengths})
    return (*lengths, whole) if lengths[-1] < whole else tuple(lengths)


def steps_accumulated(plan: RunPlan, sources: Sequence[TokenSource], stream: Any) -> int:
    """Micro-batches a step."""
    t = plan.config.train
    if t.gradient_accumulation_steps >= 1:
        return t.gradient_accumulation_steps
    at_once = t.per_device_train_batch_size * plan.world.layout.data_ranks
    return accumulation_by_size(sum(len(s) for s in sources), max(1, stream.count_packs(1)), at_once)


def counted(
    plan: RunPlan,
    tokenizer: Tokenizer,
    sources: Sequence[TokenSource],
    stream: Any,
    evaluation: Sequence[TokenSource],
    accumulation: int,
    collate: Callable[..., Batch],
) -> TrainData:
    """With what follows from the number of packs."""
    cfg, world = plan.config, plan.world
    t = cfg.train
    per_epoch = max(1, stream.count_packs(1))
    per_step = t.per_device_train_batch_size * world.layout.data_ranks * accumulation
    steps_per_epoch = max(1, math.ceil(per_epoch / per_step))
    max_steps = t.max_steps
    if max_steps <= 0:
        max_steps = max(1, math.ceil(stream.count_packs(t.num_train_epochs) / per_step))
    return TrainData(
        list(sources),
        stream,
        list(evaluation),
        per_step,
        per_epoch,
        max_steps,
        every(cfg.tracking.logging_strategy, cfg.tracking.logging_steps, steps_per_epoch),
        every(cfg.checkpoint.save_strategy, cfg.checkpoint.save_steps, steps_per_epoch),
        every(t.evaluation_strategy, t.eval_steps or max_steps, steps_per_epoch),
        tokenizer.pad_id if tokenizer.pad_id is not None else 0,
        world,
        accumulation,
        collate=collate,
        mtp_tokens=plan.mtp_tokens,
        noise=noise_of(plan),
    )


def noise_of(plan: RunPlan) -> NoiseMaker | None:
    alpha = plan.config.tuning.neftune_noise_alpha
    return NoiseMaker(alpha, plan.folder.config.hidden_size, plan.config.train.seed) if alpha else None


def accumulation_by_size(samples: int, packs: int, packs_at_once: int) -> int:
    """ERNIEKit's answer to a negative gradient_accumulation_steps: more samples a step for more data, 32 at most."""
    most = ((100, 8), (1_000, 16), (10_000, 32), (100_000, 64))
    wanted = next((goal for below, goal in most if samples < below), 128)
    return min(32, max(1, math.ceil(wanted / (packs_at_once * samples / packs))))


def every(strategy: str, steps: int, steps_per_epoch: int) -> int:
    """Steps between two of something; 0 means never on schedule."""
    return {"no": 0, "steps": steps, "epoch": steps_per_epoch}[strategy]


def sources_for(
    cfg: RunConfig, which: str, tokenizer: Tokenizer, bad_rows: BadRowsFile | None, rows: DataRows | None = None
) -> list[TokenSource]:
    """The train or eval files, tokenised; their bad rows listed in one file."""
    d = cfg.data
    files, formats = dataset_files(cfg, which)
    with one_of_several(cfg, which):
        return open_sources(
            [file.path for file in files],
            formats,
            tokenizer,
            row_rules(cfg, rows),
            cache_dir=d.cache_dir,
            num_proc=d.dataset_num_proc,
            max_bad_fraction=1.0 if cfg.compat.ignores_bad_rows else d.max_bad_fraction,
            bad_rows=bad_rows,
        )


def eval_batches(
    cfg: RunConfig,
    sources: list[TokenSource],
    world: World,
    padding: dict[str, Any],
    collate: Callable[..., Batch] = collate,
    number: int = 0,
) -> Iterator[Batch]:
    """One pass in file order, packed in sequence, from the beginning at every call. Each data rank has its share of it.

    number: of evaluations before, by which ERNIEKit shuffles the preferences it evaluates on."""
    d, lengths = cfg.data, [source.lengths for source in sources]
    stream: PackStream
    if cfg.compat.shuffled_eval_pairs and collate is collate_pairs:
        shuffled = CompatEvalOrder([source.forms() for source in sources], number, d.random_shuffle)
        options: dict[str, Any] = dict(packing=d.packing, greedy=d.greedy_intokens, buffer_size=d.buffer_size)
        stream = CompatPairStream(shuffled, lengths, d.max_seq_len, epochs=1, **options)
    else:
        order = SampleOrder([len(s) for s in sources], seed=cfg.train.seed, shuffle=False, strategy="concat")
        costs = [source.patches for source in sources if source.patches is not None]
        stream = PackStream(
            order, lengths, d.max_seq_len, packing=d.packing, greedy=False, epochs=1, costs=costs,
            max_cost=cfg.vision.max_patches if costs else None,
        )  # fmt: skip
    rows = cfg.train.per_device_eval_batch_size
    joined: tuple[int, ...] = ()
    if cfg.data.joins_rows:
        sizes = buckets.sizes_of(stream, rows)
        joined = bucket_lengths(cfg, stream, sizes, rows, world.layout.length_multiple, EVAL_LENGTHS)
    loader = BatchLoader(
        stream,
        sources,
        rows,
        dp_rank=world.layout.data_rank(world.rank),
        dp_size=world.layout.data_ranks,
        collate=collate,
        lengths=joined,
        **padding,
    )
    for micro in loader:
        yield from micro
