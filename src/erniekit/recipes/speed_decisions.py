"""What makes steps fast on the device at hand: whether rows are joined to a few lengths, whether layers are compiled
and replayed, how few of them are computed again, and which kernels a user requests (what the others are,
kernels/selection.py decides).

Called by run_plan.py: `for_device` once device, ranks and model are known, `for_lengths` once the data is; each answer
is a note with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator

from erniekit.config import RunConfig
from erniekit.config.note import Note
from erniekit.devices.base import Device
from erniekit.errors import ConfigError
from erniekit.kernels import selection
from erniekit.kernels.available import why_no_triton
from erniekit.kernels.selection import ALIGNED
from erniekit.models.config import DecoderConfig
from erniekit.models.costs import token_flops, weight_bytes
from erniekit.parallel.layout import Layout
from erniekit.parallel.mesh import World
from erniekit.planner.cards import MEASURED
from erniekit.planner.timing import AS_WRITTEN
from erniekit.recipes.memory_decisions import (
    base_of,
    gib,
    host_layers,
    kept_bytes,
    layers_to_recompute,
    least_bytes,
    limit_of,
    rows_in_fp8,
    tell_too_low,
    trained_share,
    vision_bytes,
)
from erniekit.recipes.other_models import forwards, other_model_bytes
from erniekit.registry import nearest

USUAL_MFU = 0.4
LAUNCHES = MEASURED.layer_launch  # seconds that the host needs for a compiled dense layer of a step, both ways
AS_WRITTEN_LAUNCHES = AS_WRITTEN * LAUNCHES  # for one as it is written: 2.8 to 3.6 ms, by the machine
EXPERT_LAUNCHES = MEASURED.expert_launch  # for one with experts: 277 to 308 ms for 28 of them
TWO_BANKS_LAUNCHES = 13e-3  # of one with a bank for text and one for pictures
# Replayed layers with experts are 0 to 3 % faster compiled, for a start that takes 12 s longer and 4 s for each further
# length of rows (21B, one H200); launched dense ones -1 to 1 %, for 9 s (0.3B): worth it from so many seconds of
# training on.
WORTH_COMPILING = 900.0
FILLED = 0.99  # of compiled rows that are padded further it is faster to leave both the padding and the compiler
SHORT_RUN = "a run of minutes ends sooner without it; compile: True makes steps 0 to 3 % faster"
REPLAYED_STAGES = ("SFT", "PT", "VL-SFT", "DPO")  # of DPO the policy's passes
MANY_LENGTHS = "rows of many lengths; length_buckets: auto makes them few, packing: True of one"


def for_device(cfg: RunConfig, device: Device, world: World, model: DecoderConfig) -> RunConfig:
    cfg = cfg.derive(*_buckets(cfg, device, world, model))
    cfg = cfg.derive(*_recompute(cfg, device, model))
    return cfg.derive(*host_layers(cfg, device, world, model))


def for_lengths(
    cfg: RunConfig, device: Device, world: World, model: DecoderConfig, tokens: float, steps: int
) -> RunConfig:
    """What depends on how long micro-batches and the run are. tokens: of a usual one, padding too; steps: -1 where they
    are not known."""
    cfg = cfg.derive(*_graph(cfg, device, world, model, tokens))
    return cfg.derive(*_compile(cfg, device, world, model, tokens, steps))


def force_kernels(cfg: RunConfig) -> None:
    """The key `kernels`, before a model is built."""
    wanted: dict[str, str] = {}
    where = f"kernels: {', '.join(cfg.model.kernels)}"
    for entry in cfg.model.kernels:
        operation, name = (word.strip() for word in entry.partition("=")[::2])
        if wanted.setdefault(operation, name) != name:
            both = f"{wanted[operation]} and {name}"
            raise ConfigError(f"two implementations of {operation}: {both}", where=where, fix="leave one of them out")
    try:
        selection.force(wanted)
    except ValueError as problem:
        unknown = [operation for operation in wanted if operation not in selection.OPERATIONS]
        near = nearest(unknown[0], list(selection.OPERATIONS)) if unknown else []
        raise ConfigError(
            str(problem),
            where=where,
            fix=f"did you mean {near[0]}={wanted[unknown[0]]}?"
            if near
            else "write operation=implementation, e.g. kernels: [experts=plain]; doctor prints what is there",
        ) from None


def _buckets(cfg: RunConfig, device: Device, world: World, model: DecoderConfig) -> Iterator[Note]:
    requested = cfg.data.length_buckets
    if requested == ("off",):
        return
    why_not = why_rows_stay(cfg, world.layout, model)
    compiled = _compiles(cfg, device)
    replayed = cfg.model.cuda_graph and _why_not_replayed_as_written(cfg, device, model) is None
    if why_not is None and requested == ("auto",) and not compiled and not replayed:
        why_not = "layers are neither compiled nor replayed"
    if why_not is not None:
        yield Note("length_buckets", requested, ("off",), why_not, quiet=requested == ("auto",))
    elif requested == ("auto",):
        yield Note("length_buckets", requested, ("on",), "rows of many lengths become rows of a few", quiet=True)


def why_rows_stay(cfg: RunConfig, layout: Layout, model: DecoderConfig) -> str | None:
    """Why rows are laid out one by one, each batch as long as its longest; None: they may be joined."""
    if cfg.data.packing or cfg.train.stage not in ("SFT", "DPO"):
        return "rows are of one length"
    if cfg.data.streaming:
        return "rows are read while the run trains: which lengths they have is not known"
    if cfg.compat.rows_of_one_length:
        return "compat: erniekit pads every row to max_seq_len"
    if model.vision is not None:
        return "rows of a vision-language model are not joined"
    if model.moe is not None and (model.moe.capacity is not None or model.moe.most is not None):
        return "how many tokens an expert takes depends on padding (moe_capacity)"
    if layout.pp > 1 and cfg.parallel.pp_runner == "torch":
        return "pp_runner: torch takes one shape"
    return None


def _why_not_compiled(cfg: RunConfig, device: Device) -> str | None:
    """Whatever rows there are."""
    if not device.triton:
        return "no Triton for this device"
    if problem := why_no_triton():
        return problem
    if cfg.parallel.pp_schedule == "zero_bubble":
        return "pp_schedule: zero_bubble computes a layer's two gradients apart, which a compiled one does not"
    if cfg.precision.compute_type == "fp32":
        return "fp32"
    return None


def _of_many_lengths(cfg: RunConfig) -> bool:
    """Whether rows are as long as they are. Where layers are compiled or replayed all the same they are filled up to
    max_seq_len (datasets.py)."""
    return cfg.train.stage == "SFT" and not cfg.data.packing and not cfg.data.joins_rows


def _compiles(cfg: RunConfig, device: Device) -> bool:
    """As set, or where it could be."""
    return _why_not_compiled(cfg, device) is None if cfg.model.compile is None else cfg.model.compile


def _compile(
    cfg: RunConfig, device: Device, world: World, model: DecoderConfig, tokens: float, steps: int
) -> Iterator[Note]:
    """Layers as they are written start without torch's compiler. Replayed dense ones are as fast; those with experts,
    and dense ones whose kernels are launched one by one, gain a little by it, which a short run does not get back."""
    if cfg.model.compile is not None:
        return
    why_not = _why_not_compiled(cfg, device)
    if why_not is None and _why_not_replayed_as_written(cfg, device, model) is None:
        soon = _ends_soon(cfg, device, model, tokens, steps)
        if cfg.model.cuda_graph and model.moe is None:
            why_not = "replayed layers are as fast without it, and the run starts sooner"
        elif cfg.model.cuda_graph:
            why_not = SHORT_RUN if soon and _fits_twice(cfg, device, model, tokens) else None
        elif _launched_as_written(cfg, device, world, model, tokens):
            full = tokens / (cfg.train.per_device_train_batch_size * cfg.data.max_seq_len)
            if soon:
                why_not = SHORT_RUN
            elif full < FILLED and not cfg.data.joins_rows:
                why_not = f"rows are {full:.1%} full, and compiled ones would be padded to max_seq_len"
    if why_not is None and _of_many_lengths(cfg) and not cfg.model.cuda_graph:
        why_not = MANY_LENGTHS
    lengths = "a few lengths" if cfg.data.joins_rows else "one length"
    reason = why_not or f"rows of {lengths}; write compile: False to leave it"
    yield Note("compile", None, why_not is None, reason, quiet=why_not is not None)


def _ends_soon(cfg: RunConfig, device: Device, model: DecoderConfig, tokens: float, steps: int) -> bool:
    micro_batches = steps * max(1, cfg.train.gradient_accumulation_steps)
    return 0 < micro_batches * _micro_batch_seconds(cfg, device, model, tokens) < WORTH_COMPILING


def _launched_as_written(cfg: RunConfig, device: Device, world: World, model: DecoderConfig, tokens: float) -> bool:
    """Whether layers that are not replayed keep the device at work without being compiled. Measured of dense ones that
    are whole on their rank, trained and computed once."""
    if model.moe is not None or cfg.memory.recompute or cfg.lora.lora or collectives_inside(world.layout):
        return False
    return bool(device.peak_flops) and not launches_show(cfg, device, model, tokens)


def _fits_twice(cfg: RunConfig, device: Device, model: DecoderConfig, tokens: float) -> bool:
    """Whether there is room for a step's activations twice, which recording layers with experts takes: without it they
    are launched."""
    limit = limit_of(cfg, device)
    return not limit or _computed_again(cfg, model, 2 * tokens, limit) == 0


def _graph(cfg: RunConfig, device: Device, world: World, model: DecoderConfig, tokens: float) -> Iterator[Note]:
    requested, why_not = cfg.model.cuda_graph, None
    if not device.records_graphs:
        why_not = "this kind of device replays no graphs"
    elif problem := collectives_inside(world.layout):
        why_not = problem
    elif cfg.optim.update_in_backward:
        why_not = "a graph's gradients are all complete at once, and update_in_backward lets each go"
    elif requested is None and model.mtp_layers:
        why_not = "with layers that predict further tokens only with cuda_graph: True"
    elif cfg.model.compile is False and requested is None:
        why_not = "with compile: False only with cuda_graph: True"
    elif requested is None and _of_many_lengths(cfg) and not cfg.model.compile and not cfg.compat.rows_of_one_length:
        why_not = MANY_LENGTHS
    elif not _compiles(cfg, device) and (problem := _why_not_replayed_as_written(cfg, device, model)):
        why_not = f"layers are not compiled, and {problem}"
    elif cfg.memory.recompute or (model.moe is not None and cfg.moe.use_recompute_moe):
        why_not = "layers are computed again in the backward pass"
    elif model.moe is not None and (model.hidden_size % ALIGNED or model.moe.width % ALIGNED):
        why_not = "the host waits for the routing: no grouped product takes experts of these widths"
    elif cfg.train.stage not in REPLAYED_STAGES:
        why_not = f"not with stage: {cfg.train.stage}"
    elif requested is None and cfg.train.stage == "DPO" and model.moe is not None:
        why_not = "of DPO with experts only with cuda_graph: True"
    elif requested is None and not worth_replaying(cfg, device, model, tokens):
        why_not = "the device needs longer for a micro-batch than the host for its launches"
    if requested is None:
        reason = why_not or "a micro-batch takes the host longer than the device; write cuda_graph: False to leave it"
        yield Note("cuda_graph", None, why_not is None, reason, quiet=why_not is not None)
    elif requested and why_not:
        yield Note("cuda_graph", True, False, why_not)


def _why_not_replayed_as_written(cfg: RunConfig, device: Device, model: DecoderConfig) -> str | None:
    """Why layers cannot be recorded without being compiled; None: all their steps are kernels."""
    if not device.triton or why_no_triton():
        return why_no_triton() or "no Triton for this device"
    if model.vision is not None:
        return "steps of layers with two banks of experts are torch's"
    if cfg.precision.compute_type in ("fp32", "fp8"):
        return f"kernels of layers are for 16 bits, not compute_type: {cfg.precision.compute_type}"
    return None


def collectives_inside(layout: Layout) -> str | None:
    """Why layers of this layout cannot be recorded; copies of a model that only add their gradients up can."""
    if layout.pp > 1:
        return "a pipeline has several micro-batches under way, of which a graph holds one"
    if not layout.whole_layers:
        return "ranks exchange tensors inside the layers"
    return None


def worth_replaying(cfg: RunConfig, device: Device, model: DecoderConfig, tokens: float) -> bool:
    """tokens: of a micro-batch. Replayed packs of pairs are attended to with room for documents as long as the pack,
    which takes 7 % longer: worth it only where compiled layers would wait for the host (27 for 45 ms at 1K, 24 for 50
    at 2K, 73 for 68 at 8K: 0.3B, one H200)."""
    if cfg.train.stage == "DPO" and _micro_batch_seconds(cfg, device, model, tokens) > LAUNCHES * model.num_layers:
        return False
    return launches_show(cfg, device, model, tokens)


def launches_show(cfg: RunConfig, device: Device, model: DecoderConfig, tokens: float) -> bool:
    """tokens: of a micro-batch."""
    if model.moe is None:
        as_written = not cfg.model.compile and _why_not_replayed_as_written(cfg, device, model) is None
        launches = AS_WRITTEN_LAUNCHES if as_written else LAUNCHES
    else:
        launches = EXPERT_LAUNCHES if model.vision is None else TWO_BANKS_LAUNCHES
    return _micro_batch_seconds(cfg, device, model, tokens) < launches * model.num_layers


def _micro_batch_seconds(cfg: RunConfig, device: Device, model: DecoderConfig, tokens: float) -> float:
    """On the device, about, with the passes of a live reference; infinite where its speed is not known."""
    peak = max(device.peak_flops.values(), default=0.0)
    # Of experts a token meets few, and frozen ones have no gradient.
    work = token_flops(model, model.moe is not None and cfg.lora.lora) * (1 + forwards(cfg) / 3)
    return work * tokens / (USUAL_MFU * peak) if peak else float("inf")


def _recompute(cfg: RunConfig, device: Device, model: DecoderConfig) -> Iterator[Note]:
    """On one rank; on several, spread_recompute.py has decided before."""
    m = cfg.memory
    if not m.recompute or m.recompute_granularity != "auto":
        return
    yield Note("recompute_granularity", "auto", "full", "whole layers, as few as needed")
    limit = limit_of(cfg, device)
    if not limit:
        return
    count = _computed_again(cfg, model, cfg.train.per_device_train_batch_size * cfg.data.max_seq_len, limit)
    kept = tuple(range(count, model.num_layers))
    reason = f"{count} of {model.num_layers} layers are computed again to stay in {gib(limit)} GiB"
    tell_too_low(cfg, weight_bytes(model, base_of(cfg)) + other_model_bytes(cfg, model), least_bytes(cfg, model), limit)
    yield Note("no_recompute_layers", m.no_recompute_layers, kept, reason)


def _computed_again(cfg: RunConfig, model: DecoderConfig, tokens: float, limit: float) -> int:
    """Layers that must be, for a micro-batch of so many tokens to fit so many bytes."""
    return layers_to_recompute(
        model,
        int(tokens),
        limit - other_model_bytes(cfg, model),
        trained_share(cfg, model),
        cfg.memory.loss_subbatch_seqlen,
        *kept_bytes(cfg, model),
        base_of(cfg),
        cfg.lora.lora_rank if cfg.lora.lora else 0,
        vision_bytes(cfg, model, again=True),
        rows_in_fp8(cfg),
    )
