"""Preferences on pictures for a run: sources, packs and batches of stage DPO with a vision-language model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from erniekit.config import RunConfig
from erniekit.data.preference import PairRules
from erniekit.data.preference_collate import collate_pairs
from erniekit.data.report import BadRowsFile, DataReport
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import Batch
from erniekit.data.vision import pairs
from erniekit.data.vision.rules import VisionRules
from erniekit.errors import ConfigError
from erniekit.parallel.mesh import World
from erniekit.recipes.dataset_files import one_of_several
from erniekit.recipes.datasets import TrainData, counted, eval_batches, steps_accumulated
from erniekit.recipes.run_plan import RunPlan
from erniekit.recipes.vision_data import vision_collate, vision_files, vision_rules, vision_stream


def open_vision_pairs(plan: RunPlan, tokenizer: Tokenizer, output: Path, rules: PairRules) -> TrainData:
    """As vision_data.open_vision_data, of pairs."""
    cfg, world = plan.config, plan.world
    d, t = cfg.data, cfg.train
    if not d.train_dataset_path:
        raise ConfigError("no training data", where="train_dataset_path", fix="name a file, e.g. --data my.jsonl")
    if cfg.compat.erniekit_rows or cfg.compat.erniekit_order:
        raise ConfigError(
            "ERNIEKit compares no answers about pictures", where="compat: erniekit", fix="leave compat out of this run"
        )
    seen = vision_rules(cfg, plan.folder.path)

    def listed(name: str) -> BadRowsFile:  # one rank writes it
        return BadRowsFile(output / name, world.is_main)

    sources = pair_sources(cfg, "train", tokenizer, seen, rules, listed("bad_rows.jsonl"))
    wants_eval = bool(d.eval_dataset_path) and (t.do_eval or t.evaluation_strategy != "no")
    held_out = pair_sources(cfg, "eval", tokenizer, seen, rules, listed("bad_eval_rows.jsonl")) if wants_eval else []
    at_once = t.per_device_train_batch_size * world.layout.data_ranks
    stream = vision_stream(cfg, list(sources), [], 1)
    collate = vision_collate(cfg, tokenizer, seen, at_once, decode=world.at["pp"] == 0, rows=collate_pairs)
    return counted(plan, tokenizer, sources, stream, held_out, steps_accumulated(plan, sources, stream), collate)


def held_out_pairs(
    cfg: RunConfig, tokenizer: Tokenizer, bad_rows: BadRowsFile, world: World, rules: PairRules, model: Path
) -> tuple[list[DataReport], Iterator[Batch]]:
    """As TrainingStage.held_out. model: the folder whose preprocessor_config.json has the sizes."""
    seen = vision_rules(cfg, model)
    sources = pair_sources(cfg, "eval", tokenizer, seen, rules, bad_rows)
    collate = vision_collate(cfg, tokenizer, seen, 1, rows=collate_pairs)

    def batches() -> Iterator[Batch]:
        with collate:
            yield from eval_batches(cfg, list(sources), world, {"pad_id": tokenizer.pad_id or 0}, collate)

    return [source.report for source in sources], batches()


def pair_sources(
    cfg: RunConfig,
    which: str,
    tokenizer: Tokenizer,
    seen: VisionRules,
    rules: PairRules,
    bad_rows: BadRowsFile | None,
) -> list[pairs.VisionPairSource]:
    d = cfg.data
    files, formats = vision_files(cfg, which)
    job = dict(
        tokenizer=tokenizer, max_seq_len=d.max_seq_len, overlong=d.overlong, compat=False, pairs=rules,
        thinking=d.train_thinking, rules=seen,
    )  # fmt: skip
    with one_of_several(cfg, which):
        return [
            pairs.open_vision_pairs(
                path,
                formats[n],
                job,
                cache_dir=d.cache_dir,
                num_proc=d.dataset_num_proc,
                max_bad_fraction=d.max_bad_fraction,
                bad_rows=bad_rows,
                append_bad_rows=n > 0,
            )
            for n, path in enumerate(files)
        ]
