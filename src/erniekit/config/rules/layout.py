"""Rules on how a run is spread over devices, and on what is recomputed. The number of devices is not known here."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from erniekit.config.flat import DEGREES
from erniekit.config.note import Note
from erniekit.config.view import View
from erniekit.config.world import check_interleaving
from erniekit.devices.islands import parse_islands
from erniekit.errors import ConfigError
from erniekit.printable import counted
from erniekit.registry import nearest

_REST = -1  # of sharding_parallel_degree: all devices the other degrees leave; layout_of puts in the number


def degree_below_one_is_one(run: View) -> Iterator[Note]:
    for name in DEGREES:
        if run[name] < 1 and not (name == "sharding_parallel_degree" and run["sharding"]):
            yield from run.set(name, 1, "not spread", quiet=True)


def one_sharding_stage(run: View) -> tuple[Note, ...]:
    stages = [value for value in run["sharding"] if value != "offload"]
    if len(set(stages)) > 1:
        raise ConfigError(
            f"sharding names {' and '.join(stages)}",
            where=run.origin("sharding"),
            fix=f"name one: {max(stages)} does what the lower ones do, too",
        )
    return ()


def sharding_has_a_degree(run: View) -> Iterator[Note]:
    """As in ERNIEKit: only a stage takes all remaining devices; only a degree is stage1."""
    degree, values = run["sharding_parallel_degree"], run["sharding"]
    if values and degree == 1 and run.given("sharding_parallel_degree"):
        yield from run.remark("sharding", "without effect: sharding_parallel_degree is 1")
        return
    if values and degree <= 1:
        reason = "sharding is given: all devices that the other degrees leave"
        yield from run.set("sharding_parallel_degree", _REST, reason)
    if not values and degree > 1:
        yield from run.set("sharding", ("stage1",), f"sharding_parallel_degree is {degree}")
    elif values == ("offload",):
        yield from run.set("sharding", ("stage1", "offload"), "offload is of a stage")


def sep_is_context_parallel(run: View) -> Iterator[Note]:
    sep, context = run["sep_parallel_degree"], run["context_parallel_degree"]
    if sep > 1 and context > 1:
        raise ConfigError(
            f"sep_parallel_degree is {sep} and context_parallel_degree is {context}: both cut sequences",
            where=f"{run.origin('sep_parallel_degree')} and {run.origin('context_parallel_degree')}",
            fix="keep context_parallel_degree: the number of devices one sequence is cut over",
        )
    if sep > 1:
        yield from run.set("context_parallel_degree", sep, f"sep_parallel_degree is {sep}: one way to cut sequences")


def sequence_parallel_needs_tp(run: View) -> Iterator[Note]:
    if run["tensor_parallel_degree"] <= 1:
        yield from run.set("sequence_parallel", False, "tensor_parallel_degree is 1")


def pipeline_keys_need_a_pipeline(run: View) -> Iterator[Note]:
    if run["pipeline_parallel_degree"] > 1:
        return
    if run["virtual_pp_degree"] > 1:
        yield from run.set("virtual_pp_degree", 1, "pipeline_parallel_degree is 1")
    for name, default in (("pp_schedule", "auto"), ("pp_runner", "erniekit")):
        if run[name] != default:
            yield from run.remark(name, "without effect: pipeline_parallel_degree is 1")


def islands_are_devices_with_a_pipeline_across(run: View) -> Iterator[Note]:
    if not run["islands"]:
        return
    islands = parse_islands(run["islands"], run.origin("islands"))
    if len(islands) < 2:
        raise ConfigError(
            "islands names one kind of device: there is nothing to go across",
            where=run.origin("islands"),
            fix=f"leave it out (device: {islands[0].device} says the same), or name the others: "
            f"islands: [{run['islands'][0].strip(' []')}, npu:8]",
        )
    if run["pipeline_parallel_degree"] < len(islands):
        raise ConfigError(
            f"islands names {counted(len(islands), 'kind')} of device, and pipeline_parallel_degree is "
            f"{run['pipeline_parallel_degree']}",
            where=run.origin("islands"),
            fix=f"pipeline_parallel_degree: {len(islands)} or more: only a pipeline goes across them",
        )
    if run["pp_runner"] == "torch":
        raise ConfigError(
            "torch's schedules do not go through the host",
            where=f"{run.origin('islands')} and {run.origin('pp_runner')}",
            fix="leave pp_runner out",
        )
    if run["pp_seg_method"]:
        yield from run.remark("islands", "speeds without effect on the stages: pp_seg_method cuts the layers")


def schedule_fits_the_stages(run: View) -> Iterator[Note]:
    schedule, virtual = run["pp_schedule"], run["virtual_pp_degree"]
    if run["pipeline_parallel_degree"] == 1:
        return
    several = ("interleaved", "zero_bubble") if run["pp_runner"] == "torch" else ("interleaved",)
    if schedule in several and virtual == 1:
        raise ConfigError(
            f"pp_schedule {schedule} needs several stages a device; virtual_pp_degree is 1",
            where=run.origin("pp_schedule"),
            fix="virtual_pp_degree: 2, or pp_schedule: 1f1b",
        )
    if schedule in ("gpipe", "1f1b") and virtual > 1:
        yield from run.set("pp_schedule", "interleaved", f"virtual_pp_degree is {virtual}")


def cuts_are_even_or_rising_bounds(run: View) -> tuple[Note, ...]:
    values = [value.strip(" []") for value in run["pp_seg_method"]]
    if not values or (len(values) == 1 and (values[0] == "uniform" or values[0].startswith("layer:"))):
        return ()
    if len(values) > 1 and all(value.isdecimal() for value in values):
        bounds = [int(value) for value in values]
        if bounds[0] == 0 and all(a < b for a, b in pairwise(bounds)):
            return ()
        what = f"pp_seg_method is {','.join(values)}; expected bounds that rise from 0"
    else:
        what = f"pp_seg_method is {','.join(values)}; expected uniform, layer:Name or bounds"
    near = nearest(values[0], ["uniform", "layer:"])
    fix = f"did you mean {near[0]}?" if near else "e.g. [0,29,57]: two stages of a model of 54 layers"
    raise ConfigError(what, where=run.origin("pp_seg_method"), fix=fix)


def interleaved_micro_batches_divide(run: View) -> tuple[Note, ...]:
    """Where the accumulation comes from global_batch_size it is known, and checked, with the world."""
    steps = "gradient_accumulation_steps"
    if run["do_train"] and (run.given(steps) or not run.given("global_batch_size")):
        check_interleaving(run["pipeline_parallel_degree"], run["virtual_pp_degree"], run[steps], run.origin(steps))
    return ()


def experts_have_a_group(run: View) -> Iterator[Note]:
    """A degree or ERNIEKit's flag by itself means experts over data ranks."""
    group, degree = run["moe_group"], run["expert_parallel_degree"]
    if group not in ("dummy", "none"):
        return
    if run.given("moe_group") and degree > 1:
        yield from run.remark("expert_parallel_degree", f"without effect: moe_group is {group}")
    elif degree > 1:
        yield from run.set("moe_group", "ep", f"expert_parallel_degree is {degree}")
    elif run["use_expert_parallel"] and not run.given("moe_group"):
        yield from run.set("moe_group", "data", "use_expert_parallel is True")


