"""How a run is spread: what follows from what before the number of devices is known, and what cannot be."""

from __future__ import annotations

import pytest

from erniekit.config import load
from erniekit.errors import ConfigError, PlanError
from erniekit.parallel.layout import fit
from erniekit.parallel.world import layout_of


def note(cfg, key):
    return next((n for n in cfg.notes if n.key == key), None)


def test_sequence_parallel_needs_tensor_parallel():
    cfg = load(["--sequence_parallel"])
    assert not cfg.parallel.sequence_parallel
    assert note(cfg, "sequence_parallel").reason == "tensor_parallel_degree is 1"
    assert load(["--sequence_parallel", "tensor_parallel_degree=2"]).parallel.sequence_parallel


def test_degrees_of_minus_one_are_one():
    cfg = load(["tensor_parallel_degree=-1", "sharding_degree=-1", "virtual_pp_degree=0", "context_parallel_degree=-1"])
    p = cfg.parallel
    degrees = (p.tensor_parallel_degree, p.sharding_parallel_degree, p.virtual_pp_degree, p.context_parallel_degree)
    assert degrees == (1, 1, 1, 1)


def test_degrees_below_minus_one_are_refused():
    with pytest.raises(ConfigError, match="-1 or more"):
        load(["pipeline_parallel_degree=-2"])


@pytest.mark.parametrize("words", [["sharding=stage3"], ["sharding=stage3", "sharding_parallel_degree=-1"]])
def test_a_sharding_stage_alone_takes_all_devices_that_are_left(words):
    cfg = load(words)
    assert cfg.parallel.sharding_parallel_degree == -1
    assert cfg.parallel.sharding == ("stage3",)


def test_the_layout_fills_in_how_many_that_are():
    parallel = load(["sharding=stage3", "tensor_parallel_degree=2", "sep_parallel_degree=2"]).parallel
    layout = fit(16, layout_of(parallel, 16))
    assert (layout.tp, layout.cp, layout.fsdp, layout.dp, layout.sharding_stage) == (2, 2, 4, 1, 3)
    with pytest.raises(PlanError, match="multiple of 4 ranks; there are 6"):
        fit(6, layout_of(parallel, 6))
    copies = load(["sharding=stage2", "data_parallel_degree=2"]).parallel
    assert fit(8, layout_of(copies, 8)).fsdp == 4
    assert fit(1, layout_of(load(["sharding=stage1"]).parallel, 1)).fsdp == 1


def test_a_sharding_stage_over_one_device_is_remarked_upon():
    cfg = load(["sharding=stage1", "sharding_parallel_degree=1"])
    assert cfg.parallel.sharding_parallel_degree == 1
    assert note(cfg, "sharding").reason == "without effect: sharding_parallel_degree is 1"


def test_a_sharding_degree_alone_is_stage_1():
    cfg = load(["sharding_parallel_degree=4"])
    assert cfg.parallel.sharding == ("stage1",)
    assert str(note(cfg, "sharding")) == "sharding: none -> stage1 (sharding_parallel_degree is 4)"
    assert note(load(["sharding=stage2", "sharding_parallel_degree=4"]), "sharding") is None


def test_offload_alone_is_offloaded_stage_1():
    assert load(["sharding=offload"]).parallel.sharding == ("stage1", "offload")
    assert load(["sharding=offload", "sharding_parallel_degree=2"]).parallel.sharding == ("stage1", "offload")


def test_two_sharding_stages_are_refused():
    with pytest.raises(ConfigError, match="stage1 and stage3") as e:
        load(["sharding=stage1 stage3"])
    assert "stage3" in e.value.fix


def test_one_way_to_cut_sequences():
    cfg = load(["sep_parallel_degree=4"])
    assert cfg.parallel.context_parallel_degree == 4
    assert not note(cfg, "context_parallel_degree").quiet
    with pytest.raises(ConfigError, match="both cut sequences"):
        load(["sep_parallel_degree=4", "context_parallel_degree=2"])
    assert load(["sep_parallel_degree=1", "context_parallel_degree=2"]).parallel.context_parallel_degree == 2


