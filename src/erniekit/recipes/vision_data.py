"""Rows with pictures for a run: its keys and the model's own sizes as VisionRules, sources, streams, batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from erniekit.config import RunConfig
from erniekit.data.assemble import Assembled
from erniekit.data.collate import collate
from erniekit.data.formats import parsed
from erniekit.data.formats import rows as rows_in
from erniekit.data.formats.fields import BadRow
from erniekit.data.media.limits import MediaError
from erniekit.data.mix import SampleOrder
from erniekit.data.pack import PackStream
from erniekit.data.report import BadRowsFile
from erniekit.data.thinking import Thinking, divided, kept, write_out
from erniekit.data.token_cache import TokenSource, open_sources
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import Batch, Pack
from erniekit.data.vision.collate import VisionCollate
from erniekit.data.vision.compat_packs import JoinedFlags, lengths_like_erniekit, like_erniekit
from erniekit.data.vision.job import VisionSource, open_vision_source
from erniekit.data.vision.layout import headers_from
from erniekit.data.vision.mix import CompatVisionOrder, ModalStream
from erniekit.data.vision.pairs import VisionPair, VisionPairSource, read_vision_pair
from erniekit.data.vision.proof_file import FILE, check, proof_file
from erniekit.data.vision.read import read_vision_row
from erniekit.data.vision.rules import VisionRules, VisionTokens
from erniekit.data.vision.tokens import VisionAssembler
from erniekit.data.vision.vision_row import VisionRow
from erniekit.errors import ConfigError
from erniekit.export.vision_rules import vision_rules
from erniekit.log import emit, warn
from erniekit.recipes.data_rows import row_rules
from erniekit.recipes.dataset_files import dataset_files, file_shares, one_of_several
from erniekit.recipes.datasets import TrainData, counted, steps_accumulated
from erniekit.recipes.run_plan import RunPlan
from erniekit.recipes.served_prompts import Compared

MOST_PROCESSES = 8


def open_vision_data(plan: RunPlan, tokenizer: Tokenizer, output: Path) -> TrainData:
    """What a stage with pictures trains on; its `collate` owns processes: close it with the run."""
    cfg, world = plan.config, plan.world
    d, t = cfg.data, cfg.train
    if not d.train_dataset_path:
        raise ConfigError("no training data", where="train_dataset_path", fix="name a file, e.g. --data my.jsonl")
    rules = vision_rules(cfg, plan.folder.path)

    def listed(name: str) -> BadRowsFile:  # one rank writes it
        return BadRowsFile(output / name, world.is_main)

    pictures = vision_sources(cfg, "train", tokenizer, rules, listed("bad_rows.jsonl"))
    for line in beyond_patches(cfg, pictures):
        emit(line)
    text = text_sources(cfg, tokenizer, listed("bad_text_rows.jsonl")) if cfg.vision.text_dataset_path else []
    pictures_only = vision_stream(cfg, pictures, [], 1)
    at_once = t.per_device_train_batch_size * world.layout.data_ranks
    accumulation = steps_accumulated(plan, pictures, pictures_only)
    stream = vision_stream(cfg, pictures, text, at_once * accumulation) if text else pictures_only
    wants_eval = bool(d.eval_dataset_path) and (t.do_eval or t.evaluation_strategy != "no")
    held_out = vision_sources(cfg, "eval", tokenizer, rules, listed("bad_eval_rows.jsonl")) if wants_eval else []
    collate = vision_collate(cfg, tokenizer, rules, at_once, decode=world.at["pp"] == 0)
    return counted(plan, tokenizer, [*pictures, *text], stream, held_out, accumulation, collate)


def vision_sources(
    cfg: RunConfig, which: str, tokenizer: Tokenizer, rules: VisionRules, bad_rows: BadRowsFile | None
) -> list[VisionSource]:
    """The train or eval files, tokenised."""
    d = cfg.data
    files, formats = vision_files(cfg, which)
    with one_of_several(cfg, which):
        return [
            open_vision_source(
                path,
                formats[n],
                tokenizer,
                rules,
                max_seq_len=d.max_seq_len,
                overlong=d.overlong,  # type: ignore[arg-type]
                thinking=d.train_thinking,  # type: ignore[arg-type]
                cache_dir=d.cache_dir,
                num_proc=d.dataset_num_proc,
                max_bad_fraction=1.0 if cfg.compat.ignores_bad_rows else d.max_bad_fraction,
                bad_rows=bad_rows,
                append_bad_rows=n > 0,
            )
            for n, path in enumerate(files)
        ]


def vision_files(cfg: RunConfig, which: str) -> tuple[list[Path], list[str | None]]:
    """The train or eval files and their formats. Media are found next to their rows, which must be files here."""
    files, formats = dataset_files(cfg, which)
    far = next((file.path for file in files if not isinstance(file.path, Path)), None)
    if far is not None:
        raise ConfigError(
            "rows with pictures are read from files of this machine",
            where=f"{which}_dataset_path: {far}",
            fix="copy them here, with the pictures they name",
        )
    if cfg.data.columns:
        raise ConfigError(
            "columns are not renamed in rows with pictures",
            where=cfg.origin("columns"),
            fix="name the fields in the files as `docs/vision-data.md` does",
        )
    return [Path(file.path) for file in files], formats


def text_sources(cfg: RunConfig, tokenizer: Tokenizer, bad_rows: BadRowsFile | None) -> list[TokenSource]:
    """Of text_dataset_path, the stream between the pictures."""
    d, v = cfg.data, cfg.vision
    return open_sources(
        [Path(path).expanduser() for path in v.text_dataset_path],
        [None if name == "auto" else name for name in v.text_dataset_type] or [None] * len(v.text_dataset_path),
        tokenizer,
        row_rules(cfg),
        cache_dir=d.cache_dir,
        num_proc=d.dataset_num_proc,
        max_bad_fraction=1.0 if cfg.compat.ignores_bad_rows else d.max_bad_fraction,
        bad_rows=bad_rows,
    )


def vision_stream(
    cfg: RunConfig, sources: list[VisionSource], text: list[TokenSource], packs_per_step: int
) -> PackStream | ModalStream:
    """Packs of pictures, by tokens and patches; text steps between them where modality_ratio sets them."""
    d, v = cfg.data, cfg.vision
    lengths, probs = [source.lengths for source in sources], file_shares(cfg, "train", [len(s) for s in sources])
    more: dict[str, Any] = dict(costs=[source.patches for source in sources], max_cost=v.max_patches or None)
    if cfg.compat.erniekit_order:
        rows = [_rows(source) for source in sources]
        order: Any = CompatVisionOrder(rows, probs)
        stream = PackStream(order, lengths_like_erniekit(lengths), d.max_seq_len, greedy=False)
    else:
        order = SampleOrder(
            [len(s) for s in sources], probs, seed=cfg.train.seed, shuffle=d.random_shuffle, strategy=d.mix_strategy
        )
        options: dict[str, Any] = dict(packing=d.packing, greedy=d.greedy_intokens, buffer_size=d.buffer_size)
        stream = PackStream(order, lengths, d.max_seq_len, **options, **more)
    if not text:
        return stream
    shares = list(v.text_dataset_prob) or [1.0] * len(text)
    text_order = SampleOrder(
        [len(s) for s in text], shares, seed=cfg.train.seed, shuffle=d.random_shuffle, strategy=d.mix_strategy
    )
    packs = PackStream(
        text_order, [source.lengths for source in text], d.max_seq_len, packing=d.packing, greedy=d.greedy_intokens,
        buffer_size=d.buffer_size,
    )  # fmt: skip
    first = cfg.compat.erniekit_order
    return ModalStream(stream, packs, len(sources), packs_per_step, v.modality_ratio or (1, 1), text_first=first)


def _rows(source: VisionSource) -> np.ndarray:
    """The sample that each row became; -1: none."""
    out = np.full(source.report.rows, -1, np.int64)
    for index in range(len(source)):
        out[source.row(index) - 1] = index
    return out


def beyond_patches(cfg: RunConfig, sources: Sequence[VisionSource]) -> Iterator[str]:
    """A sample is never cut for `max_patches`: it then has a pack of its own, of more patches than the bound."""
    most = cfg.vision.max_patches
    counts = np.concatenate([source.patches for source in sources]) if most and sources else np.zeros(0, np.int64)
    if above := int((counts > most).sum()):
        yield (
            f"note     max_patches: {above:,} of {len(counts):,} samples have more than {most:,} patches "
            f"by themselves, up to {int(counts.max()):,}; each has a pack of its own"
        )


def media_processes(cfg: RunConfig) -> int:
    """That decode for this rank."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cfg.vision.media_num_proc or max(1, min(MOST_PROCESSES, cores))


