"""A rounded weight as the tensors of a file, under the names each format has for them; and back, by the reader's code.

Called by layer_weights.py. A weight of ours may be several of theirs end to end (q, k, v; the experts of a layer).
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from erniekit.checkpoint.quantised import NF4_STATE, StoredWeight
from erniekit.kernels import compressed, nf4
from erniekit.models.names import Entry
from erniekit.quant_schemes import Scheme

Parts = dict[str, torch.Tensor]


def file_parts(
    entry: Entry, weight: torch.Tensor, scale: torch.Tensor, scheme: Scheme, inputs: torch.Tensor | None
) -> Parts:
    """weight: fp32 on the grid of the scales. inputs: the stored scale of activations, [1]."""
    out: Parts = {}
    for name, part, its_scale in zip(entry.theirs, entry.write(weight), entry.write(scale), strict=True):
        module = name.removesuffix(".weight")
        codes = compressed.encode(part, its_scale, scheme)
        out[f"{module}.weight_packed" if "pack" in scheme.format else name] = codes
        out[f"{module}.weight_scale"] = its_scale[0].clone() if scheme.strategy == "tensor" else its_scale
        if scheme.format == "pack-quantized":
            out[f"{module}.weight_shape"] = torch.tensor(part.shape)
        if inputs is not None:
            out[f"{module}.input_scale"] = inputs.clone()
    return out


def nf4_parts(entry: Entry, weight: torch.Tensor) -> Parts:
    """bitsandbytes' own layout of a saved 4-bit weight, with its scales quantised once more."""
    out: Parts = {}
    for name, part in zip(entry.theirs, entry.write(weight), strict=True):
        codes, absmax = nf4.encode_flat(part)
        nested = nf4.encode_absmax(absmax)
        state = {
            "quant_type": "nf4",
            "blocksize": nf4.BLOCK,
            "dtype": str(weight.dtype).removeprefix("torch."),
            "shape": list(part.shape),
            "nested_blocksize": nf4.NESTED_BLOCK,
            "nested_dtype": "float32",
            "nested_offset": float(nested.offset),
        }
        out[name] = codes.reshape(-1, 1)
        out[f"{name}.absmax"] = nested.codes
        out[f"{name}.quant_map"] = torch.tensor(nf4.VALUES)
        out[f"{name}.nested_absmax"] = nested.scale
        out[f"{name}.nested_quant_map"] = nf4.dynamic_table(signed=True).clone()
        out[f"{name.removesuffix('.weight')}{NF4_STATE}"] = torch.tensor(list(json.dumps(state).encode())).to(
            torch.uint8
        )
    return out


def weight_from(entry: Entry, parts: Mapping[str, torch.Tensor], scheme: Scheme, dtype: torch.dtype) -> torch.Tensor:
    """Our weight, as a program that loads the file gets it."""

    def shape_of(name: str) -> tuple[int, ...]:
        return tuple(parts[name].shape)

    stored = (StoredWeight(name.removesuffix(".weight"), scheme, dtype) for name in entry.theirs)
    return entry.read([one.read(parts.__getitem__, shape_of) for one in stored])
