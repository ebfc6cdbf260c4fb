"""What rows a stage reads, and the rules by which they become samples.

Used by datasets.py, streaming.py and the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from erniekit.config import RunConfig
from erniekit.data.formats.columns import as_columns
from erniekit.data.preference import PairRules
from erniekit.data.preference_collate import collate_pairs
from erniekit.data.token_cache import KindOf, RowRules
from erniekit.data.types import Batch


class DataRows(NamedTuple):
    """Rows other than conversations, and how packs of them become a batch."""

    pairs: PairRules | None
    collate: Callable[..., Batch] = collate_pairs
    # Or by file, format and columns; None: preferences.
    kind: KindOf | None = None


def rules_under(keys: Mapping[str, Any]) -> dict[str, Any]:
    """What keys decide of a TokeniseJob, by its fields: as a checkpoint recorded them."""
    fields = {"max_seq_len": "max_seq_len", "overlong": "overlong", "train_thinking": "thinking"}
    return {field: keys[key] for key, field in fields.items() if key in keys}


def row_rules(cfg: RunConfig, rows: DataRows | None = None) -> RowRules:
    d = cfg.data
    words: Any = (d.overlong, d.train_thinking)  # config/ has checked that they are among those there are
    return RowRules(
        d.max_seq_len,
        words[0],
        cfg.compat.erniekit_rows,
        None if rows is None else rows.pairs,
        words[1],
        as_columns(d.columns, cfg.origin("columns")),
        None if rows is None else rows.kind,
    )
