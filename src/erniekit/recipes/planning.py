"""A run's config and model as the planner's numbers. For plan_command.py and plan_check.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from erniekit.config import RunConfig
from erniekit.errors import PlanError
from erniekit.kernels.stored import bits_of
from erniekit.lora.inject import inject
from erniekit.lora.settings import LoRASettings
from erniekit.models import find
from erniekit.models.config import DecoderConfig
from erniekit.models.costs import adapters_met_of
from erniekit.models.family_check import check_names, check_plan
from erniekit.models.released import RELEASED
from erniekit.optim.muon_names import by_muon
from erniekit.parallel.layout import Layout, fit
from erniekit.parallel.sharding_table import plain, sharding_of
from erniekit.parallel.world import layout_of
from erniekit.planner.job import Job
from erniekit.planner.static_bytes import StorageKinds, TensorBlocks
from erniekit.recipes import other_models, trained_weights
from erniekit.recipes.adapters import settings_of
from erniekit.recipes.memory_decisions import vision_bytes
from erniekit.recipes.other_models import known_config
from erniekit.recipes.score_heads import expected_labels
from erniekit.weight_kinds import BF16, PLAIN, kinds_of, role_of

if TYPE_CHECKING:
    from erniekit.checkpoint.model_folder import ModelFolder


@dataclass(frozen=True)
class ModelShape:
    """A model on the meta device, adapters in it, and where its shape is from."""

    config: DecoderConfig
    model: Any
    spec: Any
    source: str


def raw_shape(cfg: RunConfig) -> tuple[dict[str, Any], Path | None]:
    """config.json of the folder the recipe names where it is here, and that folder; else of the released model of that
    name. Nothing is downloaded."""
    name = str(cfg.model.model_name_or_path)
    known, folder = known_config(name)
    if known is None:
        raise PlanError(
            f"the shape of {name} is not known",
            where=cfg.origin("model_name_or_path"),
            fix=f"a folder with config.json, or one of: {', '.join(RELEASED)}",
        )
    return known, folder


def shape_of(cfg: RunConfig) -> ModelShape:
    raw, folder = raw_shape(cfg)
    source = "the released shape" if folder is None else str(folder / "config.json")
    raw = {**raw, **(cfg.model.model_config or {})}
    spec = find(raw, source)
    config = spec.read_config(raw, "hf", False, source)
    labels = expected_labels(cfg, raw, source)
    config = replace(config, mtp_layers=cfg.model.num_nextn_predict_layers or 0, labels=labels)
    return ModelShape(config, built(cfg, config, spec, settings_of(cfg) if cfg.lora.lora else None), spec, source)


def built(cfg: RunConfig, config: DecoderConfig, spec: Any, lora: LoRASettings | None) -> Any:
    """The whole model on the meta device as the run stores it on one rank."""
    with torch.device("meta"):  # adapters follow their weights, and each call of torch takes longer inside
        model = spec.build(config)
    check_plan(spec, config, model)
    check_names(spec, config, "hf", model)
    model = spec.cast(model, torch.float32 if four_bytes(cfg) else torch.bfloat16)
    trained_weights.choose(cfg, model)
    if lora is not None:
        inject(model, lora, cfg.train.seed)
    return model


def four_bytes(cfg: RunConfig) -> bool:
    return cfg.precision.compute_type == "fp32" or not cfg.precision.bf16


def storing_of(cfg: RunConfig, model: Any) -> StorageKinds:
    named = [(plain(name), param) for name, param in model.named_parameters()]
    wide, muon = four_bytes(cfg), cfg.optim.optim == "muon"
    base = cfg.lora.frozen_base if cfg.lora.packed_base else ""
    return StorageKinds(
        trained=frozenset(name for name, param in named if param.requires_grad),
        fp32=frozenset() if wide else frozenset(n for n, p in named if p.dtype == torch.float32),
        bits=packed_bits([name for name, _ in named], base),
        compute=4 if wide else 2,
        masters=cfg.optim.master_weights,
        moments=cfg.optim.optim_states,
        optimiser_away=cfg.memory.offload_optim or cfg.memory.tensorwise_offload_optimizer,
        shards_away="offload" in cfg.parallel.sharding,
        in_backward=cfg.optim.update_in_backward,
        reference=other_models.live_copy(cfg),
        one_moment=frozenset(n for n, p in named if by_muon(n, p.shape)) if muon else frozenset(),
    )


def packed_bits(names: Iterable[str], base: str) -> dict[str, float]:
    """Frozen linears that have adapters, by the kind that `base` keeps their role as."""
    if not base:
        return {}
    names = list(names)
    adapted = {name.partition(".lora.")[0] for name in names if ".lora." in name}
    kinds: Mapping[str, str] = kinds_of(base)
    found = {}
    for name in names:
        module, _, last = name.rpartition(".")
        kind = kinds.get(role_of(name), PLAIN)
        if last == "weight" and module in adapted and ".lora." not in name and kind != PLAIN:
            found[name] = bits_of(kind)
    return found


def own_layout(cfg: RunConfig, ranks: int) -> Layout | None:
    """The recipe's own on this number of ranks; None where it does not divide."""
    with suppress(PlanError):
        return fit(ranks, layout_of(cfg.parallel, ranks, cfg.moe.moe_group))
    return None


