"""A training run from config to result, whatever the stage. Called by run.py and bench/ours.py.

`run` reads top to bottom: plan, open the data, build, check, resume, train, finish. stage.py has what differs between
stages.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import count
from pathlib import Path

import torch

from erniekit.checkpoint.manager import CheckpointManager
from erniekit.checkpoint.probe import Probe
from erniekit.checkpoint.read_ahead import reading_ahead
from erniekit.config import RunConfig
from erniekit.config.metrics import PREFIX
from erniekit.data.formats import CLASS_FORMATS, FORMATS, PREFERENCE_FORMATS, UNPAIRED_FORMATS
from erniekit.devices import pick
from erniekit.errors import Preempted
from erniekit.kernels.available import IMPORT_SECONDS
from erniekit.log import emit, typed, without_secrets
from erniekit.loss_table import PAIR_LOSSES, TOKEN_LOSSES
from erniekit.models import MODELS
from erniekit.models.costs import adapters_met_of
from erniekit.optim.adamw import AdamW
from erniekit.parallel.gradients import local
from erniekit.parallel.world import device_here, leave
from erniekit.recipes import (
    doctor,
    expert_layers,
    extend,
    finish,
    fp8_training,
    lost_rank,
    plan_check,
    resume,
    run_summary,
    same_run,
)
from erniekit.recipes.build import base_identity, build
from erniekit.recipes.built import Built
from erniekit.recipes.datasets import TrainData, with_data
from erniekit.recipes.generation_eval import GenerationEval
from erniekit.recipes.kernel_table import kernel_table
from erniekit.recipes.optimiser import backward_updates, make_optimizer
from erniekit.recipes.output_folder import take_output
from erniekit.recipes.own_loss import failed_in
from erniekit.recipes.reference import Reference
from erniekit.recipes.repeat import changed_data, write_recipe
from erniekit.recipes.run_plan import open_tokenizer, plan_run
from erniekit.recipes.save_times import ends_with_weights_only, minutes_between_saves
from erniekit.recipes.schedule import make_schedule
from erniekit.recipes.session import Session
from erniekit.recipes.stage import Prepare, TrainingStage
from erniekit.recipes.streaming import report_read_rows
from erniekit.recipes.vision_features import KeptFeatures, vision_training
from erniekit.result import RunResult
from erniekit.track import TRACKERS, Trackers, make_trackers
from erniekit.track.runfile import RunRecord
from erniekit.train.best import KeepBest
from erniekit.train.drift import ReplicaDrift, replicated
from erniekit.train.eval_hook import BestRule, EvalHook
from erniekit.train.evaluate import GoOn
from erniekit.train.expert_balance import ExpertBalance
from erniekit.train.fp8_scales import StaticScales
from erniekit.train.guard import FiniteGuard, Signals
from erniekit.train.hooks import CollectGarbage, Hook
from erniekit.train.metrics import LogHook
from erniekit.train.save import SaveHook, Saver
from erniekit.train.step import TrainStep
from erniekit.train.stragglers import Stragglers, device_probe
from erniekit.train.trainer import Trainer
from erniekit.train.watchdog import Watchdog


def train(
    stage: TrainingStage,
    cfg: RunConfig,
    command: Sequence[str] = (),
    launch: str = "",
    session: Session | None = None,
) -> RunResult:
    """launch: the name of the launcher's run this process is a rank of, the same for all its restarts. session: what a
    Python session adds."""
    try:
        return run(stage, cfg, command, launch, session or Session())
    except Preempted as stopped:
        again = f"\nnext: {typed(*without_secrets(command[1:]))}" if command and command[0] == "erniekit" else ""
        raise Preempted(f"{stopped}{again}") from None
    except torch.OutOfMemoryError as error:
        raise plan_check.out_of_memory(
            cfg, pick(device_here(cfg.parallel.islands, cfg.train.device), cfg.train.no_cuda)
        ) from error
    finally:
        leave()
        gc.collect()  # trainer and hooks refer to each other: a notebook's next run needs the memory now


def run(stage: TrainingStage, cfg: RunConfig, command: Sequence[str], launch: str, session: Session) -> RunResult:
    started, parts = time.perf_counter(), StartTimes()
    output = take_output(cfg, create=False)  # a missing model or a mistyped key leaves no folder behind
    plan = plan_run(cfg)
    cfg, world, folder, tokenizer = plan.config, plan.world, plan.folder, open_tokenizer(plan)
    if cfg.train.doctor == "on":
        doctor.check_vocabulary(folder, tokenizer)
    run_summary.show_plan(plan)
    formats = (FORMATS, PREFERENCE_FORMATS, UNPAIRED_FORMATS, CLASS_FORMATS)
    for table in (MODELS, *formats, TOKEN_LOSSES, PAIR_LOSSES, TRACKERS):
        table.installed()  # says which entry points of installed packages are refused
    record = RunRecord(output, command=list(command), version=run_summary.version())
    take_output(cfg)
    session.write_rows(output, world)
    manager = checkpoints(cfg, output)
    held = manager if world.is_main else nullcontext()  # one rank holds the folder, the others only look
    dog = Watchdog(output, world.rank, cfg.train.hang_soft_s, cfg.train.hang_hard_s)
    tell = lost_rank.explained(manager, world, dog, command)
    with (
        held,
        Signals(None if launch or not world.is_main else partial(newest_name, manager)) as signals,
        trackers_for(cfg, output, record, session) as trackers,
        dog,
        tell,
        ExitStack() as ends,
        signals.ends_compilers(),
    ):
        dog.phase("prepare")
        signals.preparing = True
        parts.end("plan")
        disks = resume.look_at_disks(output, world)
        point = resume.find(cfg, manager, world, disks, launch)
        extend.refuse_weights_only(cfg, point, cfg.train.max_steps)  # before data is prepared, where steps are given
        if world.rank in world.leaders:  # files are one machine's, and so is its memory
            ends.enter_context(reading_ahead(set(folder.files.values())))
        data = stage.open_data(plan, tokenizer, output)
        ends.callback(data.close)
        plan = with_data(plan, data)
        cfg = plan.config
        run_summary.show_data(data, plan)
        changed = changed_data(cfg, [source.report for source in (*data.sources, *data.evaluation)])
        for line in changed:
            emit(f"note     {line}")
        run_summary.show_saves(cfg, data)
        base = base_identity(cfg, folder)
        promise = resume.promises(cfg, data, folder, base if stage.needs_base(cfg) else None)
        same_run.check_content(cfg, promise, data.compared(), base, world)
        resume.check_promises(cfg, point, promise, data)
        parts.end("data")

        built = build(plan, stage, base)
        optimizer = make_optimizer(cfg, built)
        kernels = kernel_table(built, optimizer)
        first = data.first_batch()
        scales = fp8_training.scales_of(cfg, built, first)
        coverage = run_summary.show_coverage(built)
        prepare = stage.before_step(cfg, built, data)
        parts.end("model")
        checks = []
        if cfg.train.doctor == "on":
            checks = doctor.before_training(stage, cfg, built, optimizer, data, tokenizer, first, prepare)

        parts.end("checks")
        probe = stage.probe(cfg, built, first, tokenizer) if cfg.checkpoint.probe_tokens else None
        extra_files = stage.extra_files(cfg, data, tokenizer) if world.is_main else {}
        saver = saver_for(cfg, manager, built, optimizer, probe, disks, launch, scales, extra_files)
        state = resume.restore(cfg, saver, point, data, promise)
        parts.end("probe and resume")
        notes = [*changed, *([prepare.summary] if isinstance(prepare, KeptFeatures) else [])]
        # Nothing is refused from here on.
        if world.is_main:
            write_recipe(output, cfg, command)
            stage.write_files(cfg, data, output)
        run_summary.describe(record, cfg, data, coverage, plan.device, kernels, checks, notes, parts.all())
        hooks = [dog, *hooks_for(stage, cfg, built, data, saver, trackers, prepare, session.hooks)]
        trainer = Trainer(
            step=step_for(cfg, built, optimizer, data, prepare),
            state=state,
            batches_from=lambda pack: iter(data.loader(cfg, pack, data.max_steps - state.step)),
            max_steps=data.max_steps,
            packs_per_step=data.packs_per_step,
            hooks=hooks,
            guard=FiniteGuard(
                cfg.train.max_bad_steps, partial(failed_in, built.engine, stage.own_loss) if stage.own_loss else None
            ),
            signals=signals,
            roll_back=lambda s: resume.roll_back(saver, s, disks),
        )
        signals.preparing = False
        resume.begin(saver, point, disks)
        run_summary.show_compiling(cfg, data.max_steps - state.step)
        try:
            trainer.fit()
        except BaseException as error:
            saver.saves.abandon()  # a save in the background ends before the folder is unlocked
            lost_rank.blame_save(error, saver.saves)
            raise
        if report_read_rows(data, output):
            record.describe(data=run_summary.data_facts(data))
        result = finish.close_run(cfg, output, built, trainer, saver, trackers, started)
    record.finish("finished", result.metrics, result.next_commands)
    finish.print_result(output, result, trainer, plan)
    return result


class StartTimes:
    """Seconds of the parts of the preparation, one after the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part], self._last = round(now - self._last, 2), now

    def all(self) -> dict[str, float]:
        """And what importing libraries of kernels took of them."""
        return self.seconds | {f"import {name}": took for name, took in IMPORT_SECONDS.items()}


