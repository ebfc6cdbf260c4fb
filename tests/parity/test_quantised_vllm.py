"""What vLLM's CPU build makes of a quantised folder: its greedy tokens are ours, for the kinds that it serves there.

It has no kernels for quantised experts on x86: those are for a card.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import write_model
from erniekit.demo import tiny
from erniekit.quant_schemes import QUANT_RECIPES
from parity.test_quantised_transformers import our_logits, our_rounded_logits, quantised
from support.vllm_cpu import greedy

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("vllm")]

PROMPTS = [[5, 6, 7, 8], [100, 200, 300], list(range(50, 90))]
NEW = 8
# Kind -> how far below our best logit, in standard deviations of them, their choice may lie. It computes in bf16: an
# activation may then fall to the next of int8's or fp8's values. Seen: 0.026, 0.096 and 0.21.
SERVED = {"w4a16": 0.05, "w8a8": 0.15, "fp8_dynamic": 0.3}
# Kind -> a word of vLLM's reason.
ON_CARDS_ONLY = {"w8a16": "WNA16", "fp8_static": "static_scaled_fp8_quant", "mxfp4": "MXFP4", "nf4": "bitsandbytes"}


@pytest.fixture(params=["ernie4_5", "llama"])
def source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In bf16."""
    monkeypatch.setitem(tiny.SHAPE, "head_dim", 32)  # the smallest its CPU attention has
    folder = tiny.make_tiny_model(tmp_path / "source", family=request.param)
    model = ModelFolder(folder).build(torch.bfloat16)
    write_model(folder, model.config, model.state_dict().__getitem__)
    return folder


def test_a_cpu_says_what_we_say_or_why_it_does_not(source: Path, tmp_path: Path) -> None:
    kinds = [*SERVED, *ON_CARDS_ONLY]
    folders = {kind: quantised(source, tmp_path / kind, kind) for kind in kinds}
    answers = dict(zip(kinds, greedy(list(folders.values()), PROMPTS, NEW, "bfloat16")))
    for kind, word in ON_CARDS_ONLY.items():
        assert word in answers[kind].get("error", "")
    for kind, allowed in SERVED.items():
        assert "error" not in answers[kind], answers[kind]
        equal = plain = 0
        for prompt, said in zip(PROMPTS, answers[kind]["tokens"]):
            ids, at = torch.tensor(prompt + said), torch.tensor(said)[:, None]
            if kind == "w4a16":
                whole = our_logits(folders[kind], ids)
            else:
                whole = our_rounded_logits(folders[kind], QUANT_RECIPES[kind], ids)
            ours = whole[len(prompt) - 1 : -1]  # at each place with theirs before it
            assert ((ours.max(-1).values - ours.gather(1, at)[:, 0]) / ours.std()).max() < allowed, kind
            equal += int((ours.argmax(-1) == at[:, 0]).sum())
            plain += int((our_logits(source, ids)[len(prompt) - 1 : -1].argmax(-1) == at[:, 0]).sum())
        assert equal >= 0.8 * NEW * len(PROMPTS)
        if kind == "w4a16":  # 8 bits hardly change a choice
            assert equal > plain, "and it is not the plain model that answered"
