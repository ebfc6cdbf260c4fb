"""The slices of ranks that `erniekit rehearse --rank` runs for real."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from erniekit.config import load
from erniekit.devices import pick
from erniekit.parallel.layout import Layout
from erniekit.recipes.rehearsal import built_for, one_step, prepare
from erniekit.rehearse.recorded_group import opened
from support.small_shape import EXPERTS

TOKENS = 64


def test_routers_of_all_ranks_choose_alike_so_that_slices_add_up_to_what_one_rank_computes(tmp_path: Path) -> None:
    """Else ranks with half of the experts each would have more rows together than one with all, or fewer."""
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    keys = dict(
        model_name_or_path=tmp_path, train_dataset_path="none.jsonl", max_seq_len=TOKENS, compute_type="fp32",
        device="cpu", moe_group="ep", fine_tuning="Full",
    )  # fmt: skip
    cfg = load([f"{key}={value}" for key, value in keys.items()], "train")
    rows = []
    for rank in range(2):
        job = prepare(cfg, Layout(dp=2, experts="data"), tmp_path, micro_batches=1)
        with opened(rank, 2):
            ready = built_for(job, rank, pick("cpu"))
            (bank,) = ready.built.engine.model.layers[1].mlp.banks()
            bank.experts.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[0]))
            one_step(ready, 1)
            assert torch.isfinite(bank.router.weight).all()
    assert len(rows) == 2
    assert sum(rows) == 2 * TOKENS * EXPERTS["moe_k"]