def test_pipeline_keys_without_a_pipeline_are_told():
    cfg = load(["virtual_pp_degree=2", "pp_schedule=1f1b", "pp_runner=torch"])
    assert "without effect" in note(cfg, "pp_runner").reason
    assert cfg.parallel.virtual_pp_degree == 1
    assert note(cfg, "virtual_pp_degree").reason == "pipeline_parallel_degree is 1"
    assert "without effect" in note(cfg, "pp_schedule").reason


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_interleaving_needs_several_stages_a_device_and_so_does_torchs_zero_bubble(schedule):
    words = ["pipeline_parallel_degree=2", "gradient_accumulation_steps=4", f"pp_schedule={schedule}"]
    if schedule == "zero_bubble":
        assert load(words).parallel.pp_schedule == schedule
        words.append("pp_runner=torch")
    with pytest.raises(ConfigError, match="virtual_pp_degree is 1"):
        load(words)
    cfg = load([*words, "virtual_pp_degree=2"])
    assert (cfg.parallel.pp_schedule, note(cfg, "pp_schedule")) == (schedule, None)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_several_stages_a_device_are_interleaved(schedule):
    words = ["pipeline_parallel_degree=2", "virtual_pp_degree=2", "gradient_accumulation_steps=4"]
    cfg = load([*words, f"pp_schedule={schedule}"])
    assert cfg.parallel.pp_schedule == "interleaved"
    assert note(cfg, "pp_schedule").reason == "virtual_pp_degree is 2"
    assert load(words).parallel.pp_schedule == "auto"


def test_interleaved_micro_batches_divide_by_the_devices():
    words = ["pipeline_parallel_degree=4", "virtual_pp_degree=2"]
    with pytest.raises(ConfigError, match="not a multiple of pipeline_parallel_degree 4") as e:
        load([*words, "gradient_accumulation_steps=6"])
    assert "4 or 8" in e.value.fix
    load([*words, "gradient_accumulation_steps=8"])
    load(["pipeline_parallel_degree=4", "gradient_accumulation_steps=6"])


@pytest.mark.parametrize("method", ["uniform", "layer:Ernie4_5_DecoderLayer|EmptyLayer", "[0,29,57]", "0,7,10"])
def test_cuts_are_even_or_bounds(method):
    assert load(["pipeline_parallel_degree=2", f"pp_seg_method={method}"]).parallel.pp_seg_method


@pytest.mark.parametrize(
    ("method", "hint"),
    [("unifrom", "uniform"), ("[1,29,57]", "[0,29,57]"), ("[0,29,29]", "[0,29,57]"), ("5", "[0,29,57]")],
)
def test_other_cuts_are_refused_with_the_nearest(method, hint):
    with pytest.raises(ConfigError, match="pp_seg_method") as e:
        load([f"pp_seg_method={method}"])
    assert hint in e.value.fix


def test_server_follows_tensor_parallel():
    assert load(["tensor_parallel_degree=8"], "server").serve.server_tp_degree == 8


def test_offloaded_inputs_without_recompute_are_remarked_upon():
    assert "recompute is False" in note(load(["--offload_recompute_inputs"]), "offload_recompute_inputs").reason
    assert note(load(["--offload_recompute_inputs", "--recompute"]), "offload_recompute_inputs") is None


def test_an_expert_parallel_degree_alone_is_over_data_ranks():
    cfg = load(["expert_parallel_degree=4"])
    assert cfg.moe.moe_group == "ep"
    assert note(cfg, "moe_group").reason == "expert_parallel_degree is 4"
    assert load(["use_expert_parallel=1"]).moe.moe_group == "data"
    kept = load(["moe_group=dummy", "expert_parallel_degree=4"])
    assert kept.moe.moe_group == "dummy"
    assert "without effect" in note(kept, "expert_parallel_degree").reason


def test_expert_degrees_that_contradict_the_group_are_refused():
    with pytest.raises(ConfigError, match="tensor_parallel_degree 4 devices; expert_parallel_degree is 8"):
        load(["moe_group=mp", "tensor_parallel_degree=4", "expert_parallel_degree=8"])
    with pytest.raises(ConfigError, match="each expert is cut over 1"):
        load(["moe_group=mp", "tensor_parallel_degree=4", "expert_tensor_parallel_degree=4"])
    assert load(["moe_group=ep", "tensor_parallel_degree=4", "expert_tensor_parallel_degree=4"]).moe.moe_group == "ep"
