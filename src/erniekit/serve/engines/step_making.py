"""Recorded steps for the models that an engine has, as large as memory allows, and the limits that follow from them.

Used by embedded.py, at its start and whenever its models change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from erniekit.devices.base import Device
from erniekit.log import warn
from erniekit.printable import counted
from erniekit.serve.engines.flat_layers import why_not
from erniekit.serve.engines.out_of_memory import is_out_of_memory, reason
from erniekit.serve.engines.paged import PagedCache
from erniekit.serve.engines.recorded import RecordedSteps
from erniekit.serve.engines.scheduling import EngineLimits


class StepMaker:
    """asked: limits of the engine where all sizes fit. device: None where steps are not recorded."""

    def __init__(self, cache: PagedCache, asked: EngineLimits, device: Device | None) -> None:
        self.cache, self.asked, self.device = cache, asked, device

    def make(self, models: Mapping[str, nn.Module]) -> RecordedSteps | None:
        """Nothing of them is recorded yet. None, and a line why, where the steps do not compute what a model does."""
        if self.device is None:
            return None
        for model in models.values():
            if (other := why_not(model)) is not None:
                warn(f"steps are not recorded, answers will be slow: {other}")
                return None
        asked = self.asked
        sizes = (asked.sequences, asked.tokens, asked.length, asked.burst, asked.proposals)
        return RecordedSteps(models, self.cache, self.device, *sizes, asked.memory_key)

    def make_or_warn(self, models: Mapping[str, nn.Module]) -> RecordedSteps | None:
        """None, too, where there is no memory for their inputs and for adapters side by side."""
        try:
            return self.make(models)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            warn(f"steps are not recorded, answers will be slow: {reason(error, self.asked.memory_key)}")
            return None

    def record(self, steps: RecordedSteps | None, least: EngineLimits | None = None) -> EngineLimits:
        """The limits that what was recorded has sizes for; an error where they are lower than `least`."""
        if steps is None:
            return self.asked
        steps.record_all()
        sequences, largest = min(self.asked.sequences, steps.batches[-1]), steps.chunks[-1]
        # Beside the tokens of prompts that a step may have, each sequence may have its last one there.
        if sequences + self.asked.tokens > largest:
            sequences = min(sequences, largest // 2)
        limits = replace(self.asked, sequences=sequences, tokens=min(self.asked.tokens, largest - sequences))
        if least is not None and (limits.sequences < least.sequences or limits.tokens < least.tokens):
            raise torch.OutOfMemoryError(f"no memory for recorded steps as large as before: {_of(limits, least)}")
        return limits

    def left_out(self, limits: EngineLimits) -> str:
        """For a note, where these are lower than asked for."""
        return (
            f"no memory to record the largest steps, they are left out: {_of(limits, self.asked)}; "
            f"a lower {self.asked.memory_key} leaves more memory"
        )


def _of(limits: EngineLimits, wanted: EngineLimits) -> str:
    return (
        f"{limits.sequences} of {counted(wanted.sequences, 'answer')} at once, "
        f"prompts in steps of {limits.tokens} of {wanted.tokens} tokens"
    )
