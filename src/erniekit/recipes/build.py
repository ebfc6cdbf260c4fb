"""From a run's plan to a model ready to train, on one rank or many: meta model -> LoRA -> spread -> values.

Called by recipes/training.py and doctor_command.py; this is where config values meet components.
"""

from __future__ import annotations

import torch
from torch import nn

from erniekit.checkpoint.identity import model_identity
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import written_layout
from erniekit.config import RunConfig
from erniekit.data.collate import one_document
from erniekit.log import emit
from erniekit.lora.adapter import Adapter
from erniekit.lora.frozen_base import store_frozen
from erniekit.lora.inject import inject
from erniekit.model_contract import keep_kernels
from erniekit.models.family_check import check_names
from erniekit.parallel.apply import SpreadOptions, parallelise
from erniekit.parallel.expert import dispatch_of
from erniekit.parallel.layout import Layout
from erniekit.parallel.sharding import Sharding
from erniekit.parallel.sharding_table import plain, sharding_of
from erniekit.parallel.step_metrics import StepMetrics
from erniekit.recipes import adapters, expert_layers, expert_settings, fp8_training, own_loss, trained_weights, weights
from erniekit.recipes.built import Built
from erniekit.recipes.run_plan import RunPlan
from erniekit.recipes.stage import TrainingStage


def base_identity(cfg: RunConfig, folder: ModelFolder) -> str:
    """Of the weights a run starts from."""
    if cfg.model.continue_training:
        return model_identity(folder.path)
    return f"{model_identity(folder.path, weights=False)} random {cfg.train.seed}"


def build(plan: RunPlan, stage: TrainingStage, base_digest: str = "", fill: weights.Fill | None = None) -> Built:
    """base_digest: `base_identity` of the run, stored with its adapters. fill: values other than the run's own, for a
    rehearsal."""
    cfg, folder, world, device = plan.config, plan.folder, plan.world, plan.device
    for line in plan.model_notes:
        emit(f"note     {line}")
    whole, model = (folder.spec.cast(folder.meta(), plan.stored_dtype) for _ in range(2))
    if not plan.lora:  # before it is trained: the weights that are written are all of them
        check_names(folder.spec, folder.config, written_layout(folder.config, cfg.checkpoint.save_format), whole)
    for each in (whole, model):
        trained_weights.choose(cfg, each)
    start = None
    if plan.lora:
        start = adapters.starting_adapter(cfg, folder, whole) if fill is None else None
        for each in (whole, model):
            inject(each, plan.lora, cfg.train.seed)
    sharding = sharding_of(whole, folder.spec.plan, world.layout)
    dtypes = _unsharded_dtypes(plan) if plan.stored_dtype != plan.dtype else {}
    if dtypes:
        keep_frozen_as_computed(model, dtypes)
    if cfg.lora.packed_base:
        left = store_frozen(model, cfg.lora.frozen_base, cfg.lora.frozen_products, sharding.matrix_shapes)
        if left:
            widths = f"{cfg.lora.frozen_base} does not take their widths"
            emit(f"note     frozen_base: {left[0]} and {len(left) - 1} more stay as they are ({widths})")
    fp8_training.install(cfg, model, sharding)
    if stage.compares(cfg) and folder.config.moe is not None:
        keep_kernels(model)  # a router chooses other experts for a policy than for its reference by a few last bits
    fill = fill or _values(plan, whole, sharding, start, dtypes)
    names = (*stage.metric_names(cfg), *expert_settings.metric_names(cfg, folder.config))
    step_metrics = StepMetrics(names, device.handle) if names else None
    engine = parallelise(
        model,
        sharding,
        world,
        device,
        plan.dtype,
        stage.loss(cfg, world, step_metrics),
        fill,
        one_document,
        SpreadOptions(
            recompute=cfg.memory.recompute_granularity if cfg.memory.recompute else None,
            no_recompute_layers=cfg.memory.no_recompute_layers,
            compile=bool(cfg.model.compile),
            as_written=stage.compares(cfg),
            graphed=plan.graphed,
            schedule=cfg.parallel.pp_schedule,
            runner=cfg.parallel.pp_runner,
            offload="offload" in cfg.parallel.sharding,
            offload_recompute_inputs=cfg.memory.offload_recompute_inputs,
            attention=cfg.model.attention,
            in_host_memory=plan.host_layers,
            dispatch=dispatch_of(cfg.moe.moe_multimodal_dispatch_use_allgather),
        ),
    )
    own_loss.install(stage.own_loss, engine, cfg)
    engine.step_metrics = step_metrics
    expert_layers.install(cfg, engine)
    engine.train()
    return Built(plan, whole, engine, sharding, base_digest)


def keep_frozen_as_computed(model: nn.Module, dtypes: dict[str, torch.dtype]) -> None:
    """What is not trained needs no fp32 master: half of the bytes, and nothing to cast each time it is gathered."""
    for name, param in model.named_parameters():
        if not param.requires_grad:
            param.data = param.detach().to(dtypes[plain(name)])  # .data would be no plain tensor in a rehearsal


def _values(
    plan: RunPlan, whole: nn.Module, sharding: Sharding, start: Adapter | None, dtypes: dict[str, torch.dtype]
) -> weights.Fill:
    """What the run starts from: files or nothing, adapters, and rounded as an unsharded run would have them."""
    cfg, folder, rank = plan.config, plan.folder, plan.world.rank
    seed = cfg.train.seed
    if cfg.model.continue_training:
        base = weights.from_folder(folder, sharding, rank, seed)
    else:
        base = weights.from_nothing(sharding, rank, seed, folder.config.init_std)
    fill = base
    if plan.lora:
        held = _adapters(plan, whole, start)
        fill = weights.base_and_adapters(base, weights.from_whole(held, sharding, rank), held)
    return weights.rounded(fill, dtypes) if dtypes else fill


def _adapters(plan: RunPlan, whole: nn.Module, start: Adapter | None) -> dict[str, torch.Tensor]:
    """Their first values, whole, on every rank. What is decomposed is decomposed once: other machines might round
    otherwise."""
    assert plan.lora is not None
    cfg, world = plan.config, plan.world
    seed = cfg.train.seed
    if start is not None or not (plan.lora.pissa or plan.lora.dora):
        return weights.whole_adapters(whole, seed, start)
    table = sharding_of(whole, plan.folder.spec.plan, Layout())
    if cfg.model.continue_training:
        fill = weights.from_folder(plan.folder, table, 0)
    else:
        fill = weights.from_nothing(table, 0, seed, plan.folder.config.init_std)

    def weight_of(name: str) -> torch.Tensor:
        weight = torch.empty(table.shape(name), dtype=plan.dtype)
        fill(name, weight)
        return weight

    values = weights.whole_adapters(whole, seed, None, weight_of if world.is_main else None, cfg.lora.pissa_iterations)
    shared: dict[str, torch.Tensor] = world.broadcast(values)
    return shared


def _unsharded_dtypes(plan: RunPlan) -> dict[str, torch.dtype]:
    """Of every weight, where nothing is sharded: some stay fp32 whatever the run computes in."""
    model = plan.folder.spec.cast(plan.folder.meta(), plan.dtype)
    if plan.lora:
        inject(model, plan.lora, plan.config.train.seed)
    return {plain(name): param.dtype for name, param in model.named_parameters()}
