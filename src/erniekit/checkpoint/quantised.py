"""Reading quantised model folders: which tensors of a file make up one weight, and the weight they stand for.

Used by model_folder.py. compressed-tensors' layouts (pack-quantized, int-quantized, float-quantized,
mxfp4-pack-quantized; symmetric) and bitsandbytes' NF4. A weight is dequantised where it is read and is plain from there
on: activations are not rounded as an engine that multiplies quantised numbers would; but those of static FP8 are
(fp8_static.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch

from erniekit.checkpoint.slices import Slices, TensorFiles
from erniekit.errors import CheckpointError
from erniekit.kernels import compressed, nf4
from erniekit.kernels.fp8_qat import rotated
from erniekit.quant_schemes import QUANT_RECIPES, Scheme

KEY = "quantization_config"  # of config.json
NF4_STATE = ".weight.quant_state.bitsandbytes__nf4"
Read = Callable[[str], torch.Tensor]
Shape = tuple[int, ...]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PARTS = ("weight", "weight_packed", "weight_scale", "weight_shape", "input_scale")
_REFUSED = ("weight_zero_point", "weight_g_idx", "weight_global_scale")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_CODES = {
    "pack-quantized": torch.int32,
    "int-quantized": torch.int8,
    "float-quantized": torch.float8_e4m3fn,
    "mxfp4-pack-quantized": torch.uint8,
}
_LONGEST = 200  # characters of a module's name or of a pattern for them


@dataclass(frozen=True)
class StoredWeight:
    """One weight `module.weight` of a quantised folder."""

    module: str
    scheme: Scheme
    dtype: torch.dtype  # of the weight it stands for
    block: int = 0  # columns that were rotated together before it was rounded; 0: none
    where: str = ""  # the folder, for errors

    @property
    def data(self) -> str:
        return f"{self.module}.weight_packed" if "pack" in self.scheme.format else f"{self.module}.weight"

    def shape(self, shape_of: Callable[[str], Shape], read: Read) -> Shape:
        """Of the plain weight."""
        if self.scheme.number == "nf4":
            return tuple(int(n) for n in self._nf4_state(read)["shape"])
        found = shape_of(self.data)
        if len(found) != 2:
            raise self.wrong(f"its codes have the shape {list(found)}, which is not a matrix")
        rows, width = found
        if self.scheme.is_mxfp4:
            return rows, 2 * width
        if self.scheme.format == "pack-quantized":
            shape = self._part(read, f"{self.module}.weight_shape", torch.int64, torch.int32).flatten().tolist()
            if len(shape) != 2 or shape[0] != rows or -(-shape[1] * self.scheme.bits // 32) != width:
                raise self.wrong(f"weight_shape says {shape[:4]}, the packed weight is {[rows, width]}")
            return rows, shape[1]
        return rows, width

    def _part(self, read: Read, name: str, *dtypes: torch.dtype) -> torch.Tensor:
        """A tensor of the file, of one of these dtypes; numbers are finite."""
        part = read(name)
        if part.dtype not in dtypes:
            found, expected = (str(d).removeprefix("torch.") for d in (part.dtype, dtypes[0]))
            raise self.wrong(f"{name.removeprefix(self.module)[1:]} is {found}, {expected} belongs there")
        if part.dtype in _FLOATS and not torch.isfinite(part).all():
            raise self.wrong(f"{name.removeprefix(self.module)[1:]} holds NaN or infinity")
        return part

    def read(self, read: Read, shape_of: Callable[[str], Shape]) -> torch.Tensor:
        if self.scheme.number == "nf4":
            return self._read_nf4(read)
        rows, columns = self.shape(shape_of, read)
        codes = self._part(read, self.data, _CODES[self.scheme.format])
        kinds = (torch.uint8,) if self.scheme.is_mxfp4 else _FLOATS
        scale = self._part(read, f"{self.module}.weight_scale", *kinds)
        if self.scheme.strategy == "tensor" and scale.numel() == 1:
            scale = scale.reshape(1, 1).expand(rows, 1)
        groups = columns / self.scheme.group if self.scheme.group else 1
        if scale.shape != (rows, groups):
            raise self.wrong(f"weight_scale is {list(scale.shape)}, [{rows}, {groups:g}] belongs to this weight")
        if self.block:
            plain = compressed.decode(codes, scale, self.scheme, columns, torch.float32)
            return rotated(plain, self.block).to(self.dtype)
        return compressed.decode(codes, scale, self.scheme, columns, self.dtype)

    def _nf4_state(self, read: Read) -> dict[str, Any]:
        try:
            raw = self._part(read, f"{self.module}{NF4_STATE}", torch.uint8).flatten()
            state: dict[str, Any] = json.loads(bytes(raw.tolist()))
            supported = state["quant_type"] == "nf4" and state["blocksize"] == nf4.BLOCK
            supported &= state.get("nested_blocksize", nf4.NESTED_BLOCK) == nf4.NESTED_BLOCK
            supported &= len(state["shape"]) == 2 and all(isinstance(n, int) and n > 0 for n in state["shape"])
            supported &= math.isfinite(float(state.get("nested_offset", 0)))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self.wrong("its quant_state is not one of bitsandbytes' NF4") from None
        if not supported:
            raise self.wrong(f"only NF4 in blocks of {nf4.BLOCK} and {nf4.NESTED_BLOCK} is read")
        return state

    def _read_nf4(self, read: Read) -> torch.Tensor:
        state, name = self._nf4_state(read), f"{self.module}.weight"
        nested, count = "nested_offset" in state, prod(state["shape"])
        codes = self._part(read, name, torch.uint8).reshape(-1)
        self._same_table(read, f"{name}.quant_map", nf4.table(nf4.CPU))
        absmax = self._part(read, f"{name}.absmax", torch.uint8 if nested else torch.float32).reshape(-1)
        if codes.numel() != -(-count // 2) or absmax.numel() != -(-count // nf4.BLOCK):
            raise self.wrong("its codes and scales are not as many as its shape asks for")
        if nested:
            offset = torch.tensor(float(state["nested_offset"]))
            scale = self._part(read, f"{name}.nested_absmax", torch.float32).reshape(-1)
            if scale.numel() != -(-absmax.numel() // nf4.NESTED_BLOCK):
                raise self.wrong("its nested_absmax is not as long as its scales ask for")
            self._same_table(read, f"{name}.nested_quant_map", nf4.dynamic_table(signed=True))
            absmax = nf4.decode_absmax(nf4.Nested(absmax, scale, offset))
        return nf4.decode_flat(codes, absmax, count, self.dtype).view(state["shape"])

    def _same_table(self, read: Read, name: str, expected: torch.Tensor) -> None:
        """What codes stand for is in the file as well: with other numbers than bitsandbytes' they are read wrong."""
        held = self._part(read, name, torch.float32).flatten()
        # Its 8-bit numbers are sums of its own: the last bit may differ between its versions.
        if held.shape != expected.shape or not torch.allclose(held, expected, rtol=1e-6, atol=0):
            raise self.wrong(f"its {name.rpartition('.')[2]} is another than bitsandbytes' NF4 has")

    def wrong(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.module}: {what}", where=self.where, fix="download the model again, or quantise it again"
        )