def vision_collate(
    cfg: RunConfig,
    tokenizer: Tokenizer,
    rules: VisionRules,
    packs_at_once: int,
    decode: bool = True,
    rows: Callable[..., Batch] = collate,
) -> VisionCollate:
    """packs_at_once: that all ranks together take in one micro-batch. decode: off where there is no tower. rows: as
    VisionCollate's."""
    change: Callable[[Pack], Pack] | None = None
    if cfg.compat.erniekit_order:
        change = partial(_joined, flags=JoinedFlags(), end_id=tokenizer.end_id, at_once=packs_at_once)
    count = media_processes(cfg)
    padding = cfg.compat.erniekit_rows
    tokens = VisionTokens.of(tokenizer)
    return VisionCollate(
        tokens, rules.limits, count, zero_padding=padding, change=change, decode=decode, rules=rules, rows=rows
    )


def first_prompts(cfg: RunConfig, data: TrainData, tokenizer: Tokenizer) -> Compared | None:
    """The first conversation's last prompt as a server will send it, and as training has it. Not compared under compat:
    there ERNIEKit's own differences are kept."""
    collate = data.collate
    assert isinstance(collate, VisionCollate)
    assert collate.rules is not None
    if collate.rules.compat:
        return None
    rules, thinking = collate.rules, cast(Thinking, cfg.data.train_thinking)
    assembler = VisionAssembler(tokenizer, rules, thinking)
    header_of = headers_from(collate.pool, rules.limits)
    for row in _vision_rows(data):
        messages = kept(row.messages, thinking)
        if not messages or messages[-1].role != "assistant":
            continue
        try:
            made = assembler.sample(row, cfg.data.max_seq_len, "drop", header_of)
            reasoning = any(divided(write_out(m).content)[0] for m in messages if m.role == "assistant")
            prompt = assembler.prompt(replace(row, messages=messages[:-1]), header_of, reasoning).ids.tolist()
        except (MediaError, BadRow):
            continue
        if isinstance(made, Assembled) and not made.dropped_turns:
            return prompt, made.sample.ids[: len(prompt)].tolist()
    return None


