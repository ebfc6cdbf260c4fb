"""Rules on kinds of adapters: what DoRA and PiSSA go together with. What they do not do is refused by name."""

from __future__ import annotations

from collections.abc import Iterator

from erniekit.config.note import Note
from erniekit.config.view import View
from erniekit.errors import ConfigError


def dora_is_of_plain_weights(run: View) -> tuple[Note, ...]:
    """The norm of a row is computed in every step: of plain weights, with all of a row on one rank."""
    if not (run["use_dora"] and run["lora"] and run["do_train"]):
        return ()
    refused = {
        "frozen_base": (run["frozen_base"] != "bf16", "bf16"),
        "compute_type": (run["compute_type"] == "fp8", "bf16"),
        "use_fp8": (run["use_fp8"], False),
        "tensor_parallel_degree": (run["tensor_parallel_degree"] > 1, 1),
        "lora_init": (run["lora_init"] == "pissa", "default"),
        "save_format": (run["save_format"] == "paddle", "hf"),
    }
    for name, (is_set, instead) in refused.items():
        if is_set:
            raise ConfigError(
                f"use_dora does not work with {name}: {run[name]}",
                where=f"{run.origin('use_dora')} and {run.origin(name)}",
                fix=f"{name}: {instead}, or use_dora: False",
            )
    return ()


def pissa_starts_new_adapters(run: View) -> Iterator[Note]:
    if not (run["lora"] and run["do_train"]):
        return
    if run["lora_init"] != "pissa":
        if run.given("pissa_iterations") and run["pissa_iterations"]:
            yield from run.remark("pissa_iterations", "without effect: lora_init is default")
        return
    if run["lora_path"]:
        raise ConfigError(
            "lora_init: pissa makes new adapters from the weights, and lora_path names some to start from",
            where=f"{run.origin('lora_init')} and {run.origin('lora_path')}",
            fix="leave one of them out: an adapter started with PiSSA continues as plain LoRA of twice the rank",
        )