def expert_degrees_fit_their_group(run: View) -> tuple[Note, ...]:
    group, tp = run["moe_group"], run["tensor_parallel_degree"]
    degree, inside = run["expert_parallel_degree"], run["expert_tensor_parallel_degree"]
    over_tp = group in ("mp", "tp", "model")
    if over_tp and degree > 1 and degree != tp:
        raise ConfigError(
            f"moe_group {group} deals experts to tensor_parallel_degree {tp} devices; "
            f"expert_parallel_degree is {degree}",
            where=run.origin("expert_parallel_degree"),
            fix=f"leave it out, or moe_group: ep for {degree} of the devices that read different data",
        )
    cut_over = 1 if over_tp or group in ("world", "all") else tp
    if inside > 1 and inside != cut_over:
        raise ConfigError(
            f"expert_tensor_parallel_degree is {inside}; with moe_group {group} and tensor_parallel_degree {tp} each "
            f"expert is cut over {cut_over}",
            where=run.origin("expert_tensor_parallel_degree"),
            fix="leave it out, or make tensor_parallel_degree the same with moe_group: ep or dummy",
        )
    return ()


def server_follows_tensor_parallel(run: View) -> Iterator[Note]:
    name, degree = "server_tp_degree", run["tensor_parallel_degree"]
    yield from run.set(name, degree, f"tensor_parallel_degree is {degree}", quiet=not run.given(name))


def recompute_moe_keeps_attention(run: View) -> Iterator[Note]:
    if run["use_recompute_moe"] and run["recompute_granularity"] == "full":
        yield from run.set("recompute_granularity", "full_attn", "use_recompute_moe is True")


def inputs_are_offloaded_with_recompute(run: View) -> Iterator[Note]:
    if run["offload_recompute_inputs"] and not run["recompute"]:
        yield from run.remark("offload_recompute_inputs", "without effect: recompute is False")
