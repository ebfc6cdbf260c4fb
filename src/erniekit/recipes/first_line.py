"""The first line of a run, and what can be refused before it: all that needs no torch, whose import takes seconds.

Called by cli/train.py, run.py and doctor_command.py; run_summary.py goes on once device and model are open.
"""

from __future__ import annotations

from erniekit.checkpoint.hub import resolve_model
from erniekit.config import RunConfig, refuse_not_yet_supported
from erniekit.config.opening_line import announce_work
from erniekit.recipes.named_data import refuse_missing_data
from erniekit.recipes.output_folder import take_output


def begin(cfg: RunConfig, shown: bool = False, own_rows: bool = False) -> None:
    """shown: the line has been printed, by the launcher of this rank. own_rows: a Python session has some."""
    refuse_not_yet_supported(cfg)
    output = take_output(cfg, create=False)  # a missing model or a mistyped key leaves no folder behind
    if not own_rows:
        refuse_missing_data(cfg)
    resolve_model(cfg.model.model_name_or_path, cfg.model.download_hub)  # which may download it
    if not shown:
        compat = ", compat: erniekit" if cfg.train.compat else ""
        announce_work(f"{cfg.train.stage}, seed {cfg.train.seed}{compat}, to {output}")
