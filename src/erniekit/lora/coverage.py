"""What LoRA trains and what it does not, as a table printed before the first step.

Called by recipes/run_summary.py, for runs and the doctor. A projection that silently got no adapter is how fine-tunes
fail; here it shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from erniekit.lora.inject import is_lora, lora_linears
from erniekit.lora.projections import Projection, projections
from erniekit.model_contract import spread

GROUPS = ("attention", "mlp", "dense mlp", "shared experts", "routed experts", "vision experts")


@dataclass(frozen=True)
class CoverageRow:
    group: str
    adapted: dict[str, int]  # public part name -> projections with an adapter
    total: dict[str, int]  # public part name -> projections in the model; a weight that never has one: its name -> 0
    ranks: tuple[int, ...]
    trainable: int  # parameters
    parameters: int  # of the base weights in this group

    @property
    def num_adapted(self) -> int:
        return sum(self.adapted.values())

    @property
    def num_total(self) -> int:
        return sum(self.total.values())


def coverage(model: nn.Module) -> list[CoverageRow]:
    """One row a group of projections (each expert counts), then one for all that LoRA never touches (embeddings,
    norms, head)."""
    ranks, sizes = _adapters(model)
    everything = projections(model)
    sparse = any(p.expert is not None for p in everything)
    front = [prefix.removesuffix(".") for tower in spread(model).towers().values() for prefix in tower.adapts]
    rows = []
    for group in (*GROUPS, *front, "router"):
        members = [p for p in everything if _group(p, sparse, front) == group]
        if not members:
            continue
        with_adapter = [p for p in members if (p.module, p.part) in ranks]
        modules = {p.module for p in members}
        rows.append(
            CoverageRow(
                group,
                _count(with_adapter),
                _count(members),
                tuple(sorted({ranks[p.module, p.part] for p in with_adapter})),
                sum(size for module, size in sizes.items() if module in modules),
                sum(p.rows * p.in_features for p in members),
            )
        )
    rows.append(_never(model, everything))
    return rows


def coverage_table(model: nn.Module) -> str:
    """At most eight lines, ten where there are experts."""
    rows = coverage(model)
    wide = max(10, *(len(row.group) for row in rows))
    lines = [f"  {'LoRA':<{wide}} {'adapted':<27} {'layers':>11} {'rank':>5} {'trainable':>13}"]
    for row in rows[:-1]:
        have = " ".join(_shown(row, part) for part in row.total if row.adapted.get(part)) or "none"
        count, rank = f"{row.num_adapted}/{row.num_total}", "-".join(map(str, row.ranks)) or "-"
        lines.append(f"  {row.group:<{wide}} {have:<27} {count:>11} {rank:>5} {row.trainable:>13,}")
    missing = [name for row in rows[:-1] for name in _left_out(row)]
    trainable, base = sum(r.trainable for r in rows), sum(r.parameters for r in rows)
    if rows[-1].trainable:
        lines.append(f"  {'score head':<{wide}} {'trained whole':<27} {'1/1':>11} {'-':>5} {rows[-1].trainable:>13,}")
    lines.append(f"  not adapted: {', '.join([*missing, *rows[-1].total])}")
    lines.append(f"  trainable {trainable:,} of {base + trainable:,} parameters ({trainable / (base + trainable):.2%})")
    return "\n".join(lines)


def _group(p: Projection, sparse: bool, front: Sequence[str]) -> str:
    """front: the modules of towers that LoRA adapts, each a group."""
    if p.router:
        return "router"
    if ".self_attn." in p.public:
        return "attention"
    if (first := p.module.partition(".")[0]) in front:
        return first
    if p.expert is not None:
        return "vision experts" if ".vision." in p.module else "routed experts"
    if ".shared_experts." in p.public:
        return "shared experts"
    return "dense mlp" if sparse else "mlp"


def _left_out(row: CoverageRow) -> list[str]:
    """Parts by name; several groups have a gate, an up and a down, so those of experts go by their group's."""
    parts = [_short(part) for part in row.total if not row.adapted.get(part)]
    if row.group in ("attention", "mlp"):
        return parts
    return [row.group] if not row.num_adapted else [f"{row.group} {'/'.join(parts)}"] if parts else []


def _adapters(model: nn.Module) -> tuple[dict[tuple[str, str], int], dict[str, int]]:
    ranks: dict[tuple[str, str], int] = {}
    sizes: dict[str, int] = {}
    for name, module in lora_linears(model):
        for pair in module.pairs().values():
            ranks.update({(name, part): pair.rank for part, _ in pair.parts})
            sizes[name] = sizes.get(name, 0) + sum(p.numel() for p in (pair.A, pair.B, pair.magnitude) if p is not None)
    return ranks, sizes


def _count(members: list[Projection]) -> dict[str, int]:
    out: dict[str, int] = {}
    for p in members:
        out[p.part] = out.get(p.part, 0) + 1
    return out


def _never(model: nn.Module, everything: list[Projection]) -> CoverageRow:
    """A score head is in it, and trained whole."""
    weights = {p.weight for p in everything} | {p.module + ".base.weight" for p in everything}
    rest = {n: p for n, p in model.named_parameters() if n not in weights and not is_lora(n)}
    kinds = {"embeddings": "embed.", "norms": "norm.", "head": "head", "biases": ".bias", "mtp layers": "mtp."}
    for tower in spread(model).towers().values():
        kinds |= {f"{tower.name} tower": prefix for prefix in tower.prefixes if prefix not in tower.adapts}
    named = [kind for kind, part in kinds.items() if any(part in name for name in rest)]
    trained = sum(p.numel() for p in rest.values() if p.requires_grad)
    held = sum(p.numel() for p in rest.values()) - trained
    return CoverageRow("rest", {}, dict.fromkeys(named, 0), (), trained, held)


def _shown(row: CoverageRow, part: str) -> str:
    """`q`, or `q(2/3)` when only some layers have it."""
    have, all_of = row.adapted[part], row.total[part]
    return _short(part) if have == all_of else f"{_short(part)}({have}/{all_of})"


def _short(part: str) -> str:
    return part.removesuffix("_proj").replace("_linear_", ".")
