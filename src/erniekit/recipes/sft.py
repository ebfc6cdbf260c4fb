"""Supervised fine-tuning, full or LoRA. Registered in recipes/__init__.py; all of it is in stage.py and fit.py."""

from __future__ import annotations

from erniekit.recipes.stage import Stage

STAGE = Stage()
