"""FlashAttention-4 where there is no card for it; the kernels themselves are in tests/device/test_cuda_attention.py."""

from __future__ import annotations

import torch

from erniekit.kernels import flash4


def test_the_op_of_rows_has_the_shapes_a_compiler_asks_for() -> None:
    q, k = torch.empty(2, 5, 4, 64, device="meta"), torch.empty(2, 5, 2, 64, device="meta")
    out, stats = torch.ops.erniekit.flash4_rows(q, k, k)
    assert (out.shape, stats.shape, stats.dtype) == (q.shape, (2, 4, 5), torch.float32)
    grads = torch.ops.erniekit.flash4_rows_backward(q, q, k, k, out, stats)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]


def test_short_documents_are_told_to_be_of_a_usual_length_so_that_no_other_kernel_is_made_for_them() -> None:
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    told = flash4._documents(bounds, bounds, 3, 900)
    assert (told["max_seqlen_q"], told["max_seqlen_k"]) == (flash4.LEAST, 900)
    assert flash4._documents(None, None, 0, 0) == {}
