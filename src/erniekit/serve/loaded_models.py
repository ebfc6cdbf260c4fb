"""The models a server offers, by name, loaded into the embedded engine. Used by server.py and chat_server.py.

A base and its adapters are one set of weights: each adapter is a tree of modules around the base's own tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from erniekit.api_load import DTYPES, Found, find_model
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.config import RunConfig
from erniekit.config.sections.serve import ServeSection
from erniekit.data.vision.proof_file import check as check_proof
from erniekit.data.vision.proof_file import warn_of_other_rules
from erniekit.devices import pick
from erniekit.devices.base import Device
from erniekit.errors import CheckpointError, ConfigError, DeviceError
from erniekit.export.vision_rules import vision_rules
from erniekit.log import warn
from erniekit.lora.frozen_base import packing
from erniekit.models.config import DecoderConfig
from erniekit.models.score_head import refuse as refuse_score_head
from erniekit.printable import counted
from erniekit.serve.engines.embedded import EmbeddedEngine, EngineLimits
from erniekit.serve.engines.paged import PagedCache, bytes_per_block
from erniekit.serve.folder import choose_folder, stop_ids
from erniekit.serve.mtp_layers import proposed_tokens, with_mtp_layers
from erniekit.serve.request_parsing import ServedModel
from erniekit.serve.runtime_adapters import RuntimeAdapters
from erniekit.serve.shared_weights import second_tree
from erniekit.serve.vision_prompt import MOST, VisionSettings
from erniekit.weight_kinds import BF16, SERVED

USUAL_LENGTH = 2048  # of a prompt and its answer


@dataclass(frozen=True)
class ModelEntry:
    """A model's name and its folders."""

    name: str
    found: Found

    @property
    def folder(self) -> Path:
        return self.found.adapter or self.found.weights.path


def find_models(cfg: RunConfig) -> list[ModelEntry]:
    """The models the keys name; the first is the default. An adapter brings its base with it."""
    folder, below = choose_folder(cfg)
    first = find_model(folder, below, cfg.model.download_hub, cfg.lora.override_base, cfg.checkpoint.verify)
    refuse_score_head(first.weights.config.labels, cfg.command, first.describe())
    base = Found(first.weights)
    named = cfg.serve.served_model_name
    out = [ModelEntry(named or _name(first.adapter or first.weights.path), first)]
    for entry in cfg.serve.lora_modules:
        name, equals, path = entry.partition("=")
        if not equals:
            name, path = _name(Path(entry)), entry
        name = name.strip()
        if name in ("", "default"):  # `default` is what clients call the first model by
            raise ConfigError(
                f"an adapter cannot be called {name!r}: {entry}",
                where="lora_modules",
                fix="give it another name: name=DIR, other=DIR",
            )
        out.append(ModelEntry(name, _adapter_at(path.strip(), first.weights, cfg.lora.override_base)))
    if first.adapter is not None:
        out.append(ModelEntry(_free(_name(base.weights.path), out), base))
    double = next((o.name for k, o in enumerate(out) if o.name in {p.name for p in out[:k]}), None)
    if double is not None:
        raise ConfigError(
            f"two models would be called {double!r}", where="lora_modules", fix="name them: name=DIR, other=DIR"
        )
    return out


def _adapter_at(path: str, base: ModelFolder, override_base: bool, where: str = "lora_modules") -> Found:
    """base: opened, and compared with its digests where that is to be done."""
    try:
        found = find_model(path, base.path, override_base=override_base, verify=base.verify, base_verify="size")
    except CheckpointError as error:
        if error.where != "model_name_or_path":  # the key that most names of models come from
            raise
        fix = "give the folder with adapter_config.json: name=DIR"
        raise ConfigError(f"adapter {path!r} is not a folder here", where=where, fix=fix) from None
    if found.adapter is None:
        raise ConfigError(f"{path} holds no adapter", where=where, fix="give the folder with adapter_config.json")
    refuse_score_head(found.weights.config.labels, "server", found.describe())
    return found


