"""From a resolved config to a model ready to train, on one rank or many: meta model -> LoRA -> spread -> values.

Called by recipes/fit.py and doctor.py; this is where config values meet components.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from erniekit.checkpoint.hub import lasting_name, resolve_model
from erniekit.checkpoint.identity import model_identity, write_base
from erniekit.checkpoint.model_folder import GENERATION_FILES, SIDE_FILES, ModelFolder
from erniekit.checkpoint.model_writer import copy_side_files, write_model
from erniekit.config import RunConfig
from erniekit.config.note import Note
from erniekit.data.collate import one_document
from erniekit.data.tokenizer import Tokenizer, load_tokenizer
from erniekit.devices import pick
from erniekit.devices.base import Device
from erniekit.errors import DeviceError
from erniekit.files.tokenizer_names import TOKENIZER_FILES
from erniekit.log import say
from erniekit.lora.adapter import adapter_of
from erniekit.lora.adapter_files import write_adapter
from erniekit.lora.frozen import check, to_fp8
from erniekit.lora.inject import inject, is_lora, is_lora_b
from erniekit.lora.settings import LoRASettings
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.offload import states_home
from erniekit.optim.schedule import Schedule
from erniekit.parallel.apply import Options, parallelise, plain, sharding_of
from erniekit.parallel.engine import Engine
from erniekit.parallel.expert import dispatch_of
from erniekit.parallel.gradients import local
from erniekit.parallel.ledger import Ledger
from erniekit.parallel.mesh import World
from erniekit.parallel.sharding import Sharding
from erniekit.recipes import adapters, experts, weights
from erniekit.recipes.model_config import changes_of
from erniekit.recipes.stage import Stage

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class Built:
    """A model spread over the world, and what belongs to it. `lora` is None in full fine-tuning."""

    folder: ModelFolder
    whole: nn.Module  # the unspread model on the meta device: names and structure only
    engine: Engine
    sharding: Sharding
    world: World
    device: Device
    dtype: torch.dtype
    lora: LoRASettings | None
    save_format: str
    tokenizer_folder: Path  # whose files go beside the weights: what trained is what serves
    seed: int
    base_name: str  # stored with adapters: the folder's absolute path, or its hub id
    base: str = ""  # identity of the model in `folder`; of one from scratch: of its config and seed

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name and parameter of all this rank holds, each once."""
        seen: set[int] = set()
        for part in self.engine.parts:
            for name, param in part.named_parameters():
                if id(param) not in seen:
                    seen.add(id(param))
                    yield plain(name), param

    @property
    def further(self) -> int:
        """Layers that learn to predict further tokens."""
        return self.folder.config.mtp_layers if getattr(self.whole, "mtp_weight", 0.0) else 0

    def trainable(self) -> int:
        return sum(p.numel() for p in self.whole.parameters() if p.requires_grad)

    def total(self) -> int:
        return sum(p.numel() for p in self.whole.parameters())

    # What the saver needs: this rank's pieces of what a checkpoint holds, and both ways of its format.

    def saved_names(self) -> list[str]:
        return [n for n in self.sharding.names() if is_lora(n)] if self.lora else self.sharding.names()

    def pieces(self) -> dict[str, torch.Tensor]:
        wanted = set(self.saved_names())
        held = ((n, local(p.detach())) for n, p in self.parameters() if n in wanted)
        return {name: tensor.to(self.folder.spec.dtype_of(name, self.dtype)) for name, tensor in held}

    def write_weights(self, target: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """`tensors`: whole ones, by our names."""
        if not self.lora:
            copy_side_files(self.folder.path, target, SIDE_FILES)
        copy_side_files(self.tokenizer_folder, target, TOKENIZER_FILES)
        if self.tokenizer_folder != self.folder.path:  # ends of answers are ids of the tokenizer
            copy_side_files(self.tokenizer_folder, target, GENERATION_FILES)
        if self.lora:
            adapter = adapter_of(self.whole, self.lora, tensors, base=self.base_name)
            write_adapter(target, adapter, self.whole, self.save_format)
            if self.base and self.folder.files:  # a base from scratch is in no folder
                write_base(target, self.base, self.base_name)
            return
        write_model(target, self.folder.config, tensors.__getitem__, layout=self.save_format)

    @torch.no_grad()
    def read_weights(self, source: Path) -> None:
        fill = weights.saved(source, self.whole, self.sharding, self.world.rank, self.lora is not None, self.seed)
        for name, param in self.parameters():
            if not self.lora or is_lora(name):
                fill(name, local(param))


def settle(cfg: RunConfig) -> tuple[RunConfig, Device, torch.dtype]:
    """What only this machine can decide: its device, and fp32 where nobody asked for the bf16 a CPU is slow at."""
    device = pick(cfg.train.device, cfg.train.no_cuda)
    if device.type == "cpu" and cfg.precision.compute_type == "bf16" and not cfg.given("compute_type"):
        note = Note("compute_type", "bf16", "fp32", "bf16 is slow on a CPU; write compute_type: bf16 to have it")
        say(f"note     {note}")
        flag = Note("bf16", cfg.precision.bf16, False, "compute_type is fp32", quiet=True)
        cfg = cfg.derive(replace(note, quiet=True), flag)  # said already, whatever command it is
    device.reset_peak()
    if cfg.train.deterministic:
        device.same_bits()
    torch.manual_seed(cfg.train.seed)
    return cfg, device, DTYPES[cfg.precision.compute_type]


def open_model(cfg: RunConfig) -> tuple[ModelFolder, Tokenizer]:
    path = resolve_model(cfg.model.model_name_or_path, cfg.model.download_hub)
    folder = ModelFolder(path, weights=cfg.model.continue_training, changes=changes_of(cfg, path))
    return folder, load_tokenizer(cfg.model.tokenizer_name or folder.path, folder.config.vocab_size)


def base_identity(cfg: RunConfig, folder: ModelFolder) -> str:
    """Of the weights a run starts from."""
    if cfg.model.continue_training:
        return model_identity(folder.path)
    return f"{model_identity(folder.path, weights=False)} random {cfg.train.seed}"


def lora_settings(cfg: RunConfig) -> LoRASettings | None:
    if not cfg.lora.lora:
        return None
    return LoRASettings.resolve(
        cfg.lora.lora_rank,
        cfg.lora.lora_alpha,
        rslora=cfg.lora.rslora,
        rslora_plus=cfg.lora.rslora_plus,
        lora_plus_scale=cfg.lora.lora_plus_scale,
        targets=cfg.lora.lora_target_modules or None,
        shared_a=cfg.compat.shared_lora_a,
    )


def _graphed(cfg: RunConfig) -> tuple[int, int, int] | None:
    if not cfg.model.cuda_graph:
        return None
    return cfg.train.per_device_train_batch_size, cfg.data.max_seq_len, cfg.train.gradient_accumulation_steps


def build(cfg: RunConfig, folder: ModelFolder, device: Device, dtype: torch.dtype, world: World, stage: Stage) -> Built:
    # fully_shard keeps fp32 weights and computes in dtype; elsewhere the optimiser keeps the fp32 copies.
    stored = torch.float32 if world.layout.fsdp > 1 else dtype
    if cfg.lora.fp8_base:
        check(device.handle, world.size, folder.config.moe is not None, cfg.origin("frozen_base"))
    experts.settle_config(cfg, folder)
    if not cfg.model.continue_training:
        _refuse_oversized(folder, device, world)
    whole, model = (folder.spec.cast(folder.meta(), stored) for _ in range(2))
    for each in (whole, model):
        experts.set_further(cfg, each)
    settings = lora_settings(cfg)
    start = None
    if settings:
        start = adapters.starting_adapter(cfg, folder, whole)
        if start is not None:
            settings = adapters.settings_from(start, cfg, whole)
        for each in (whole, model):
            inject(each, settings, cfg.train.seed)
    sharding = sharding_of(whole, folder.spec.plan, world.layout)
    rank, seed = world.rank, cfg.train.seed
    if cfg.model.continue_training:
        base = weights.from_folder(folder, sharding, rank)
    else:
        base = weights.from_nothing(sharding, rank, seed, folder.config.init_std)
    low_rank = None
    if settings:
        low_rank = weights.from_whole(weights.whole_adapters(whole, seed, start), sharding, rank)
    tells = (*stage.tells(cfg), *experts.tells(cfg, folder.config))
    ledger = Ledger(tells, device.handle) if tells else None
    engine = parallelise(
        model,
        sharding,
        world,
        device.handle,
        dtype,
        stage.loss(cfg, world, ledger),
        weights.base_and_adapters(base, low_rank),
        one_document,
        Options(
            recompute=cfg.memory.recompute_granularity if cfg.memory.recompute else None,
            no_recompute_layers=cfg.memory.no_recompute_layers,
            compile=bool(cfg.model.compile),
            graphed=_graphed(cfg),
            schedule=cfg.parallel.pp_schedule,
            offload="offload" in cfg.parallel.sharding,
            offload_recompute_inputs=cfg.memory.offload_recompute_inputs,
            attention=cfg.model.attention,
            dispatch=dispatch_of(cfg.moe.moe_multimodal_dispatch_use_allgather),
        ),
    )
    engine.ledger = ledger
    if cfg.lora.fp8_base and (left := to_fp8(engine.parts)):
        say(f"note     frozen_base: {left[0]} and {len(left) - 1} more stay as they are (widths no multiples of 16)")
    experts.put_in(cfg, engine)
    engine.train()
    tokenizer_folder = Path(cfg.model.tokenizer_name).expanduser() if cfg.model.tokenizer_name else folder.path
    save_format = cfg.checkpoint.save_format
    base_name = lasting_name(str(cfg.model.model_name_or_path), folder.path)
    return Built(
        folder, whole, engine, sharding, world, device, dtype, settings, save_format, tokenizer_folder, seed, base_name
    )


def _refuse_oversized(folder: ModelFolder, device: Device, world: World) -> None:
    """A model from scratch has no weight files whose sizes could contradict its config.json: memory is what bounds it.
    Counted are its 16-bit weights alone, spread over all ranks: whoever exceeds that cannot train it in any way."""
    count = folder.config.parameters()
    each = 2 * count / world.size
    if device.total_memory and each > device.total_memory:
        raise DeviceError(
            f"config.json describes a model of {count:,} parameters: {each / 2**30:,.0f} GiB of weights for each of "
            f"{world.size} ranks, which have {device.total_memory / 2**30:,.0f} GiB",
            where=str(folder.path / "config.json"),
            fix="check its sizes (num_hidden_layers, hidden_size, vocab_size, ...), or use more devices",
        )


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
        fair=not cfg.compat.moments_round_to_nearest,
    )


def make_schedule(cfg: RunConfig, max_steps: int) -> Schedule:
    o = cfg.optim
    return Schedule(
        kind=o.lr_scheduler_type,
        peak=o.learning_rate,
        total_steps=max_steps,
        warmup_steps=o.warmup_steps or int(o.warmup_ratio * max_steps + 0.999999),
        min_lr=o.min_lr,
        num_cycles=o.num_cycles,
        lr_end=o.lr_end,
        power=o.power,
        decay_steps=o.decay_steps if cfg.given("decay_steps") else None,  # a derived one is max_steps
        steady_steps=_steady_steps(o.lr_scheduler),
        decay_function=o.decay_function,
        one_step_late=cfg.compat.learning_rate_one_step_late,
    )


def _steady_steps(lr_scheduler: str | None) -> int | None:
    """`lr_scheduler: wsd:600` holds the peak until step 600."""
    kind, _, steps = (lr_scheduler or "").partition(":")
    return int(steps) if kind == "wsd" and steps else None