def newest_name(manager: CheckpointManager) -> str:
    point = manager.newest_whole()
    return point.name if point else ""


def checkpoints(cfg: RunConfig, output: Path) -> CheckpointManager:
    return CheckpointManager(
        output,
        keep_last=cfg.checkpoint.save_total_limit,
        keep_every=cfg.checkpoint.keep_every,
        verify=cfg.checkpoint.verify,  # type: ignore[arg-type]
        async_save="async_save" in cfg.checkpoint.unified_checkpoint_config,
    )


def trackers_for(cfg: RunConfig, output: Path, record: RunRecord, session: Session) -> Trackers:
    return make_trackers(
        cfg.tracking.report_to,
        output,
        cfg.tracking.logging_dir,
        run_name=cfg.tracking.run_name or "",
        config=cfg.flat(),
        disable_tqdm=cfg.tracking.disable_tqdm,
        wandb_api_key=cfg.tracking.wandb_api_key,
        wandb_http_proxy=cfg.tracking.wandb_http_proxy,
        explicit=cfg.given("report_to"),
        record=record,
        more=session.trackers,
    )


def step_for(
    cfg: RunConfig, built: Built, optimizer: AdamW, data: TrainData, prepare: Prepare | None = None
) -> TrainStep:
    schedule = make_schedule(cfg, data.max_steps)
    batch_means = cfg.compat.mean_of_micro_batch_means
    inside = backward_updates(cfg, optimizer)
    return TrainStep(built.engine, optimizer, schedule, cfg.optim.max_grad_norm, batch_means, prepare, inside)


