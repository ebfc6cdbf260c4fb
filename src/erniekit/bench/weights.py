"""The same random weights for every trainer: drawn by name on the device, for our model and under a peer's names.

Called by ours.py, peers/hf.py and peers/peft_vl.py; nothing is written to disk and no model is held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.models.init import initial_value

SKEW = 0.02  # of a router's probabilities among 64 experts this is about one standard deviation


def skewed_bias(experts: int, device: torch.device) -> torch.Tensor:
    """Added to the router's probabilities when it chooses: falls with the logarithm of an expert's rank. The first is
    chosen by nearly every token, which is the most a top-k router can give it (1 / k of all choices)."""
    return -SKEW * torch.arange(1, experts + 1, device=device, dtype=torch.float32).log()


def peer_tensors(
    folder: ModelFolder, layout: str, dtype: torch.dtype, device: torch.device, seed: int, skew: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """(their name, tensor) of every weight, one of ours at a time; the values recipes/build.py gives a model that
    starts from nothing with this seed."""
    shapes = {name: tuple(p.shape) for name, p in folder.meta().named_parameters()}
    for entry in folder.spec.names(folder.config, layout):
        if entry.copy_of:
            continue
        value = initial_value(entry.ours, shapes[entry.ours], seed, folder.config.init_std, device)
        if skew and entry.ours.endswith("router.bias"):
            value = skewed_bias(value.numel(), device)
        value = value.to(folder.spec.dtype_of(entry.ours, dtype))
        for name, tensor in zip(entry.theirs, entry.write(value)):
            yield name, tensor.clone() if len(entry.theirs) > 1 else tensor.contiguous()


def plain_parameter(name: str, tensor: torch.Tensor, trained: bool) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=trained)


def fill(
    model: nn.Module,
    tensors: Iterable[tuple[str, torch.Tensor]],
    made: Callable[[str, torch.Tensor, bool], nn.Parameter] = plain_parameter,
) -> None:
    """Puts them in the place of a meta model's parameters, by name. made: a parameter as the model holds it."""
    for name, tensor in tensors:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        old = module._parameters[leaf]
        assert old is not None
        assert old.shape == tensor.shape, f"{name}: {tuple(old.shape)} there, {tuple(tensor.shape)} here"
        module._parameters[leaf] = made(name, tensor, old.requires_grad)


def require_filled(model: nn.Module) -> None:
    """After tied weights and computed tables too: nothing of the model is left on the meta device."""
    unfilled = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    assert not unfilled, f"no weights for {unfilled[:3]}"
