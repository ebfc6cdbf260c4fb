"""The run's optimiser: groups, the form and the place of its states, and whether it updates inside backward.

Called by training.py, doctor_command.py and bench/; this is where config values meet optim/.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch

from erniekit.config import RunConfig
from erniekit.errors import ConfigError
from erniekit.kernels.moments8 import BLOCK, fits8
from erniekit.kernels.position_noise import TensorPart, salt_of
from erniekit.lora.inject import is_lora_b
from erniekit.models.vision_parts import tower_lr_scale
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.in_backward import BackwardUpdates
from erniekit.optim.muon import Muon, MuonSettings
from erniekit.optim.muon_names import by_muon
from erniekit.optim.offload import states_home
from erniekit.optim.storage import Storage
from erniekit.parallel.sharding import Sharding, module_of
from erniekit.parallel.whole_tensors import WholeTensors, holds_whole_experts
from erniekit.recipes.built import Built

SMALLEST = 16  # columns of a block of 8-bit moments: a scale each costs three quarters of a byte a weight


def make_optimizer(cfg: RunConfig, built: Built) -> AdamW:
    scale_b = built.lora.lora_plus_scale if built.lora else 1.0
    ratio = cfg.moe.moe_gate_lr_ratio
    router = 1.0 if ratio is None else ratio
    vision = built.folder.config.vision
    depth = 0 if vision is None else vision.depth

    matrices = muon_matrices(built) if cfg.optim.optim == "muon" else {}
    ahead = muon_rate(cfg)

    def scale_of(name: str) -> float:
        lora = scale_b if is_lora_b(name) else 1.0
        gate = router if ".router." in name else 1.0
        muon = ahead if name in matrices else 1.0
        return lora * gate * muon * tower_lr_scale(name, depth, cfg.vision.vit_lr_ratio)

    groups = make_groups(
        built.parameters(),
        built.folder.config.num_layers,
        cfg.optim.weight_decay,
        cfg.optim.layerwise_lr_decay_bound,
        scale_of,
        built.sharding.front,
    )
    by_place = cfg.optim.optim_states == "8bit" or cfg.optim.master_weights == "none"
    names = [name for group in groups for name in group.names] if by_place else []
    storage = Storage(
        moments=cfg.optim.optim_states,
        masters=cfg.optim.master_weights,
        stochastic=not cfg.compat.moments_round_to_nearest,
        seed=cfg.train.seed,
        places={n: place_of(n, built.sharding, built.world.rank, cfg.train.seed, built.device.handle) for n in names},
    )
    options: dict[str, Any] = dict(
        low_precision=built.dtype != torch.float32,
        home=states_home(cfg.memory.offload_optim, cfg.memory.tensorwise_offload_optimizer, built.device),
        storage=storage,
    )
    betas = (cfg.optim.adam_beta1, cfg.optim.adam_beta2)
    if cfg.optim.optim != "muon":
        return AdamW(groups, betas, cfg.optim.adam_epsilon, **options)
    return Muon(
        groups,
        betas,
        cfg.optim.adam_epsilon,
        matrices=matrices,
        settings=MuonSettings(
            cfg.optim.muon_momentum,
            cfg.optim.muon_scale == "match_adamw",
            torch.float32 if built.dtype == torch.float32 else torch.bfloat16,
        ),
        spread=WholeTensors(matrices, built.sharding, built.world),
        **options,
    )


def muon_matrices(built: Built) -> dict[str, tuple[int, ...]]:
    """The tensors here that Muon updates, and the rows of the matrices each is a stack of: parts of a fused linear, of
    every expert. Refuses layouts that leave no rank a whole expert to gather."""
    sharding = built.sharding
    names = [n for n, p in built.parameters() if p.requires_grad and by_muon(n, sharding.shape(n))]
    if any(sharding.is_expert(n) for n in sharding.names()) and not holds_whole_experts(sharding):
        raise ConfigError(
            f"optim: muon needs whole experts, and this layout cuts them: {built.world.layout.describe()}",
            where="optim",
            fix="an expert_parallel_degree that leaves one copy of each expert and tensor_parallel_degree: 1; or "
            "optim: adamw",
        )
    rows = sharding.part_rows
    return {n: tuple(c for _, c in rows.get(module_of(n), (("", sharding.shape(n)[0]),))) for n in names}


def muon_rate(cfg: RunConfig) -> float:
    """What learning_rate is multiplied by for Muon's matrices."""
    own = cfg.optim.muon_learning_rate
    return 1.0 if own is None or not cfg.optim.learning_rate else own / cfg.optim.learning_rate


def place_of(name: str, sharding: Sharding, rank: int, seed: int, device: torch.device) -> TensorPart:
    """Which rows and columns of the whole tensor this rank holds."""
    whole, boxes = sharding.shape(name), sharding.boxes(name, rank)
    rows = torch.zeros(sharding.local_shape(name, rank)[0], dtype=torch.int32)
    first_column = 0
    for box in boxes:
        there = box.global_slices[0]
        rows[box.local_slices[0]] = torch.arange(there.start, there.stop, dtype=torch.int32)
        first_column = box.global_slices[1].start if len(whole) > 1 else 0
    in_order = torch.equal(rows, torch.arange(whole[0], dtype=torch.int32))
    return TensorPart(
        salt_of(seed, name), None if in_order else rows.to(device), first_column, block_of(name, sharding)
    )


def block_of(name: str, sharding: Sharding) -> int:
    """Columns of a block of 8-bit moments, the same on every rank: less than usual where tensor parallelism cuts rows
    inside a block, and 0, for wide moments, where it leaves hardly any."""
    if not fits8(sharding.shape(name)):
        return 0
    starts = {box.global_slices[1].start for _, boxes in sharding.holders(name) for box in boxes}
    block = gcd(BLOCK, *starts)
    return block if block >= SMALLEST else 0


def backward_updates(cfg: RunConfig, optimizer: AdamW) -> BackwardUpdates | None:
    if not cfg.optim.update_in_backward:
        return None
    return BackwardUpdates(optimizer, cfg.optim.max_grad_norm, per_tensor=cfg.optim.grad_clip == "tensor")