def saver_for(
    cfg: RunConfig,
    manager: CheckpointManager,
    built: Built,
    optimizer: AdamW,
    probe: Probe | None,
    disks: resume.Disks,
    launch: str = "",
    scales: StaticScales | None = None,
    extra_files: Mapping[str, bytes] | None = None,
) -> Saver:
    words = set(cfg.checkpoint.unified_checkpoint_config)
    return Saver(
        manager,
        built.engine,
        optimizer,
        built.device,
        built.sharding,
        probe,
        built.pieces,
        built.write_weights,
        built.read_weights,
        with_optimizer=not cfg.checkpoint.ignore_save_lr_and_optim,
        extra={"config": cfg.to_dict(), "version": run_summary.version()},
        compress="O0" if cfg.checkpoint.disable_ckpt_quant else cfg.checkpoint.ckpt_quant_stage,
        with_masters="remove_master_weight" not in words,
        rebuild_masters=bool(words & {"remove_master_weight", "master_weight_compatible"}),
        copy_to=disks.without if cfg.checkpoint.save_on_each_node else (),
        frozen_base="fp8 QAT" if scales is not None else cfg.lora.frozen_base if cfg.lora.packed_base else "",
        launch=launch,
        scales=scales,
        clear_scales=cfg.quant.fp8_force_clear_state,
        extra_files=extra_files,
        model_files=built.model_files(),
    )