def packs_of(cfg: RunConfig, ranks: int) -> int:
    """Of a step: as given, else what the recipe's own layout makes of its accumulation."""
    t = cfg.train
    if cfg.given("global_batch_size") and t.global_batch_size:
        return t.global_batch_size
    own = own_layout(cfg, ranks)
    p = cfg.parallel
    cut = max(1, p.tensor_parallel_degree) * max(1, p.pipeline_parallel_degree) * max(1, p.context_parallel_degree)
    data = own.data_ranks if own is not None else max(1, ranks // cut)
    return t.per_device_train_batch_size * max(1, t.gradient_accumulation_steps) * data


def shape_in(cfg: RunConfig, folder: ModelFolder, lora: LoRASettings | None) -> ModelShape:
    """Of a folder that is opened already."""
    return ModelShape(folder.config, built(cfg, folder.config, folder.spec, lora), folder.spec, str(folder.path))


def job_in(cfg: RunConfig, shape: ModelShape, layout: Layout) -> Job:
    """In the layout that the run has."""
    t = cfg.train
    packs = t.per_device_train_batch_size * max(1, t.gradient_accumulation_steps) * layout.data_ranks
    return job_of(cfg, shape, packs)


def job_of(cfg: RunConfig, shape: ModelShape, packs: int, storing: StorageKinds | None = None) -> Job:
    sharding = sharding_of(shape.model, shape.spec.plan, Layout())
    storing = storing or storing_of(cfg, shape.model)
    sharding.packed = set(storing.bits)
    c = shape.config
    m = cfg.memory
    return Job(
        model=c,
        blocks=TensorBlocks(sharding, tuple(c.sparse(n) for n in range(c.num_layers)), storing),
        rows=cfg.train.per_device_train_batch_size,
        length=cfg.data.max_seq_len,
        packs=packs,
        rank=cfg.lora.lora_rank if cfg.lora.lora else 0,
        adapters_met=adapters_met_of(c, ((n, p.numel()) for n, p in shape.model.named_parameters())),
        head_rows=m.loss_subbatch_seqlen,
        recompute=m.recompute_granularity if m.recompute else "",
        forwards=other_models.forwards(cfg),
        teacher=other_models.teacher_of(cfg),
        data_only=other_models.spread_over_data_only(cfg),
        compute=storing.compute,
        offload_optimiser=storing.optimiser_away,
        vision_kept=vision_bytes(cfg, c, again=m.recompute and m.recompute_granularity in ("full", "auto")),
        schedule=cfg.parallel.pp_schedule,
        base=cfg.lora.frozen_base if cfg.lora.packed_base else BF16,
        products=cfg.lora.frozen_products if cfg.lora.packed_base else BF16,
    )


@dataclass(frozen=True)
class Lever:
    """One change of the recipe, and the job with it."""

    keys: dict[str, Any]
    job: Job
    loses: str  # what it costs besides time


def levers(cfg: RunConfig, job: Job) -> list[Lever]:
    """What a recipe can trade for memory, the cheapest first."""
    storing = job.blocks.storing
    out = []

    def stored(keys: dict[str, Any], loses: str, **changes: Any) -> None:
        made = replace(storing, **changes)
        blocks = TensorBlocks(job.blocks.sharding, job.blocks.sparse, made)
        out.append(Lever(keys, replace(job, blocks=blocks, offload_optimiser=made.optimiser_away), loses))

    if job.recompute != "full":
        out.append(Lever({"recompute": True, "recompute_granularity": "full"}, replace(job, recompute="full"), "time"))
    if storing.compute == 2 and storing.masters == "fp32" and not storing.one_moment:
        stored({"master_weights": "exact16"}, "nothing", masters="exact16")
    if storing.moments != "8bit" and not storing.one_moment:
        stored({"optim_states": "8bit"}, "moments rounded", moments="8bit")
    if not storing.optimiser_away:
        stored({"offload_optim": True}, "time, host memory", optimiser_away=True)
    if job.rank:
        for base in ("int8", "wint4/8"):
            bits = packed_bits(storing_names(job), base)
            if base != cfg.lora.frozen_base:
                sharding = job.blocks.sharding
                table = _with_packed(sharding, set(bits))
                blocks = TensorBlocks(table, job.blocks.sparse, replace(storing, bits=bits))
                out.append(
                    Lever({"frozen_base": base}, replace(job, blocks=blocks, base=base), "frozen weights rounded")
                )
    if job.length > 1024:
        out.append(Lever({"max_seq_len": job.length // 2}, replace(job, length=job.length // 2), "rows half as long"))
    if job.rows > 1:
        out.append(Lever({"batch_size": 1}, replace(job, rows=1), "more micro-batches"))
    return out


def storing_names(job: Job) -> list[str]:
    return job.blocks.sharding.names()


def _with_packed(sharding: Any, packed: set[str]) -> Any:
    from copy import copy

    made = copy(sharding)
    made.packed = packed
    return made
