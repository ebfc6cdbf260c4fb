"""The model an adapter sits on: where it is, and whether it is the one the adapter was trained on.

Called by export, by api_load.py (chat, server, eval, `load`) and by recipes/adapters.py (lora_path).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from erniekit.checkpoint import identity as identities
from erniekit.checkpoint import probe as probes
from erniekit.checkpoint.hub import expanded, looks_like_id, resolve_model
from erniekit.checkpoint.probe import Answer, Probe, Verdict
from erniekit.errors import CheckpointError
from erniekit.files.listed import has_file
from erniekit.log import warn
from erniekit.lora import paddle_files, peft_files
from erniekit.lora.adapter_config import config_fields
from erniekit.model_contract import packed_layers, spread
from erniekit.weight_kinds import BF16

MAX_NAME = 4096  # characters of a path
OTHERWISE = "override_base: True uses this base all the same"


def find_base(adapter: Path, given: str | Path | None, hub: str | None = None) -> Path:
    """The model an adapter sits on: as given, else the path in its config, relative to here or to the adapter."""
    if given is not None:
        return _whole(resolve_model(str(given), hub))
    config = adapter / (peft_files.CONFIG if has_file(adapter, peft_files.CONFIG) else paddle_files.CONFIG)
    name = config_fields(config).get("base_model_name_or_path")
    if not isinstance(name, str) or not name or len(name) > MAX_NAME or not name.isprintable():
        raise CheckpointError(
            "the adapter does not name the model it was trained on",
            where=str(config),
            fix=f"name it: lora_path={adapter} model_name_or_path=DIR, or erniekit.load(..., base=DIR)",
        )
    for place in (expanded(name), adapter / name):
        if (place / "config.json").is_file():
            return place
    try:
        return _whole(resolve_model(name, hub))
    except CheckpointError as error:
        way = f"name it: lora_path={adapter} model_name_or_path=DIR, or erniekit.load(..., base=DIR)"
        raise CheckpointError(
            f"the model this adapter was trained on is not here: {name}",
            where=str(config),
            fix=f"{way}; if it is a hub id, {error.fix}" if looks_like_id(name) else way,
        ) from None


def _whole(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} holds an adapter, where the base of one is needed",
            where="model_name_or_path",
            fix="name the model below it; give adapters as lora_path=ONE,OTHER",
        )
    return folder


def stored_probe(adapter: Path) -> Probe | None:
    """None for one taken over packed frozen weights: the stored ones do not repeat it."""
    probe = probes.load(adapter)
    return None if probe is None or probe.setting.endswith(probes.PACKED_BASE) else probe


def trained_over(adapter: Path) -> str | None:
    """The frozen_base that an adapter was trained over, by its probe; None where its folder has none."""
    probe = probes.load(adapter)
    if probe is None:
        return None
    if not probe.setting.endswith(probes.PACKED_BASE):
        return BF16
    return probe.setting.removesuffix(probes.PACKED_BASE).split("/", 4)[-1]  # device, dtype, torch, layout, base


def same_base(adapter: Path, base: Path) -> bool | None:
    """Whether these are the weights the adapter was trained on; None where its folder has no record."""
    recorded = identities.read_base(adapter)
    return None if recorded is None else recorded == identities.model_identity(base)


def check_files(adapter: Path, base: Path, override: bool) -> None:
    """Refuses another base than the adapter's by its files only, where no model is loaded that could be run."""
    if same_base(adapter, base) is False and not override:
        raise _another(adapter, base, f"{base} has other weights")


def check_answers(
    adapter: Path, base: Path, answer: Answer, dtype: torch.dtype, config: Any, device: torch.device | None = None
) -> None:
    """Refuses base + adapter (`answer`) unless it gives the logits stored with the adapter; by the base's files where
    none are stored. The same model in other files (another layout, another dtype) passes with a warning.

    config: the base's."""
    same, probe = same_base(adapter, base), stored_probe(adapter)
    if probe is None:
        if same is False:
            raise _another(adapter, base, f"{base} has other weights")
        return
    verdict = _verdict(answer, probe, dtype, config, device)
    if verdict is None or not verdict.max_difference <= verdict.tolerance:  # NaN is refused, too
        reason = (
            "it does not take the tokens or pictures of the adapter's probe" if verdict is None else verdict.failed()
        )
        exact = dtype == torch.float32 and "float32" in probe.setting
        if same and config.moe is not None and not exact and verdict is not None:
            # Rounding tips a router's choice between two nearly equal experts, and the logits move by far more.
            warn(f"{adapter} on {base}: {reason}; the weights are those it was trained on")
            return
        if same:
            raise CheckpointError(
                f"the adapter does not answer as it did when it was saved: {reason}",
                where=str(adapter),
                fix=f"its files were changed: use another checkpoint of the run; {OTHERWISE}",
            )
        raise _another(adapter, base, f"on {base}, {reason}")
    if same is False:
        warn(
            f"{base} is not the folder {adapter} was trained on ({trained_on(adapter)}), yet answers alike: logits "
            f"within {verdict.max_difference:.1e}, allowed {verdict.tolerance:.1e}"
        )


def check_model(adapter: Path, base: Path, model: nn.Module) -> None:
    """check_answers of a model in memory, its adapter attached."""
    if packed_layers(model):  # logits of rounded weights differ: compare the files
        check_files(adapter, base, override=False)
        return
    first = next(model.parameters())

    @torch.no_grad()
    def answer(ids: torch.Tensor, **more: Any) -> torch.Tensor:
        logits: torch.Tensor = model(ids.to(first.device), **more)
        return logits

    check_answers(adapter, base, answer, first.dtype, spread(model).config, first.device)


def _verdict(
    answer: Answer, probe: Probe, dtype: torch.dtype, config: Any, device: torch.device | None
) -> Verdict | None:
    """None where the model cannot be run on the probe: its vocabulary or its tower is another."""
    assert probe.rows is not None
    if not probe.fits(config):
        return None
    logits = answer(probe.ids, **probe.more(device))
    if logits.shape[-1] != probe.rows.shape[-1]:
        return None
    return probes.compare(logits, probe, probes.allowed(probe, dtype))


def trained_on(adapter: Path) -> str:
    """The base as the adapter's own files name it, for messages."""
    for name in (peft_files.CONFIG, paddle_files.CONFIG):
        if has_file(adapter, name):
            name_or_path = str(config_fields(adapter / name).get("base_model_name_or_path") or "not named")
            return "".join(c if c.isprintable() else "?" for c in name_or_path[:200])
    return "not named"


def _another(adapter: Path, base: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the adapter was trained on another model ({trained_on(adapter)}): {reason}",
        where=str(adapter),
        fix=f"name the model it was trained on: lora_path={adapter} model_name_or_path=DIR; {OTHERWISE}",
    )
