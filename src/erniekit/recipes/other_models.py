"""Models that a run keeps besides the one it trains, in numbers: a live reference and a teacher.

Called by planning.py, memory_decisions.py and rehearsal.py; nothing is downloaded, and no weight is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from erniekit.config import RunConfig
from erniekit.loss_table import SCORE_KEYS
from erniekit.models import costs, find
from erniekit.models.config import DecoderConfig
from erniekit.models.released import released


def live_reference(cfg: RunConfig) -> bool:
    live = cfg.dpo.reference_logps == "live"
    return live and (cfg.train.stage == "KTO" or (cfg.train.stage == "DPO" and not cfg.dpo.reference_free))


def live_copy(cfg: RunConfig) -> bool:
    """DPO or KTO that trains every weight keeps a second model."""
    return live_reference(cfg) and not cfg.lora.lora


def forwards(cfg: RunConfig) -> int:
    """Passes over a step's rows without gradient. KTO: the policy over each prompt with another row's answer, and a
    live reference over both kinds of rows."""
    live = live_reference(cfg)
    return 1 + 2 * live if cfg.train.stage == "KTO" else int(live)


def spread_over_data_only(cfg: RunConfig) -> bool:
    """As config/rules/stages.py refuses all other axes."""
    return cfg.train.stage in SCORE_KEYS or bool(cfg.distill.teacher_model_name_or_path)


def known_config(name: str) -> tuple[dict[str, Any] | None, Path | None]:
    """config.json of a folder that is here, and that folder; of a released model of that name; or nothing."""
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        from erniekit.checkpoint.model_folder import read_json  # here: of a released name no folder is read

        return read_json(folder / "config.json"), folder
    return released(name), None


def teacher_of(cfg: RunConfig) -> DecoderConfig | None:
    """The shape of the teacher; None where there is none, or its config.json is not here."""
    name = cfg.distill.teacher_model_name_or_path
    raw, folder = known_config(name) if name else (None, None)
    if raw is None:
        return None
    where = str(folder or name)
    config: DecoderConfig = find(raw, where).read_config(dict(raw), "hf", False, where)
    return config


def other_model_bytes(cfg: RunConfig, model: DecoderConfig, each: int = 2) -> float:
    """Weights of all of them on one device; each: bytes of a number."""
    teacher = teacher_of(cfg)
    own = costs.parameters(model) if live_copy(cfg) else 0
    return float(each * (own + (costs.parameters(teacher) if teacher is not None else 0)))
