"""RunPlan: what a run has decided before anything is built, taken in one place and then frozen.

`plan_run` is for training and the doctor; `decide` is its second half, for a caller that has opened device, ranks and
model itself (bench/, tests). build.py and the stages work from the plan. Two things are known later, each a frozen
object made once: TrainData (steps and packs, counted in the data) and Built (the model spread over the ranks).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from erniekit.checkpoint.hub import resolve_model
from erniekit.checkpoint.manifest import Verify
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.config import RunConfig, for_world
from erniekit.config.note import Note
from erniekit.config.rules.frozen import PACKED
from erniekit.config.rules.optimiser import FP32_MASTERS
from erniekit.data.tokenizer import Tokenizer, load_tokenizer
from erniekit.devices import pick
from erniekit.devices.base import Device
from erniekit.errors import CheckpointError, DeviceError
from erniekit.log import emit
from erniekit.lora.adapter_files import is_adapter
from erniekit.lora.base import trained_on
from erniekit.lora.frozen_base import check as check_frozen_base
from erniekit.lora.settings import LoRASettings
from erniekit.models import costs
from erniekit.parallel.cuda_graphs import Graphed
from erniekit.parallel.mesh import World
from erniekit.parallel.self_test import check_collectives
from erniekit.parallel.world import check_model, check_schedule, device_here, open_world
from erniekit.printable import counted
from erniekit.recipes import (
    adapters,
    island_stages,
    memory_decisions,
    other_models,
    same_run,
    speed_decisions,
    spread_recompute,
    trained_weights,
)
from erniekit.recipes.expert_settings import as_built, mtp_tokens
from erniekit.recipes.model_config import changes_of
from erniekit.recipes.score_heads import head_changes
from erniekit.weight_kinds import BF16, MIXES, kinds_of

DTYPES = {"fp32": torch.float32, **dict.fromkeys(("bf16", *PACKED), torch.bfloat16)}


@dataclass(frozen=True)
class DevicePlan:
    """What the device at hand decides; all that `erniekit eval` needs."""

    config: RunConfig
    device: Device

    @property
    def dtype(self) -> torch.dtype:
        """Of what is not quantised."""
        precision = self.config.precision
        if precision.compute_type == "fp8":
            return torch.bfloat16 if precision.bf16 else torch.float32
        return DTYPES[precision.compute_type]


@dataclass(frozen=True)
class RunPlan(DevicePlan):
    """`config` has every derived value with its reason, as run.json and checkpoints keep it."""

    world: World  # with the layout as this model uses it
    folder: ModelFolder  # with the model's config as this run builds it
    lora: LoRASettings | None  # None in full fine-tuning
    mtp_tokens: int  # further tokens that are trained (MTP)
    model_notes: tuple[str, ...] = ()  # what the user should know of the model that is built
    lengths: tuple[int, ...] = ()  # of joined rows, once the data is known; none: rows are not joined

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of trained weights. fully_shard keeps them in fp32 and computes in dtype; elsewhere the optimiser does."""
        return torch.float32 if self.world.layout.fsdp > 1 else self.dtype

    @property
    def graphed(self) -> Graphed | None:
        """The batches that CUDA graphs are recorded for; None: no graphs."""
        t = self.config.train
        if not self.config.model.cuda_graph:
            return None
        if self.lengths:
            return Graphed(1, self.lengths, t.gradient_accumulation_steps)
        return Graphed(t.per_device_train_batch_size, (self.config.data.max_seq_len,), t.gradient_accumulation_steps)

    def with_lengths(self, lengths: tuple[int, ...], usual: float, steps: int) -> RunPlan:
        """With what the data decides: the lengths its joined rows have, tokens of a usual micro-batch, and steps."""
        cfg = speed_decisions.for_lengths(self.config, self.device, self.world, self.folder.config, usual, steps)
        return replace(self, config=cfg, lengths=lengths)

    @property
    def full_size(self) -> int:
        """Tokens of a micro-batch whose rows are as long as they may be."""
        return self.config.train.per_device_train_batch_size * self.config.data.max_seq_len

    def at_full_length(self) -> RunPlan:
        """Where no data is read: rows are as long as they may be, and of steps is known what the recipe says."""
        return self.with_lengths((), self.full_size, self.config.train.max_steps)

    @property
    def host_layers(self) -> tuple[int, ...]:
        """Layers whose packed weights wait in host memory."""
        count = self.config.memory.frozen_layers_in_host
        return (
            memory_decisions.numbers_of(self.folder.config, count, memory_decisions.base_of(self.config))
            if count
            else ()
        )

    @property
    def tokenizer_folder(self) -> Path:
        """Whose files are saved with the weights: what trained is what serves."""
        name = self.config.model.tokenizer_name
        return Path(name).expanduser() if name else self.folder.path


