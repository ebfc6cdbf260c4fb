"""Names of PaddleFormers 1.2, ERNIEKit's successor: which key each is here, what does nothing, what has no counterpart.

flat.py reads RENAMED, ignored_keys.py IGNORED, sources.py all three; so does `erniekit migrate`.
"""

from __future__ import annotations

from typing import Any

# Its name -> ours. Read as an alias, with a note.
RENAMED: dict[str, str] = {
    "tensor_model_parallel_size": "tensor_parallel_degree",
    "pipeline_model_parallel_size": "pipeline_parallel_degree",
    "virtual_pipeline_model_parallel_size": "virtual_pp_degree",
    "sharding_parallel_size": "sharding_parallel_degree",
    "data_parallel_size": "data_parallel_degree",
    "context_parallel_size": "context_parallel_degree",
    "sep_parallel_size": "sep_parallel_degree",
    "expert_model_parallel_size": "expert_parallel_degree",
    "expert_tensor_model_parallel_size": "expert_tensor_parallel_degree",
    "loss_subbatch_sequence_length": "loss_subbatch_seqlen",
    "router_aux_loss_coef": "moe_aux_loss_lambda",
    "moe_router_bias_update_rate": "moe_use_aux_free_update_coef",
    "num_empty_layers_add_in_tail": "add_tail_layers",
    "optimizer_cpu_offload": "offload_optim",
}

# Its template of pictures -> ours; other templates are the model's own.
TEMPLATES = {"ernie_vl": "paddleformers_vl", "ernie_vl_nothink": "paddleformers_vl_nothink"}

_REASONS = {
    "a kernel choice; kernels of equal results are picked by device, see `attention`": """
        attn_impl _attn_implementation apply_rope_fusion moe_token_dispatcher_type moe_expert_fusion
        moe_router_fusion moe_deep_gemm moe_subbatch_token_num_before_dispatch""",
    "conversations are written by the model's own template": "template template_backend",
    "a pipeline sends whole tensors of one length, in the order of its schedule": """
        partial_send_recv batch_p2p_comm p2p_cache_shape overlap_p2p_comm send_recv_overlap variable_seq_lengths
        clear_every_step_cache split_backward""",
    "an order of stages; pp_schedule chooses here": "best_unbalanced_scheduler use_dualpipev",
    "what travels between stages stays on the device; recompute saves more": "offload_queue",
    "the loss is divided once, by the step's trained tokens": """
        pp_delay_scale_loss dp_allreduce_avg_in_gradinent_scale sp_allreduce_avg_in_gradinent_scale
        gradient_sync_after_accumulate hybrid_parallel_expert_grad_scale""",
    "gradients are freed after every step, always": "pp_release_grads sd_release_grads",
    "copies stay equal: one gradient, one update, checked every drift_check_steps": """
        tp_sync_param tp_sync_grad tp_sync_moment sync_param sync_grad sync_moment""",
    "sums between tensor-parallel ranks are waited for; the numbers are the same": "mp_async_allreduce",
    "tensors are always cut inside, and a layer's travel together": """
        split_param stage1_tensor_fusion fuse_optimizer_states sharding_offload_opt_buffersize_GB""",
    "fully_shard overlaps by itself": "stage1_overlap stage2_overlap",
    "tensor-parallel ranks are nearest and pipeline stages farthest": """
        reorder_pipeline_priority nccl_comm_group_config""",
    "recompute is for whole layers: `recompute` turns it on, no_recompute_layers names exceptions": """
        recompute_method recompute_num_layers recompute_modules""",
    "checkpoints hold whole tensors in safetensors, whatever the layout": """
        save_checkpoint_format load_checkpoint_format load_via_cpu save_safetensors""",
    "always so: padding is left out": "padding_free",
    "speed is always measured, see metrics.jsonl in output_dir": "benchmark autotuner_benchmark",
    "of Paddle's automatic parallelism": "use_intermediate_api",
}

IGNORED: dict[str, str] = {name: reason for reason, names in _REASONS.items() for name in names.split()}

# Its keys that would change a result and that nothing here does: refused, unless they are off.
NO_COUNTERPART: dict[str, str] = {
    "custom_register_path": "no code of a recipe is run; a template belongs in the model's tokenizer files",
    "new_special_tokens_path": "add the tokens to the tokenizer and the model first",
    "binpacking": "packs are made by greedy_intokens",
    "truncation_strategy": "overlong sets what happens to turns that are too long",
    "truncate_packing": "rows are never cut to fill a pack",
    "make_offline_data": "tokens are cached by themselves; `erniekit data index` writes token files",
    "eval_with_do_generation": "evaluation keeps losses; `erniekit eval --tasks` generates",
    "merge_with_qdq_base_model": "adapters are merged into the weights as they are stored",
    "mtp_attention_flexible": "further tokens are predicted from the documents' own attention",
    "moe_router_load_balancing_type": "the router's losses are moe_aux_loss_lambda, moe_z_loss_lambda and the bias",
    "moe_router_force_load_balancing": "tokens go where the router sends them",
    "fp32_residual_connection": "what is between layers has compute_type",
}

_OFF = ("", "false", "0", "0.0", "none", "null", "no", "off")


def is_off(value: Any) -> bool:
    """Whether a key that nothing here reads is at a value without effect."""
    return value is None or str(value).strip().lower() in _OFF


def translated(name: str, value: Any) -> tuple[str, Any]:
    """`template` as the key it is here: of pictures chat_template, else the name itself, which does nothing."""
    if name == "template" and str(value) in TEMPLATES:
        return "chat_template", TEMPLATES[str(value)]
    return name, value
