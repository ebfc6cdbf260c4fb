"""Which programs load a quantised folder, and how: printed when one is written, and in its report.

Measured with transformers 5.17 to 5.19 (tests/parity/test_quantised_transformers.py repeats it); vLLM's by the rules of
0.32's loader.
"""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.quant_schemes import QuantRecipe


@dataclass(frozen=True)
class FolderReader:
    name: str
    loads: bool
    note: str = ""


def readers(recipe: QuantRecipe, moe: bool) -> list[FolderReader]:
    return [_erniekit(recipe), _transformers(recipe, moe), _vllm(recipe, moe)]


def warnings(recipe: QuantRecipe, moe: bool) -> list[str]:
    """One line for each reader that refuses the folder."""
    return [f"{reader.name}: {reader.note}" for reader in readers(recipe, moe) if not reader.loads]


def _erniekit(recipe: QuantRecipe) -> FolderReader:
    if recipe.rest.static_inputs:
        return FolderReader("erniekit", True, "computes as an FP8 engine does, with the stored scales")
    return FolderReader("erniekit", True, "weights are dequantised as they are read; activations stay in 16 bit")


def _transformers(recipe: QuantRecipe, moe: bool) -> FolderReader:
    name, scheme = "transformers", recipe.experts
    if scheme.number == "nf4":
        if moe:
            return FolderReader(name, False, "cannot load experts in bitsandbytes' layout")
        return FolderReader(name, True, "with bitsandbytes installed")
    if not moe or not scheme.inputs:
        return FolderReader(name, True, "with compressed-tensors installed")
    if scheme.number == "int":
        return FolderReader(name, False, "cannot load int8 experts of w8a8; use w8a16 for it")
    what = "their stored input scales are dropped"
    if not scheme.static_inputs:
        what = "their inputs are not rounded, and those of shared experts by one scale for all tokens"
    return FolderReader(name, True, f"experts become 16 bit: {what}, so its logits are not those of an fp8 engine")


def _vllm(recipe: QuantRecipe, moe: bool) -> FolderReader:
    if recipe.experts.number == "nf4":
        if moe:
            return FolderReader("vLLM", False, "its bitsandbytes loader has no rule for these experts")
        return FolderReader("vLLM", True, "with bitsandbytes installed; by its rules, not run here")
    return FolderReader("vLLM", True, "by its loader's rules, not run here")
