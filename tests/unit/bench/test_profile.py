"""Kernels by kind, with names as an H200 tells them; and the times of real steps."""

from __future__ import annotations

import pytest
import torch

from erniekit.bench.profile import KernelSpan, idle, kind_of, lines, overlap, profile_steps, steps_for, summary
from erniekit.devices import pick


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_9", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<...>", "attention"),
        ("triton_tem_fused_flex_attention_3", "attention"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<GroupProblemShape<...>>>", "grouped"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTT", "gemm"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<...>>", "copy"),
        ("triton_poi_fused__to_copy_add_mul_2", "element-wise"),
        ("triton_red_fused_rms_norm_index_0", "element-wise"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("void at::native::radixSortKVInPlace<...>", "sort and index"),
        ("_linear_cross_entropy_kernel", "loss and softmax"),
        ("_rows", "loss and softmax"),
        ("update", "optimizer"),
        ("_activate_backward", "experts' rows"),
        ("turn_0", "positions and swiglu"),
        ("void cudnn::fusion::compute_dot_do_o_ragged_specialized<true, 128>(...)", "attention"),
        ("something_else", "other"),
    ],
)
def test_a_kernel_has_a_kind(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_kinds_add_up_and_the_longest_come_first() -> None:
    told = summary({"nvjet_a": (3.0, 2), "nvjet_b": (1.0, 1), "sdpa": (5.0, 4)})
    assert told["busy_ms"] == 9.0
    assert told["kinds_ms"] == {"attention": 5.0, "gemm": 4.0}
    assert [k["kernel"] for k in told["longest"]] == ["sdpa", "nvjet_a", "nvjet_b"]
    assert "9.00 ms" in lines("A1", told)[0]


def test_real_steps_are_timed_by_operator_and_those_ahead_are_not_counted() -> None:
    a, run = torch.randn(64, 64), []

    def step(number: int) -> None:
        run.append(number)
        a @ a
        if number < 8:
            torch.sort(a)

    told = profile_steps(step, first=5, before=3, count=2, device=pick("cpu"))
    assert run == [5, 6, 7, 8, 9]
    assert told["kinds_ms"]["gemm"] > 0
    assert "sort and index" not in told["kinds_ms"]
    assert {k["kernel"]: k["calls"] for k in told["longest"]}["aten::mm"] == 1  # of one step


@pytest.mark.parametrize(
    ("step_s", "before", "count"), [(0.001, 100, 2), (0.072, 28, 2), (0.35, 6, 2), (2.2, 1, 1), (9.0, 1, 1)]
)
def test_about_two_seconds_run_ahead_and_one_long_step_is_enough(step_s: float, before: int, count: int) -> None:
    assert steps_for(step_s, card=True) == (before, count)
    assert steps_for(step_s, card=False) == (1, count)


def test_pauses_are_those_in_which_no_kernel_runs_and_are_named_by_what_is_around_them() -> None:
    ms = 1_000_000
    spans = [
        KernelSpan("a", 0, 4 * ms),
        KernelSpan("b", ms, 5 * ms),
        KernelSpan("c", 8 * ms, ms),
        KernelSpan("b", 2 * ms, ms),
    ]
    found = idle([*spans, KernelSpan("b", 20 * ms, ms), KernelSpan("c", 22 * ms, ms)], steps=2)
    assert found["idle_ms"] == (2 + 11 + 1) / 2
    assert found["pauses"][0] == {"after": "c", "before": "b", "ms": 5.5, "times": 1}
    assert found["pauses"][1] == {"after": "b", "before": "c", "ms": 1.5, "times": 1}
    assert "nothing runs for 7.00 ms" in "\n".join(lines("x", {**summary({"a": (1.0, 1)}), **found}))


def test_calls_beside_the_computation_are_counted_once_however_many_kernels_run() -> None:
    ms = 1_000_000
    spans = [
        KernelSpan("gemm", 0, 10 * ms),
        KernelSpan("norm", 4 * ms, 2 * ms),  # beside the product, on another stream
        KernelSpan("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 8 * ms, 6 * ms),
        KernelSpan("ncclDevKernel_AllGather", 9 * ms, 1 * ms),
        KernelSpan("update", 20 * ms, 3 * ms),
    ]
    found = overlap(reversed(spans))
    assert found == {"communication_ms": 6.0, "computation_ms": 13.0, "both_ms": 2.0}
    assert overlap([]) == {"communication_ms": 0.0, "computation_ms": 0.0, "both_ms": 0.0}
