"""STAGES: the `stage` value -> the function that trains it. One line here adds a stage."""

from __future__ import annotations

from erniekit.registry import Registry

STAGES = Registry("stage", {"SFT": "erniekit.recipes.sft:train"})
