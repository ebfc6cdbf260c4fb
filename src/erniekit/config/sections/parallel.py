"""How one run is spread over devices. One device today: a degree above 1 is refused by name (later.py)."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key

_PARALLEL = "several devices"
_PIPELINE_WORDS = (
    "disable_p2p_cache_shape", "disable_partial_send_recv", "enable_delay_scale_loss", "enable_dp_comm_overlap",
    "enable_sharding_comm_overlap", "enable_timer", "enable_release_grads", "enable_clear_every_step_cache",
    "enable_overlap_p2p_comm", "disable_batch_p2p_comm", "best_unbalanced_scheduler", "enable_offload_queue",
    "use_dualpipev", "forward_backward_overlap_scheduler", "enable_dynamic_shape",
)  # fmt: skip
_SHARDING_WORDS = (
    "enable_stage1_tensor_fusion", "enable_stage1_overlap", "enable_stage2_overlap", "split_param",
    "disable_stage1_reduce_avg", "enable_stage1_broadcast_overlap", "enable_stage1_allgather_overlap",
    "enable_release_grads", "enable_fuse_optimizer_states",
)  # fmt: skip
_TENSOR_WORDS = (
    "sync_param", "sync_grad", "sync_moment", "enable_mp_async_allreduce", "enable_mp_skip_c_identity",
    "enable_mp_fused_linear_param_grad_add", "enable_sp_async_reduce_scatter", "enable_delay_scale_loss",
    "replace_with_parallel_cross_entropy",
)  # fmt: skip


@dataclass(frozen=True)
class ParallelSection:
    tensor_parallel_degree: int = key(1, "Devices one layer is spread over.", later=_PARALLEL)
    pipeline_parallel_degree: int = key(1, "Devices the layers are dealt to.", later=_PARALLEL)
    virtual_pp_degree: int = key(1, "Stages per device.", later=_PARALLEL)
    sharding_parallel_degree: int = key(
        1, "Devices the states are spread over.", also=("sharding_degree",), later=_PARALLEL
    )
    sharding: tuple[str, ...] = key(
        (), "What is spread.", choices=("stage1", "stage2", "stage3", "offload"), later=_PARALLEL
    )
    data_parallel_degree: int = key(1, "Copies of the model; what is left of the devices.", later=_PARALLEL)
    sep_parallel_degree: int = key(1, "Devices one sequence is spread over, by segment.", later=_PARALLEL)
    context_parallel_degree: int = key(1, "Devices one sequence is spread over.", later=_PARALLEL)
    expert_parallel_degree: int = key(1, "Devices the experts are dealt to.", later=_PARALLEL)
    expert_tensor_parallel_degree: int = key(1, "Devices one expert is spread over.", later=_PARALLEL)
    use_expert_parallel: bool = key(False, "Experts over data-parallel devices.", later=_PARALLEL)
    sequence_parallel: bool = key(False, "Spread norms and dropout over the tensor-parallel devices.", later=_PARALLEL)
    hybrid_parallel_topo_order: str | None = key(
        None, "Which axis is nearest.", choices=("pp_first", "sharding_first"), later=_PARALLEL
    )
    tensor_parallel_config: tuple[str, ...] = key((), "Options.", choices=_TENSOR_WORDS, later=_PARALLEL)
    pipeline_parallel_config: tuple[str, ...] = key((), "Options.", choices=_PIPELINE_WORDS, later=_PARALLEL)
    sharding_parallel_config: tuple[str, ...] = key((), "Options.", choices=_SHARDING_WORDS, later=_PARALLEL)
    sharding_comm_buffer_size_MB: int = key(-1, "Gradients sent at once; -1 is 256 MB.", later=_PARALLEL)
    pp_seg_method: tuple[str, ...] = key(
        (), "Where the layers are cut: uniform, layer:Name, or bounds such as [0,29,57].", commas=True, later=_PARALLEL
    )
    add_tail_layers: int = key(0, "Empty layers added so that the stages divide.", low=0, later=_PARALLEL)
    pp_need_data: bool = key(False, "Let several stages load data.", later=_PARALLEL)
    pp_need_data_degree: int = key(0, "How many of them.", low=0, later=_PARALLEL)
    disable_pipeline_warmup: bool = key(False, "Skip the pipeline's dry run.", later=_PARALLEL)
    distributed_dataloader: bool = key(False, "Read on one rank, send to the others.", later=_PARALLEL)
