"""How one run is spread over devices: the degrees, what is cut, and in which order a pipeline works.

Read by parallel/world.py (the layout), config/world.py and the recipes. Layouts change where numbers are stored, never
their values.
"""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key
from erniekit.config.ignored_keys import IGNORED_OPTIONS

_HELP = "ERNIEKit's options of {}, accepted; `erniekit config` shows what each of them does here."


@dataclass(frozen=True)
class ParallelSection:
    tensor_parallel_degree: int = key(
        1,
        "Devices that each layer is split over, within one machine; raise it if a layer or its activations do not fit. "
        "Heads need not divide by it.",
        low=-1,
        basic=True,
    )
    pipeline_parallel_degree: int = key(
        1,
        "Pipeline stages that the layers are split into; raise it for a model too large for one machine, and keep "
        "gradient_accumulation_steps at several times it.",
        low=-1,
        basic=True,
    )
    sharding: tuple[str, ...] = key(
        (),
        "stage1/2/3 shard optimiser states, + gradients, + weights; use the lowest that fits: stage3 communicates "
        "most. Add offload to keep the shards in host memory.",
        choices=("stage1", "stage2", "stage3", "offload"),
        basic=True,
    )
    sharding_parallel_degree: int = key(
        1,
        "Devices that share one copy; -1, or only `sharding` = all that the other degrees leave. Lower it to the "
        "devices of one machine if the network between machines is slow.",
        also=("sharding_degree",),
        low=-1,
    )
    data_parallel_degree: int = key(
        1,
        "Replicas of the model. Derived from the number of devices; a number that does not match is an error.",
        low=-1,
    )
    context_parallel_degree: int = key(
        1,
        "Devices that one sequence is split over; raise it if max_seq_len does not fit with recompute on.",
        low=-1,
    )
    sep_parallel_degree: int = key(1, "Other name of context_parallel_degree; give one of them.", low=-1)
    sequence_parallel: bool = key(
        False,
        "Also split activations between the layers' matrices over the tensor-parallel devices: less memory, same time.",
    )
    virtual_pp_degree: int = key(
        1,
        "Virtual stages per pipeline device. 2 or more: smaller bubble, more communication; "
        "gradient_accumulation_steps must then be a multiple of pipeline_parallel_degree.",
        low=-1,
    )
    pp_schedule: str = key(
        "auto",
        "Pipeline schedule; auto = 1f1b, or interleaved with virtual_pp_degree above 1. zero_bubble has the smallest "
        "bubble; layers that are recomputed or compiled lose what it gains.",
        choices=("auto", "gpipe", "1f1b", "interleaved", "zero_bubble"),
    )
    pp_runner: str = key(
        "erniekit",
        "Pipeline implementation; torch = torch's own schedules, for comparison.",
        choices=("erniekit", "torch"),
    )
    pp_seg_method: tuple[str, ...] = key(
        (),
        "How layers are split into stages: evenly (uniform, layer:Name), or at bounds such as [0,29,57] that count the "
        "embedding, each layer, norm and head. Give the last stage fewer layers: it has the head and the loss.",
        commas=True,
    )
    islands: tuple[str, ...] = key(
        (),
        "One job on unlike devices, with a pipeline across: DEVICE:RANKS of each in order (gpu:8,iluvatar_gpu:8). "
        "gpu:8:3 adds its relative speed, gpu:8:3:79G its memory as well; what is missing is measured.",
        commas=True,
    )
    pipeline_parallel_config: tuple[str, ...] = key(
        (),
        _HELP.format("pipeline"),
        choices=("use_dualpipev", "forward_backward_overlap_scheduler"),
        idle=IGNORED_OPTIONS["pipeline_parallel_config"],
    )
    tensor_parallel_config: tuple[str, ...] = key(
        (), _HELP.format("tensor parallelism"), idle=IGNORED_OPTIONS["tensor_parallel_config"]
    )
    sharding_parallel_config: tuple[str, ...] = key(
        (), _HELP.format("sharding"), idle=IGNORED_OPTIONS["sharding_parallel_config"]
    )
    expert_parallel_degree: int = key(
        1,
        "Devices that together hold all experts, among those moe_group names; 1 = all of them. The others hold copies.",
        low=-1,
    )
    expert_tensor_parallel_degree: int = key(
        1,
        "Devices that one expert is split over: tensor_parallel_degree, unless moe_group distributes experts to those.",
        low=-1,
    )
    use_expert_parallel: bool = key(False, "Other name of moe_group: data.")
