"""`erniekit split`: the same weights in files of bounded size, in either layout, bit for bit.

Called by recipes/run.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from erniekit.checkpoint import probe as probes
from erniekit.checkpoint.hub import resolve_model
from erniekit.config import RunConfig, need
from erniekit.errors import CheckpointError
from erniekit.export.plan import named_tokenizer, note_unread
from erniekit.export.run import export, result_of
from erniekit.export.source import find_source
from erniekit.result import RunResult


def run_split(cfg: RunConfig, command: Sequence[str] = ()) -> RunResult:
    """The model in output_dir, or model_name_or_path when output_dir holds none, to <output_dir>/split_export."""
    need(cfg, "output_dir")
    note_unread(cfg)
    output_dir = Path(str(cfg.train.output_dir)).expanduser()
    found = find_source(output_dir) if output_dir.is_dir() else None
    if found is not None and found.is_adapter:
        raise CheckpointError(
            "this folder holds an adapter, which has no weights to split",
            where=f"output_dir: {output_dir}",
            fix="run `erniekit export` with the same keys: it merges and writes files of max_shard_size, too",
        )
    if found is None and not cfg.model.model_name_or_path:
        raise CheckpointError(
            "no model in this folder or in a checkpoint-N inside it",
            where=f"output_dir: {output_dir}",
            fix="set output_dir to a trained model, or model_name_or_path to any model",
        )
    source = found.path if found else resolve_model(cfg.model.model_name_or_path, cfg.model.download_hub)
    return result_of(
        export(
            source,
            None,
            output_dir / "split_export",
            layout=cfg.checkpoint.save_format,
            max_shard_size=cfg.export.max_shard_size,
            copy_tokenizer=cfg.export.copy_tokenizer,
            tokenizer=named_tokenizer(cfg),
            probe=probes.load(source),
        )
    )
