"""A model folder's forward pass with one layer in memory at a time, so that export can check any size of model.

Used by verify.py and gguf/. Computes in fp32 on the CPU, whatever the files hold.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.lora.adapter import Adapter, attach, load_adapter
from erniekit.lora.inject import base_state
from erniekit.model_contract import front_prefixes
from erniekit.models.layers.head import LocalHead
from erniekit.models.score_head import WEIGHT as SCORE

Change = Callable[[str, torch.Tensor], torch.Tensor]  # (our name, fp32 weight) -> the weight to use; in layers only
# (our name, where its rows go, the first of them)
Fill = Callable[[str, torch.Tensor, int], None]
Ready = Callable[[nn.Module, str], None]  # (model, the prefix of a layer that is filled now)
VOCABULARY = ("embed.weight", "head.weight")  # with a row for each token: never in memory as a whole
HEADS = (SCORE, "head.weight", "embed.weight")  # the last where it is tied
_AT_ONCE = 16 << 20  # weights of the head that are multiplied in one go


def streamed(
    folder: ModelFolder, adapter: Adapter | None = None, change: Change | None = None, ready: Ready | None = None
) -> nn.Module:
    """The folder's model, with the adapter if given. Layers come and go."""
    entries = {entry.ours: entry for entry in folder.entries() if not entry.copy_of}

    def fill(name: str, slot: torch.Tensor, first: int) -> None:
        if change is None or not name.startswith("layers."):
            folder.fill(entries[name], slot, first)
        else:
            slot.copy_(change(name, folder.read(entries[name]).float()))

    return streamed_by(folder.meta(), fill, adapter, ready)


def streamed_by(model: nn.Module, fill: Fill, adapter: Adapter | None = None, ready: Ready | None = None) -> nn.Module:
    """A model on the meta device, its weights from anywhere."""
    if adapter is not None:
        attach(model, adapter)

    def fill_those(selected: Callable[[str], bool]) -> None:
        with torch.no_grad():
            for name, slot in base_state(model).items():
                if selected(name):
                    fill(name, slot, 0)

    def stream(prefix: str, layer: nn.Module) -> None:
        def before(*_: object) -> None:
            layer.to_empty(device="cpu")
            fill_those(lambda name: name.startswith(prefix))
            if adapter is not None:
                load_adapter(model, adapter, under=prefix)
            if ready is not None:
                ready(model, prefix)

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(lambda *_: layer.to("meta") and None)

    model.to_empty(device="cpu", recurse=False)
    names = base_state(model)
    for name, child in model.named_children():
        if name != "layers" and f"{name}.weight" not in VOCABULARY:
            child.to_empty(device="cpu")
    if "head.bias" in names:
        model.get_submodule("head").bias = nn.Parameter(torch.empty(names["head.bias"].shape))
    fill_those(lambda name: not name.startswith("layers.") and name not in VOCABULARY)
    if adapter is not None:
        for prefix in front_prefixes(model):  # in memory as a whole
            load_adapter(model, adapter, under=prefix)
    model.embedding = _RowsEmbedding(fill)
    model.output = _RowsHead(fill, next(name for name in HEADS if name in names))
    for name, layer in model.get_submodule("layers").named_children():
        stream(f"layers.{name}.", layer)
    return model.eval()


class _RowsEmbedding(nn.Module):
    """Reads only the rows of the given ids."""

    def __init__(self, fill: Fill) -> None:
        super().__init__()
        self._fill = fill

    def forward(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty(ids.numel(), weight.shape[1])
        for place, id in enumerate(ids.flatten().tolist()):
            self._fill("embed.weight", out[place : place + 1], id)
        return out.view(*ids.shape, -1)


class _RowsHead(LocalHead):
    """Goes through the vocabulary a part at a time."""

    def __init__(self, fill: Fill, name: str) -> None:
        super().__init__()
        self._fill, self._name = fill, name

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        count, width = weight.shape
        step = max(1, _AT_ONCE // width)
        out = hidden.new_empty(*hidden.shape[:-1], count)
        for first in range(0, count, step):
            part = slice(first, min(count, first + step))
            rows = torch.empty(part.stop - first, width)
            self._fill(self._name, rows, first)
            out[..., part] = F.linear(hidden, rows, None if bias is None else bias[part])
        return out
