"""Rules on how a run is spread over devices, and on what is recomputed."""

from __future__ import annotations

from collections.abc import Iterator

from erniekit.config.flat import DEGREES
from erniekit.config.note import Note
from erniekit.config.view import View


def degree_below_one_is_one(run: View) -> Iterator[Note]:
    for name in DEGREES:
        if run[name] < 1:
            yield from run.set(name, 1, "not spread", quiet=True)


def sequence_parallel_needs_tp(run: View) -> Iterator[Note]:
    if run["tensor_parallel_degree"] <= 1:
        yield from run.set("sequence_parallel", False, "tensor_parallel_degree is 1")


def moe_group_decides_expert_parallel(run: View) -> Iterator[Note]:
    if run["moe_group"] in ("data", "dp") and run["data_parallel_degree"] > 1:
        yield from run.set("use_expert_parallel", True, f"moe_group is {run['moe_group']}")


def pp_need_data_has_a_degree(run: View) -> Iterator[Note]:
    if run["pp_need_data"] and not run["pp_need_data_degree"]:
        degree = run["pipeline_parallel_degree"]
        yield from run.set("pp_need_data_degree", degree, f"pipeline_parallel_degree is {degree}")


def server_follows_tensor_parallel(run: View) -> Iterator[Note]:
    name, degree = "server_tp_degree", run["tensor_parallel_degree"]
    yield from run.set(name, degree, f"tensor_parallel_degree is {degree}", quiet=not run.given(name))


def recompute_moe_keeps_attention(run: View) -> Iterator[Note]:
    if run["use_recompute_moe"] and run["recompute_granularity"] == "full":
        yield from run.set("recompute_granularity", "full_attn", "use_recompute_moe is True")
