"""Supervised fine-tuning, full or LoRA. Registered in recipes/__init__.py; all of it is in stage.py and training.py."""

from __future__ import annotations

from erniekit.recipes.stage import TrainingStage

STAGE = TrainingStage()
