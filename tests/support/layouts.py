"""The layouts that training must not differ in: parity tests run them on real ranks, rehearsals on none."""

from __future__ import annotations

from typing import Any

TO_ALL, GATHER = "all_to_all", "all_gather"

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": dict(dp=2),
    "dp4": dict(dp=4),
    "tp2": dict(tp=2),
    "tp2 with sequence parallel": dict(tp=2, sequence_parallel=True),
    "tp4": dict(tp=4),
    "pp2": dict(pp=2),
    "pp4": dict(pp=4),
    "pp2 cut by hand": dict(pp=2, stage_cuts=(1,)),
    "pp2 interleaved": dict(pp=2, virtual_stages=2),
    "cp2": dict(cp=2),
    "cp4": dict(cp=4),
    "sharding stage 1": dict(fsdp=2, sharding_stage=1),
    "sharding stage 2": dict(fsdp=2, sharding_stage=2),
    "sharding stage 3": dict(fsdp=2, sharding_stage=3),
    "sharding 2 x dp 2": dict(fsdp=2, dp=2),
    "tp2 x pp2": dict(tp=2, pp=2),
    "tp2 x sharding 2": dict(tp=2, fsdp=2, sharding_stage=3),
    "pp2 x dp2": dict(pp=2, dp=2),
    "tp2 x cp2": dict(tp=2, cp=2, sequence_parallel=True),
    "sharding 2 x cp2": dict(fsdp=2, cp=2),
    "pp2 x sharding 2": dict(pp=2, fsdp=2),
    "tp2 x pp2 x dp2": dict(tp=2, pp=2, dp=2, sequence_parallel=True),
}

# Of models with experts, and how tokens reach those.
EXPERT_LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "tp2": (dict(tp=2, experts="tp"), TO_ALL),
    "tp2 with sequence parallel, all to all": (dict(tp=2, sequence_parallel=True, experts="tp"), TO_ALL),
    "tp2 with sequence parallel, all gather": (dict(tp=2, sequence_parallel=True, experts="tp"), GATHER),
    "data 2, all to all": (dict(dp=2, experts="data"), TO_ALL),
    "data 2, all gather": (dict(dp=2, experts="data"), GATHER),
    "data 4 in two copies": (dict(dp=4, experts="data", ep=2), TO_ALL),
    "sharding 2": (dict(fsdp=2, experts="data", sharding_stage=3), TO_ALL),
    "sharding 4 in two copies": (dict(fsdp=4, experts="data", ep=2), TO_ALL),
    "sharding 2 x dp 2": (dict(fsdp=2, dp=2, experts="data", sharding_stage=2), GATHER),
    "sharding 2 x dp 2 in two copies": (dict(fsdp=2, dp=2, experts="data", ep=2), TO_ALL),
    "tp2 x dp2, experts over tp": (dict(tp=2, dp=2, experts="tp"), TO_ALL),
    "tp2 x sharding 2, experts over tp": (dict(tp=2, fsdp=2, experts="tp", sequence_parallel=True), TO_ALL),
    "tp2 x dp2, experts over data": (dict(tp=2, dp=2, experts="data"), TO_ALL),
    "tp2 x sharding 2, experts over data": (dict(tp=2, fsdp=2, experts="data", sequence_parallel=True), GATHER),
    "tp2 x dp2, experts over all": (dict(tp=2, dp=2, experts="world", sequence_parallel=True), TO_ALL),
    "tp2 x dp2, over all, two copies": (dict(tp=2, dp=2, experts="world", ep=2, sequence_parallel=True), GATHER),
    "tp2 x sharding 2, experts over all": (dict(tp=2, fsdp=2, experts="world", sequence_parallel=True), TO_ALL),
    "pp2 x dp2": (dict(pp=2, dp=2, experts="data"), TO_ALL),
    "pp2 x tp2": (dict(pp=2, tp=2, experts="tp"), TO_ALL),
    "pp2 x sharding 2": (dict(pp=2, fsdp=2, experts="data"), TO_ALL),
    "cp2": (dict(cp=2, experts="data"), TO_ALL),
    "cp2 x dp2": (dict(cp=2, dp=2, experts="data"), GATHER),
    "cp2 x sharding 2": (dict(cp=2, fsdp=2, experts="data", ep=2), TO_ALL),
    "cp2 x tp2": (dict(cp=2, tp=2, experts="tp", sequence_parallel=True), TO_ALL),
    "tp2 inside experts": (dict(tp=2), TO_ALL),
    "tp2 inside experts with sequence parallel": (dict(tp=2, sequence_parallel=True), TO_ALL),
    "tp2 inside experts x sharding 2": (dict(tp=2, fsdp=2), TO_ALL),
}  # fmt: skip
