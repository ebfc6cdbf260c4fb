"""Rules on what kind of run it is: stage, adapters, number formats, device."""

from __future__ import annotations

from collections.abc import Iterator

from erniekit.config.note import Note
from erniekit.config.view import View
from erniekit.errors import ConfigError

_ALGOS = {"fp8": "fp8linear", "wint8": "weight_only_int8", "wint4/8": "weight_only_mix", "nf4": "nf4"}
NEFTUNE_ALPHA = 5.0  # the paper's first choice
_INT4 = "weight_only_int4"  # no compute_type has it


def pre_training_files_train_pt(run: View) -> Iterator[Note]:
    documents = run["input_dir"] or run["data_filelist"] or run["dataset_type"] == "pretrain"
    if not run.given("stage") and (run.sources.sectioned or documents):
        yield from run.set("stage", "PT", "the recipe is of the pre-training form")
    elif run["stage"] != "PT" and run["dataset_type"] == "pretrain":
        raise ConfigError(
            f"dataset_type is pretrain, stage is {run['stage']}", where=run.origin("dataset_type"), fix="stage: PT"
        )


def pre_training_trains_every_weight(run: View) -> Iterator[Note]:
    if run["stage"] == "PT" and not run.given("fine_tuning") and not run.given("lora"):
        yield from run.set("fine_tuning", "Full", "pre-training trains every weight")


def patterns_choose_weights(run: View) -> Iterator[Note]:
    """train_only and freeze choose among the model's own weights, which LoRA leaves frozen."""
    keys = [name for name in ("train_only", "freeze") if run[name]]
    if not keys:
        return
    if not run.given("fine_tuning") and not run.given("lora"):
        yield from run.set("fine_tuning", "Full", f"{keys[0]} chooses among the model's own weights")
    elif run["fine_tuning"] == "LoRA" or run["lora"]:
        raise ConfigError(
            f"{keys[0]} chooses among the model's own weights; LoRA trains none of them",
            where=run.origin(keys[0]),
            fix="fine_tuning: Full, or lora_target_modules to choose where adapters go",
        )


def neftune_is_a_number(run: View) -> Iterator[Note]:
    """PaddleFormers has a switch besides the number. Noise is for the rows of SFT: a reference must not get it, and
    pictures are no embeddings of tokens."""
    if run["neftune"] is False:
        yield from run.set("neftune_noise_alpha", 0.0, "neftune is False")
        return
    if not run["neftune"] and not run["neftune_noise_alpha"]:
        return
    if run["stage"] != "SFT":
        key = "neftune_noise_alpha" if run["neftune_noise_alpha"] else "neftune"
        raise ConfigError(
            f"noise on embeddings is for stage: SFT, and stage is {run['stage']}",
            where=run.origin(key),
            fix=f"leave {key} out",
        )
    if not run["neftune_noise_alpha"]:
        yield from run.set("neftune_noise_alpha", NEFTUNE_ALPHA, "neftune is True")


def scratch_means_no_weights(run: View) -> Iterator[Note]:
    """Of ERNIE's pre-training; elsewhere a reader of ERNIEKit has a switch of that name."""
    if run["stage"] == "PT" and run.wins("from_scratch", "continue_training"):
        yield from run.set("continue_training", not run["from_scratch"], f"from_scratch is {run['from_scratch']}")


def erniekit_documents_see_each_other(run: View) -> Iterator[Note]:
    if run["stage"] == "PT" and run.compat.no_document_masks and not run.given("use_global_causal_attn"):
        yield from run.set("use_global_causal_attn", True, "compat is erniekit: no masks between documents")


def lora_value_means_fine_tuning(run: View) -> Iterator[Note]:
    if run.wins("lora", "fine_tuning"):
        kind = "LoRA" if run["lora"] else "Full"
        yield from run.set("fine_tuning", kind, f"lora is {run['lora']}: {run.origin('lora')}")


def fine_tuning_decides_lora(run: View) -> Iterator[Note]:
    lora = run["fine_tuning"] == "LoRA"
    conflict = run.given("lora") and run["lora"] != lora
    yield from run.set("lora", lora, f"fine_tuning is {run['fine_tuning']}", quiet=not conflict)


