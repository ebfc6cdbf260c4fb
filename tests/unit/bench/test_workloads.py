"""The table of workloads: what it names exists, and a name or its beginning picks from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from erniekit.bench.ours import run_config
from erniekit.bench.peers import NEEDS, PEERS, absent
from erniekit.bench.runner import Task
from erniekit.bench.workloads import WORKLOADS, BenchOptions, chosen, tiny
from erniekit.devices import pick
from erniekit.errors import ConfigError


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_a_recipe_the_product_accepts(name: str, tmp_path: Path) -> None:
    work = WORKLOADS[name]
    cfg = run_config(Task(work, BenchOptions(), tmp_path, pick("cpu"), torch.float32, []))
    assert cfg.train.stage == work.stage
    assert cfg.lora.lora == work.lora
    assert cfg.data.max_seq_len == work.rows.length
    assert cfg.memory.recompute == ("recompute" in work.keys)


def test_keys_of_the_command_line_come_after_the_workloads_own(tmp_path: Path) -> None:
    options = BenchOptions(keys={"recompute": "True", "compile": "True"})
    cfg = run_config(Task(WORKLOADS["A1"], options, tmp_path, pick("cpu"), torch.float32, []))
    assert cfg.memory.recompute
    assert cfg.model.compile


def test_every_peer_a_workload_names_is_in_the_tables() -> None:
    named = {peer for work in WORKLOADS.values() for peer in work.possible}
    assert named == set(PEERS) == set(NEEDS)


def test_a_workload_is_picked_by_its_name_or_by_its_beginning() -> None:
    assert [w.name for w in chosen(["C1-60", "A1"])] == ["A1", "C1-60"]
    assert [w.name for w in chosen(["C1"])] == ["C1-85", "C1-60", "C1-skew", "C1-fp8"]
    assert len(chosen([])) == len(WORKLOADS)
    with pytest.raises(ConfigError, match="no workload"):
        chosen(["A1", "A3"])


def test_a_tiny_workload_is_the_same_kind_of_work() -> None:
    for work in WORKLOADS.values():
        small = tiny(work)
        assert small.model["model_type"] == work.model["model_type"]
        assert small.rows.tokens <= 256
        assert small.keys.keys() == work.keys.keys() - {"memory_limit"}
        assert "memory_limit" not in work.keys or small.keys["recompute_granularity"] == "full"
        # What steps wait for data is a share of our own time.
        assert small.peers or work.name == "V1-input", "every workload is compared with somebody"


def test_a_peer_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = replace(NEEDS["hf+liger"], modules=("transformers", "no_such_package_here"))
    monkeypatch.setitem(NEEDS, "hf+liger", missing)
    assert absent("hf+liger") == "no_such_package_here is not installed: pip install liger-kernel"
    assert absent("hf") == ""
