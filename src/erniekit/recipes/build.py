"""From a run's plan to a model ready to train, on one rank or many: meta model -> LoRA -> spread -> values.

Called by recipes/training.py and doctor.py; this is where config values meet components.
"""

from __future__ import annotations

import torch

from erniekit.checkpoint.identity import model_identity
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.config import RunConfig
from erniekit.data.collate import one_document
from erniekit.log import say
from erniekit.lora.frozen_base import store_frozen
from erniekit.lora.inject import inject, is_lora_b
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.offload import states_home
from erniekit.parallel.apply import SpreadOptions, parallelise, sharding_of
from erniekit.parallel.expert import dispatch_of
from erniekit.parallel.step_metrics import StepMetrics
from erniekit.recipes import adapters, expert_layers, expert_settings, fp8_training, weights
from erniekit.recipes.built import Built
from erniekit.recipes.run_plan import RunPlan
from erniekit.recipes.stage import TrainingStage


def base_identity(cfg: RunConfig, folder: ModelFolder) -> str:
    """Of the weights a run starts from."""
    if cfg.model.continue_training:
        return model_identity(folder.path)
    return f"{model_identity(folder.path, weights=False)} random {cfg.train.seed}"


def build(plan: RunPlan, stage: TrainingStage, base_digest: str = "") -> Built:
    """base_digest: `base_identity` of the run, stored with its adapters."""
    cfg, folder, world, device = plan.config, plan.folder, plan.world, plan.device
    for line in plan.model_notes:
        say(f"note     {line}")
    whole, model = (folder.spec.cast(folder.meta(), plan.stored_dtype) for _ in range(2))
    for each in (whole, model):
        expert_layers.set_mtp(cfg, each)
    start = None
    if plan.lora:
        start = adapters.starting_adapter(cfg, folder, whole)
        for each in (whole, model):
            inject(each, plan.lora, cfg.train.seed)
    sharding = sharding_of(whole, folder.spec.plan, world.layout)
    if cfg.lora.packed_base and (left := store_frozen(model, cfg.lora.frozen_base, sharding.matrix_shapes)):
        widths = f"{cfg.lora.frozen_base} does not take their widths"
        say(f"note     frozen_base: {left[0]} and {len(left) - 1} more stay as they are ({widths})")
    fp8_training.install(cfg, model, sharding)
    rank, seed = world.rank, cfg.train.seed
    if cfg.model.continue_training:
        base = weights.from_folder(folder, sharding, rank)
    else:
        base = weights.from_nothing(sharding, rank, seed, folder.config.init_std)
    low_rank = None
    if plan.lora:
        low_rank = weights.from_whole(weights.whole_adapters(whole, seed, start), sharding, rank)
    names = (*stage.metric_names(cfg), *expert_settings.metric_names(cfg, folder.config))
    step_metrics = StepMetrics(names, device.handle) if names else None
    engine = parallelise(
        model,
        sharding,
        world,
        device,
        plan.dtype,
        stage.loss(cfg, world, step_metrics),
        weights.base_and_adapters(base, low_rank),
        one_document,
        SpreadOptions(
            recompute=cfg.memory.recompute_granularity if cfg.memory.recompute else None,
            no_recompute_layers=cfg.memory.no_recompute_layers,
            compile=bool(cfg.model.compile),
            graphed=plan.graph_shape,
            schedule=cfg.parallel.pp_schedule,
            offload="offload" in cfg.parallel.sharding,
            offload_recompute_inputs=cfg.memory.offload_recompute_inputs,
            attention=cfg.model.attention,
            dispatch=dispatch_of(cfg.moe.moe_multimodal_dispatch_use_allgather),
        ),
    )
    engine.step_metrics = step_metrics
    expert_layers.install(cfg, engine)
    engine.train()
    return Built(plan, whole, engine, sharding, base_digest)


def make_optimizer(cfg: RunConfig, built: Built) -> AdamW:
    scale_b = built.lora.lora_plus_scale if built.lora else 1.0
    ratio = cfg.moe.moe_gate_lr_ratio
    router = 1.0 if ratio is None else ratio
    groups = make_groups(
        built.parameters(),
        built.folder.config.num_layers,
        cfg.optim.weight_decay,
        cfg.optim.layerwise_lr_decay_bound,
        lambda name: (scale_b if is_lora_b(name) else 1.0) * (router if ".router." in name else 1.0),
    )
    betas = (cfg.optim.adam_beta1, cfg.optim.adam_beta2)
    home = states_home(cfg.memory.offload_optim, cfg.memory.tensorwise_offload_optimizer)
    return AdamW(
        groups,
        betas,
        cfg.optim.adam_epsilon,
        low_precision=built.dtype != torch.float32,
        home=home,
        moments=torch.bfloat16 if cfg.optim.use_lowprecision_moment else torch.float32,
        stochastic_rounding=not cfg.compat.moments_round_to_nearest,
    )