def _name(path: Path) -> str:
    """The folder's own name; a checkpoint or an export is called after the run it is in."""
    path = path.expanduser().resolve()
    plain = path.parent.name if re.fullmatch(r"checkpoint-\d+|export", path.name) else path.name
    return plain or "model"


def _free(name: str, taken: list[ModelEntry]) -> str:
    return f"{name}-base" if name in {entry.name for entry in taken} else name


@dataclass(frozen=True)
class LoadedModels:
    engine: EmbeddedEngine
    models: dict[str, ServedModel]
    about: str
    adapters: RuntimeAdapters | None = None


def load_models(cfg: RunConfig, entries: list[ModelEntry]) -> LoadedModels:
    """Load every model and start the engine."""
    hardware = pick(cfg.train.device, cfg.train.no_cuda)
    device = hardware.handle
    proposals = proposed_tokens(cfg.serve, entries[0].found.weights.config)
    mtp = min(1, proposals)  # layers; further tokens come from the same one
    entries = [replace(entry, found=with_mtp_layers(entry.found, mtp)) for entry in entries]
    weights = entries[0].found.weights
    compute_type = cfg.precision.compute_type if cfg.compute_type_given else None
    # CPUs without 16-bit units compute bf16 many times slower than fp32.
    dtype = DTYPES.get(compute_type or "") or (None if hardware.fast_bf16 else torch.float32)
    kept = SERVED.get(cfg.serve.quantization or "", BF16)
    notes: list[str] = []
    base = weights.build(dtype, device, packing(weights, kept, device, notes.append)).eval()
    if entries[0].found.adapter is None:
        entries[0].found.check(base)
    trees: dict[str, nn.Module] = {}
    for entry in entries:
        trees[entry.name] = base if entry.found.adapter is None else with_adapter(base, entry.found)
    s = cfg.serve
    kind = next(base.parameters()).dtype
    longest = context_length(s, weights.config, kind, hardware)
    limits = EngineLimits(
        s.max_num_seqs,
        s.max_num_batched_tokens,
        longest,
        s.max_queue,
        s.vision_cache_bytes,
        exact=s.decoding == "exact",
        proposals=proposals,
    )
    share, given = s.gpu_memory_utilization, s.max_model_len is not None
    cache = make_cache(weights.config, limits, s.block_size, kind, hardware, share, given)
    vision = vision_settings(cfg, entries[0]) if weights.config.vision is not None else None
    if vision is not None and vision.enabled:
        for entry in entries:
            warn_of_other_rules(entry.found.trained, vision.rules)
            proved = check_proof(entry.found.trained, entry.found.tokenizer(cfg.model.tokenizer_name))
            if proved is not None and proved.stage is not None:
                warn(f"{entry.name}: {proved.line()}")
    models = {entry.name: _served(entry, longest, cfg.model.tokenizer_name, entries, vision) for entry in entries}
    dtype_name = str(kind).removeprefix("torch.")
    about = f"{dtype_name} on {device}, {limits.sequences} at once, a cache of {cache.blocks * cache.size} tokens"
    if proposals:
        notes.append(f"{counted(proposals, 'token')} proposed at a time by the MTP layer")
    fast = hardware if s.decoding == "auto" and hardware.records_graphs and hardware.triton else None
    engine = EmbeddedEngine(trees, cache, limits, fast)

    def open_adapter(name: str, key: str, folder: Path) -> tuple[nn.Module, ServedModel]:
        found = with_mtp_layers(_adapter_at(str(folder), weights, cfg.lora.override_base, "lora_path"), mtp)
        served = _served(ModelEntry(name, found), longest, cfg.model.tokenizer_name, entries, vision)
        served.prepare_tokenizer()
        return with_adapter(base, found), replace(served, key=key)

    adapters = RuntimeAdapters(engine, models, s.lora_dirs, open_adapter)
    return LoadedModels(engine, models, "; ".join([*notes, about]), adapters)


