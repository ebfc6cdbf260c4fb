"""Rules on the frozen weights under adapters: which kind they are kept in, and how they are multiplied by.

`frozen_base` is the one key that the run reads. `compute_type: wint8 | wint4/8 | nf4` and `weight_quantize_algo` are
ERNIEKit's names for it and set it.
"""

from __future__ import annotations

from collections.abc import Iterator

from erniekit.config.note import Note
from erniekit.config.view import View
from erniekit.errors import ConfigError
from erniekit.weight_kinds import BF16, IN_FP8, PLAIN, kinds_of

# compute_type -> the base, and a description.
PACKED = {
    "wint8": ("int8", "int8: routed and shared experts, attention and dense feed-forward; the rest bf16"),
    "wint4/8": (
        "wint4/8",
        "int4: routed experts, where there are any; int8: attention and dense feed-forward; shared experts, head and "
        "the rest bf16",
    ),
    "nf4": ("nf4", "nf4: routed and shared experts, attention and dense feed-forward; the rest bf16"),
}


def compute_type_decides_the_base(run: View) -> Iterator[Note]:
    kind = run["compute_type"]
    if kind not in PACKED or not run["do_train"]:
        return
    base, meaning = PACKED[kind]
    key = "compute_type" if run.given("compute_type") else "weight_quantize_algo"
    if not run["lora"]:
        raise ConfigError(
            f"compute_type: {kind} packs weights that adapters leave frozen; fine_tuning: Full trains them all",
            where=run.origin(key),
            fix="fine_tuning: LoRA, or compute_type: bf16",
        )
    if run.given("frozen_base") and run["frozen_base"] != base:
        given = run["frozen_base"]
        raise ConfigError(
            f"compute_type: {kind} and frozen_base: {given} both set how frozen weights are stored, and differ",
            where=f"{run.origin(key)} and {run.origin('frozen_base')}",
            fix=f"compute_type: bf16 with frozen_base: {given}, or leave frozen_base out",
        )
    yield from run.set("frozen_base", base, f"compute_type is {kind}; {meaning}; computed in bf16")


def a_base_is_written_with_its_products(run: View) -> tuple[Note, ...]:
    """The kinds that multiply in fp8 are known by two keys."""
    for key in ("frozen_base", "merge_grid"):
        kind = next((kind for kind, held in IN_FP8.items() if run[key] == held != kind), None)
        if kind is not None:
            more = " and frozen_products: fp8" if key == "frozen_base" else ""
            raise ConfigError(
                f"{key}: {run[key]} is {kind} multiplied in fp8", where=run.origin(key), fix=f"{key}: {kind}{more}"
            )
    return ()


def a_packed_base_is_of_adapters(run: View) -> tuple[Note, ...]:
    base = run["frozen_base"]
    if base == BF16 or not run["do_train"]:
        return ()
    if not run["lora"]:
        raise ConfigError(
            f"frozen_base: {base} is for weights that adapters leave frozen; fine_tuning: Full trains them all",
            where=run.origin("frozen_base"),
            fix="fine_tuning: LoRA, or frozen_base: bf16",
        )
    return ()


def products_fit_the_base(run: View) -> Iterator[Note]:
    base, products = run["frozen_base"], run["frozen_products"]
    if not run["do_train"] or not run["lora"]:
        return
    where = run.origin("frozen_products")
    if base == "fp8":
        if run.given("frozen_products") and products == BF16:
            raise ConfigError(
                "frozen_base: fp8 is multiplied in fp8", where=where, fix="frozen_products: fp8, or frozen_base: int8"
            )
        yield from run.set("frozen_products", "fp8", "frozen_base is fp8")
        return
    kinds = set(kinds_of(base).values()) - {PLAIN}
    exact, others = sorted(kinds & IN_FP8.keys()), sorted(kinds - IN_FP8.keys())
    if products == "fp8" and not exact:
        raise ConfigError(
            f"frozen_products: fp8 needs frozen weights that are exact in fp8; those of frozen_base: {base} are not",
            where=where,
            fix="frozen_products: bf16, or frozen_base: int4, mxfp4, fp8 or wint4/8",
        )
    if products == "fp8" and others:
        yield from run.remark("frozen_products", f"of {', '.join(exact)} weights; {', '.join(others)} stay bf16")
    elif products == BF16 and exact and not run.given("frozen_products"):
        yield from run.remark(
            "frozen_products", f"the default; {', '.join(exact)} weights are exact in fp8, which Hopper does faster"
        )