def proof_files(cfg: RunConfig, data: TrainData, tokenizer: Tokenizer) -> dict[str, bytes]:
    """Of preprocessing, for each checkpoint, by name."""
    if not cfg.vision.vision_proof:
        return {}
    collate = data.collate
    assert isinstance(collate, VisionCollate)
    assert collate.rules is not None
    thinking = cast(Thinking, cfg.data.train_thinking)
    rows = _vision_rows(data, collate.rules.compat)
    made = proof_file(rows, tokenizer, collate.rules, thinking, cfg.data.max_seq_len, collate.pool)
    return {FILE: made} if made is not None else {}


def proof_lines(folder: Path, tokenizer: Tokenizer) -> list[str]:
    """What the files of a trained folder prove of preprocessing; a difference is a warning."""
    proved = check(folder, tokenizer) if folder.is_dir() else None
    if proved is not None and proved.stage is not None:
        warn(proved.line())
    return [proved.line()] if proved is not None and proved.stage is None else []


def _vision_rows(data: TrainData, compat: bool = False) -> Iterator[VisionRow]:
    for source in data.sources:
        if not isinstance(source, VisionSource):
            continue
        folder, format = Path(source.path).absolute().parent, source.report.format
        read: Callable[[Any], VisionRow] = partial(read_vision_row, folder=folder, format=format, compat=compat)
        if isinstance(source, VisionPairSource):
            read = partial(read_vision_pair, folder=folder, format=format)
        for line, raw in rows_in(source.path):
            row = parsed(raw, line, source.path, read)
            if isinstance(row, VisionPair):  # as it is served: the question with the better answer
                yield VisionRow((*row.messages, *row.chosen), row.media)
            elif isinstance(row, VisionRow):
                yield row


def _joined(pack: Pack, flags: JoinedFlags, end_id: int, at_once: int) -> Pack:
    return like_erniekit(pack, pack.index // at_once, flags, end_id)
