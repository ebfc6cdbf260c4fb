"""What `lora_path` decides: adapters that training starts from have a rank, a scale and targets of their own.

Called by run_plan.py (`decide`) and by build.py (`starting_adapter`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from erniekit.config import RunConfig
from erniekit.config.note import Note, shown
from erniekit.errors import ConfigError
from erniekit.lora.settings import LoRASettings

if TYPE_CHECKING:
    from erniekit.checkpoint.model_folder import ModelFolder
    from erniekit.lora.adapter import Adapter


def decide(cfg: RunConfig, folder: ModelFolder) -> tuple[LoRASettings | None, list[Note]]:
    """Rank, scale and targets of a run's adapters, None where it trains none; and what an adapter it starts from puts
    in the place of defaults. What was given and contradicts that adapter is refused."""
    if not cfg.lora.lora:
        return None, []
    if not cfg.lora.lora_path:
        return settings_of(cfg), []
    model = folder.meta()
    start = starting_adapter(cfg, folder, model)
    assert start is not None
    settings = settings_from(start, cfg, model)
    if settings.dora:
        _check_dora(cfg, start)
    return settings, list(_notes(cfg, settings))


def _check_dora(cfg: RunConfig, start: Adapter) -> None:
    """As in config/rules/adapters.py, for an adapter that is DoRA whatever the keys are."""
    whole = cfg.parallel.tensor_parallel_degree <= 1 and not cfg.lora.packed_base
    if not whole or cfg.precision.compute_type == "fp8" or cfg.quant.use_fp8:
        raise ConfigError(
            "the adapter is DoRA, which trains on plain weights without tensor parallelism",
            where=f"lora_path: {start.where}",
            fix="tensor_parallel_degree: 1, frozen_base: bf16 and no fp8, or merge it first with erniekit export",
        )


def settings_of(cfg: RunConfig) -> LoRASettings:
    return LoRASettings.resolve(
        cfg.lora.lora_rank,
        cfg.lora.lora_alpha,
        rslora=cfg.lora.rslora,
        lora_plus_scale=cfg.lora.lora_plus_scale,
        targets=cfg.lora.lora_target_modules or None,
        shared_a=cfg.compat.shared_lora_a,
        dora=cfg.lora.use_dora,
        pissa=cfg.lora.lora_init == "pissa",
    )


def starting_adapter(cfg: RunConfig, folder: ModelFolder, whole: nn.Module) -> Adapter | None:
    if not cfg.lora.lora_path:
        return None
    from erniekit.lora.adapter_files import read_adapter  # here: a plan reads no files of adapters
    from erniekit.lora.base import check_files

    path = Path(cfg.lora.lora_path[0]).expanduser()
    adapter = read_adapter(path, whole, folder.verify)
    check_files(path, folder.path, cfg.lora.override_base)
    return adapter


def settings_from(start: Adapter, cfg: RunConfig, model: nn.Module) -> LoRASettings:
    """The adapter's own rank, scale and targets. How fast B learns is the run's: no weight depends on it."""
    own = start.settings(model, cfg.compat.shared_lora_a)
    by_plus = cfg.given("rslora_plus") and cfg.lora.rslora_plus
    requested: dict[str, tuple[Any, Any]] = {
        "lora_rank": (cfg.lora.lora_rank, own.rank),
        "lora_alpha": (cfg.lora.lora_alpha, own.alpha),
        "rslora": (cfg.lora.rslora, own.rslora),
        "use_dora": (cfg.lora.use_dora, own.dora),
    }
    for name, (value, held) in requested.items():
        key = "rslora_plus" if by_plus and name in ("lora_alpha", "rslora") and not cfg.given(name) else name
        if cfg.given(key) and value != held:
            because = f" ({key} is True)" if key != name else ""
            raise ConfigError(
                f"{name} is {shown(value)}{because}; the adapter that training starts from has {shown(held)}",
                where=f"{cfg.origin(key)} and {start.where}",
                fix=f"leave {key} out, or lora_path to start from new adapters"
                + (" (only lora_plus_scale may be changed)" if key != name else ""),
            )
    faster = by_plus or cfg.given("lora_plus_scale")
    scale = cfg.lora.lora_plus_scale if faster else own.lora_plus_scale
    # Its own targets by the given patterns: names that match nothing, or too little, are refused on loading.
    targets = cfg.lora.lora_target_modules if cfg.given("lora_target_modules") else own.targets
    return replace(own, lora_plus_scale=scale, targets=targets)


def _notes(cfg: RunConfig, settings: LoRASettings) -> Iterator[Note]:
    reason = "the adapter's own: lora_path"
    alpha: float = settings.alpha
    values = {
        "lora_rank": settings.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else cfg.lora.lora_alpha,
        "rslora": settings.rslora,
        "use_dora": settings.dora,
        "lora_plus_scale": settings.lora_plus_scale,
        "lora_target_modules": settings.targets or (),
    }
    for name, value in values.items():
        if cfg[name] != value:
            yield Note(name, cfg[name], value, reason, quiet=True)  # one line reports it: run_summary.show_plan
    if alpha != int(alpha):
        yield Note("lora_alpha", cfg.lora.lora_alpha, cfg.lora.lora_alpha, f"the adapter's own is {alpha:g}: lora_path")
