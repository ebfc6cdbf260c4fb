"""`streaming: True`: rows are read while the run trains. Called by the stages and, at the end of a run, by training.py.

What a run trains on then becomes known as it goes: how many rows there are, which of them are bad, how long they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

from erniekit.config import RunConfig
from erniekit.data.collate import collate
from erniekit.data.storage import DatasetFile
from erniekit.data.stream_order import StreamOrder, StreamPacks
from erniekit.data.stream_source import PairStream, StreamSource, file_versions, stream_fingerprint
from erniekit.data.stream_store import StreamStore
from erniekit.data.token_cache import TokenSource, cache_key, row_job
from erniekit.data.tokenise import TokeniseJob
from erniekit.data.tokenizer import Tokenizer
from erniekit.files.cache_folder import default_cache_dir
from erniekit.log import emit
from erniekit.recipes.data_rows import DataRows, row_rules
from erniekit.recipes.dataset_files import dataset_files
from erniekit.recipes.datasets import TrainData, counted, evaluation_sources, need_training_data, open_data
from erniekit.recipes.run_plan import RunPlan


def open_streamed(plan: RunPlan, tokenizer: Tokenizer, output: Path, rows: DataRows | None = None) -> TrainData:
    """rows: None for conversations."""
    cfg, d, t = plan.config, plan.config.data, plan.config.train
    need_training_data(cfg)
    sources = stream_sources(cfg, tokenizer, output, rows)
    order = StreamOrder(
        sources, d.train_dataset_prob or None, seed=t.seed, shuffle=d.random_shuffle, strategy=d.mix_strategy,
        block=d.shuffle_buffer,
    )  # fmt: skip
    per_step = t.per_device_train_batch_size * plan.world.layout.data_ranks * t.gradient_accumulation_steps
    stream = StreamPacks(
        order, sources, d.max_seq_len, per_step, t.max_steps, packing=d.packing, greedy=d.greedy_intokens,
        buffer_size=d.buffer_size,
    )  # fmt: skip
    for source in sources:
        source.require(1)  # what cannot be read at all, or has no usable row, is an error of the start
    evaluation = evaluation_sources(plan, tokenizer, output, rows)
    # A run asks its sources for samples, reports and fingerprints alone.
    found, made = cast("list[TokenSource]", sources), collate if rows is None else rows.collate
    return counted(plan, tokenizer, found, stream, evaluation, t.gradient_accumulation_steps, made)


def open_rows(plan: RunPlan, tokenizer: Tokenizer, output: Path, rows: DataRows | None = None) -> TrainData:
    """Read first, or while the run trains."""
    return (open_streamed if plan.config.data.streaming else open_data)(plan, tokenizer, output, rows)


def stream_sources(
    cfg: RunConfig, tokenizer: Tokenizer, output: Path, rows: DataRows | None = None
) -> list[StreamSource]:
    """One for each entry of train_dataset_path: the files of a folder or a pattern follow each other by name."""
    files, formats = dataset_files(cfg, "train")
    entries: dict[int, list[tuple[DatasetFile, str | None]]] = {}
    for file, format in zip(files, formats):
        entries.setdefault(file.entry, []).append((file, format))
    return [_source(cfg, tokenizer, output, number, found, rows) for number, found in entries.items()]


def _source(
    cfg: RunConfig,
    tokenizer: Tokenizer,
    output: Path,
    number: int,
    found: Sequence[tuple[DatasetFile, str | None]],
    rows: DataRows | None,
) -> StreamSource:
    paths, format = [str(file.path) for file, _ in found], found[0][1]
    rules = row_rules(cfg, rows)

    def job_of(path: str) -> TokeniseJob:
        return row_job(path, format, tokenizer, rules)

    versions = file_versions(paths)
    fingerprint = stream_fingerprint(versions, partial(cache_key, job_of(paths[0])))
    kind = StreamSource if rules.pairs is None else PairStream
    name, store, listed = stream_places(cfg, output, number, paths, fingerprint)
    return kind(name, paths, job_of, fingerprint, store, cfg.data.max_bad_fraction, versions, listed)


def stream_places(
    cfg: RunConfig, output: Path, number: int, paths: Sequence[str], fingerprint: str
) -> tuple[str, StreamStore, Path]:
    """Of entry `number` of train_dataset_path: its name in messages, where its samples are stored, and where bad rows
    are listed."""
    d = cfg.data
    # A run's own: another would have to wait until this one reads on.
    own = hashlib.blake2b(f"{output.absolute()}\n{number}".encode(), digest_size=8).hexdigest()
    folder = Path(d.cache_dir or default_cache_dir()).expanduser() / "streams" / f"{fingerprint}-{own}"
    name = paths[0] if len(paths) == 1 else d.train_dataset_path[number]
    return name, StreamStore(folder), output / "bad_rows.jsonl"


def report_read_rows(data: TrainData, output: Path) -> bool:
    """At the end of a run, what it has read: on screen, and its bad rows as a file; the samples go. False: the run had
    read all before it began."""
    if not data.is_streamed:
        return False
    lines = [line for source in data.sources for line in source.report.lines()]
    for k, line in enumerate(lines):
        emit(f"{'data' if k == 0 else '':<9}{line}")
    for number, source in enumerate(cast("list[StreamSource]", data.sources)):
        if data.world.is_main:
            source.list_bad_rows(output / "bad_rows.jsonl", append=number > 0)
        source.discard()
    return True
