"""The end of a run: final model in output_dir, result files, the report, and what to type next. For training.py."""

from __future__ import annotations

import os
import time
from pathlib import Path

from erniekit import heartbeat
from erniekit.checkpoint.final_model import publish_model
from erniekit.checkpoint.nodes import nodes_without
from erniekit.config import RunConfig
from erniekit.errors import CheckpointError
from erniekit.log import emit, paint, typed, warn
from erniekit.parallel.mesh import World
from erniekit.printable import counted
from erniekit.recipes import plan_check
from erniekit.recipes.built import Built
from erniekit.recipes.final_choice import choose, verify_model
from erniekit.recipes.run_plan import RunPlan
from erniekit.result import REMOVED, RunResult
from erniekit.track import Trackers
from erniekit.track.report import write_report
from erniekit.track.results import speeds, write_results, write_trainer_state
from erniekit.train.eval_hook import EvalHook
from erniekit.train.metrics import LogHook
from erniekit.train.save import Saver
from erniekit.train.trainer import Trainer


def close_run(
    cfg: RunConfig,
    output: Path,
    built: Built,
    trainer: Trainer,
    saver: Saver,
    trackers: Trackers,
    started: float,
) -> RunResult:
    state = trainer.state
    evaluation = next((hook.last for hook in trainer.hooks if isinstance(hook, EvalHook)), {})
    extras = next((hook.extras for hook in trainer.hooks if isinstance(hook, LogHook)), {})
    seconds = time.perf_counter() - started
    metrics = {
        "train_loss": state.loss_sum / max(1, state.updates),
        "train_runtime": seconds,
        "train_samples_per_second": (state.packs - trainer.began_at[1]) / seconds,
        "train_steps_per_second": (state.step - trainer.began_at[0]) / seconds,
        "train_tokens": float(state.tokens),
        "skipped_steps": float(state.skipped_steps),
        **extras,
        **evaluation,
    }
    if state.step == trainer.began_at[0]:  # a finished run's command again: its times are those of its training
        metrics |= speeds(output)
    best = state.best_step if cfg.checkpoint.load_best_model_at_end else None
    saver.saves.close()
    trackers.log(state.step, metrics, "end")
    choice = choose(saver.manager, best, state.step) if built.world.is_main else None
    if cfg.checkpoint.save_on_each_node:
        publish_on_nodes(output / built.world.broadcast(choice and choice.path.name), output, built.world)
    if choice is None:
        return RunResult(output, metrics, state.step)
    publish_model(choice.path, output, heartbeat.beat)
    kept = output / f"checkpoint-{state.best_step}"
    training = {k: v for k, v in metrics.items() if not k.startswith("eval_")}
    write_results(output, train=training, evaluation=evaluation or None)
    write_trainer_state(
        output,
        global_step=state.step,
        max_steps=trainer.max_steps,
        num_train_epochs=cfg.train.num_train_epochs,
        best_metric=state.best_metric,
        best_model_checkpoint=str(kept) if state.best_step and kept.is_dir() else None,
        summary=training,
    )
    if choice.note:
        trackers.event(state.step, "final model", choice.note)
    return RunResult(output, metrics, state.step, next_commands(output, built), choice.note)


def publish_on_nodes(checkpoint: Path, output: Path, world: World) -> None:
    """The same on nodes with a disk of their own, out of their copies of the checkpoint. All ranks call it."""
    problem = ""
    if world.rank in nodes_without(output, world.leaders, world.rank, world.control):
        try:
            verify_model(checkpoint)
            publish_model(checkpoint, output, heartbeat.beat)
        except CheckpointError as error:
            problem = f"no final model on the node of rank {world.rank}: {error.what}"
    for extras in filter(None, world.gather(problem)):  # the run has its result: worth a warning, no more
        warn(extras)


def next_commands(output: Path, built: Built) -> list[str]:
    export = typed("export", f"model_name_or_path={built.folder.path}", f"output_dir={output}", "lora=True")
    if built.folder.config.labels:
        stage = f"stage={built.plan.config.train.stage}"
        return [typed("eval", output, stage, "eval_dataset_path=FILE"), *([export] if built.lora else [])]
    if built.lora:
        return [typed("chat", output), export, typed("chat", output / "export")]
    if built.plan.config.precision.compute_type == "fp8":
        return [typed("export", f"output_dir={output}"), typed("chat", output / "export")]
    return [typed("chat", output), typed("split", f"output_dir={output}", "max_shard_size=5")]


def steps_line(steps: int, before: int, seconds: float) -> str:
    """before: steps of earlier sessions; the seconds are this one's."""
    if before >= steps:
        return f"{counted(steps, 'step')}, none of them now"
    now = f", the last {steps - before:,} of them" if steps - before > 1 else ", the last of them"
    return f"{counted(steps, 'step')}{now if before else ''} in {seconds:.0f} s"


def print_result(output: Path, result: RunResult, trainer: Trainer, plan: RunPlan) -> None:
    if not result.next_commands:
        return  # another rank does
    usual = next((hook.usual() for hook in trainer.hooks if isinstance(hook, LogHook)), None)
    report = write_report(output)
    m = result.metrics
    evaluation = f", eval_loss {m['eval_loss']:.4f}" if "eval_loss" in m else ""
    if trainer.stop_reason:
        emit(trainer.stop_reason)
    emit(
        f"{paint('done', 'green', 'bold')}     {steps_line(result.steps, trainer.began_at[0], m['train_runtime'])}, "
        f"train_loss {m['train_loss']:.4f}{evaluation}"
    )
    if planned := plan_check.line_of(plan, usual):
        emit(f"plan     {planned}")
    if result.note:
        warn(result.note)
    if os.environ.get(REMOVED) == "1":
        return
    emit(f"result   {output}    report {report}")
    emit("next     " + f"\n{'':9}".join(result.next_commands))
