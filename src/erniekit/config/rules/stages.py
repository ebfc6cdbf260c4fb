"""Rules of adapters, preference training and vision, and remarks on keys of a stage that is not run."""

from __future__ import annotations

import os
from collections.abc import Iterator

from erniekit.config.flat import KEYS
from erniekit.config.note import Note
from erniekit.config.sources import BARE
from erniekit.config.view import View
from erniekit.errors import ConfigError
from erniekit.lora_scale import RSLORA_PLUS, default_alpha
from erniekit.loss_table import OF_KTO, PREFERENCE_KEYS, PREFERENCE_LOSSES, SCORE_KEYS, preference_loss

_MERGE = "erniekit export BASE lora_path=ADAPTER[,ADAPTER] output_dir=DEST"


def rslora_plus_is_three_keys(run: View) -> Iterator[Note]:
    if run["rslora_plus"]:
        for name, value in RSLORA_PLUS.items():
            yield from run.set(name, value, "rslora_plus is True")


def alpha_follows_rank(run: View) -> Iterator[Note]:
    if run["lora_alpha"] < 1:
        alpha, reason = default_alpha(run["lora_rank"], run["rslora"])
        yield from run.set("lora_alpha", alpha, reason, quiet=not (run["lora"] and run["do_train"]))


def adapters_go_where_the_command_takes_them(run: View) -> tuple[Note, ...]:
    """An adapter that is left out is not noticed: the base's answers and losses look like any other's."""
    adapters, command = run["lora_path"], run.command
    what = fix = ""
    if not adapters:
        return ()
    trains = command in ("train", "doctor")
    if trains and not run["lora"]:
        what = "lora_path names adapters to start from; fine_tuning: Full trains no adapters"
        fix = f"{_MERGE}, and train DEST; or fine_tuning: LoRA"
    elif command == "split":
        what, fix = "split cuts a model's weights and merges no adapters", _MERGE
    elif command == "quantize":
        what, fix = "quantize takes a whole model and merges no adapters", f"{_MERGE}, and quantize DEST"
    elif command == "export" and not run.given("output_dir") and not _of_one_folder(run):
        what, fix = "output_dir is missing: where base + lora_path is written", _MERGE
    elif len(set(adapters)) < len(adapters):
        what, fix = "lora_path names an adapter twice", "name each once"
    elif len(adapters) > 1 and (trains or command in ("chat", "server", "eval")):
        what = f"{command} takes one adapter; lora_path names {len(adapters)}"
        serve = "; or lora_modules=name=DIR,other=DIR serves each of them" if command == "server" else ""
        fix = f"merge them first: {_MERGE}{serve}"
    if what:
        raise ConfigError(what, where=f"lora_path: {run.origin('lora_path')}", fix=fix)
    return ()


def an_adapters_export_goes_into_its_folder(run: View) -> Iterator[Note]:
    """As the folder itself given as a bare word, which errors about a base that moved cannot name for every command."""
    if run.command == "export" and not run.given("output_dir") and _of_one_folder(run):
        yield from run.set("output_dir", run["lora_path"][0], "the folder of the adapter")


def _of_one_folder(run: View) -> bool:
    """Typed `lora_path=DIR model_name_or_path=BASE`. Not a recipe, whose lora_path may be where its run began, nor a
    bare BASE, behind which the result's place is named too."""
    adapters, base = run["lora_path"], run.sources.given.get("model_name_or_path")
    typed = run.given("lora_path") and not run.sources.given["lora_path"].in_file
    return (
        typed
        and len(adapters) == 1
        and base is not None
        and base.origin != BARE
        and os.path.isdir(os.path.expanduser(adapters[0]))
    )


