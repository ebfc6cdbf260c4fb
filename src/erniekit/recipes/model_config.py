"""`model_config` of a recipe: values that take the place of those in the model's config.json. Called by run_plan.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from erniekit.checkpoint.model_folder import read_json
from erniekit.config import RunConfig
from erniekit.config.flat import KEYS
from erniekit.config.ignored_keys import IGNORED_KEYS
from erniekit.errors import ConfigError
from erniekit.log import emit
from erniekit.models import find
from erniekit.registry import nearest

ALSO = {"multi_token_pred_depth": "num_nextn_predict_layers"}
# How ERNIE's pre-training computes and sends what is the same mathematics; config/not_yet_supported.py refuses fp8.
WITHOUT_EFFECT = {
    "use_fp8_mlp", "use_fp8_fuse_node", "fp8_mem_configs", "fp8_fused_ops_configs", "use_quant_before_a2a",
    "use_ep_comm_overlap", "use_combine_before_a2a", "use_async_a2a", "use_rms_qkv_recompute",
}  # fmt: skip


class Recorder(dict[str, Any]):
    """A config.json that records which of its names were read, present or not."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:  # type: ignore[override]
        self.asked.add(name)
        return super().get(name, default)


def changes_of(cfg: RunConfig, folder: Path) -> dict[str, Any]:
    """In config.json's names. A name that nothing reads is refused: it would be a model other than its recipe says."""
    given = dict(cfg.model.model_config or {})
    if cfg.model.initializer_range is not None:
        given["initializer_range"] = cfg.model.initializer_range
    changes = {ALSO.get(name, name): value for name, value in given.items() if not _idle(name)}
    if not changes:
        return changes
    raw = read_json(folder / "config.json")
    where = str(folder / "config.json")
    nested = _rope_in_both(raw, changes)
    values = Recorder({**raw, **changes, **nested})
    find(values, where).read_config(values, "hf", False, where)
    for name in changes:
        if name not in values.asked | raw.keys():
            raise _unknown(name, values.asked, cfg.origin("model_config"))
    differ = [f"{name} {raw.get(name)} -> {value}" for name, value in changes.items() if raw.get(name) != value]
    if differ:
        emit(f"note     model_config: {', '.join(differ)}")
    return {**changes, **nested}


def _rope_in_both(raw: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """rope_parameters of a file that has them, with what changes of the same values elsewhere."""
    before, scaling = raw.get("rope_parameters"), changes.get("rope_scaling")
    if not isinstance(before, dict) or "rope_parameters" in changes:
        return {}
    out = {**scaling, "rope_theta": before.get("rope_theta")} if isinstance(scaling, dict) else dict(before)
    if "rope_theta" in changes:
        out["rope_theta"] = changes["rope_theta"]
    return {"rope_parameters": out}


def _idle(name: str) -> bool:
    return name in WITHOUT_EFFECT or name in IGNORED_KEYS


def _unknown(name: str, known: set[str], where: str) -> ConfigError:
    if name in KEYS:
        return ConfigError(f"model_config.{name}: {name} is a key of the recipe", where=where, fix="move it up there")
    near = nearest(name, sorted(known))
    return ConfigError(
        f"model_config.{name}: this kind of model has no such value",
        where=where,
        fix=f"did you mean {near[0]}?" if near else "leave it out; known: " + ", ".join(sorted(known)),
    )
