"""Pre-training on plain text, from scratch or continued. Registered in recipes/__init__.py; rows: data/pretrain.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.config import RunConfig
from erniekit.data.documents import DocumentRows
from erniekit.data.formats.columns import as_columns
from erniekit.data.loader import BatchLoader
from erniekit.data.mmap_files import TokenFiles
from erniekit.data.pretrain import EVERYTHING, PretrainData, RowStream, index_online, open_corpora
from erniekit.data.report import BadRowsFile, DataReport
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import Batch, Sample
from erniekit.errors import ConfigError
from erniekit.parallel.mesh import World
from erniekit.recipes.dataset_files import dataset_files, file_shares, one_of_several
from erniekit.recipes.datasets import TrainData, every
from erniekit.recipes.run_plan import RunPlan
from erniekit.recipes.stage import TrainingStage
from erniekit.recipes.streaming_text import StreamedText, open_streamed_text


class Pretraining(TrainingStage):
    chats = False

    def separates_documents(self, cfg: RunConfig) -> bool:
        return not cfg.model.use_global_causal_attn

    def open_data(self, plan: RunPlan, tokenizer: Tokenizer, output: Path) -> TrainData:
        cfg, world = plan.config, plan.world
        wants_eval = cfg.train.do_eval or cfg.train.evaluation_strategy != "no"
        held_out = open_rows(cfg, cfg.data.eval_part, tokenizer, output, world.is_main) if wants_eval else None
        t = cfg.train
        streamed = open_streamed_text(plan, tokenizer, output) if cfg.data.streaming else None
        trained: StreamedText | DocumentSplit = streamed or open_rows(cfg, "train", tokenizer, output, world.is_main)
        stream = trained.stream
        per_epoch, accumulation = stream.count_packs(1), t.gradient_accumulation_steps
        per_step = t.per_device_train_batch_size * world.layout.data_ranks * accumulation
        steps_per_epoch = max(1, math.ceil(per_epoch / per_step))
        max_steps = t.max_steps
        if max_steps <= 0:
            max_steps = max(1, math.ceil(stream.count_packs(t.num_train_epochs) / per_step))
        parts: dict[str, Any] = {
            "sources": trained.sources,
            "stream": stream,
            "evaluation": held_out.sources if held_out is not None else [],
        }
        return TextData(
            **parts,
            packs_per_step=per_step,
            packs_per_epoch=per_epoch,
            max_steps=max_steps,
            log_every=every(cfg.tracking.logging_strategy, cfg.tracking.logging_steps, steps_per_epoch),
            save_every=every(cfg.checkpoint.save_strategy, cfg.checkpoint.save_steps, steps_per_epoch),
            eval_every=every(t.evaluation_strategy, t.eval_steps or max_steps, steps_per_epoch),
            pad_id=tokenizer.pad_id or 0,
            world=world,
            accumulation=accumulation,
            mtp_tokens=plan.mtp_tokens,
            rows=trained.rows if isinstance(trained, DocumentSplit) else None,
            streamed=streamed,
            held_out=held_out.rows if held_out is not None else None,
        )

    def held_out(
        self,
        cfg: RunConfig,
        tokenizer: Tokenizer,
        bad_rows: BadRowsFile,
        world: World,
        model: ModelFolder | None = None,
    ) -> tuple[list[DataReport], Iterator[Batch]]:
        part = open_rows(cfg, cfg.data.eval_part, tokenizer, bad_rows.path.parent)
        batches = eval_batches(cfg, part.rows, world, {"pad_id": tokenizer.pad_id or 0})
        return [source.report for source in part.sources], batches


@dataclass(frozen=True)
class TextData(TrainData):
    rows: PretrainData | None = None
    streamed: StreamedText | None = None  # in place of rows
    held_out: PretrainData | None = None

    def fingerprints(self, keys: Mapping[str, Any] | None = None) -> list[str]:
        """No key decides it: text is cut into rows after it is tokenised."""
        if self.streamed is not None:
            return self.streamed.fingerprints()
        assert self.rows is not None
        return self.rows.fingerprints()

    def written(self) -> dict[str, int]:
        return self.rows.written() if self.rows is not None else {}

    def eval_fingerprints(self) -> list[str]:
        return self.held_out.fingerprints() if self.held_out is not None else []

    def eval_batches(self, cfg: RunConfig, number: int = 0) -> Iterator[Batch]:
        assert self.held_out is not None
        return eval_batches(cfg, self.held_out, self.world, self.padding(cfg))


@dataclass(frozen=True)
class Documents:
    """A data set's rows as the loader reads them, and their report."""

    rows: DocumentRows
    report: DataReport

    def sample(self, index: int) -> Sample:
        return self.rows.sample(index)


