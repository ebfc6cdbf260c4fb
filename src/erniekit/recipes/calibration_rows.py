"""The rows a model is quantised with, of any format and stage: conversations, preference pairs, documents. For
quantize.py.

A row is one sample, or for stage PT a sequence of documents. As few as are asked for are read, and short ones share a
sequence: a layer is run once for many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from erniekit.config import RunConfig
from erniekit.data.collate import collate
from erniekit.data.mix import SampleOrder
from erniekit.data.preference_collate import collate_pairs
from erniekit.data.report import DataReport, total_lines
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import Batch, Pack
from erniekit.log import emit
from erniekit.recipes.data_rows import DataRows
from erniekit.recipes.datasets import sources_for
from erniekit.recipes.dpo import pair_rules
from erniekit.recipes.pretrain import open_rows

GIVEN = ("train_dataset_path", "input_dir", "data_filelist")  # keys that name rows to calibrate on


def rows_are_given(cfg: RunConfig) -> bool:
    return any(cfg[key] for key in GIVEN)


def calibration_rows(cfg: RunConfig, tokenizer: Tokenizer) -> list[Batch]:
    """calibration_rows of them, drawn by seed over all train files."""
    return _rows(cfg, "train", tokenizer)


def evaluation_rows(cfg: RunConfig, tokenizer: Tokenizer) -> list[Batch]:
    """As many of the eval files, in their order; none where there are no such files."""
    return _rows(cfg, "eval", tokenizer) if cfg.data.eval_dataset_path else []


def _rows(cfg: RunConfig, which: str, tokenizer: Tokenizer) -> list[Batch]:
    put: Callable[..., Batch] = partial(collate, pad_multiple=1)
    sources: Sequence[Any]
    packs: Iterator[list[tuple[int, int]]]
    if cfg.train.stage == "PT":
        part = open_rows(cfg, which, tokenizer, None)
        sources, packs = part.sources, iter(part.rows.stream[k] for k in range(len(part.rows)))
    else:
        pairs = DataRows(pair_rules(cfg)) if cfg.train.stage == "DPO" else None
        put = put if pairs is None else partial(collate_pairs, pad_multiple=1)
        sources = sources_for(cfg, which, tokenizer, None, pairs)
        packs = _singly(sources, cfg.train.seed, shuffle=which == "train")
    _tell("rows" if which == "train" else "eval", [source.report for source in sources])
    chosen = islice(packs, cfg.quantize.calibration_rows)
    samples = ([sources[s].sample(k) for s, k in members] for members in chosen)
    return [put([Pack(tuple(pack), 0)]) for pack in _together(samples, cfg.data.max_seq_len)]


def _together(rows: Iterable[list[Any]], most: int) -> Iterator[list[Any]]:
    """Rows end to end, up to `most` tokens."""
    held: list[Any] = []
    for row in rows:
        if held and sum(len(sample.ids) for sample in (*held, *row)) > most:
            yield held
            held = []
        held += row
    if held:
        yield held


def _singly(sources: Sequence[Any], seed: int, shuffle: bool) -> Iterator[list[tuple[int, int]]]:
    sizes = [len(source) for source in sources]
    order = SampleOrder(sizes, seed=seed, shuffle=shuffle, strategy="random" if shuffle else "concat")
    for at in range(sum(sizes)):
        source, index = (int(numbers[0]) for numbers in order.take(at, 1))
        yield [(source, index)]


def _tell(label: str, reports: Sequence[DataReport]) -> None:
    for line in [line for report in reports for line in report.lines()] + total_lines(list(reports)):
        emit(f"{label:<9}{line}")
