"""What was recorded from ERNIEKit's vision-language code on Paddle, as batches of ours. Called by tests/parity."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from erniekit.data.types import IGNORE, Batch, Vision
from support.recorded_training import bounds_of
from support.seen import FOLDER


@cache
def numbers() -> dict[str, Any]:
    return json.loads((FOLDER / "vl.json").read_text())


@cache
def tensors() -> dict[str, torch.Tensor]:
    return load_file(FOLDER / "vl.safetensors")


@cache
def _patches() -> dict[str, torch.Tensor]:
    return load_file(FOLDER / "patches.safetensors")


def recorded_batch(name: str) -> Batch:
    """One row: its samples, the pictures they show and where those go."""
    case, t = numbers()["cases"][name], tensors()
    ids, labels = t[f"{name}.input_ids"].long(), t[f"{name}.labels"].long()
    labels = labels.masked_fill(labels < 0, IGNORE)
    vision = None
    if case["patches_of"]:
        patches = torch.cat([_patches()[which] for which in case["patches_of"]])
        places = (ids == numbers()["token_ids"]["<|IMAGE_PLACEHOLDER|>"]).nonzero()[:, 0]
        vision = Vision(patches, t[f"{name}.grid_thw"].long(), places)
    sizes = case["sample_lengths"]
    return Batch(
        input_ids=ids[None],
        labels=labels[None],
        positions=t[f"{name}.position_ids"].long()[None],
        cu_seqlens=bounds_of(sizes),
        max_doc=max(sizes),
        num_label_tokens=int((labels != IGNORE).sum()),
        num_tokens=len(ids),
        packed=len(sizes) > 1,
        vision=vision,
        modality=t[f"{name}.token_type_ids"][:-1].to(torch.uint8)[None],
    )


def logits_of(model: Any, batch: Batch) -> torch.Tensor:
    """[L, V] of the one row."""
    with torch.no_grad():
        out: torch.Tensor = model(batch.input_ids, batch.positions, batch.documents(), batch.max_doc, more=batch.more())
    return out[0]


class _FrozenScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.norm = norm
        return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = F.layer_norm(x, ctx.norm.normalized_shape, None, None, ctx.norm.eps)
        return torch.autograd.grad(y, x, grad)[0], None


def layer_norms_as_in_paddle_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paddle's CPU kernel multiplies by the scale on the way back only where the scale itself is trained. With adapters
    it is frozen, so the recorded LoRA run has the resampler's gradients without it. A fault of that kernel: ours has
    the scale, and the recording is met only with the fault put in."""

    def forward(self: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
        if self.weight.requires_grad or not x.requires_grad:
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        out: torch.Tensor = _FrozenScale.apply(x, self)
        return out

    monkeypatch.setattr(nn.LayerNorm, "forward", forward)