def loss_type_decides_reference(run: View) -> Iterator[Note]:
    if run["stage"] != "DPO":
        return
    kind = run["loss_type"]
    loss = preference_loss(kind)
    if not loss.needs_reference:
        yield from run.set("reference_free", True, f"loss_type is {kind}")
    if loss.sft_ratio is not None:
        yield from run.set("sft_loss_ratio", loss.sft_ratio, f"loss_type is {kind}")
    if run["lora"]:
        yield from run.set("ref_model_update_steps", -1, "the reference is the model without adapters")
    elif run["reference_free"] or not loss.needs_reference:
        yield from run.set("ref_model_update_steps", -1, "there is no reference")
    elif run["ref_model_update_steps"] > 0 and run["reference_logps"] == "cached":
        raise ConfigError(
            "reference_logps: cached keeps one reference, ref_model_update_steps changes it",
            where=f"{run.origin('ref_model_update_steps')} and {run.origin('reference_logps')}",
            fix="reference_logps: live",
        )


def beta_is_above_zero(run: View) -> tuple[Note, ...]:
    """With 0 a loss is a constant, or divides by it."""
    kind = "" if run["stage"] == "KTO" else run["loss_type"]
    of_beta = not kind or (kind in PREFERENCE_LOSSES and not PREFERENCE_LOSSES[kind].log_odds)
    if run["do_train"] and run["stage"] in ("DPO", "KTO") and run["beta"] == 0 and of_beta:
        what = f"beta is 0, with which {f'loss_type {kind}' if kind else 'the loss of KTO'} trains nothing"
        raise ConfigError(
            what, where=run.origin("beta"), fix="beta: 0.1 is usual; smaller values let the model go further"
        )
    return ()


def kto_scores_the_end(run: View) -> Iterator[Note]:
    """As TRL: an answer is judged with its end. DPO's default is ERNIEKit's."""
    if run["stage"] == "KTO" and not run.given("mask_out_eos_token"):
        yield from run.set("mask_out_eos_token", False, "KTO scores the end token", quiet=True)


def a_teacher_is_of_sft(run: View) -> Iterator[Note]:
    if not run["teacher_model_name_or_path"]:
        return
    where = run.origin("teacher_model_name_or_path")
    if run["stage"] != "SFT" and run["do_train"]:
        raise ConfigError(
            f"a teacher is of stage SFT; stage is {run['stage']}", where=where, fix="stage: SFT, or leave the key out"
        )
    _spread_over_data_only(run, "distillation", where)
    yield from ()


def score_heads_train_every_weight(run: View) -> Iterator[Note]:
    """Stages RM and CLS train every weight unless adapters are requested."""
    if run["stage"] in SCORE_KEYS and not run.given("fine_tuning") and not run.given("lora"):
        reason = f"stage {run['stage']} trains all weights"
        yield from run.set("fine_tuning", "Full", reason, quiet=True)


def score_heads_are_spread_over_data(run: View) -> Iterator[Note]:
    stage = run["stage"]
    if stage not in SCORE_KEYS:
        return
    where = f"stage: {run.origin('stage')}"
    if run["compute_type"] not in ("bf16", "fp32"):
        raise ConfigError(
            f"stage {stage} computes in bf16 or fp32; compute_type is {run['compute_type']}",
            where=f"{run.origin('compute_type')} and {where}",
            fix="compute_type: bf16",
        )
    if run["lora"] and run["do_train"] and run["save_format"] == "paddle":
        raise ConfigError(
            "ERNIEKit's adapter files have no place for a score head",
            where=f"{run.origin('save_format')} and {where}",
            fix="save_format: hf, or fine_tuning: Full",
        )
    _spread_over_data_only(run, f"stage {stage}", where)
    yield from ()


_GENERATES = ("SFT", "DPO", "KTO")


def answers_are_generated_from_plain_weights(run: View) -> Iterator[Note]:
    """eval_generate runs the engine during training, over the same weights."""
    if not run["eval_generate"] or not run["do_train"]:
        return
    where, off = run.origin("eval_generate"), "eval_generate: 0"
    if not run["eval_dataset_path"]:
        yield from run.remark("eval_generate", "without effect: no eval_dataset_path")
        return
    if run["stage"] not in _GENERATES:
        what = f"stage {run['stage']} generates no answers in its evaluations"
        raise ConfigError(what, where=where, fix=f"{off}; stages that do: {', '.join(_GENERATES)}")
    _spread_over_data_only(run, "generation during training", where)
    if run["compute_type"] == "fp8" or (run["lora"] and run["frozen_base"] != "bf16"):
        key = "compute_type" if run["compute_type"] == "fp8" else "frozen_base"
        raise ConfigError(
            f"answers are generated from plain weights; {key} is {run[key]}",
            where=f"{where} and {run.origin(key)}",
            fix=f"{off}, or {key}: bf16",
        )


