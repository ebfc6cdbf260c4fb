"""What becomes of the environment variables of a Paddle launch script: kept, or dropped with the reason.

Called by runs.py for every variable a script exports or puts before a command.
"""

from __future__ import annotations

import re

_ALLOCATOR = "torch's allocator grows as needed; on Ascend PYTORCH_NPU_ALLOC_CONF=expandable_segments:True"
_LAUNCHER = "the launcher gives each process its own"
# The first pattern that matches counts. Reason "": the variable is kept.
_RULES: tuple[tuple[str, str], ...] = (
    (r"PADDLE_XCCL_BACKEND", "set by the key device"),
    (r"PADDLE_DISTRI_BACKEND", "the device has its own collective library"),
    (r"PADDLE_(TRAINER|PSERVER|ELASTIC|CURRENT|RANK|WORLD|NNODES|MASTER|GLOBAL|LOCAL).*", _LAUNCHER),
    (r"DISTRIBUTED_TRAINER_ENDPOINTS|FLAGS_START_PORT|FLAGS_selected_.*", _LAUNCHER),
    (r"FLAGS_(embedding|cudnn)_deterministic", "deterministic: True makes a whole run repeat bit for bit"),
    (r"FLAGS_allocator_strategy.*|FLAGS_use_auto_growth.*|FLAGS_fraction_of_gpu_memory.*", _ALLOCATOR),
    (r"FLAGS_npu_jit_compile", "torch_npu compiles no operator during a run"),
    (r"FLAGS_enable_ixdnn_attn", "attention is picked by device, see the key attention"),
    (r"FLAGS_.*|PADDLE_.*", "read by Paddle only"),
    (r"GLOG_.*", "read by Paddle only"),
    (r"CUSTOM_DEVICE_.*", "read by Paddle only"),
    (r"PYTHONPATH", "erniekit is installed, not found by its path"),
    (r"LD_PRELOAD", "it was for Paddle; the vendor's torch finds its own libraries"),
    (r"BKCL_.*", "of Kunlunxin's library under Paddle; the vendor's torch image sets its own"),
    (r"FLAGCX_ENABLE_TOPO_DETECT", "not a variable of today's FlagCX; FLAGCX_TOPO_DETECTION_DISABLE turns it off"),
    (r"ALLOW_EXTRA_ARGS", "unknown keys are errors here, always"),
    (r"PDC_.*", "a service of another cluster"),
)
# Kept: libraries below torch read them, whichever framework is above.
_KEPT = re.compile(
    r"NVIDIA_.*|NCCL_.*|GLOO_.*|FLAGCX_.*|HCCL_.*|TORCH.*|PYTORCH_.*|.*_VISIBLE_DEVICES|ASCEND_.*|XMLIR_.*|XPU_.*"
    r"|CUDA_.*|CUBLAS_.*|LD_LIBRARY_PATH|PATH|OMP_NUM_THREADS|HF_.*|ERNIEKIT_.*|.*_PROXY|.*_proxy|TOKENIZERS_PARALLELISM"
)
# Of the launch itself: the launch line has them.
LAUNCH = {"NNODES": "nnodes", "MASTER_ADDR": "master_addr", "MASTER_PORT": "master_port", "RANK": "rank"}


def decide(name: str) -> tuple[bool, str]:
    """Whether a variable is kept, and why not."""
    for pattern, reason in _RULES:
        if re.fullmatch(pattern, name):
            return False, reason
    return True, "" if _KEPT.fullmatch(name) else "kept as it is: not used here"
