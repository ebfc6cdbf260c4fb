"""`streaming: True` in stage PT: text is read while the run trains. Called by pretrain.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from erniekit.config import RunConfig
from erniekit.data.formats.columns import as_columns
from erniekit.data.stream_source import file_versions, stream_fingerprint
from erniekit.data.stream_text import StreamRows, StreamRowStream, StreamTextJob, TextStream
from erniekit.data.tokenizer import Tokenizer
from erniekit.recipes.dataset_files import dataset_files
from erniekit.recipes.datasets import need_training_data
from erniekit.recipes.run_plan import RunPlan
from erniekit.recipes.streaming import stream_places


@dataclass(frozen=True)
class StreamedText:
    sources: list[TextStream]
    stream: StreamRowStream
    shares: list[Fraction]

    def fingerprints(self) -> list[str]:
        """As PretrainData's: content, place (which seeds its order) and share of the rows."""
        return [
            f"{source.fingerprint} number {number} share {share}"
            for number, (source, share) in enumerate(zip(self.sources, self.shares))
        ]


def open_streamed_text(plan: RunPlan, tokenizer: Tokenizer, output: Path) -> StreamedText:
    cfg, d, t = plan.config, plan.config.data, plan.config.train
    need_training_data(cfg)
    files, _ = dataset_files(cfg, "train")
    entries: dict[int, list[str]] = {}
    for file in files:
        entries.setdefault(file.entry, []).append(str(file.path))
    sources = [_source(cfg, tokenizer, output, number, paths) for number, paths in entries.items()]
    rows = [
        StreamRows(
            source,
            d.max_seq_len,
            seed=t.seed,
            number=number,
            shuffle=d.random_shuffle,
            masked=not cfg.model.use_global_causal_attn,
            block=d.shuffle_buffer,
            vocab_size=tokenizer.usable_ids,
        )
        for number, source in enumerate(sources)
    ]
    per_step = t.per_device_train_batch_size * plan.world.layout.data_ranks * t.gradient_accumulation_steps
    given = [Fraction(str(share)) for share in d.train_dataset_prob or [1] * len(sources)]
    shares = [share / sum(given) for share in given]
    for source in sources:
        source.require(1)  # what cannot be read at all, or has no usable row, is an error of the start
    return StreamedText(sources, StreamRowStream(shares, rows, per_step, t.max_steps), shares)


def _source(cfg: RunConfig, tokenizer: Tokenizer, output: Path, number: int, paths: Sequence[str]) -> TextStream:
    """Of an entry of train_dataset_path: the files of a folder or a pattern follow each other by name."""
    columns: dict[str, Any] = dict(as_columns(cfg.data.columns, cfg.origin("columns")))

    def job_of(path: str) -> StreamTextJob:
        return StreamTextJob.of(path, tokenizer, columns.get("text", "text"))

    versions = file_versions(paths)
    fingerprint = stream_fingerprint(versions, job_of(paths[0]).key)
    name, store, listed = stream_places(cfg, output, number, paths, fingerprint)
    return TextStream(name, paths, job_of, fingerprint, store, cfg.data.max_bad_fraction, versions, listed)
