"""transformers with Liger's kernels: norms, RoPE, SwiGLU and the loss fused with the head. Listed in PEERS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from erniekit.bench.peers.hf import Transformers
from erniekit.bench.runner import Patch


class Liger(Transformers):
    name = "hf+liger"
    best_attention = True
    _patch: ClassVar[Patch | None] = None

    def adapted(self, model: Any) -> Any:
        """Norms, MLPs and the loss are patched in this model only."""
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
        return model

    @contextmanager
    def active(self) -> Iterator[None]:
        """RoPE is a function of transformers' module, which other runners use as well."""
        from transformers.models.llama import modeling_llama

        names = ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP")
        patch = type(self)._patch = type(self)._patch or Patch(*((modeling_llama, name) for name in names))
        with patch.on(_apply):
            yield


class LigerMasters(Liger):
    """What ours keeps as well; 16-bit states lose most updates of a long pre-training."""

    name = "hf+liger+fp32"
    masters = True


def _apply() -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(rope=True, fused_linear_cross_entropy=False, cross_entropy=False)
