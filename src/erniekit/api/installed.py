"""`erniekit.plugins`: what installed packages add to erniekit, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.data.formats import CLASS_FORMATS, FORMATS, PREFERENCE_FORMATS, UNPAIRED_FORMATS
from erniekit.devices import INSTALLED as DEVICES
from erniekit.devices import device_entry
from erniekit.errors import ErnieKitError
from erniekit.loss_table import PAIR_LOSSES, TOKEN_LOSSES
from erniekit.models import MODELS
from erniekit.registry import installed_plugins
from erniekit.track import TRACKERS
from erniekit.weight_kinds import WEIGHT_KINDS

TABLES = (
    MODELS, FORMATS, PREFERENCE_FORMATS, UNPAIRED_FORMATS, CLASS_FORMATS, TOKEN_LOSSES, PAIR_LOSSES, TRACKERS, DEVICES,
    WEIGHT_KINDS,
)  # fmt: skip


@dataclass(frozen=True)
class InstalledPlugin:
    """One entry point."""

    kind: str  # model, dataset type, token loss, preference loss, tracker, device
    name: str
    distribution: str  # name and version of the package that brings it
    problem: str = ""  # why it is not used; empty: it works


def plugins() -> list[InstalledPlugin]:
    """Every entry point of the groups erniekit.models, .formats, .preference_formats, .unpaired_formats,
    .class_formats, .losses, .preference_losses, .trackers, .devices and .weight_kinds, loaded to see whether it
    works."""
    out = []
    for table in TABLES:
        usable = table.installed()
        for plugin in installed_plugins(table.group):
            problem = ""
            if plugin.name in set(table):
                problem = "the name is built in"
            elif plugin.name not in usable:
                problem = "another package brings the same name"
            else:
                try:
                    device_entry(plugin.name).load() if table is DEVICES else table.get(plugin.name)
                except ErnieKitError as error:
                    problem = error.what
            out.append(InstalledPlugin(table.kind, plugin.name, plugin.distribution, problem))
    return out
