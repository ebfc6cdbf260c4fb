"""Kernels by kind, with names as an H200 tells them; and the times of real steps."""

from __future__ import annotations

import pytest
import torch

from erniekit.bench.profile import kind_of, lines, profile_steps, summary


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_9", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<...>", "attention"),
        ("triton_tem_fused_flex_attention_3", "attention"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<GroupProblemShape<...>>>", "grouped"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTT", "gemm"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
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


def test_real_steps_are_timed_by_operator() -> None:
    a = torch.randn(64, 64)
    told = profile_steps(lambda number: a @ a, 0, 2, torch.device("cpu"))
    assert told["kinds_ms"]["gemm"] > 0
