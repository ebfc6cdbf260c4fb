"""Ignored keys: old keys, and options of keys, that are accepted without effect, each with its reason.

Shown by `erniekit config`. sources.py looks keys up here; the sections declare the options.
"""

from __future__ import annotations

from erniekit.config import paddleformers

_REASONS = {
    "a kernel choice; kernels of equal results are picked by device, see `attention`": """
        fuse_linear fuse_rope fuse_softmax_mask fuse_rms_norm fuse_swiglu fuse_gate_detach_matmul
        use_fused_rms_norm use_fused_rope use_flash_attention use_mem_eff_attn use_flash_attn_with_mask
        use_sparse_flash_attn use_attn_mask_start_row_indices use_attn_mask_startend_row_indices""",
    "always so: the loss reads trained tokens only, in chunks of `loss_subbatch_seqlen`": """
        use_sparse_head_and_loss_fn use_fused_head_and_loss_fn use_recompute_loss_fn""",
    "always so: loss, rope, reductions, master weights in fp32": """
        fp16_opt_level amp_master_grad amp_custom_white_list amp_custom_black_list""",
    "evaluation runs in compute_type": "bf16_full_eval fp16_full_eval",
    "gradients are freed after every step": "release_grads",
    "one recompute implementation": "recompute_use_reentrant refined_recompute",
    "the allocator grows as needed": "pre_alloc_memory",
    "read by no version of ERNIEKit": "pad_to_max_seqlen",
    "pickled weights are never read: convert them to safetensors": "allow_pickle",
    "gone since ERNIEKit 1.2.0; use download_hub": "from_hf_hub from_aistudio from_modelscope",
    "the layout is read from the files; save_format sets the one to write": """
        use_huggingface_model convert_from_hf save_to_hf""",
    "checkpoints hold whole tensors, whatever the layout": """
        unified_checkpoint save_sharded_model load_sharded_model load_sharded_model_remap_parameter_name
        force_reshard_pp save_sharding_stage1_model_include_freeze_params reshard_save_then_exit""",
    "checkpoints are always whole and published by one rename": """
        save_tokenizer save_rng_states output_signal_dir ordered_save_group_size""",
    "optimiser states are stored whole, in files of bounded size": "optim_shard_num",
    "another way to save during training; unified_checkpoint_config: async_save does it": """
        use_async_save flash_device_save_steps enable_zero_cost_checkpoint zcc_workers_num
        zcc_pipeline_hooks_capacity_usage zcc_save_ema_coef zcc_ema_interval""",
    "a service of another cluster": "pdc_download_ckpt pdc_download_timeout loss_spike_settings",
    "steps are counted, not estimated": "max_estimate_samples num_of_gpus",
    "always measured, see metrics.jsonl in output_dir": """
        skip_memory_metrics skip_profile_timer count_trained_tokens metrics_output_path log_global_grad_norm
        enable_global_training_logs global_logging_interval record_optimizer_stat enable_timer
        enable_optimizer_timer log_on_each_node""",
    "evaluation keeps losses only": "prediction_loss_only eval_accumulation_steps label_names past_index",
    "another command does that": "do_predict do_export",
    "declared by ERNIEKit and used by none of its code": "mergekit_task_config hf_hub_id",
    "a switch of another reader": """
        dataset_name num_comparisons in_tokens_batching use_cls lazy_data_processing remove_unused_columns
        dataloader_drop_last dataloader_shuffle data_load_process_num base_seq_length num_consecutive
        shuffle_consecutive skip_load_data_seq_cache dev_data same_data factor pseudo_strategy
        pseudo_sampling_prob example_from_same_task_prob min_shot max_shot corpus_name prompt_dir
        sampling_wo_replacement_data_resuming use_train_part_sharding text_use_train_part_sharding
        load_args_from_api video_use_asr""",
    "config.json defines whether the model takes images": "multimodal",
    "of ERNIEKit's text stream between pictures; rows are rendered as its text stage does": """
        add_sys_token drop_history_with_k trigger_data_prob""",
    "pictures are decoded where the tower is, by processes of their own": """
        balanced_image_preprocess vit_second_fwd_batch_size""",
    "declared by ERNIEKit and without effect in its picture reader": """
        im_prefix_length image_token_len serialize_output image_dtype""",
    "ERNIEKit forgets it after the first row; max_pixels bounds a picture": """
        adaptive_max_imgtoken_option adaptive_max_imgtoken_rate""",
    "always so: labels are shifted by one": "sft_shift_by_one",
    "always so: whole optimiser steps alternate, see modality_ratio": "modality_interleave",
    "one router, in fp32 always": "moe_gate",
    "router losses are fed in where they arise, whatever the stage": "moe_with_send_router_loss",
    "always so: the orthogonal loss counts once a step": "use_ortho_loss_callback",
    "every pipeline stage reads its batch itself, further tokens too": "enable_mtp_magic_send",
    "read from the tokenizer": "pad_token_id",
    "read from the model's config.json": "model_type use_moe",
    "always so: under sequence_parallel the norms' gradients are summed once a step, together": """
        use_sp_callback fuse_sequence_parallel_allreduce""",
    "the loss is always taken from logits cut by vocabulary; the number is the same": "tensor_parallel_output",
    "the norm takes one sum over the ranks that hold the model": "split_norm_comm",
    "always so: context_parallel_degree cuts sequences": "split_inputs_sequence_dim",
    "gradients are summed in buckets, inside the last backward pass or after it": """
        flatten_param_grads ddp_find_unused_parameters""",
    "sharded layers travel one at a time, other gradients in buckets of 256 MB": "sharding_comm_buffer_size_MB",
    "tensor-parallel ranks are nearest and pipeline stages farthest; results do not depend on it": """
        hybrid_parallel_topo_order""",
    "stages need not be of one size, so there is nothing to fill up": "add_tail_layers",
    "every rank reads its batch itself, from the token cache": """
        distributed_dataloader pp_need_data pp_need_data_degree""",
    "there is no dry run: shapes are known before the first step": "disable_pipeline_warmup",
    "given by the launcher": "local_rank",
    "Paddle's automatic parallelism": """
        to_static enable_auto_parallel auto_parallel_resume_form_hybrid_parallel sharding_parallel_mesh_dimension
        data_parallel_config sequence_parallel_config n_microbatches pipeline_schedule_mode""",
    "environment variables are set in the shell": "env",
}