class QuantisedFiles(TensorFiles):
    """As TensorFiles, with the plain weights in place of the tensors that store them. A part of a weight is cut from
    the whole of it, decoded."""

    def __init__(self, files: Mapping[str, Path], stored: Mapping[str, StoredWeight]) -> None:
        super().__init__(files)
        self.stored = stored
        self._disk = TensorFiles(files)  # the tensors as they are: the codes of a weight may have the weight's name
        self._last: tuple[str, torch.Tensor] | None = None  # parts of one weight are read one after the other

    def shape(self, name: str) -> Shape:
        if name not in self.stored:
            return super().shape(name)
        return self.stored[name].shape(self._disk.shape, self._disk.read)

    def dtype(self, name: str) -> torch.dtype:
        return self.stored[name].dtype if name in self.stored else super().dtype(name)

    def read(self, name: str, at: Slices | None = None, shape: Sequence[int] = ()) -> torch.Tensor:
        if name not in self.stored:
            return super().read(name, at, shape)
        if self._last is None or self._last[0] != name:
            self._last = name, self.stored[name].read(self._disk.read, self._disk.shape)
        whole = self._last[1]
        return whole.clone() if at is None else (whole.reshape(tuple(shape)) if shape else whole)[at].clone()


def stored_weights(config: Mapping[str, Any], files: Mapping[str, Path], where: Path) -> dict[str, StoredWeight]:
    """Plain weight names -> how they are stored; empty for a model that is not quantised."""
    quantisation = config.get(KEY)
    if quantisation is None:
        return {}
    method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
    dtype = _DTYPES.get(str(config.get("dtype", config.get("torch_dtype", ""))), torch.bfloat16)
    if method == "compressed-tensors":
        return _compressed(quantisation, files, dtype, where)
    if method == "bitsandbytes" and quantisation.get("bnb_4bit_quant_type") == "nf4":
        scheme = QUANT_RECIPES["nf4"].rest
        modules = [name.removesuffix(NF4_STATE) for name in files if name.endswith(NF4_STATE)]
        stored = {f"{module}.weight": StoredWeight(module, scheme, dtype, where=str(where)) for module in modules}
        if missing := next((name for name in stored if name not in files), None):
            raise _refusal(f"{missing} is missing, though its quant_state is there", where)
        return stored
    raise _refusal(f"its weights are quantised by {method!r}, which is not read", where)


