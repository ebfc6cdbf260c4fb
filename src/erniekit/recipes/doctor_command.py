"""`erniekit doctor`: a run is prepared and checked, and what holds its speed back is named; without a recipe this
machine's devices are tried. In the command table; the first line is printed before torch is imported.
"""

from __future__ import annotations

from erniekit.config import RunConfig, load
from erniekit.config.opening_line import announce_work
from erniekit.early_imports import without_collections
from erniekit.log import emit, typed
from erniekit.recipes.first_line import begin
from erniekit.recipes.output_folder import take_output


def doctor_command(args: list[str]) -> int:
    cfg = load(args, "train")
    if not (cfg.model.model_name_or_path or cfg.data.train_dataset_path):
        announce_work("the devices of this machine")
        from erniekit.recipes import device_report

        return device_report.report(cfg)
    begin(cfg)
    check_run(cfg)
    emit(f"next     {typed('train', *args)}")
    return 0


def check_run(cfg: RunConfig) -> None:
    """All that training does before its first step."""
    with without_collections():
        from erniekit.parallel.layout import CONFIG_KEYS
        from erniekit.recipes import run_summary, slowdowns, stage_of
        from erniekit.recipes.build import build
        from erniekit.recipes.datasets import with_data
        from erniekit.recipes.doctor import before_training, check_vocabulary
        from erniekit.recipes.fp8_training import scales_of
        from erniekit.recipes.kernel_table import kernel_table
        from erniekit.recipes.optimiser import make_optimizer
        from erniekit.recipes.run_plan import open_tokenizer, plan_run
    output = take_output(cfg, create=False)
    plan = plan_run(cfg, one_process=True)
    cfg, tokenizer = plan.config, open_tokenizer(plan)
    check_vocabulary(plan.folder, tokenizer)
    run_summary.show_plan(plan)
    stage = stage_of(cfg)
    data = stage.open_data(plan, tokenizer, output)
    plan = with_data(plan, data)
    cfg = plan.config
    run_summary.show_data(data, plan)
    built, first = build(plan, stage), data.first_batch()
    scales_of(cfg, built, first)
    run_summary.show_coverage(built)
    prepare, optimizer = stage.before_step(cfg, built, data), make_optimizer(cfg, built)
    kernels = kernel_table(built, optimizer)
    run_summary.show_kernels(kernels)
    if several := [f"{key}={cfg[key]}" for key in CONFIG_KEYS.values() if cfg[key] > 1]:
        emit(f"note     kernels: of one process; ranks with {' '.join(several)} keep theirs in run.json")
    slowdowns.show(plan, data, kernels)
    before_training(stage, cfg, built, optimizer, data, tokenizer, first, prepare)
