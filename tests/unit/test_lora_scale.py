"""One set of rules for LoRA's scale: keys, settings in memory and adapter files give the same number."""

from __future__ import annotations

import pytest

from erniekit.config import load
from erniekit.lora.settings import LoRASettings
from erniekit.lora_scale import alpha_of, scale_of

KEYS = {
    "nothing given": [],
    "rank": ["lora_rank=32"],
    "alpha": ["lora_rank=32", "lora_alpha=8"],
    "rslora": ["lora_rank=16", "rslora=True"],
    "rslora and alpha": ["lora_rank=16", "rslora=True", "lora_alpha=8"],
    "rslora_plus": ["lora_rank=16", "rslora_plus=True", "lora_alpha=99"],
}


@pytest.mark.parametrize("case", KEYS)
def test_config_and_settings_resolve_the_keys_alike(case: str) -> None:
    words = KEYS[case]
    typed = dict(word.split("=") for word in words)
    lora = load(["fine_tuning=LoRA", *words], "train").lora
    settings = LoRASettings.resolve(
        int(typed.get("lora_rank", 8)),
        int(typed.get("lora_alpha", -1)),
        rslora="rslora" in typed,
        rslora_plus="rslora_plus" in typed,
    )
    assert (lora.lora_rank, lora.lora_alpha, lora.rslora) == (settings.rank, settings.alpha, settings.rslora)
    assert lora.lora_plus_scale == settings.lora_plus_scale


@pytest.mark.parametrize("rslora", [False, True])
def test_an_alpha_made_for_a_scale_gives_that_scale(rslora: bool) -> None:
    for rank in (1, 3, 8, 64):
        assert scale_of(alpha_of(0.75, rank, rslora), rank, rslora) == pytest.approx(0.75, rel=1e-15)