@dataclass
class TextReport(DataReport):
    told: str = ""

    def lines(self) -> list[str]:
        return [self.told, *(line for line in super().lines() if line.startswith(("  bad rows", "    ")))]


@dataclass(frozen=True)
class DocumentSplit:
    rows: PretrainData
    sources: list[Documents]

    @property
    def stream(self) -> RowStream:
        return self.rows.stream


def open_rows(cfg: RunConfig, part: str, tokenizer: Tokenizer, output: Path | None, main: bool = True) -> DocumentSplit:
    """Training's or evaluation's rows. A file of its own for evaluation leaves all documents to training.

    output: where bad rows are listed, by the main rank."""
    d = cfg.data
    own_eval = bool(d.eval_dataset_path)
    weights: Sequence[float] | None = None
    reports: list[DataReport] = []
    if own_eval and part != "train":
        corpora, reports = _index(
            cfg, "eval", tokenizer, BadRowsFile(output / "bad_eval_rows.jsonl", main) if output else None
        )
    elif d.input_dir or d.data_filelist:
        corpora, weights = open_corpora(d.input_dir, d.data_filelist, d.data_weights)
    elif d.train_dataset_path:
        corpora, reports = _index(
            cfg, "train", tokenizer, BadRowsFile(output / "bad_rows.jsonl", main) if output else None
        )
        if cfg.given("train_dataset_prob"):
            weights = file_shares(cfg, "train", [files.num_documents for files in corpora])
    else:
        raise ConfigError(
            "no text to train on",
            where="input_dir, train_dataset_path",
            fix="name token files with input_dir (`erniekit data index` makes them), or text files with --data",
        )
    rows = PretrainData(
        corpora,
        weights if part == "train" else None,
        max_seq_len=d.max_seq_len,
        split=EVERYTHING if own_eval else d.split,
        part="train" if own_eval else part,
        seed=cfg.train.seed,
        shuffle=d.random_shuffle and part == "train",
        masked=not cfg.model.use_global_causal_attn,
        epochs=None if part == "train" else 1,
        vocab_size=tokenizer.usable_ids,
        cache_dir=d.cache_dir,
    )
    by_prefix = {files.prefix: report for files, report in zip(corpora, reports)}
    described = zip(rows.sources, rows.lines())
    return DocumentSplit(rows, [Documents(source, _report(source, line, by_prefix)) for source, line in described])


def _index(
    cfg: RunConfig, which: str, tokenizer: Tokenizer, bad_rows: BadRowsFile | None
) -> tuple[list[TokenFiles], list[DataReport]]:
    columns = dict(as_columns(cfg.data.columns, cfg.origin("columns")))
    files = [_local(file.path, which) for file in dataset_files(cfg, which)[0]]
    with one_of_several(cfg, which):
        return index_online(
            files,
            tokenizer,
            json_key=columns.get("text", "text"),
            cache_dir=cfg.data.cache_dir,
            num_proc=cfg.data.dataset_num_proc or None,
            max_bad_fraction=cfg.data.max_bad_fraction,
            bad_rows=bad_rows,
        )


def _local(path: str | Path, which: str) -> Path:
    """Text is indexed from files, whose bytes an interrupted index goes back to."""
    if isinstance(path, Path):
        return path
    raise ConfigError(
        "text for pre-training is read from files of this machine",
        where=f"{which}_dataset_path: {path}",
        fix="copy it here first; conversations and pairs are read from where they lie",
    )


def _report(source: DocumentRows, line: str, indexed: dict[str, DataReport]) -> TextReport:
    """Of the documents in use: a part of those in the files, which may have been indexed long ago."""
    found = indexed.get(
        source.files.prefix, DataReport(source.files.prefix, "documents", rows=source.files.num_documents)
    )
    ends = len(source.part) if source.masked else 1  # nothing follows those
    values = {**vars(found), "samples": len(source.part), "tokens": source.tokens}
    values |= {"trained_tokens": max(0, source.tokens - ends), "told": line}
    return TextReport(**values)


def eval_batches(cfg: RunConfig, rows: PretrainData, world: World, padding: dict[str, Any]) -> Iterator[Batch]:
    """One pass in file order; each data rank has its share of it."""
    loader = BatchLoader(
        rows.stream,
        rows.sources,
        cfg.train.per_device_eval_batch_size,
        dp_rank=world.layout.data_rank(world.rank),
        dp_size=world.layout.data_ranks,
        **padding,
    )
    for micro in loader:
        yield from micro


STAGE = Pretraining()
