"""A device without memory says so in several words."""

from __future__ import annotations

import pytest
import torch

from erniekit.serve.engines.out_of_memory import is_out_of_memory, reason


def after(first: Exception, second: Exception) -> Exception:
    try:
        try:
            raise first
        finally:
            raise second
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), True),
        (after(torch.OutOfMemoryError("2 GiB"), RuntimeError("capture was invalidated")), True),
        (RuntimeError("an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_an_error_for_want_of_memory_is_known_and_its_reason_names_the_key(error: Exception, expected: bool):
    assert is_out_of_memory(error) is expected
    assert reason(error, "some_key").endswith("; a lower some_key leaves more memory") is expected


def test_a_reason_is_one_line():
    assert reason(ValueError("one\n  two"), "key") == "ValueError: one two"