IGNORED_KEYS: dict[str, str] = {
    **{name: reason for reason, names in _REASONS.items() for name in names.split()},
    **paddleformers.IGNORED,
}

# Keys that hold several options: the key -> its options without effect -> why. Options that are not here are read.
_ONCE = "the loss is divided once, by the step's trained tokens"
_FREED = "gradients are freed after every step, always"
_FIXED = "a pipeline's rows are all of one length, so shapes never change"
_TORCH = "torch's schedules decide how sends and receives are posted"
_OVERLAPS = "fully_shard overlaps by itself"
_EQUAL = "copies stay equal: one gradient, one update, checked every drift_check_steps"

IGNORED_OPTIONS: dict[str, dict[str, str]] = {
    "pipeline_parallel_config": {
        "disable_p2p_cache_shape": _FIXED,
        "enable_dynamic_shape": _FIXED,
        "enable_clear_every_step_cache": _FIXED,
        "disable_partial_send_recv": "whole tensors are always sent",
        "enable_overlap_p2p_comm": _TORCH,
        "disable_batch_p2p_comm": _TORCH,
        "enable_delay_scale_loss": _ONCE,
        "enable_dp_comm_overlap": "gradients are added up while the last backward pass computes others",
        "enable_sharding_comm_overlap": _OVERLAPS,
        "enable_release_grads": _FREED,
        "enable_timer": "step times are always in metrics.jsonl",
        "best_unbalanced_scheduler": "an order of interleaved stages; pp_schedule chooses here",
        "enable_offload_queue": "what travels between stages stays on the device; recompute saves more",
    },
    "tensor_parallel_config": {
        "sync_param": _EQUAL,
        "sync_grad": _EQUAL,
        "sync_moment": _EQUAL,
        "enable_mp_async_allreduce": "sums between tensor-parallel ranks are waited for; the numbers are the same",
        "enable_sp_async_reduce_scatter": "sums between tensor-parallel ranks are waited for; the numbers are the same",
        "enable_mp_skip_c_identity": "fused layers sum their input's gradient once, always",
        "enable_mp_fused_linear_param_grad_add": "gradients are added in fp32 as they are made, always",
        "enable_delay_scale_loss": _ONCE,
        "replace_with_parallel_cross_entropy": "the cross-entropy is always taken in parallel over the vocabulary",
        "replace_with_c_embedding": "the embedding is always cut by vocabulary",
    },
    "sharding_parallel_config": {
        "split_param": "tensors are always cut inside, in equal shares",
        "enable_stage1_tensor_fusion": "a layer's tensors always travel together",
        "enable_fuse_optimizer_states": "torch's fused update takes all tensors at once, always",
        "enable_stage1_overlap": _OVERLAPS,
        "enable_stage2_overlap": _OVERLAPS,
        "enable_stage1_broadcast_overlap": _OVERLAPS,
        "enable_stage1_allgather_overlap": _OVERLAPS,
        "disable_stage1_reduce_avg": _ONCE,
        "enable_release_grads": _FREED,
    },
    "unified_checkpoint_config": {
        "skip_save_model_weight": "weights are always saved: every checkpoint can be exported and served",
        "ignore_merge_optimizer": "optimiser states are stored whole tensor by tensor, whatever the layout",
    },
}
