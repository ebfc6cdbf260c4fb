"""When to save, what to keep and how to resume. Read by the recipes, which set up checkpoint/."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key
from erniekit.config.ignored_keys import IGNORED_OPTIONS


@dataclass(frozen=True)
class CheckpointSection:
    save_steps: int = key(500, "Steps between checkpoints.", low=1, basic=True)
    save_minutes: float = key(
        15.0,
        "Also save when this many minutes have passed since the last checkpoint; 0 = off (as with save_strategy: no, "
        "unless this key is given). Such a checkpoint is removed when there are two newer ones.",
        low=0,
    )
    save_strategy: str = key(
        "steps",
        "When to save. no = only the final model, without optimiser states; "
        "ignore_save_lr_and_optim: False keeps them.",
        choices=("no", "steps", "epoch"),
    )
    save_total_limit: int | None = key(
        None, "Maximum number of checkpoints kept, at least 2; default: all.", basic=True
    )
    keep_every: int = key(0, "Also keep every checkpoint whose step is a multiple of this; 0 = off.", low=0)
    save_format: str = key(
        "hf",
        "Layout of the weights written: hf, paddle; hf_fused has all experts of a layer in one tensor; hf_transformers "
        "is what transformers saves of ERNIE-4.5-VL, whose releases differ (hf).",
        choices=("hf", "paddle", "hf_fused", "hf_transformers"),
        basic=True,
    )
    overwrite_output_dir: bool = key(False, "Start from step 0 even if output_dir holds a run; False = resume it.")
    resume_from_checkpoint: str | None = key(
        None, "Checkpoint to resume from; default: the newest complete one.", path="one"
    )
    override_resume: bool = key(False, "Resume even if keys that affect the result have changed.")
    extend_run: bool = key(
        False,
        "Continue to a larger max_steps or num_train_epochs even if the learning-rate schedule so far was that of a "
        "shorter run. Not needed for schedules that do not depend on the length.",
    )
    load_best_model_at_end: bool = key(
        False, "Keep the best checkpoint: the final model has its weights instead of the last step's."
    )
    metric_for_best_model: str | None = key(None, "Metric that selects the best checkpoint; default: loss.")
    greater_is_better: bool | None = key(None, "Whether a larger metric is better; default: by the metric.")
    verify: str = key(
        "auto",
        "How a checkpoint is checked before use; auto = hash every file below 20 GB.",
        choices=("auto", "full", "size"),
    )
    probe_tokens: int = key(64, "Tokens of the probe that resume and export must reproduce.", low=0)
    ignore_load_lr_and_optim: bool = key(False, "Resume only the weights.")
    ignore_save_lr_and_optim: bool = key(False, "Save only the weights: smaller, cannot resume exactly.")
    unified_checkpoint_config: tuple[str, ...] = key(
        (),
        "async_save writes while training continues. remove_master_weight leaves out the fp32 weights; "
        "master_weight_compatible restores missing ones from the 16-bit weights: neither resumes bit for bit.",
        choices=("async_save", "remove_master_weight", "master_weight_compatible", "enable_all_options"),
        idle=IGNORED_OPTIONS["unified_checkpoint_config"],
    )
    ckpt_quant_stage: str = key(
        "O0",
        "Store the optimiser's moments in full (O0), in 8 bit (O1) or 4 bit (O2): smaller, but a resume is not exact.",
        choices=("O0", "O1", "O2"),
    )
    save_on_each_node: bool = key(False, "Save on every node's own disk; for nodes that share none.")
    disable_ckpt_quant: bool = key(False, "Store moments in full, regardless of ckpt_quant_stage.")
    ignore_data_skip: bool = key(
        False, "Resume from the first sample of the data.", not_yet="resuming elsewhere in the data"
    )
    skip_data_intervals: object | None = key(
        None, "Global steps whose data is skipped.", not_yet="resuming elsewhere in the data"
    )
