"""Models that a run keeps besides the one it trains, in numbers: a live reference and a teacher.

Called by run_plan.py, planning.py, memory_decisions.py and rehearsal.py; nothing is downloaded, and no weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from erniekit.config import RunConfig
from erniekit.config.note import Note
from erniekit.loss_table import SCORE_KEYS
from erniekit.models import costs, find
from erniekit.models.config import DecoderConfig
from erniekit.models.released import released


def compares(cfg: RunConfig) -> bool:
    """Whether there is a reference."""
    return cfg.train.stage == "KTO" or (cfg.train.stage == "DPO" and not cfg.dpo.reference_free)


def cuts_pairs(cfg: RunConfig) -> bool:
    """Whether a pair's log-probabilities depend on its place in a row: context parallelism cuts the row, and each part
    is rounded to 16 bits."""
    parts = max(cfg.parallel.context_parallel_degree, cfg.parallel.sep_parallel_degree)
    return parts > 1 and cfg.precision.compute_type != "fp32"


def reference_notes(cfg: RunConfig) -> Iterator[Note]:
    """Before the first step pairs share rows in the order of the files, in training in another."""
    if compares(cfg) and cfg.dpo.reference_logps == "cached" and cuts_pairs(cfg):
        reason = (
            "with context parallelism in 16 bits a pair is rounded by where its row is cut, and kept numbers are of "
            "other rows: the first loss would not be ln 2; compute_type: fp32 keeps them"
        )
        yield Note("reference_logps", "cached", "live", reason)


def live_reference(cfg: RunConfig) -> bool:
    return compares(cfg) and (cfg.dpo.reference_logps == "live" or cuts_pairs(cfg))


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
