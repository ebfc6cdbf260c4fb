"""ERNIEKit's adapter folders (lora_config.json, peft_model-*.safetensors): linears [in, out], q/k/v and gate/up fused.

Called by adapter_files.py. r rank; Paddle stores A [in, r] and B [r, out], with one r for the whole adapter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from erniekit.checkpoint.shards import write_json, write_shards
from erniekit.errors import CheckpointError
from erniekit.files.listed import has_file
from erniekit.lora.adapter import Adapter, LowRank, places
from erniekit.lora.adapter_config import ONE_FILE, config_fields, paired, plain_number, rank_and_alpha, read_tensors
from erniekit.lora.projections import Projection, config_of, projections, short_name_of, short_names
from erniekit.lora.settings import LoRASettings
from erniekit.lora_scale import alpha_of
from erniekit.models import MODELS
from erniekit.models.names import Entry
from erniekit.printable import counted

CONFIG = "lora_config.json"
WEIGHTS, INDEX = "peft_model-00001-of-00001.safetensors", "peft_model.safetensors.index.json"
# Ours in lora_config.json, ignored by Paddle: which updates these were before they took Paddle's fused shape.
NOTE = "erniekit"
_VARIANTS = ("pissa", "loraga", "lorapro", "use_mora", "lora_use_mixer", "trainable_bias", "trainable_modules")


@dataclass(frozen=True)
class FusedRows:
    """One linear of Paddle's with the projections of ours inside it, all of them, in our row order."""

    entry: Entry
    parts: list[Projection]
    rows: int

    def to_paddle(self, B: torch.Tensor) -> torch.Tensor:
        """[rows, r] -> [r, out]: B's rows are ordered as the weight's rows are, so the weight's table moves them."""
        return self.entry.write(B)[0]

    def from_paddle(self, B: torch.Tensor) -> torch.Tensor:
        return self.entry.read([B])


def fused_linears(model: nn.Module) -> dict[str, FusedRows]:
    """Paddle's linear name -> its projections; a linear that Paddle keeps apart has one."""
    config = config_of(model)
    entries = {e.ours: e for e in MODELS.get(config.family).entries(config, "paddle") if not e.copy_of}
    out: dict[str, FusedRows] = {}
    for p in projections(model):
        entry = entries[p.weight]
        if len(entry.theirs) > 1:  # the weight is several of Paddle's: an expert each, or a projection each
            entry = Entry(p.weight, (p.paddle,), lambda ts: ts[0].t(), lambda t: [t.t()])
        before = out.get(p.paddle)
        parts = [*before.parts, p] if before else [p]
        out[p.paddle] = FusedRows(entry, parts, sum(each.rows for each in parts))
    return out


def read_paddle(folder: Path, model: nn.Module) -> Adapter:
    where = str(folder / CONFIG)
    config = config_fields(folder / CONFIG)
    variant = next((key for key in _VARIANTS if config.get(key)), None)
    if variant is not None:
        raise CheckpointError(
            f"the adapter uses {variant}, which changes more than low-rank updates",
            where=where,
            fix="merge it with ERNIEKit and use the merged model as base",
        )
    rank, alpha = rank_and_alpha(config, where)
    rslora = bool(config.get("rslora", False))
    scale = LoRASettings(rank, alpha, rslora).scaling
    stored = paired(_tensors(folder), str(folder))
    by_public = {p.public: p for p in projections(model)}
    by_paddle = fused_linears(model)
    updates: dict[str, LowRank] = {}
    for key, (A, B) in stored.items():
        name = key.removeprefix("model.") if key not in by_public and key not in by_paddle else key
        if name in by_public:  # separate projections under transformers' names
            A, B = _upright(A, B, by_public[name])
            updates[name] = LowRank(A, B, scale)
        elif name in by_paddle:
            fused = by_paddle[name]
            if B.shape[1] != fused.rows:
                raise CheckpointError(f"{key} has {B.shape[1]} columns, {fused.rows} needed", where=str(folder))
            split = fused.from_paddle(B).split([p.rows for p in fused.parts])
            updates.update({p.public: LowRank(A.t(), rows, scale) for p, rows in zip(fused.parts, split)})
        else:
            updates[key] = LowRank(A.t(), B.t(), scale)  # no such layer: the caller names it
    base, plus = config.get("base_model_name_or_path"), float(config.get("lora_plus_scale") or 1.0)
    adapter = Adapter(updates, rank, alpha, rslora, plus, base, str(folder))
    return _as_noted(adapter, config[NOTE], model) if NOTE in config else adapter