def script_flags_choose_compute_type(run: View) -> Iterator[Note]:
    algo = run["weight_quantize_algo"]
    by_algo = {v: k for k, v in _ALGOS.items()}
    if run["bf16"] and run["fp16"]:
        where = f"{run.origin('bf16')} and {run.origin('fp16')}"
        raise ConfigError("bf16 and fp16 are both on", where=where, fix="keep one, or set compute_type")
    if run.wins("weight_quantize_algo", "compute_type") and algo in by_algo:
        yield from run.set("compute_type", by_algo[algo], f"weight_quantize_algo is {algo}")
    elif run.wins("weight_quantize_algo", "compute_type") and algo == _INT4 and not run.given("frozen_base"):
        yield from run.set("frozen_base", "int4", f"weight_quantize_algo is {algo}")
    elif run.wins("fp16", "compute_type") and run["fp16"]:
        yield from run.set("compute_type", "fp16", "fp16 is True")
    elif run.wins("bf16", "compute_type"):
        yield from run.set("compute_type", "bf16" if run["bf16"] else "fp32", f"bf16 is {run['bf16']}")


def compute_type_decides_formats(run: View) -> Iterator[Note]:
    kind = run["compute_type"]
    reason = f"compute_type is {kind}"
    yield from run.set("bf16", kind not in ("fp16", "fp32"), reason, quiet=True)
    yield from run.set("fp16", kind == "fp16", reason, quiet=True)
    quiet = not run.given("weight_quantize_algo")
    if run["weight_quantize_algo"] != _INT4 or run["frozen_base"] != "int4":
        yield from run.set("weight_quantize_algo", _ALGOS.get(kind), reason, quiet=quiet)


def fp8_brings_its_optimiser(run: View) -> Iterator[Note]:
    """What ERNIEKit's fp8 sets silently; here it is reported, and the user's values win."""
    if run["compute_type"] != "fp8":
        return
    implied = {
        "use_lowprecision_moment": (True, "compute_type is fp8: moments in bf16"),
        "tensorwise_offload_optimizer": (True, "compute_type is fp8: fp32 weights and moments in host memory"),
    }
    if run.compat.fp8_as_recorded:
        implied["apply_hadamard"] = (True, "compute_type is fp8, compat is erniekit")
    elif not run.given("apply_hadamard"):
        reason = "compute_type is fp8: ERNIEKit rotates; e4m3 gains little by it, and few servers can"
        yield from run.remark("apply_hadamard", reason)
    for name, (value, reason) in implied.items():
        if not run.given(name):
            yield from run.set(name, value, reason)
    if run["optim"] == "adamw_custom":
        yield from run.set("optim", "adamw", "adamw keeps fp32 weights and bf16 moments in host memory itself")


def fp8_is_set_once(run: View) -> Iterator[Note]:
    """One way of rounding products a run."""
    static, blocks = run["compute_type"] == "fp8", run["use_fp8"]
    if static and blocks:
        raise ConfigError(
            "compute_type: fp8 rounds with static scales, use_fp8 with block-wise ones",
            where=f"{run.origin('compute_type')} and {run.origin('use_fp8')}",
            fix="compute_type: fp8 for weights that are served in FP8; use_fp8 with compute_type: bf16 to pre-train",
        )
    if (static or blocks) and run["fine_tuning"] == "LoRA" and run["frozen_base"] != "bf16":
        raise ConfigError(
            f"{'compute_type: fp8' if static else 'use_fp8'} and frozen_base: {run['frozen_base']} both set how the "
            "base computes",
            where=f"{run.origin('compute_type' if static else 'use_fp8')} and {run.origin('frozen_base')}",
            fix="frozen_base: bf16, or compute_type: bf16 for a faster base whose scales are not trained for",
        )
    if static and run["stage"] == "DPO" and run["fine_tuning"] == "Full" and (run["ref_model_update_steps"] or 0) > 0:
        raise ConfigError(
            "a reference that becomes the policy would need its scales, which is not in this version",
            where=f"{run.origin('compute_type')} and {run.origin('ref_model_update_steps')}",
            fix="leave ref_model_update_steps out, or compute_type: bf16",
        )
    block = run["hadamard_block_size"]
    if block & (block - 1):
        raise ConfigError(
            f"hadamard_block_size is {block}, no power of two", where=run.origin("hadamard_block_size"), fix="use 32"
        )
    yield from ()


def no_cuda_means_cpu(run: View) -> Iterator[Note]:
    if run.wins("no_cuda", "device") and run["no_cuda"]:
        yield from run.set("device", "cpu", "no_cuda is True")


def train_command_trains(run: View) -> Iterator[Note]:
    if run.command in ("train", "doctor") and not run.given("do_train"):
        yield from run.set("do_train", True, f"the command is {run.command}", quiet=True)
