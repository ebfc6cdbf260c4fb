"""The same over a base in 4 bits (NF4 of bitsandbytes): what unsloth-zoo trains where memory is short. Listed in PEERS.

Experts are stacks that bitsandbytes does not support: unsloth-zoo's forward dequantises a layer's and multiplies by
groups. Attention, dense and shared linears are bitsandbytes' own. Router, norms and head stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from erniekit.bench.peers.unsloth import Unsloth, expert_path
from erniekit.bench.runner import Patch

EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
HOW: dict[str, Any] = dict(requires_grad=False, quant_type="nf4", compress_statistics=True)


class Unsloth4Bit(Unsloth):
    name = "unsloth-4bit"
    _shapes: ClassVar[Patch | None] = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """PEFT reads an expert weight's shape, which packed bytes do not have."""
        from peft.tuners.lora.layer import ParamWrapper

        patch = Unsloth4Bit._shapes = Unsloth4Bit._shapes or Patch((ParamWrapper, "get_param"))
        with (
            super().active(),
            patch.on(lambda: expert_path("moe_utils_bnb4bit").patch_peft_param_wrapper_4bit_expert_shape()),
        ):
            yield

    def parameter(self, name: str, tensor: torch.Tensor, trained: bool) -> nn.Parameter:
        """Packed as it comes: the model is never whole in 16 bits."""
        if not name.endswith(EXPERTS):
            return super().parameter(name, tensor, trained)
        packed = in_4_bits(tensor)
        packed._original_shape = tensor.shape  # where unsloth-zoo looks for it
        return packed

    def adapted(self, model: Any) -> Any:
        for layer in model.model.layers:
            for name, linear in [(n, m) for n, m in layer.named_modules() if type(m) is nn.Linear]:
                layer.set_submodule(name, self._packed(linear))
        model.is_loaded_in_4bit = True  # PEFT then has adapters for such linears
        return super().adapted(model)

    def _packed(self, linear: nn.Linear) -> nn.Module:
        from bitsandbytes.nn import Linear4bit

        with torch.device("meta"):
            made: nn.Module = Linear4bit(
                linear.in_features, linear.out_features, linear.bias is not None, compute_dtype=self.task.dtype
            )
        made.weight = in_4_bits(linear.weight.data)
        made.bias = linear.bias
        return made


def in_4_bits(weight: torch.Tensor) -> Any:
    """bitsandbytes packs when a weight is moved to a device, the one it is on as well."""
    from bitsandbytes.nn import Params4bit

    packed: Any = Params4bit(weight, **HOW)
    return packed.to(weight.device)