def logical_files(files: Mapping[str, Path], stored: Mapping[str, StoredWeight]) -> dict[str, Path]:
    """The files by the names of plain weights: what stores a weight is not seen."""
    hidden: set[str] = set()
    for weight in stored.values():
        hidden |= {f"{weight.module}.{part}" for part in _PARTS}
    if any(weight.scheme.number == "nf4" for weight in stored.values()):
        hidden |= {name for name in files if ".weight." in name and name.partition(".weight.")[0] + ".weight" in stored}
    plain = {name: file for name, file in files.items() if name not in hidden}
    return plain | {name: files[weight.data] for name, weight in stored.items()}


@dataclass(frozen=True)
class _Group:
    targets: tuple[str, ...]
    scheme: Scheme

    def names(self, module: str) -> bool:
        return any(_matches(target, module) for target in self.targets)


def _compressed(
    quantisation: Mapping[str, Any], files: Mapping[str, Path], dtype: torch.dtype, where: Path
) -> dict[str, StoredWeight]:
    odd = next((name for name in files if name.endswith(_REFUSED)), None)
    if odd is not None:
        raise _refusal(f"{odd}: only symmetric weights in their own order are read", where)
    groups = quantisation.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _refusal("its quantization_config has no config_groups", where)
    parsed = [_group(group, quantisation, where) for group in groups.values()]
    rotations = _rotations(quantisation, where)
    out = {}
    for name in files:
        if not name.endswith(".weight_scale"):
            continue
        module = name.removesuffix(".weight_scale")
        by_name = next((group for group in parsed if group.names(module)), None)
        group = by_name or next((group for group in parsed if "Linear" in group.targets), None)
        if group is None:
            raise _refusal(f"no config_group covers {module}", where)
        block = next((size for targets, size in rotations if any(_matches(t, module) for t in targets)), 0)
        weight = StoredWeight(module, group.scheme, dtype, block, str(where))
        missing = [n for n in (weight.data, *_shape_part(weight)) if n not in files]
        if missing:
            raise _refusal(f"{missing[0]} is missing, though {name} is there", where)
        out[f"{module}.weight"] = weight
    return out


