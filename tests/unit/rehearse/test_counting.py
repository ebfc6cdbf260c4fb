"""What is counted of a step that has shapes only, and that fully_shard's streams are seen."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from erniekit.kernels.expert_mlp import expert_mlp
from erniekit.kernels.lora_linear import RowUpdate, lora_linear
from erniekit.kernels.moe_permute import by_expert
from erniekit.kernels.stored import Stored, kind_named
from erniekit.parallel.layout import Layout
from erniekit.rehearse.calls import Trace
from erniekit.rehearse.counting import step_counted, streams_seen
from erniekit.rehearse.moments import AFTER, START, WAIT, WORK, CountedWork, Moments
from erniekit.rehearse.recorded_group import opened
from erniekit.rehearse.shapes import shapes_only
from support.tiny_step import step


def counted(run) -> CountedWork:
    """All that a function computes, on tensors that have shapes only."""
    trace = Trace(0)
    with shapes_only(), streams_seen(trace), step_counted(trace):
        run()
    (found,) = [moment.work for moment in trace.moments.made if moment.work is not None]
    return found


def test_a_product_counts_its_flops_and_the_bytes_it_reads_and_writes() -> None:
    found = counted(lambda: torch.empty(8192, 64, dtype=torch.bfloat16) @ torch.empty(64, 128, dtype=torch.bfloat16))
    assert found.products == 2 * 8192 * 64 * 128
    assert found.passes == 2 * (8192 * 64 + 64 * 128 + 8192 * 128)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_counts_half_the_square_where_it_looks_back_only(causal: bool) -> None:
    def run() -> None:
        q, k, v = (torch.empty(1, 4, 2048, 16, requires_grad=True) for _ in range(3))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        out.sum().backward()

    found = counted(run)
    assert found.attention == {2048: 3 * (2 if causal else 4) * 4 * 16 * 2048**2}
    assert found.products == 0


@pytest.mark.parametrize("kind", ["plain", "int8"])
def test_a_linear_with_adapters_counts_its_products_both_ways(kind: str) -> None:
    rows, width, out, rank = 2048, 64, 96, 4
    packed = kind_named(kind).pack(torch.ones(out, width))

    def run() -> None:
        x = torch.empty(rows, width, requires_grad=True)
        A, B = torch.empty(rank, width, requires_grad=True), torch.empty(out, rank, requires_grad=True)
        lora_linear(x, packed, None, [RowUpdate(A, B, 2.0, ((0, out),))]).sum().backward()

    whole, low = rows * width * out, rows * rank * (width + out)
    assert counted(run).products == 2 * (whole + low) + 2 * (whole + 2 * low)


@pytest.mark.parametrize("trained", [True, False])
def test_experts_count_what_their_rows_meet_and_gradients_of_weights_that_are_trained(trained: bool) -> None:
    tokens, choices, experts, hidden, width = 2048, 2, 4, 32, 24

    def run() -> None:
        x = torch.empty(tokens, hidden, requires_grad=True)
        order = by_expert((torch.arange(tokens * choices) % experts).view(tokens, choices), experts)
        weights = torch.empty(tokens, choices)
        gate_up = torch.empty(experts, 2 * width, hidden, requires_grad=trained)
        down = torch.empty(experts, hidden, width, requires_grad=trained)
        expert_mlp(x, order, weights, Stored(gate_up), Stored(down)).sum().backward()

    forward = 2 * tokens * choices * hidden * 3 * width
    assert counted(run).experts == (3 if trained else 2) * forward


def recorded(layout: Layout) -> Moments:
    with opened(0, layout.size) as trace, shapes_only(), streams_seen(trace), step_counted(trace):
        step(layout, 0, length=1024)
    assert trace.moments is not None
    return trace.moments


def test_gathers_of_fully_shard_are_on_streams_of_their_own() -> None:
    found = recorded(Layout(fsdp=4, sharding_stage=3)).made
    assert {moment.stream for moment in found if moment.kind == WORK} > {0}
    assert sum(moment.kind == START and moment.stream != 0 for moment in found) > 8
    assert any(moment.kind == AFTER and moment.stream == 0 for moment in found)


def test_sums_of_tensor_parallel_ranks_are_waited_for_where_they_are_computed() -> None:
    found = recorded(Layout(tp=2)).made
    assert {moment.stream for moment in found} == {0}
    starts = [k for k, moment in enumerate(found) if moment.kind == START]
    assert len(starts) > 8
    assert all(found[k + 1].kind == WAIT and found[k + 1].number == found[k].number for k in starts)


def test_a_call_that_is_not_waited_for_at_once_leaves_room_for_computation() -> None:
    x = torch.zeros(8192, 64)
    with opened(0, 2) as trace, shapes_only(), streams_seen(trace), step_counted(trace):
        under_way = dist.all_reduce(torch.zeros(4), async_op=True)
        x @ x.t()
        under_way.wait()
    assert [moment.kind for moment in trace.moments.made] == [START, WORK, WAIT]


def test_torch_has_its_own_streams_again_afterwards() -> None:
    before = torch.cpu.Stream, torch.cpu.Event, torch.cpu.current_stream, torch.cpu.stream
    recorded(Layout(fsdp=2, sharding_stage=3))
    assert (torch.cpu.Stream, torch.cpu.Event, torch.cpu.current_stream, torch.cpu.stream) == before