def write_paddle(folder: Path, adapter: Adapter, model: nn.Module) -> list[Path]:
    """Where a fused linear's parts have an A each, ranks are stacked: [A_q; A_k; A_v] with a block-structured B."""
    if adapter.dora:
        raise CheckpointError(
            "ERNIEKit's adapter files have no place for DoRA's row lengths", where="save_format", fix="save_format: hf"
        )
    if adapter.head is not None:
        raise CheckpointError(
            "ERNIEKit's adapter files have no place for a score head", where="save_format", fix="save_format: hf"
        )
    placed = {p.public: u for p, u in places(model, adapter).items()}
    linears = {n: f for n, f in fused_linears(model).items() if any(p.public in placed for p in f.parts)}
    found = {n: [placed.get(p.public) for p in f.parts] for n, f in linears.items()}
    shared = all(_shares_a(updates) for updates in found.values())
    ranks = [[u.rank for u in updates if u is not None] for updates in found.values()]
    rank = max(max(r) if shared else sum(r) for r in ranks)
    tensors = {}
    for name, fused in linears.items():
        A, B = _stack(found[name], fused, rank, adapter.scale, shared)
        tensors[f"{name}.lora_A"] = A.t()
        tensors[f"{name}.lora_B"] = fused.to_paddle(B)
    config = _config(adapter, model, linears, rank, next(iter(tensors.values())).dtype)
    write_shards(folder, "peft_model", tensors.items(), ONE_FILE, tag="np")[0].rename(folder / WEIGHTS)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    # ERNIEKit finds safetensors adapters by their index only.
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(tensors, WEIGHTS)}
    write_json(folder / INDEX, index)
    write_json(folder / CONFIG, config)
    return [folder / WEIGHTS, folder / INDEX, folder / CONFIG]


def _config(
    adapter: Adapter, model: nn.Module, linears: dict[str, FusedRows], rank: int, dtype: torch.dtype
) -> dict[str, Any]:
    """A higher, stacked rank needs an alpha that keeps the scale; `rslora` is spelt out in it then."""
    same = rank == adapter.rank
    alpha = adapter.alpha if same else alpha_of(adapter.scale, rank, rslora=False)
    projection_kinds = {short_name_of(name) for name in linears}
    everywhere = {n for n in fused_linears(model) if short_name_of(n) in projection_kinds} == set(linears)
    # A router's name is part of other names.
    patterns = [f".*{w}.*" if w.endswith("_proj") else rf".*\.{w}" for w in sorted(projection_kinds)]
    targets = patterns if everywhere else [re.escape(n) for n in linears]
    config = {
        "r": rank,
        "lora_alpha": plain_number(alpha),
        "rslora": adapter.rslora and same,
        "scaling": adapter.scale,
        "lora_dropout": 0.0,
        "lora_plus_scale": adapter.lora_plus_scale,
        "target_modules": targets,
        "base_model_name_or_path": adapter.base,
        "dtype": str(dtype).removeprefix("torch."),
        "head_dim": config_of(model).head_dim,
        "tensor_parallel_degree": 1,
    }
    uniform = len({(u.rank, u.scale) for u in adapter.updates.values()}) == 1
    whole = len(adapter.updates) == sum(len(fused.parts) for fused in linears.values())
    if uniform and not (same and whole):
        config[NOTE] = {
            "rank": adapter.rank,
            "alpha": plain_number(adapter.alpha),
            "rslora": adapter.rslora,
            "projections": short_names(list(adapter.updates), model),
            "stacked": not same,
        }
    return config


def _shares_a(updates: list[LowRank | None]) -> bool:
    """One A serves every adapted part, so that Paddle's fused form fits without stacking."""
    present = [u for u in updates if u is not None]
    first = present[0]
    return all(u.scale == first.scale and torch.equal(u.A, first.A) for u in present[1:])


def _stack(
    updates: list[LowRank | None], fused: FusedRows, rank: int, scale: float, shared: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A [rank, in] and B [rows, rank] of one Paddle linear; what the parts do not fill stays zero."""
    like = next(u for u in updates if u is not None)
    A = like.A.new_zeros(rank, like.A.shape[1])
    B = like.B.new_zeros(fused.rows, rank)
    row = column = 0
    for part, update in zip(fused.parts, updates):
        if update is not None:
            width = slice(column, column + update.rank)
            A[width] = update.A
            B[row : row + part.rows, width] = update.B * (update.scale / scale)
            column += 0 if shared else update.rank
        row += part.rows
    return A, B


def _as_noted(adapter: Adapter, note: Any, model: nn.Module) -> Adapter:
    """The updates as they were before `write_paddle`, bit for bit: block i of a stacked rank is part i's."""
    settings = LoRASettings(int(note["rank"]), float(note["alpha"]), bool(note["rslora"]))
    names, r = set(note["projections"]), settings.rank
    updates = {}
    for fused in fused_linears(model).values():
        kept = [p for p in fused.parts if p.public in adapter.updates and {p.short_name, p.public} & names]
        for i, p in enumerate(kept):
            first = i * r if note["stacked"] else 0
            whole, block = adapter.updates[p.public], slice(first, first + r)
            updates[p.public] = LowRank(whole.A[block], whole.B[:, block], settings.scaling)
    return Adapter(updates, r, settings.alpha, settings.rslora, adapter.lora_plus_scale, adapter.base, adapter.where)


def _upright(A: torch.Tensor, B: torch.Tensor, p: Projection) -> tuple[torch.Tensor, torch.Tensor]:
    """Paddle's [in, r], [r, out] turned; files converted to torch's orientation are taken as they are."""
    if A.shape[0] != p.in_features and A.shape[1] == p.in_features:
        return A, B
    return A.t(), B.t()


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    if has_file(folder, INDEX):
        named = {str(name) for name in config_fields(folder / INDEX).get("weight_map", {}).values()}
        missing = sorted(name for name in named if not has_file(folder, name))
        if missing:
            raise CheckpointError(
                counted(len(missing), "file named in the index is missing", "files named in the index are missing")
                + f": {', '.join(missing[:3])}",
                where=str(folder / INDEX),
                fix="copy the files of the other nodes here",
            )
    return read_tensors(folder, ["peft_model*.safetensors", "*lora*.safetensors", "*adapter*.safetensors"])
