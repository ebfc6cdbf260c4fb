"""Compat: what `compat: erniekit` repeats of the old toolkit, one named flag for each behaviour. No torch in here.

Rules and recipes read `cfg.compat.<behaviour>`; nothing else compares the key. docs/compat.md lists the same
differences for users, and a test compares both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields


def behaviour(reason: str, *rows: str) -> bool:
    """A flag that only `compat: erniekit` sets. reason: what the old toolkit does. rows: of docs/compat.md's table."""
    made: bool = field(default=False, metadata={"reason": reason, "rows": rows})
    return made


@dataclass(frozen=True)
class Compat:
    # data
    erniekit_rows: bool = behaviour(
        "Rows are read and assembled as its readers did, faults included (the `compat` argument in data/).",
        "end of an answer inside a conversation",
        "alpaca",
        "empty system text",
        "white space",
        "DPO rows",
        "rows with pictures",
    )
    erniekit_order: bool = behaviour(
        "Samples are drawn, shuffled twice and packed by its own rules, so that micro-batches are the recorded ones.",
        "order and packs",
        "packs of pictures",
    )
    ignores_bad_rows: bool = behaviour("No share of bad rows stops a run.", "bad rows")
    shuffled_eval_pairs: bool = behaviour(
        "Preference pairs for evaluation are shuffled again each time and packed as in training.", "DPO evaluation"
    )
    rows_of_one_length: bool = behaviour(
        "Every row is padded to max_seq_len: its router losses read the padding.", "padding"
    )
    positions_span_rows: bool = behaviour("Positions run through a row, over the documents in it.", "positions")
    no_document_masks: bool = behaviour(
        "Documents of a pre-training row attend to each other, unless use_global_causal_attn is set otherwise.",
        "documents of a pre-training row",
    )
    # loss
    mean_of_micro_batch_means: bool = behaviour(
        "A step's loss is the mean of its micro-batches' means, whatever their numbers of trained tokens.",
        "loss of an accumulated step",
    )
    eval_mean_of_batch_means: bool = behaviour(
        "An evaluation's loss is the mean of its batches' means.", "loss of an evaluation"
    )
    dpo_batch_means: bool = behaviour(
        "DPO's SFT term and metrics are means over a micro-batch before they are means over the step.", "DPO means"
    )
    # optimiser
    learning_rate_one_step_late: bool = behaviour(
        "The first update runs at scheduler step 0, which is rate 0 under warm-up.", "first step"
    )
    lr_scheduler_in_pretraining_only: bool = behaviour(
        "SFT and DPO do not read lr_scheduler, the old name of lr_scheduler_type.", "`lr_scheduler` in SFT"
    )
    moments_round_to_nearest: bool = behaviour(
        "16-bit moments are rounded to the nearest value, which loses small changes.", "16-bit moments"
    )
    # fp8
    fp8_as_recorded: bool = behaviour(
        "FP8 training rotates the inputs of its linears, and takes 488 for the highest number of e4m3, which is 448.",
        "FP8 training",
    )
    # adapters
    shared_lora_a: bool = behaviour("The parts of a fused linear share one A.", "LoRA on fused layers")
    # experts
    router_losses_per_micro_batch: bool = behaviour(
        "Router losses count whole in every micro-batch, as a mean over all its positions, padding too.",
        "router losses",
    )
    padding_attends_evenly: bool = behaviour(
        "Padding attends to its whole row, which the router losses see.", "padding"
    )
    unused_router_bias_is_dropped: bool = behaviour(
        "With moe_use_aux_free: False saved models lack the router's bias.", "router bias that is switched off"
    )
    router_bias_moves_in_pretraining_only: bool = behaviour(
        "Fine-tuning never moves the router's bias, even where its update rate is given.",
        "router bias in fine-tuning",
    )


PLAIN = Compat()
ERNIEKIT = Compat(**{f.name: True for f in fields(Compat)})
COMPAT = {"": PLAIN, "erniekit": ERNIEKIT}  # by the value of the key `compat`
