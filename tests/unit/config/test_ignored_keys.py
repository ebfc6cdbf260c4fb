"""Keys and words without effect: each has its reason, is told by `erniekit config`, and is the docs' own table."""

from __future__ import annotations

import pytest

from erniekit.cli.config_command import report
from erniekit.cli.help import help_lines
from erniekit.config import RunConfig, load
from erniekit.config.flat import KEYS
from erniekit.config.ignored_keys import IGNORED_KEYS, IGNORED_OPTIONS
from erniekit.errors import ConfigError

# As ERNIEKit 1.3.0 accepts them, and two of its automatic parallelism.
KNOWN = {
    "pipeline_parallel_config": """
        disable_p2p_cache_shape disable_partial_send_recv enable_delay_scale_loss enable_dp_comm_overlap
        enable_sharding_comm_overlap enable_timer enable_release_grads enable_clear_every_step_cache
        enable_overlap_p2p_comm disable_batch_p2p_comm best_unbalanced_scheduler enable_offload_queue use_dualpipev
        forward_backward_overlap_scheduler enable_dynamic_shape""",
    "tensor_parallel_config": """
        sync_param sync_grad sync_moment enable_mp_async_allreduce enable_mp_skip_c_identity
        enable_mp_fused_linear_param_grad_add enable_sp_async_reduce_scatter enable_delay_scale_loss
        replace_with_parallel_cross_entropy replace_with_c_embedding""",
    "sharding_parallel_config": """
        enable_stage1_tensor_fusion enable_stage1_overlap enable_stage2_overlap split_param disable_stage1_reduce_avg
        enable_stage1_broadcast_overlap enable_stage1_allgather_overlap enable_release_grads
        enable_fuse_optimizer_states""",
    "unified_checkpoint_config": """
        async_save skip_save_model_weight master_weight_compatible remove_master_weight ignore_merge_optimizer
        enable_all_options""",
}


@pytest.mark.parametrize("key", KNOWN)
def test_every_word_erniekit_knew_is_accepted(key):
    assert set(KEYS[key].choices) == set(KNOWN[key].split())
    assert load([f"{key}={KNOWN[key]}"])


def test_words_without_effect_are_told_each_with_its_reason():
    cfg = load(
        ["pipeline_parallel_config=disable_partial_send_recv use_dualpipev", "unified_checkpoint_config=async_save"]
    )
    (item,) = cfg.ignored
    assert (item.name, item.key) == ("disable_partial_send_recv", "pipeline_parallel_config")
    assert item.reason == "whole tensors are always sent"
    assert any("disable_partial_send_recv (whole tensors are always sent)" in line for line in report(cfg))
    assert RunConfig.from_json(cfg.to_json()).ignored == cfg.ignored


def test_words_a_rule_brings_are_told_as_well():
    cfg = load(["unified_checkpoint_config=enable_all_options"])
    assert [item.name for item in cfg.ignored] == ["skip_save_model_weight"]


def test_a_mistyped_word_is_refused_with_the_nearest():
    with pytest.raises(ConfigError) as e:
        load(["pipeline_parallel_config=disable_partial_send_recv enable_delay_scale_los"])
    assert "'enable_delay_scale_los'" in e.value.what
    assert "did you mean enable_delay_scale_loss?" in e.value.fix


def test_help_on_a_key_names_its_words_without_effect():
    lines = help_lines(["train", "sharding_parallel_config"])
    for word, reason in IGNORED_OPTIONS["sharding_parallel_config"].items():
        assert f"  {word}: without effect; {reason}" in lines
    assert max(map(len, lines)) <= 120


def test_details_of_paddles_parallelism_have_reasons_of_their_own():
    names = """hybrid_parallel_topo_order sharding_comm_buffer_size_MB tensor_parallel_output use_sp_callback
        distributed_dataloader disable_pipeline_warmup add_tail_layers split_norm_comm"""
    assert len({IGNORED_KEYS[name] for name in names.split()}) == len(names.split())
    assert not [reason for reason in IGNORED_KEYS.values() if "Paddle's communication" in reason]


def test_the_docs_table_is_this_table(root):
    rows = [line for line in (root / "docs/config.md").read_text().splitlines() if line.startswith("| `")]
    for key, words in IGNORED_OPTIONS.items():
        for word, reason in words.items():
            assert any(f"`{key}`" in row and f"`{word}`" in row and reason in row for row in rows), (key, word)
