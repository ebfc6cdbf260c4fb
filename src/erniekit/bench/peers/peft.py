"""transformers + PEFT: LoRA on attention, or on attention and the routed experts. Listed in PEERS.

PEFT reaches neither the shared experts nor the dense layers of an ERNIE with experts, so it trains less than we do.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from erniekit.bench.peers.hf import Transformers

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


class Peft(Transformers):
    name = "peft"
    best_attention = True
    experts = True

    def adapted(self, model: Any) -> Any:
        from peft import LoraConfig, get_peft_model

        rank = int(self.task.workload.keys["lora_rank"])
        with_experts = self.experts and "moe_k" in self.task.workload.model
        settings = LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            target_modules=ATTENTION,
            target_parameters=EXPERTS if with_experts else None,
            task_type="CAUSAL_LM",
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted: Any = get_peft_model(model, settings)
        return adapted

    def recompute(self) -> None:
        base = self.model.get_base_model()
        base.enable_input_require_grads()
        base.gradient_checkpointing_enable({"use_reentrant": False})

    @contextlib.contextmanager
    def as_reference(self) -> Iterator[Any]:
        with self.model.disable_adapter():
            yield self.model


class PeftAttention(Peft):
    """Less work than ours: no adapter outside attention."""

    name = "peft-attention"
    experts = False
