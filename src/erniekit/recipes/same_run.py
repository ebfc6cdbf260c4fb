"""Every rank must be of one and the same run: settings are compared when the ranks have met, then data, base and steps
before anything is built. What may differ from node to node (paths, logs) is compared by content or not at all.

Called by run_plan.py and training.py. Without it, nodes with another learning rate train on, and ranks with other
numbers of steps wait for each other for ever.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from erniekit.config import RunConfig
from erniekit.config.flat import KEYS
from erniekit.data import sealed
from erniekit.errors import ConfigError
from erniekit.log import warn
from erniekit.parallel.mesh import World
from erniekit.recipes.changes import ADAPTER, BASE, CONTENTS, content_letters
from erniekit.version import __version__

# A node's own: where it keeps its files (their contents are compared later), what it logs, how long it waits.
OWN_SECTIONS = ("launch", "export", "serve")
OWN_KEYS = (
    "model_name_or_path", "download_hub", "tokenizer_name", "lora_path", "vision_model_name_or_path",
    "train_dataset_path", "eval_dataset_path", "text_dataset_path", "offline_dataset_path", "input_dir",
    "data_filelist", "data_weights", "cache_dir", "dataset_num_proc", "dataloader_num_workers", "prefetch_factor",
    "media_num_proc", "media_timeout", "media_check",
    "max_bad_fraction", "output_dir", "resume_from_checkpoint", "device", "no_cuda", "memory_limit", "gc_interval",
    "hang_soft_s", "hang_hard_s", "preempt_grace_s", "verify", "save_total_limit", "keep_every", "logging_dir",
    "report_to", "run_name", "disable_tqdm", "wandb_api_key", "wandb_http_proxy",
)  # fmt: skip
SHOWN = 4  # keys that differ; a longer list does not help
_WIDE = 60  # characters of a value


def check_settings(cfg: RunConfig, world: World) -> None:
    """Keys and versions, as soon as the ranks have met: some decide which collectives come next."""
    if world.size == 1:
        return
    shared = [name for name, k in KEYS.items() if k.section not in OWN_SECTIONS and name not in OWN_KEYS]
    values = cfg.to_dict()["values"]
    settings = {name: values[name] for name in shared}
    resume = str(cfg.checkpoint.resume_from_checkpoint or "").lower()
    settings["resume_from_checkpoint given"] = resume not in ("", "true", "false", "none")
    settings["erniekit version"] = __version__
    _compare(settings, world)
    versions = world.gather((platform.node(), torch.__version__))
    if len({version for _, version in versions}) > 1:
        named = ", ".join(f"{version} on {host}" for host, version in sorted(set(versions)))
        warn(f"the nodes have different versions of torch ({named}): their kernels may round differently")


def check_content(cfg: RunConfig, promise: Mapping[str, Any], more: Mapping[str, Any], base: str, world: World) -> None:
    """What the keys came to: data, base, steps. Before the model is built and before the first step."""
    if world.size == 1:
        return
    _compare({**promise, BASE: base, ADAPTER: _adapters(cfg.lora.lora_path), **more}, world)


def _adapters(folders: Sequence[str]) -> list[str]:
    """What a run begins with, by the contents of its adapter files."""
    out = []
    for folder in (Path(folder).expanduser() for folder in folders):
        files = sorted(p for p in folder.glob("*") if p.name.endswith((".safetensors", "config.json")))
        settings = json.dumps({path.name: sealed.record(path) for path in files})
        out.append(hashlib.blake2b(settings.encode(), digest_size=16).hexdigest())
    return out


def _compare(settings: Mapping[str, Any], world: World) -> None:
    """A digest first; the values are sent only when it differs. Every rank raises the same message."""
    encoded = {name: json.dumps(value, sort_keys=True, default=str) for name, value in settings.items()}
    digest = hashlib.blake2b(json.dumps(encoded, sort_keys=True).encode(), digest_size=16).hexdigest()
    if len(set(world.gather(digest))) == 1:
        return
    everyone: list[tuple[str, dict[str, str]]] = world.gather((platform.node(), encoded))
    names = list(dict.fromkeys(name for _, there in everyone for name in there))
    differing = [name for name in names if len({there.get(name) for _, there in everyone}) > 1]
    lines = [_described(name, everyone, world.leaders) for name in differing[:SHOWN]]
    if len(differing) > SHOWN:
        lines.append(f"and {len(differing) - SHOWN} more")
    raise ConfigError(
        "the ranks of this run do not train the same: their settings, data or model differ",
        where="; ".join(lines),
        fix="start every node with the same keys, data, model and version of erniekit",
    )


def _described(name: str, everyone: Sequence[tuple[str, Mapping[str, str]]], leaders: Sequence[int]) -> str:
    """`learning_rate: 0.001 on node 0 (rank 0, host a), 0.002 on node 1 (rank 1, host b)`"""
    values = list(dict.fromkeys(there.get(name) for _, there in everyone))
    held = {value: [r for r, (_, there) in enumerate(everyone) if there.get(name) == value] for value in values}
    nodes = [[r for r in range(len(everyone)) if _node(r, leaders) == k] for k in range(len(leaders))]

    def ranks_named(ranks: list[int]) -> str:
        whole = [k for k, node in enumerate(nodes) if set(node) <= set(ranks)]
        if sum(len(nodes[k]) for k in whole) < len(ranks):  # ranks of one node differ
            return _listed("rank", ranks)
        hosts = ", ".join(dict.fromkeys(everyone[nodes[k][0]][0] for k in whole))
        return f"{_listed('node', whole)} ({_listed('rank', ranks)}, {hosts})"

    if name in CONTENTS:
        shown = content_letters(values)
    else:
        shown = {value: _shown(value, [v for v in values if v != value]) for value in values}
    return f"{name}: " + ", ".join(f"{shown[value]} on {ranks_named(ranks)}" for value, ranks in held.items())


def _shown(value: str | None, others: Iterable[str | None]) -> str:
    """A long value is cut to where it first differs from another."""
    if value is None:
        return "nothing"
    if len(value) <= _WIDE:
        return value
    same = min(_same_start(value, other or "") for other in others)
    first = max(0, same - 8)
    return ("..." if first else "") + value[first : first + _WIDE] + ("..." if first + _WIDE < len(value) else "")


def _same_start(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _node(rank: int, leaders: Sequence[int]) -> int:
    return sum(leader <= rank for leader in leaders) - 1


def _listed(what: str, numbers: Sequence[int]) -> str:
    """`ranks 0-3, 6`"""
    runs = []
    for _, group in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in group]
        runs.append(f"{members[0]}-{members[-1]}" if len(members) > 2 else ", ".join(map(str, members)))
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(runs)}"
