"""Numbers of a form that would start processes, threads or memory without end are refused by their key."""

from __future__ import annotations

import os

import pytest

from erniekit.config.flat import KEYS
from erniekit.webui import forms
from erniekit.webui.allowed import limit_of

COUNTS = (
    "nproc_per_node", "dataset_num_proc", "dataloader_num_workers", "prefetch_factor", "buffer_size", "max_restarts",
    "max_num_seqs", "max_queue",
)  # fmt: skip


@pytest.mark.parametrize("key", COUNTS)
def test_a_number_beyond_its_bound_is_a_problem_of_its_key(key: str) -> None:
    limit = limit_of(key)
    assert limit is not None
    assert limit >= (KEYS[key].default or 1)
    assert not forms.check_each({key: limit}, None)
    for value in (limit + 1, 10**9, str(10**9)):
        problems = forms.check_each({key: value}, None)
        assert [p.key for p in problems] == [key]
        assert f"{limit:,}" in problems[0].fix


def test_no_more_processes_than_devices_or_cores() -> None:
    assert forms.check_each({"nproc_per_node": 10_000}, None)
    assert forms.check_each({"devices": [str(n) for n in range(5000)]}, None)
    assert not forms.check_each({"nproc_per_node": os.cpu_count(), "devices": ["0"]}, None)


def test_keys_that_count_processes_or_threads_have_a_bound() -> None:
    """By their names and words; several machines cannot be asked for at all."""
    words = ("process", "thread", "worker", "_proc", "nproc")
    for k in KEYS.values():
        told = f"{k.name} {k.help}".lower()
        if k.item == "int" and any(word in told for word in words) and "port" not in k.name and not k.not_yet:
            assert limit_of(k.name) is not None or k.name in forms.NEVER, k.name
