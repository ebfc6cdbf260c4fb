"""Stages RM and CLS: how a language model becomes one with a score head.

run_plan.py uses the changes of config.json, evaluate.py whether model and stage belong together.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from erniekit.config import RunConfig
from erniekit.errors import ConfigError
from erniekit.loss_table import SCORE_KEYS
from erniekit.models.score_head import changes, labels_in, refuse
from erniekit.printable import counted

REWARD = ("LABEL_0",)  # transformers' name of an only class
ASSUMED = ("LABEL_0", "LABEL_1")


def head_changes(cfg: RunConfig, folder: Path) -> dict[str, Any]:
    """Values of config.json that give the model the head its stage trains; none where it has it already."""
    from erniekit.checkpoint.model_folder import read_json  # here and below: a plan reads no files

    raw, where = read_json(folder / "config.json"), str(folder / "config.json")
    if cfg.train.stage not in SCORE_KEYS:
        refuse(labels_in(raw, where), f"stage {cfg.train.stage}", where)
        return {}
    if raw.get("vision_config"):
        raise ConfigError(
            f"stage {cfg.train.stage} reads text; this is a vision-language model", where=where, fix="take a text model"
        )
    own = labels_in(raw, where)
    held = _classes_of_adapter(cfg) or own
    wanted = REWARD if cfg.train.stage == "RM" else _classes(cfg, held)
    if held and held != wanted:
        whose = "model" if held is own else "adapter"
        raise ConfigError(
            f"the {whose}'s score head has {counted(len(held), 'class', 'classes')} ({', '.join(held[:4])}), "
            f"this run {len(wanted)} ({', '.join(wanted[:4])})",
            where=where if held is own else cfg.lora.lora_path[0],
            fix="class_labels with those classes in their order, or start from a language model",
        )
    return {} if own == wanted else changes(raw, wanted)


def expected_labels(cfg: RunConfig, raw: dict[str, Any], where: str) -> tuple[str, ...]:
    """For a plan, which reads no rows: the classes that are named somewhere, else two."""
    held = labels_in(raw, where)
    if cfg.train.stage not in SCORE_KEYS:
        refuse(held, f"stage {cfg.train.stage}", where)
        return ()
    return REWARD if cfg.train.stage == "RM" else cfg.score.class_labels or held or ASSUMED


def _classes_of_adapter(cfg: RunConfig) -> tuple[str, ...]:
    """Of an adapter that the run starts from."""
    if not cfg.lora.lora or not cfg.lora.lora_path:
        return ()
    from erniekit.lora.score_head import classes_of

    return classes_of(Path(cfg.lora.lora_path[0]).expanduser())


def _classes(cfg: RunConfig, held: tuple[str, ...]) -> tuple[str, ...]:
    named = cfg.score.class_labels
    if not named:
        from erniekit.recipes.dataset_files import dataset_files

        files, formats = dataset_files(cfg, "train")
        named = read_classes(cfg, [file.path for file in files], formats)
    if not cfg.given("class_labels") and held and set(named) <= set(held):
        named = held
    if len(set(named)) < 2 or len(set(named)) < len(named):
        shown = ", ".join(named[:8]) or "none"
        raise ConfigError(
            f"classification needs two classes or more, each once; found: {shown}",
            where="class_labels" if cfg.given("class_labels") else "train_dataset_path",
            fix="rows of stage CLS have `text` and `label`; class_labels: a,b,c names the classes",
        )
    return tuple(named)


def read_classes(cfg: RunConfig, files: Sequence[Path | str], formats: Sequence[str | None]) -> tuple[str, ...]:
    from erniekit.data.classification import classes_in
    from erniekit.data.formats.columns import as_columns

    return classes_in(files, as_columns(cfg.data.columns, cfg.origin("columns")), formats)


def check_head(cfg: RunConfig, labels: Sequence[str], model: str) -> None:
    """Of `erniekit eval`: a model and a stage that do not belong together. model: for people."""
    scores, stage = bool(labels), cfg.train.stage
    if scores == (stage in SCORE_KEYS) and (stage != "RM" or len(labels) == 1):
        return
    what = "has a score head" if scores else "has no score head"
    right = "stage: CLS, or RM for a reward model" if scores else "stage: SFT, or a model that RM or CLS trained"
    raise ConfigError(f"this model {what}; stage is {stage}", where=model, fix=right)
