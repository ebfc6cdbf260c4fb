"""When to save, what to keep and how to resume. Read by the recipes, which set up checkpoint/."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key
from erniekit.config.ignored_keys import IGNORED_WORDS


@dataclass(frozen=True)
class CheckpointSection:
    save_steps: int = key(500, "Steps between checkpoints.", low=1, basic=True)
    save_minutes: float = key(
        15.0,
        "Also save once so many minutes have passed since the last checkpoint; 0 is off, and save_strategy: no as well "
        "unless this key is given. Such a checkpoint goes when there are two newer ones.",
        low=0,
    )
    save_strategy: str = key(
        "steps",
        "When to save. no: only the model at the end, without what training on from it takes; "
        "ignore_save_lr_and_optim: False keeps that, too.",
        choices=("no", "steps", "epoch"),
    )
    save_total_limit: int | None = key(None, "Checkpoints kept, 2 or more; all when not given.", basic=True)
    keep_every: int = key(0, "Also keep every checkpoint whose step is a multiple of this; 0 is off.", low=0)
    save_format: str = key(
        "hf",
        "Layout of the weights written: hf, paddle; hf_fused has all experts of a layer in one tensor; hf_transformers "
        "is what transformers saves of ERNIE-4.5-VL, whose releases differ (hf).",
        choices=("hf", "paddle", "hf_fused", "hf_transformers"),
        basic=True,
    )
    overwrite_output_dir: bool = key(False, "Start anew although output_dir holds a run; False resumes it.")
    resume_from_checkpoint: str | None = key(
        None, "Resume from this one; the newest whole one when not given.", path="one"
    )
    override_resume: bool = key(False, "Resume although keys that decide the result have changed.")
    extend_run: bool = key(
        False,
        "Go on to a larger max_steps or num_train_epochs although the learning rate so far was that of a shorter run. "
        "Not needed where the rate does not depend on them.",
    )
    load_best_model_at_end: bool = key(False, "End with the best evaluated weights instead of the last.")
    metric_for_best_model: str | None = key(None, "What best means: loss when not given.")
    greater_is_better: bool | None = key(None, "Whether more of it is better; by the metric when not given.")
    verify: str = key(
        "auto",
        "How a checkpoint is checked before use; auto hashes it all below 20 GB.",
        choices=("auto", "full", "size"),
    )
    probe_tokens: int = key(64, "Tokens of the probe that resume and export must reproduce.", low=0)
    ignore_load_lr_and_optim: bool = key(False, "Resume the weights alone.")
    ignore_save_lr_and_optim: bool = key(False, "Save the weights alone: smaller, cannot resume exactly.")
    unified_checkpoint_config: tuple[str, ...] = key(
        (),
        "async_save writes behind training. remove_master_weight leaves the fp32 weights out; master_weight_compatible "
        "makes them from the 16-bit ones where they are missing: neither resumes bit for bit.",
        choices=("async_save", "remove_master_weight", "master_weight_compatible", "enable_all_options"),
        idle=IGNORED_WORDS["unified_checkpoint_config"],
    )
    ckpt_quant_stage: str = key(
        "O0",
        "Store the optimiser's moments whole (O0), in 8 (O1) or 4 bit (O2); smaller, and a resume is close, not exact.",
        choices=("O0", "O1", "O2"),
    )
    save_on_each_node: bool = key(
        False, "Where nodes share no disk: checkpoints on every node's own, not on the first one's alone."
    )
    disable_ckpt_quant: bool = key(False, "Store them whole, whatever ckpt_quant_stage says.")
    ignore_data_skip: bool = key(False, "Resume at the first sample.", later="resuming elsewhere in the data")
    skip_data_intervals: object | None = key(
        None, "Global steps whose data is passed over.", later="resuming elsewhere in the data"
    )