def plan_run(cfg: RunConfig, one_process: bool = False) -> RunPlan:
    """Opens device, ranks and model and decides. one_process: in this process, however many ranks the layout has."""
    opened = open_device(cfg)
    cfg, device = opened.config, opened.device
    if one_process:
        world = World(device_type=device.type)
    else:
        world = open_world(cfg.parallel, device, cfg.moe.moe_group, cfg.launch.ranks_per_device)
        cfg = for_world(cfg, world.layout.data_ranks)
        same_run.check_settings(cfg, world)
        check_collectives(world, device, torch_schedules=cfg.parallel.pp_runner == "torch")
    return decide(cfg, device, world, open_model(cfg, first=world.rank in world.leaders))


def open_device(cfg: RunConfig) -> DevicePlan:
    """This machine's device, seeded; and fp32 where the device is slow at bf16 and bf16 was not requested."""
    name = device_here(cfg.parallel.islands, cfg.train.device)
    device = pick(name, cfg.train.no_cuda)
    if cfg.launch.devices and device.vendor == "cpu" and name != "cpu" and not cfg.train.no_cuda:
        raise DeviceError(
            f"devices names {', '.join(cfg.launch.devices)}, and torch finds no accelerator here",
            where=cfg.origin("devices"),
            fix="erniekit doctor shows what drivers and torch lack; device=cpu trains on the CPU",
        )
    each = cfg.launch.ranks_per_device
    if each > 1 and device.vendor == "cpu":
        emit(f"note     {Note('ranks_per_device', each, each, 'without effect: on a CPU nproc_per_node sets it')}")
    elif each > 1:
        device = device.share(int(os.environ.get("RANK", "0")), each)
    kind = cfg.precision.compute_type
    slow = f"bf16 is slow on {'a CPU' if device.vendor == 'cpu' else device.name}"
    if why := device.lacks.get("bf16"):
        slow = f"{device.name} has no bf16"
        if kind == BF16 and cfg.compute_type_given:
            name = "compute_type" if cfg.given("compute_type") else "bf16"
            raise DeviceError(f"{slow} ({why})", where=cfg.origin(name), fix=f"compute_type: fp32, or leave {name} out")
    if not device.fast_bf16 and (kind in PACKED or (kind == BF16 and not cfg.compute_type_given)):
        base = f" with frozen_base: {cfg.lora.frozen_base}" if kind in PACKED else ""
        otherwise = f"; write compute_type: bf16{base} to have it" if cfg.train.do_train or not base else ""
        note = Note("compute_type", kind, "fp32", slow + ("" if why else otherwise))
        emit(f"note     {note}")
        flag = Note("bf16", cfg.precision.bf16, False, "compute_type is fp32", quiet=True)
        cfg = cfg.derive(replace(note, quiet=True), flag)  # printed already, whatever command it is
    if not device.fast_bf16 and cfg.precision.compute_type == "fp8" and not cfg.given("bf16"):
        note = Note("bf16", True, False, f"{slow}: what is not fp8 is fp32")
        emit(f"note     {note}")
        cfg = cfg.derive(replace(note, quiet=True))
    if cfg.train.do_train and cfg.optim.master_weights != "fp32" and not cfg.precision.bf16:
        note = Note("master_weights", cfg.optim.master_weights, "fp32", FP32_MASTERS)
        emit(f"note     {note}")
        cfg = cfg.derive(replace(note, quiet=True))
    device.reset_peak()
    if cfg.train.deterministic:
        device.same_bits()
    device.seed(cfg.train.seed)
    return DevicePlan(cfg, device)


def in_16_bits(cfg: RunConfig) -> RunConfig:
    """For `erniekit quantize`: a recipe's compute_type is how it was trained; layers are computed in bf16 or fp32."""
    kind = cfg.precision.compute_type
    if kind in (BF16, "fp32"):
        return cfg
    note = Note("compute_type", kind, BF16, "layers are computed in bf16 or fp32 while weights are quantised")
    emit(f"note     {note}")
    return cfg.derive(
        replace(note, quiet=True), Note("bf16", cfg.precision.bf16, True, "compute_type is bf16", quiet=True)
    )


def packed_as(cfg: RunConfig) -> str:
    """The base that compute_type: wint8, wint4/8 or nf4 means: what a run over it answers with."""
    return PACKED[cfg.precision.compute_type][0] if cfg.precision.compute_type in PACKED else BF16


