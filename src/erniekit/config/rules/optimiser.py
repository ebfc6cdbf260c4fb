"""Rules on what the optimiser keeps of a weight, and when it updates it."""

from __future__ import annotations

from collections.abc import Iterator

from erniekit.config.note import Note
from erniekit.config.view import View
from erniekit.errors import ConfigError

FP32_MASTERS = "weights are computed in fp32: they are their own masters"


def moments_have_one_name(run: View) -> Iterator[Note]:
    """use_lowprecision_moment is ERNIEKit's name for one of the choices."""
    low, states = run["use_lowprecision_moment"], run["optim_states"]
    if low and states == "fp32" and not run.given("optim_states"):
        yield from run.set("optim_states", "bf16", "use_lowprecision_moment is True", quiet=True)
        return
    if low and states != "bf16" and run.given("use_lowprecision_moment"):
        raise ConfigError(
            f"use_lowprecision_moment means optim_states: bf16, and optim_states is {states}",
            where=f"{run.origin('use_lowprecision_moment')} and {run.origin('optim_states')}",
            fix="keep one of them",
        )
    yield from run.set("use_lowprecision_moment", states == "bf16", f"optim_states is {states}", quiet=True)


def masters_are_of_16_bit_weights(run: View) -> Iterator[Note]:
    if run["master_weights"] == "fp32":
        return
    if run["compute_type"] == "fp32":
        yield from run.set("master_weights", "fp32", FP32_MASTERS)
    elif run["sharding_parallel_degree"] > 1:
        reason = "shards are in fp32, weight and master in one: 4 bytes, as exact16"
        yield from run.set("master_weights", "fp32", reason)


def backward_updates_one_micro_batch(run: View) -> Iterator[Note]:
    if not run["update_in_backward"]:
        if run["grad_clip"] != "global":
            reason = "without update_in_backward the whole gradient's norm is known in time"
            yield from run.set("grad_clip", "global", reason)
        return
    where = run.origin("update_in_backward")
    if run["gradient_accumulation_steps"] > 1:
        raise ConfigError(
            f"update_in_backward lets a gradient go at once, and gradient_accumulation_steps "
            f"{run['gradient_accumulation_steps']} adds several up",
            where=f"{where} and {run.origin('gradient_accumulation_steps')}",
            fix="gradient_accumulation_steps: 1 with a larger batch_size, or update_in_backward: False",
        )
    if run["max_grad_norm"] <= 0 or run["grad_clip"] != "global":
        return
    if run.given("grad_clip"):
        raise ConfigError(
            "update_in_backward updates weights before the whole gradient's norm is known, and grad_clip is global",
            where=f"{where} and {run.origin('grad_clip')}",
            fix="grad_clip: previous or tensor, or max_grad_norm: 0",
        )
    reason = "update_in_backward: the norm of this step is known too late; write grad_clip: tensor for each one's own"
    yield from run.set("grad_clip", "previous", reason)


MUON_KEYS = ("muon_momentum", "muon_learning_rate", "muon_scale")


def muon_is_for_whole_weights(run: View) -> Iterator[Note]:
    """What Muon does not do is refused by name."""
    if run["optim"] != "muon":
        for name in MUON_KEYS:
            if run.given(name) and run["do_train"]:
                yield from run.remark(name, f"without effect: optim is {run['optim']}")
        return
    where = run.origin("optim")
    if run["lora"]:
        raise ConfigError(
            "optim: muon steps along directions of whole weight matrices; LoRA trains none",
            where=where,
            fix="fine_tuning: Full, or optim: adamw",
        )
    for name, wanted in (("optim_states", "fp32"), ("master_weights", "fp32"), ("update_in_backward", False)):
        if run[name] != wanted:
            raise ConfigError(
                f"optim: muon keeps fp32 averages and masters and updates after backward; {name} is {run[name]}",
                where=f"{where} and {run.origin(name)}",
                fix=f"{name}: {wanted}, or optim: adamw; offload_optim: True moves states to host memory",
            )


def compressed_states_are_saved_as_they_are(run: View) -> Iterator[Note]:
    if run["optim_states"] == "8bit" and run["ckpt_quant_stage"] != "O0":
        yield from run.set("ckpt_quant_stage", "O0", "optim_states is 8bit: saved as they are, bit for bit")