def hooks_for(
    stage: TrainingStage,
    cfg: RunConfig,
    built: Built,
    data: TrainData,
    saver: Saver,
    trackers: Trackers,
    prepare: Prepare | None,
    own: Sequence[Hook] = (),
) -> list[Hook]:
    """Log first, so that a step's numbers are out before its checkpoint and its evaluation; only what belongs to the
    update itself comes before. Save before evaluating: a step must be safe before hours may pass. own: a Python
    session's, before a save, which then holds what they changed."""
    loads = expert_layers.balance_hook(cfg, built)
    log = LogHook(
        trackers,
        built.device,
        built.folder.config,
        built.dtype,
        data.log_every,
        data.packs_per_step,
        data.packs_per_epoch,
        frozen_base=built.lora is not None,
        first=cfg.tracking.logging_first_step,
        ranks=built.world.size,
        further=data.mtp_tokens,
        also=metrics_of(
            loads,
            saver.scales if cfg.quant.enable_fp8_quantize_analysis else None,
            prepare if isinstance(prepare, KeptFeatures) else None,
        ),
        perplexity=stage.perplexity and not cfg.distill.teacher_model_name_or_path,
        adapters=adapters_met_of(built.folder.config, ((n, p.numel()) for n, p in built.whole.named_parameters())),
        live_reference=isinstance(prepare, Reference) and not prepare.kept,
        vision_training=vision_training(built, prepare),
    )
    sweep: list[Hook] = [CollectGarbage(cfg.memory.gc_interval)] if cfg.memory.gc_interval else []
    first: list[Hook] = [hook for hook in (loads, saver.scales) if hook is not None]
    watch = [*first, *stage.hooks(cfg, built, prepare), *watchers(cfg, built, saver)]
    minutes, alone = minutes_between_saves(cfg), ends_with_weights_only(cfg)
    save = SaveHook(saver, trackers, data.save_every, cfg.train.preempt_grace_s, minutes, alone)
    if not data.evaluation:
        return [*watch, log, *own, save, *sweep]

    evaluations = count()

    def run_evaluation(go_on: GoOn) -> dict[str, float]:
        return stage.evaluate(cfg, built.engine, data.eval_batches(cfg, next(evaluations)), prepare, go_on)

    best = KeepBest(save) if cfg.checkpoint.load_best_model_at_end else None
    keep = best.keep if best else None
    rule = best_rule(cfg)
    generate = generation(cfg, built, data, trackers) if cfg.train.eval_generate else None
    evaluate = EvalHook(
        run_evaluation, trackers, data.eval_every, rule, keep, leave=save.leave, world=built.world, generate=generate
    )
    return [*watch, log, *own, *([best] if best else []), save, evaluate, *sweep]


def generation(cfg: RunConfig, built: Built, data: TrainData, trackers: Trackers) -> GenerationEval:
    output = Path(cfg.train.output_dir or "output").expanduser()
    return GenerationEval(cfg, built, data, open_tokenizer(built.plan), trackers, output)


def metrics_of(*hooks: ExpertBalance | StaticScales | KeptFeatures | None) -> Callable[[], dict[str, float]]:
    """What these add to every record."""
    return lambda: {name: value for hook in hooks if hook is not None for name, value in hook.metrics().items()}


def watchers(cfg: RunConfig, built: Built, saver: Saver) -> list[Hook]:
    """Where there are several ranks: slow ones are named, and copies of a weight must stay the same bits; none is saved
    before they have shown that they are."""
    if built.world.size == 1:
        return []
    out: list[Hook] = []
    if cfg.train.straggler_factor:
        probe = device_probe(built.device)
        out.append(Stragglers(built.world, cfg.train.straggler_factor, probe=probe))
    if cfg.train.drift_check_steps:
        blocks = replicated(built.sharding, built.world.rank)
        held = {name: local(param) for name, param in built.parameters()}
        drift = ReplicaDrift(blocks, lambda: held, built.world, cfg.train.drift_check_steps)
        saver.before = drift.check
        out.append(drift)
    return out


def best_rule(cfg: RunConfig) -> BestRule:
    """By the rules both are known where the metric was given; the loss is better when it is less."""
    metric = (cfg.checkpoint.metric_for_best_model or "loss").removeprefix(PREFIX)
    greater = bool(cfg.checkpoint.greater_is_better)
    return BestRule(PREFIX + metric, greater, cfg.train.early_stopping_patience, cfg.train.early_stopping_threshold)
