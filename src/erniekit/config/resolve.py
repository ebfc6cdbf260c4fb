"""Values that follow from other values: every rule in the order it applies. Called by config.load.

A rule looks at a `View` and returns notes; it edits nothing. What it changes is seen by the rules after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from erniekit.config.note import Note
from erniekit.config.rules import adapters, batch, frozen, kind, layout, optimiser, order, schedule, stages, streaming
from erniekit.config.sources import Sources
from erniekit.config.view import Rule, View

RULES: tuple[Rule, ...] = (
    kind.pre_training_files_train_pt,
    kind.pre_training_trains_every_weight,
    kind.patterns_choose_weights,
    kind.neftune_is_a_number,
    kind.scratch_means_no_weights,
    kind.erniekit_documents_see_each_other,
    stages.score_heads_train_every_weight,
    kind.lora_value_means_fine_tuning,
    kind.fine_tuning_decides_lora,
    kind.script_flags_choose_compute_type,
    kind.compute_type_decides_formats,
    kind.fp8_brings_its_optimiser,
    kind.fp8_is_set_once,
    kind.no_cuda_means_cpu,
    kind.train_command_trains,
    layout.degree_below_one_is_one,
    layout.one_sharding_stage,
    layout.sharding_has_a_degree,
    layout.sep_is_context_parallel,
    layout.sequence_parallel_needs_tp,
    layout.pipeline_keys_need_a_pipeline,
    layout.islands_are_devices_with_a_pipeline_across,
    layout.schedule_fits_the_stages,
    layout.cuts_are_even_or_rising_bounds,
    layout.experts_have_a_group,
    layout.expert_degrees_fit_their_group,
    layout.server_follows_tensor_parallel,
    layout.recompute_moe_keeps_attention,
    layout.inputs_are_offloaded_with_recompute,
    batch.training_files_agree,
    batch.evaluation_files_agree,
    batch.buckets_are_a_mode_or_lengths,
    order.mixtures_change_at_steps,
    order.a_curriculum_orders_rows,
    batch.prompt_fits_sequence,
    batch.script_batch_size_counts,
    batch.batch_size_sets_per_device,
    batch.global_batch_gives_accumulation,
    batch.accumulation_is_positive,
    batch.global_batch_follows,
    layout.interleaved_micro_batches_divide,
    optimiser.moments_have_one_name,
    optimiser.masters_are_of_16_bit_weights,
    optimiser.backward_updates_one_micro_batch,
    optimiser.muon_is_for_whole_weights,
    stages.rslora_plus_is_three_keys,
    stages.alpha_follows_rank,
    frozen.compute_type_decides_the_base,
    frozen.a_base_is_written_with_its_products,
    frozen.a_packed_base_is_of_adapters,
    frozen.products_fit_the_base,
    adapters.dora_is_of_plain_weights,
    adapters.pissa_starts_new_adapters,
    stages.adapters_go_where_the_command_takes_them,
    stages.an_adapters_export_goes_into_its_folder,
    stages.loss_type_decides_reference,
    stages.beta_is_above_zero,
    stages.kto_scores_the_end,
    stages.a_teacher_is_of_sft,
    stages.score_heads_are_spread_over_data,
    stages.answers_are_generated_from_plain_weights,
    stages.preference_training_has_no_dropout,
    stages.benchmark_only_trains,
    stages.vision_keys_follow,
    stages.target_frames_turn_fps_off,
    stages.fewest_frames_are_below_most,
    stages.shares_of_modalities_need_text,
    schedule.lr_scheduler_is_an_old_name,
    schedule.wsd_says_how_long,
    schedule.a_run_has_steps,
    schedule.schedule_spans_the_run,
    schedule.warmup_steps_beat_ratio,
    schedule.warmup_fits_the_run,
    schedule.min_lr_is_below_learning_rate,
    schedule.evaluation_needs_a_file,
    schedule.evaluation_has_steps,
    schedule.evaluate_often_enough,
    schedule.best_model_needs_evaluation,
    schedule.metric_says_which_is_better,
    schedule.keep_at_least_two,
    schedule.all_options_are_two,
    schedule.quantised_states_can_be_disabled,
    optimiser.compressed_states_are_saved_as_they_are,
    schedule.saves_happen_within_the_run,
    streaming.streams_have_no_known_end,
    stages.keys_of_another_stage,
)


def resolve(values: Mapping[str, Any], sources: Sources, command: str) -> tuple[dict[str, Any], list[Note]]:
    """The values after every rule, and every note in the order it was made."""
    now, notes = dict(values), []
    for rule in RULES:
        made = list(rule(View(now, sources, command)))
        now = {**now, **{n.key: n.new for n in made}}
        notes += made
    return now, notes
