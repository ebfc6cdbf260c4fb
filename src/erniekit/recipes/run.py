"""`erniekit train`, `eval`, `export`, `quantize` and `split`: config in, stage picked, result out. Called by cli/ and
api/. Nothing here imports torch before the first line is on the screen."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from erniekit.config import RunConfig, for_world, load, refuse_not_yet_supported
from erniekit.config.opening_line import announce_command
from erniekit.devices import entry_of
from erniekit.early_imports import import_beside_torch, without_collections
from erniekit.errors import ConfigError
from erniekit.recipes import stage_of
from erniekit.recipes.first_line import begin
from erniekit.recipes.named_data import refuse_missing_data
from erniekit.result import RunResult
from erniekit.weight_kinds import BF16

if TYPE_CHECKING:
    from erniekit.recipes.session import Session


def eval_command(args: list[str]) -> int:
    run_eval(_announced(args, "eval"))
    return 0


def export_command(args: list[str]) -> int:
    run_export(_announced(args, "export"))
    return 0


def quantize_command(args: list[str]) -> int:
    cfg = _announced(args, "quantize")
    with without_collections():
        from erniekit.recipes.quantize import run_quantize
    run_quantize(cfg)
    return 0


def split_command(args: list[str]) -> int:
    cfg = _announced(args, "split")
    with without_collections():
        from erniekit.export.split import run_split
    run_split(cfg)
    return 0


def _announced(args: list[str], command: str) -> RunConfig:
    cfg = load(args, command)
    if command in ("eval", "quantize"):
        refuse_missing_data(cfg)
    announce_command(cfg)
    return cfg


def run_train(
    cfg: RunConfig,
    command: Sequence[str] = (),
    launch: str = "",
    begun: bool = False,
    session: Session | None = None,
) -> RunResult:
    """launch: see recipes/training.py. begun: the launcher of this rank has printed the first line. session: what a
    Python session adds to the keys."""
    begin(cfg, begun, own_rows=session is not None and bool(session.rows))
    with without_collections():
        if _on_card(cfg):
            import_beside_torch(compiles=bool(cfg.model.compile))
        from erniekit.recipes.training import train
    return train(stage_of(cfg, session.loss if session else None), cfg, command or sys.argv, launch, session)


def _on_card(cfg: RunConfig) -> bool:
    """Whether this run will probably be on one; found without torch."""
    train, env = cfg.train, os.environ
    if train.no_cuda or train.device == "cpu":
        return False
    return entry_of(train.device, env).count_visible(env) > 0


def check_world(cfg: RunConfig, ranks: int) -> None:
    """Before any rank is started: whether the run can be spread over this number."""
    from erniekit.parallel.layout import fit
    from erniekit.parallel.world import check_ranks_of_islands, check_schedule, layout_of

    check_ranks_of_islands(cfg.parallel.islands, ranks)
    layout = fit(ranks, layout_of(cfg.parallel, ranks, cfg.moe.moe_group))
    trained = cfg.model.num_nextn_predict_layers > 0 and cfg.model.multi_token_pred_lambda > 0
    check_schedule(cfg.parallel.pp_schedule, layout, trained, cfg.parallel.pp_runner)
    for_world(cfg, layout.data_ranks)


def run_eval(cfg: RunConfig, command: Sequence[str] = ()) -> RunResult:
    refuse_not_yet_supported(cfg)
    if cfg.train.eval_tasks:
        from erniekit.recipes.tasks import run_tasks

        return run_tasks(cfg)
    from erniekit.recipes.evaluate import evaluate_run

    return evaluate_run(cfg)


def run_export(cfg: RunConfig, command: Sequence[str] = ()) -> RunResult:
    """quant: what is exported is then quantised. What was trained in FP8 is exported so."""
    _check_export(cfg)
    rounded = cfg.export.format == "gguf" or cfg.export.merge_grid != BF16
    if cfg.quantize.quant in (None, "fp8_static") and not rounded:
        from erniekit.recipes.fp8_export import export_fp8, trained_in_fp8

        if trained_in_fp8(cfg):
            return export_fp8(cfg)
    if cfg.quantize.quant:
        from erniekit.recipes.quantize import export_quantised

        return export_quantised(cfg)
    from erniekit.export import run as export

    return export.run_export(cfg)


def _check_export(cfg: RunConfig) -> None:
    """Keys of which one would be dropped."""
    kind, gguf = cfg.export.gguf_type, cfg.export.format == "gguf"
    if gguf and cfg.quantize.quant:
        raise ConfigError(
            f"format: gguf and quant: {cfg.quantize.quant} each set how weights are stored",
            where=f"{cfg.origin('format')} and {cfg.origin('quant')}",
            fix="format: gguf with gguf_type: q8_0, q4_0 or mxfp4; or quant alone",
        )
    if not gguf and cfg.given("gguf_type"):
        raise ConfigError(
            f"gguf_type: {kind} is how a GGUF file stores weights, and this export writes none",
            where=cfg.origin("gguf_type"),
            fix=f"format: gguf with gguf_type: {kind}",
        )


def run(command: str, *args: Any, **keys: Any) -> RunResult:
    """Any command that ends with a result: train, eval, export, quantize or split.

    `run("eval", "out", eval_dataset_path="rows.jsonl")` gives a RunResult with output_dir, metrics, steps and
    next_commands.

    args: recipes or arguments as on the command line
    keys: any key of the command
    """
    from erniekit.export.split import run_split
    from erniekit.recipes.quantize import run_quantize

    arguments = [str(a) for a in args] + [f"{k}={v}" for k, v in keys.items()]
    table: dict[str, Callable[..., RunResult]] = {
        "train": run_train,
        "eval": run_eval,
        "export": run_export,
        "quantize": run_quantize,
        "split": run_split,
    }
    if command not in table:
        raise ConfigError(f"{command!r} is not a command that run() has", where="run", fix="one of " + ", ".join(table))
    return table[command](load(arguments, command), ["erniekit", command, *arguments])
