"""What stages with a score head share. recipes/reward.py and classify.py derive from it."""

from __future__ import annotations

import torch

from erniekit.checkpoint.probe import Probe, probe_from
from erniekit.config import RunConfig
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import IGNORE, Batch
from erniekit.recipes.built import Built
from erniekit.recipes.stage import TrainingStage


class ScoringStage(TrainingStage):
    chats = False
    perplexity = False
    labels_are_tokens = False

    def probe(self, cfg: RunConfig, built: Built, first: Batch, tokenizer: Tokenizer) -> Probe:
        """Labels of the probe are classes: the first one, at the last token."""
        made = probe_from(first, cfg.checkpoint.probe_tokens)
        labels = torch.full_like(made.labels, IGNORE)
        labels[:, -1] = 0
        return Probe(made.ids, labels)