_SPLITS = ("tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree")


def _spread_over_data_only(run: View, what: str, where: str) -> None:
    """Refuses what has not been proven for it: weights or sequences cut over ranks."""
    for name in _SPLITS:
        if run["do_train"] and run[name] > 1:
            raise ConfigError(
                f"{what} runs with data parallelism and sharding; {name} is {run[name]}",
                where=f"{run.origin(name)} and {where}",
                fix=f"{name}: 1; sharding_parallel_degree spreads weights and states over devices",
            )


def preference_training_has_no_dropout(run: View) -> Iterator[Note]:
    if run["stage"] in ("DPO", "KTO"):
        reason = f"{run['stage']}: policy and reference must be one network; dropout would be noise between them"
        yield from run.set("attention_probs_dropout_prob", 0.0, reason)
        yield from run.set("dropout_warmup_steps", 0, "no dropout", quiet=True)


def benchmark_only_trains(run: View) -> Iterator[Note]:
    name = "dpo_benchmark" if run["stage"] == "DPO" else "sft_benchmark"
    if run[name]:
        reason = f"{name} is True"
        yield from run.set("evaluation_strategy", "no", reason)
        yield from run.set("do_eval", False, reason, quiet=True)
        yield from run.set("save_strategy", "no", reason)


def vision_keys_follow(run: View) -> Iterator[Note]:
    if run["visual_ld"] is not None:
        yield from run.set("vit_lr_ratio", run["visual_ld"], f"visual_ld is {run['visual_ld']:g}")


def target_frames_turn_fps_off(run: View) -> Iterator[Note]:
    frames, fps = run["video_target_frames"], run["video_fps"]
    if frames <= 0 or fps <= 0:
        return
    if run.given("video_fps"):
        raise ConfigError(
            f"video_target_frames is {frames} and video_fps is {fps:g}: only one can hold",
            where=f"{run.origin('video_target_frames')} and {run.origin('video_fps')}",
            fix="video_fps: -1",
        )
    yield from run.set("video_fps", -1.0, f"video_target_frames is {frames}")


def fewest_frames_are_below_most(run: View) -> Iterator[Note]:
    least, most = run["video_min_frames"], run["video_max_frames"]
    if 0 < most < least:
        raise ConfigError(
            f"video_min_frames is {least}, video_max_frames {most}",
            where=f"{run.origin('video_min_frames')} and {run.origin('video_max_frames')}",
            fix="set both, the first not above the second; -1 is no limit",
        )
    return iter(())


def shares_of_modalities_need_text(run: View) -> Iterator[Note]:
    if run["modality_ratio"] and not run["text_dataset_path"] and run["do_train"]:
        yield from run.remark("modality_ratio", "without effect: no text_dataset_path")


def keys_of_another_stage(run: View) -> Iterator[Note]:
    """A remark on each key that was given and that this run will not read."""
    if not run["do_train"]:
        return
    stage = run["stage"]
    idle = {"dpo": f"stage is {stage}", "score": f"stage is {stage}"}
    if not run["teacher_model_name_or_path"]:
        idle["distill"] = "there is no teacher_model_name_or_path"
    if not run["lora"]:
        idle["lora"] = "fine_tuning is Full"
    switches = ("fine_tuning", "lora", "lora_alpha", *PREFERENCE_KEYS.get(stage, ()), *SCORE_KEYS.get(stage, ()))
    if stage == "DPO":
        switches += tuple(name for name, k in KEYS.items() if k.section == "dpo" and name not in OF_KTO)
    for k in KEYS.values():
        if k.section in idle and k.name not in switches and run.given(k.name) and run[k.name] != k.default:
            yield from run.remark(k.name, f"without effect: {idle[k.section]}")