def with_adapter(base: nn.Module, found: Found) -> nn.Module:
    """The base's own tensors with an adapter added: only the adapter takes memory."""
    tree = second_tree(base, found)
    found.check(tree)
    return tree


def context_length(s: ServeSection, config: DecoderConfig, dtype: torch.dtype, device: Device) -> int:
    """As requested; else the model's own, or what fits one sequence's cache in memory, with a note."""
    if s.max_model_len is not None:
        if s.max_model_len > config.max_positions:
            warn(f"context: {config.max_positions:,} tokens, the model's own; max_model_len is {s.max_model_len:,}")
        return min(s.max_model_len, config.max_positions)
    free = device.usable_memory(s.gpu_memory_utilization)
    fits = free // bytes_per_block(config, s.block_size, dtype, config.mtp_layers > 0) * s.block_size
    if fits >= config.max_positions or fits == 0:  # none at all is make_cache's to refuse
        return config.max_positions
    warn(
        f"context: {fits:,} of the model's {config.max_positions:,} tokens; {free / 2**30:.1f} GiB of memory for the "
        "cache hold no more (max_model_len sets it)"
    )
    return fits


def make_cache(
    config: DecoderConfig,
    limits: EngineLimits,
    size: int,
    dtype: torch.dtype,
    device: Device,
    share: float,
    given: bool = True,
) -> PagedCache:
    """Blocks for every sequence at full length, or what memory allows. given: the length was set; else a host's
    memory is taken for one sequence of that length, or for each of a usual one, and waiting is not reported."""
    each = bytes_per_block(config, size, dtype, limits.proposals > 0)
    least = -(-limits.length // size)
    wanted = limits.sequences * least
    if not given and device.handle.type == "cpu":
        wanted = max(least, limits.sequences * -(-min(limits.length, USUAL_LENGTH) // size))
    blocks = min(wanted, device.usable_memory(share) // each)
    if blocks < least:
        raise DeviceError(
            f"one sequence of {limits.length} tokens needs {least * each / 2**30:.1f} GiB of cache, which is not free",
            where="max_model_len",
            fix="lower max_model_len",
        )
    if blocks < wanted and given:
        full = f"{counted(limits.sequences, 'sequence')} (max_num_seqs) of {limits.length} tokens (max_model_len)"
        warn(f"the cache holds {blocks / wanted:.0%} of {full}; long ones will wait for each other")
    return PagedCache(config, blocks, size, dtype, device.handle, limits.proposals > 0)


def vision_settings(cfg: RunConfig, entry: ModelEntry) -> VisionSettings:
    """Of a vision-language model: the keys of training and the folder's own sizes, the limits of a request."""
    given = cfg.serve.limit_mm_per_prompt or {}
    for name, most in given.items():
        if name not in MOST or isinstance(most, bool) or not isinstance(most, int) or most < 0:
            raise ConfigError(
                f"limit_mm_per_prompt has {name}: {most}",
                where=cfg.origin("limit_mm_per_prompt"),
                fix="{image: N, video: N}, whole numbers",
            )
    enabled = cfg.serve.enable_mm or not cfg.given("enable_mm")
    return VisionSettings(vision_rules(cfg, entry.found.weights.path), {**MOST, **given}, enabled)


def _served(
    entry: ModelEntry,
    longest: int,
    tokenizer_name: str | None,
    entries: list[ModelEntry],
    vision: VisionSettings | None,
) -> ServedModel:
    found = entry.found
    vocab = found.weights.config.vocab_size
    tokenizer = found.tokenizer(tokenizer_name)
    ends = frozenset({tokenizer.eos_id, tokenizer.end_id, *stop_ids(found)})
    parent = next((o.name for o in entries if o.found.adapter is None), None) if found.adapter else None
    return ServedModel(entry.name, tokenizer, ends, longest, vocab, str(entry.folder), parent, vision)


def adapter_folders(entries: list[ModelEntry]) -> Mapping[str, Path]:
    return {entry.name: entry.found.adapter for entry in entries if entry.found.adapter is not None}
