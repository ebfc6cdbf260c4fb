"""How one run is spread over devices: the degrees, what is cut, and in which order a pipeline works.

Read by config/world.py (the layout) and the recipes. Layouts change where numbers live, never what they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key
from erniekit.config.ignored_keys import IGNORED_WORDS

_WORDS = "Words of ERNIEKit's {}, accepted; `erniekit config` says what each of yours does here."


@dataclass(frozen=True)
class ParallelSection:
    tensor_parallel_degree: int = key(
        1,
        "Devices each layer is cut over, within one machine; raise it when a layer or its activations do not fit. "
        "Heads need not divide by it.",
        low=-1,
        basic=True,
    )
    pipeline_parallel_degree: int = key(
        1,
        "Devices the layers are dealt to, in stages; raise it for a model too large for one machine, and keep "
        "gradient_accumulation_steps at several times it.",
        low=-1,
        basic=True,
    )
    sharding: tuple[str, ...] = key(
        (),
        "stage1/2/3 share optimiser states, + gradients, + weights; take the lowest that fits: stage3 sends most. "
        "Add offload to keep the shares in host memory.",
        choices=("stage1", "stage2", "stage3", "offload"),
        basic=True,
    )
    sharding_parallel_degree: int = key(
        1,
        "Devices that share one copy; -1, or `sharding` alone, takes all that the other degrees leave. Lower it to "
        "the devices of one machine when machines are slow to talk.",
        also=("sharding_degree",),
        low=-1,
    )
    data_parallel_degree: int = key(
        1, "Copies of the model. Follows from the number of devices; a number that does not fit it stops.", low=-1
    )
    context_parallel_degree: int = key(
        1,
        "Devices one sequence is cut over; raise it when max_seq_len does not fit although recompute is on.",
        low=-1,
    )
    sep_parallel_degree: int = key(1, "context_parallel_degree under another name; give one of them.", low=-1)
    sequence_parallel: bool = key(
        False, "Also cut what is between the layers' matrices over the tensor-parallel devices: less memory, same time."
    )
    virtual_pp_degree: int = key(
        1,
        "Stages each pipeline device holds. 2 or more waits less and sends more; gradient_accumulation_steps must "
        "then be a multiple of pipeline_parallel_degree.",
        low=-1,
    )
    pp_schedule: str = key(
        "auto",
        "Order of a pipeline's work; auto takes 1f1b, or interleaved with virtual_pp_degree above 1. zero_bubble waits "
        "least; layers that are computed again or compiled lose what it gains.",
        choices=("auto", "gpipe", "1f1b", "interleaved", "zero_bubble"),
    )
    pp_runner: str = key(
        "erniekit",
        "What executes a pipeline's work; torch takes torch's own schedules, to compare with.",
        choices=("erniekit", "torch"),
    )
    pp_seg_method: tuple[str, ...] = key(
        (),
        "Where the layers are cut: evenly (uniform, layer:Name), or at bounds such as [0,29,57] that count the "
        "embedding, each layer, norm and head. Give the last stage fewer layers: it has the head and the loss.",
        commas=True,
    )
    islands: tuple[str, ...] = key(
        (),
        "One job on unlike devices, with a pipeline across: DEVICE:RANKS of each in order (gpu:8,iluvatar_gpu:8). "
        "gpu:8:3 also says how fast one is beside the others, gpu:8:3:79G its memory; what is not said is measured.",
        commas=True,
    )
    pipeline_parallel_config: tuple[str, ...] = key(
        (),
        _WORDS.format("pipeline"),
        choices=("use_dualpipev", "forward_backward_overlap_scheduler"),
        idle=IGNORED_WORDS["pipeline_parallel_config"],
    )
    tensor_parallel_config: tuple[str, ...] = key(
        (), _WORDS.format("tensor parallelism"), idle=IGNORED_WORDS["tensor_parallel_config"]
    )
    sharding_parallel_config: tuple[str, ...] = key(
        (), _WORDS.format("sharding"), idle=IGNORED_WORDS["sharding_parallel_config"]
    )
    expert_parallel_degree: int = key(
        1,
        "Devices that together hold all experts, of those moe_group names; 1 takes all. The others hold copies.",
        low=-1,
    )
    expert_tensor_parallel_degree: int = key(
        1, "Devices one expert is cut over: tensor_parallel_degree, unless moe_group deals experts to those.", low=-1
    )
    use_expert_parallel: bool = key(False, "moe_group: data under another name.")