def open_model(cfg: RunConfig, first: bool = True) -> ModelFolder:
    """first: of the ranks on this machine. It compares a checkpoint's files with their digests for all."""
    path = resolve_model(cfg.model.model_name_or_path, cfg.model.download_hub)
    if is_adapter(path) and not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} holds an adapter, where a whole model is needed",
            where=f"model_name_or_path: {cfg.origin('model_name_or_path')}",
            fix=f"to train on from it: lora_path={path} model_name_or_path={trained_on(path)} fine_tuning=LoRA; "
            "or merge it first with erniekit export",
        )
    changes = changes_of(cfg, path) | head_changes(cfg, path)
    verify: Verify = cfg.checkpoint.verify if first else "size"  # type: ignore[assignment]
    folder = ModelFolder(path, weights=cfg.model.continue_training, changes=changes, verify=verify)
    folder.spec.check_layout(cfg.checkpoint.save_format)
    return folder


def open_tokenizer(plan: RunPlan) -> Tokenizer:
    folder = plan.folder
    return load_tokenizer(plan.config.model.tokenizer_name or folder.path, folder.config.vocab_size)


def decide(cfg: RunConfig, device: Device, world: World, folder: ModelFolder) -> RunPlan:
    """The rest of the plan, and the refusals that need it: model, layout, adapters, speed, memory.

    `world` is freshly opened: its layout is replaced here by what a model of this shape uses, and stays.
    """
    folder, model_notes = as_built(folder, cfg)
    model = folder.config
    further = mtp_tokens(cfg, model)
    if cfg.tuning.partial:
        trained_weights.choose(cfg, folder.meta())  # refuses patterns that match nothing
    world.layout = island_stages.cut(cfg, device, world, model)
    world.layout = check_model(world.layout, model.num_layers, model.moe.experts if model.moe else 0)
    check_schedule(cfg.parallel.pp_schedule, world.layout, further > 0, cfg.parallel.pp_runner)
    lora, notes = adapters.decide(cfg, folder)
    memory_decisions.check_backward_updates(cfg, world)
    speed_decisions.force_kernels(cfg)
    cfg = cfg.derive(*notes, *other_models.reference_notes(cfg))
    cfg = cfg.derive(*spread_recompute.notes(cfg, device, world, folder, lora))
    cfg = speed_decisions.for_device(cfg, device, world, model)
    memory_decisions.advise(cfg, device, world, model)
    if cfg.lora.packed_base:
        check_frozen_base(
            cfg.lora.frozen_base,
            cfg.lora.frozen_products,
            device.handle,
            model.moe is not None,
            cfg.origin("frozen_base") if cfg.given("frozen_base") else cfg.origin("compute_type"),
        )
    if not cfg.model.continue_training:
        _refuse_oversized(cfg, folder, device, world)
    if cfg.lora.packed_base and cfg.lora.frozen_base in MIXES and model.moe is None:
        kinds = ", ".join(dict.fromkeys(kinds_of(cfg.lora.frozen_base)[role] for role in ("attention", "mlp")))
        model_notes += (f"frozen_base: {cfg.lora.frozen_base} is {kinds} here: the model has no experts",)
        cfg = _without_exact_weights(cfg)
    return RunPlan(cfg, device, world, folder, lora, further, model_notes)


def _without_exact_weights(cfg: RunConfig) -> RunConfig:
    """What the rules set for products counts on experts: only their weights are exact in fp8."""
    cfg = replace(cfg, notes=tuple(note for note in cfg.notes if note.key != "frozen_products"))
    if cfg.lora.frozen_products == BF16:
        return cfg
    return cfg.derive(
        Note("frozen_products", cfg.lora.frozen_products, BF16, "only experts' weights are exact in fp8; here are none")
    )


def _refuse_oversized(cfg: RunConfig, folder: ModelFolder, device: Device, world: World) -> None:
    """A model from scratch has no weight files whose sizes could contradict its config.json: memory is what bounds it.
    Only its weights are counted, as they are stored, spread over all ranks: a model above that cannot be trained at
    all. Packed weights may wait in host memory as well."""
    count, base = costs.parameters(folder.config), memory_decisions.base_of(cfg)
    each = costs.weight_bytes(folder.config, base) / world.size
    has = device.total_memory or 0
    available = has + (0 if base == BF16 else pick("cpu").total_memory or 0)
    if has and each > available:
        raise DeviceError(
            f"config.json describes a model of {count:,} parameters: {each / 2**30:,.0f} GiB of weights for each of "
            f"{counted(world.size, 'rank')}, with {available / 2**30:,.0f} GiB",
            where=str(folder.path / "config.json"),
            fix="check its sizes (num_hidden_layers, hidden_size, vocab_size, ...), or use more devices",
        )
