"""A model folder's forward pass with one layer in memory at a time, so that export can check any size of model.

Used by verify.py. Computes in fp32 on the CPU, whatever the files hold.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.lora.adapter import Adapter, attach, load_adapter
from erniekit.lora.inject import base_state

Change = Callable[[str, torch.Tensor], torch.Tensor]  # (our name, fp32 weight) -> the weight to use
Ready = Callable[[nn.Module, str], None]  # (model, the prefix of a layer that is filled now)


def streamed(
    folder: ModelFolder, adapter: Adapter | None = None, change: Change | None = None, ready: Ready | None = None
) -> nn.Module:
    """The folder's model, with the adapter if given. Embedding, norm and head stay; layers come and go."""
    model = folder.meta()
    if adapter is not None:
        attach(model, adapter)
    entries = {entry.ours: entry for entry in folder.entries() if not entry.copy_of}

    def fill(wanted: Callable[[str], bool]) -> None:
        with torch.no_grad():
            for name, slot in base_state(model).items():
                if wanted(name):
                    value = folder.read(entries[name]).float()
                    slot.copy_(change(name, value) if change else value)

    def stream(prefix: str, layer: nn.Module) -> None:
        def before(*_: object) -> None:
            layer.to_empty(device="cpu")
            fill(lambda name: name.startswith(prefix))
            if adapter is not None:
                load_adapter(model, adapter, under=prefix)
            if ready is not None:
                ready(model, prefix)

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(lambda *_: layer.to("meta") and None)

    model.to_empty(device="cpu", recurse=False)
    for name, child in model.named_children():
        if name != "layers":
            child.to_empty(device="cpu")
    fill(lambda name: not name.startswith("layers."))
    for name, layer in model.get_submodule("layers").named_children():
        stream(f"layers.{name}.", layer)
    return model.eval()
