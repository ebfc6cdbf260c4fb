"""How each tensor of a GGUF file is stored, by `gguf_type`. Called by run.py.

Norms, biases and the router stay fp32 whatever the type, as in llama.cpp's own files: they are small and they decide.
"""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.models.config import DecoderConfig

BLOCK = 32  # weights that share a scale in each of the block types
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "MXFP4": 17}  # of a block with its scale
BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # of a weight


@dataclass(frozen=True)
class GgufType:
    name: str  # as llama.cpp spells it; part of the file's name
    file_type: int  # LLAMA_FTYPE_*
    embedding: str  # the embedding and the head
    experts: str
    rest: str


def gguf_type(key: str, c: DecoderConfig) -> GgufType:
    """The 4-bit types keep embedding and head in 8 bits. MXFP4 of a model with experts is what llama.cpp calls so: the
    routed experts only, which are nearly all of the weights."""
    other = "Q8_0" if c.moe else "MXFP4"
    return {
        "f32": GgufType("F32", 0, "F32", "F32", "F32"),
        "f16": GgufType("F16", 1, "F16", "F16", "F16"),
        "bf16": GgufType("BF16", 32, "BF16", "BF16", "BF16"),
        "q8_0": GgufType("Q8_0", 7, "Q8_0", "Q8_0", "Q8_0"),
        "q4_0": GgufType("Q4_0", 2, "Q8_0", "Q4_0", "Q4_0"),
        "mxfp4": GgufType("MXFP4", 38, "Q8_0", "MXFP4", other),
    }[key]


def stored_as(kind: GgufType, name: str, shape: tuple[int, ...]) -> str:
    """Rows that are no whole number of blocks stay 16-bit."""
    if len(shape) == 1 or name.endswith("ffn_gate_inp.weight"):
        return "F32"
    if name in ("token_embd.weight", "output.weight"):
        type_name = kind.embedding
    else:
        type_name = kind.experts if name.endswith("_exps.weight") else kind.rest
    return "F16" if type_name in BLOCK_BYTES and shape[-1] % BLOCK else type_name


def row_bytes(type_name: str, columns: int) -> int:
    return columns // BLOCK * BLOCK_BYTES[type_name] if type_name in BLOCK_BYTES else columns * BYTES[type_name]