def _shape_part(weight: StoredWeight) -> tuple[str, ...]:
    return (f"{weight.module}.weight_shape",) if weight.scheme.format == "pack-quantized" else ()


def _group(group: Any, quantisation: Mapping[str, Any], where: Path) -> _Group:
    try:
        weights, inputs = group["weights"], group.get("input_activations")
        form = group.get("format") or quantisation["format"]
        targets = tuple(str(target) for target in group["targets"])
        inputs_by: Literal["", "token", "tensor"] = ""
        if inputs is not None:
            inputs_by = "token" if inputs.get("dynamic") else "tensor"
        scheme = Scheme(
            int(weights["num_bits"]), weights["type"], weights["strategy"], int(weights.get("group_size") or 0),
            inputs_by, form,
        )  # fmt: skip
        symmetric = weights.get("symmetric", True)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _refusal("its quantization_config has a group that is not compressed-tensors'", where) from None
    if odd := next((target for target in targets if not _is_harmless(target)), None):
        raise _refusal(f"the target {odd[:80]!r} of a config_group is not read", where)
    if form == "naive-quantized":
        form = "int-quantized" if scheme.number == "int" else "float-quantized"
    scheme = Scheme(scheme.bits, scheme.number, scheme.strategy, max(0, scheme.group), scheme.inputs, form)
    integer = scheme.number == "int" and scheme.bits in (4, 8) and form in ("pack-quantized", "int-quantized")
    fp8 = scheme.number == "float" and scheme.bits == 8 and form == "float-quantized"
    fp4 = scheme.is_mxfp4 and scheme.group == 32 and form == "mxfp4-pack-quantized"
    if not symmetric or scheme.strategy not in ("group", "channel", "tensor") or not (integer or fp8 or fp4):
        kind = f"{scheme.number}{scheme.bits} {scheme.strategy}, {form}" + ("" if symmetric else ", asymmetric")
        raise _refusal(f"its weights are {kind}, which is not read", where)
    return _Group(targets, scheme)


def _rotations(quantisation: Mapping[str, Any], where: Path) -> list[tuple[list[str], int]]:
    """Which modules' inputs and weights are rotated by Hadamard's matrix, and in what blocks."""
    try:
        schemes = list((quantisation.get("transform_config") or {"config_groups": {}})["config_groups"].values())
        out = []
        for scheme in schemes:
            applied = scheme["apply"]
            targets = [[str(target) for target in each["targets"]] for each in applied]
            both = sorted(each["location"] for each in applied) == ["input", "weight_input"]
            size = int(scheme["head_dim"])
            plain = scheme["type"] == "hadamard" and not scheme.get("randomize") and not applied[0].get("ignore")
            if not both or not plain or targets[0] != targets[1] or size < 1 or size & (size - 1) or size > 1 << 12:
                raise ValueError
            out.append((targets[0], size))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise _refusal("its transform_config is another than a Hadamard rotation of linears' inputs", where) from None
    return out


def _matches(target: str, module: str) -> bool:
    if not target.startswith("re:"):
        return target == module
    return len(module) <= _LONGEST and re.match(target.removeprefix("re:"), module) is not None


def _is_harmless(target: str) -> bool:
    """Patterns come from untrusted files: one with repeated groups, or many repeats, may never end on a name."""
    if not target.startswith("re:"):
        return True
    repeats = re.findall(r"(?<!\\)[*+?{]", target)
    if len(target) > _LONGEST or len(repeats) > 3 or re.search(r"(?<!\\)\)[*+?{]", target):
        return False
    try:
        re.compile(target.removeprefix("re:"))
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _refusal(what: str, where: Path) -> CheckpointError:
    return CheckpointError(
        f"this model is quantised: {what}",
        where=str(where / "config.json"),
        fix="use the 16-bit release of this model, or one of `erniekit quantize` (docs/quantize.md lists the kinds)",
    )
