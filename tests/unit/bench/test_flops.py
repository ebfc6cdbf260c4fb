"""The count MFU is made of, against the arithmetic done by hand."""

from __future__ import annotations

import pytest

from erniekit.bench.data import make_steps
from erniekit.bench.flops import useful_flops
from erniekit.bench.workloads import WORKLOADS, Rows
from erniekit.models import MODELS
from erniekit.models.config import DecoderConfig


def config(name: str) -> DecoderConfig:
    raw = dict(WORKLOADS[name].model)
    read: DecoderConfig = MODELS.get(raw["model_type"]).read_config(raw, "hf", False, "")
    return read


def test_the_llama_shape_at_38k_tokens_is_66_percent_of_the_peak() -> None:
    (step,) = make_steps(WORKLOADS["F1"].rows, 100, 1, 0)
    flops = useful_flops(config("F1"), [step.batch], lora=False, live_reference=False)
    layer = 4 * 5120**2 + 3 * 5120 * 13824
    by_hand = 6 * (8 * layer + 32000 * 5120) * 16384 + 7 * 8 * 5120 * 4 * 4096**2
    assert flops == pytest.approx(by_hand, rel=1e-3)  # norms, and the four places that train nothing
    assert flops / (16384 / 38e3) / 989.4e12 == pytest.approx(0.667, abs=0.005)


def test_a_token_meets_six_of_64_experts_and_a_frozen_weight_no_gradient() -> None:
    (step,) = make_steps(Rows(1, 1024), 100, 1, 0)
    full, lora = (useful_flops(config("C1-85"), [step.batch], lora, False) for lora in (False, True))
    attention, router, expert = 2560 * 128 * 2 * (20 + 4), 64 * 2560, 3 * 2560 * 1536
    weights = 28 * attention + 3 * 2560 * 12288 + 27 * (router + (6 + 2) * expert) + 103424 * 2560
    by_hand = 6 * weights * 1024 + 7 * 28 * 20 * 128 * 1024**2
    assert full == pytest.approx(by_hand, rel=1e-3)
    assert lora / full == pytest.approx(4 / 6, abs=0.01)


def test_a_live_reference_is_a_third_more_in_full_training() -> None:
    (step,) = make_steps(Rows(1, 256), 100, 1, 0)
    alone, live = (useful_flops(config("A1"), [step.batch], False, ref) for ref in (False, True))
    assert live / alone == pytest.approx(8 / 6, abs=0.01)


def test_masked_labels_cost_no_head() -> None:
    some, none = (make_steps(Rows(1, 256, masked=m), 100, 1, 0)[0].batch for m in (0.5, 0.0))
    c = config("A1")
    saved = useful_flops(c, [none], False, False) - useful_flops(c, [some], False, False)
    assert saved == 6 * c.vocab_size * c.hidden_size * (none.num_label_tokens - some.num_label_tokens)
