"""A run's adapter in one file that all ranks write at once (checkpoint/assembly.py): which part of which of our tensors
each of its tensors is. Called by recipes/built.py.

Nothing here says how PEFT's tensors are made: peft_files.py makes them, of a model without memory, and each of them is
a view of one of ours, or it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from erniekit.checkpoint.assembly import ModelFiles
from erniekit.checkpoint.collective import SavedTensors
from erniekit.lora.adapter import adapter_of
from erniekit.lora.adapter_files import write_adapter
from erniekit.lora.inject import lora_state
from erniekit.lora.peft_files import STEM, peft_tensors, write_peft_settings
from erniekit.lora.settings import LoRASettings


@dataclass(frozen=True)
class TensorRegion:
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.as_strided(self.shape, self.strides, self.start)


@dataclass(frozen=True)
class PartsOfTensor:
    """One of ours, and the tensors of the file that are parts of it."""

    ours: str
    parts: Mapping[str, TensorRegion]

    @property
    def theirs(self) -> tuple[str, ...]:
        return tuple(self.parts)

    def write(self, whole: torch.Tensor) -> list[torch.Tensor]:
        whole = whole.contiguous()
        return [view.of(whole) for view in self.parts.values()]


def adapter_files(model: nn.Module, settings: LoRASettings, layout: str) -> ModelFiles | None:
    """model: on the meta device. None: one rank writes, as not every stored tensor is a part of one of ours.

    So it is in the Paddle layout, where A and B of several projections are joined and B takes up scales; for PiSSA,
    whose A and B are stored joined to what they began as; and where experts' `down_proj` has no adapter and PEFT needs
    zeros for it. DoRA's lengths, a score head, an A that several projections share, and each expert's part of a
    layer's matrices are parts."""
    if layout == "paddle":
        return None
    ours = {tensor.untyped_storage()._cdata: name for name, tensor in lora_state(model).items()}
    found: dict[str, dict[str, TensorRegion]] = {}
    for name, tensor in peft_tensors(adapter_of(model, settings), model).items():
        if (of := ours.get(tensor.untyped_storage()._cdata)) is None:
            return None
        found.setdefault(of, {})[name] = TensorRegion(
            tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        )
    return ModelFiles([PartsOfTensor(name, parts) for name, parts in found.items()], one_file=True)


def write_run_adapter(
    folder: Path, model: nn.Module, settings: LoRASettings, tensors: Mapping[str, torch.Tensor], base: str, layout: str
) -> None:
    """By all ranks where `tensors` are on many of them and that can be done; else whole tensors by this one."""
    if isinstance(tensors, SavedTensors) and tensors.write_files(folder, STEM) is not None:
        write_peft_settings(folder, adapter_of(model, settings, base=base), model)
    else:
        write_adapter(folder, adapter_of(model, settings, tensors, base), model, layout)
