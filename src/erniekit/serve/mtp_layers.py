"""Whether a server proposes tokens by the model's MTP layer, and a folder that is read without layers it does not use.

Used by loaded_models.py and recipes/tasks.py.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

from erniekit.api_load import Found
from erniekit.config.sections.serve import ServeSection
from erniekit.log import warn
from erniekit.models.config import DecoderConfig


def proposed_tokens(s: ServeSection, config: DecoderConfig) -> int:
    """As requested; none, and one line why, where that is not possible."""
    wanted = s.num_speculative_tokens
    if not wanted:
        return 0
    if not config.mtp_layers:
        warn(f"num_speculative_tokens={wanted} has no effect: the model's files hold no MTP layer")
        return 0
    if s.decoding == "exact":
        warn(f"num_speculative_tokens={wanted} has no effect: decoding: exact computes one token after the other")
        return 0
    return wanted


def with_mtp_layers(found: Found, count: int) -> Found:
    """The same files with the first `count` of the model's MTP layers; others are not read."""
    folder = copy(found.weights)
    count = min(count, folder.config.mtp_layers)
    if count == folder.config.mtp_layers:
        return found
    before = {name for entry in folder.entries() for name in entry.theirs}
    folder.config = replace(folder.config, mtp_layers=count)
    unused = before - {name for entry in folder.entries() for name in entry.theirs}
    folder.files = {name: file for name, file in folder.files.items() if name not in unused}
    return replace(found, weights=folder)
