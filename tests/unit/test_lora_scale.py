"""One set of rules for LoRA's scale, which keys, settings in memory and adapter files follow."""

from __future__ import annotations

import pytest

from erniekit.config import load
from erniekit.lora.settings import LoRASettings
from erniekit.lora_scale import alpha_of, scale_of
from erniekit.recipes.adapters import settings_of

KEYS = {  # words -> alpha, scale, how much faster B learns
    (): (16, 2.0, 1.0),
    ("lora_rank=32",): (64, 2.0, 1.0),
    ("lora_rank=32", "lora_alpha=8"): (8, 0.25, 1.0),
    ("lora_rank=16", "rslora=True"): (4, 1.0, 1.0),
    ("lora_rank=16", "rslora=True", "lora_alpha=8"): (8, 2.0, 1.0),
    ("lora_rank=16", "rslora_plus=True"): (4, 1.0, 4.0),
    ("lora_rank=16", "rslora_plus=True", "lora_alpha=99", "lora_plus_scale=2"): (4, 1.0, 4.0),
}


@pytest.mark.parametrize("words", KEYS, ids=" ".join)
def test_alpha_and_scale_follow_erniekits_rules(words: tuple[str, ...]) -> None:
    settings = settings_of(load(["fine_tuning=LoRA", *words], "train"))
    assert (settings.alpha, settings.scaling, settings.lora_plus_scale) == KEYS[words]


def test_without_an_alpha_settings_take_the_one_of_the_key_that_is_not_given() -> None:
    for rank, rslora in ((8, False), (16, True)):
        lora = load(["fine_tuning=LoRA", f"lora_rank={rank}", f"rslora={rslora}"], "train").lora
        assert LoRASettings.resolve(rank, rslora=rslora).alpha == lora.lora_alpha


@pytest.mark.parametrize("rslora", [False, True])
def test_an_alpha_made_for_a_scale_gives_that_scale(rslora: bool) -> None:
    for rank in (1, 3, 8, 64):
        assert scale_of(alpha_of(0.75, rank, rslora), rank, rslora) == pytest.approx(0.75, rel=1e-15)
