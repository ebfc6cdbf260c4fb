"""The run's optimiser: groups, the form and the place of its states, and whether it updates inside backward.

Called by training.py, doctor.py and bench/; this is where config values meet optim/.
"""

from __future__ import annotations

from math import gcd

import torch

from erniekit.config import RunConfig
from erniekit.kernels.moments8 import BLOCK, fits8
from erniekit.kernels.position_noise import TensorPart, salt_of
from erniekit.lora.inject import is_lora_b
from erniekit.models.vision_parts import tower_lr_scale
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.in_backward import BackwardUpdates
from erniekit.optim.offload import states_home
from erniekit.optim.storage import Storage
from erniekit.parallel.sharding import Sharding
from erniekit.recipes.built import Built

SMALLEST = 16  # columns of a block of 8-bit moments: a scale each costs three quarters of a byte a weight


def make_optimizer(cfg: RunConfig, built: Built) -> AdamW:
    scale_b = built.lora.lora_plus_scale if built.lora else 1.0
    ratio = cfg.moe.moe_gate_lr_ratio
    router = 1.0 if ratio is None else ratio
    vision = built.folder.config.vision
    depth = 0 if vision is None else vision.depth

    def scale_of(name: str) -> float:
        lora = scale_b if is_lora_b(name) else 1.0
        gate = router if ".router." in name else 1.0
        return lora * gate * tower_lr_scale(name, depth, cfg.vision.vit_lr_ratio)

    groups = make_groups(
        built.parameters(),
        built.folder.config.num_layers,
        cfg.optim.weight_decay,
        cfg.optim.layerwise_lr_decay_bound,
        scale_of,
    )
    by_place = cfg.optim.optim_states == "8bit" or cfg.optim.master_weights == "none"
    names = [name for group in groups for name in group.names] if by_place else []
    storage = Storage(
        moments=cfg.optim.optim_states,
        masters=cfg.optim.master_weights,
        fair=not cfg.compat.moments_round_to_nearest,
        seed=cfg.train.seed,
        places={n: place_of(n, built.sharding, built.world.rank, cfg.train.seed, built.device.handle) for n in names},
    )
    return AdamW(
        groups,
        (cfg.optim.adam_beta1, cfg.optim.adam_beta2),
        cfg.optim.adam_epsilon,
        low_precision=built.dtype != torch.float32,
        home=states_home(cfg.memory.offload_optim, cfg.memory.tensorwise_offload_optimizer, built.device),
        storage=storage,
    )


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
