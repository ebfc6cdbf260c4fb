from __future__ import annotations

import pytest

from erniekit.errors import ConfigError
from erniekit.lora.settings import LoRASettings


@pytest.mark.parametrize(
    ("keys", "alpha", "scaling", "plus"),
    [
        ({"rank": 8}, 16, 2.0, 1.0),
        ({"rank": 32, "alpha": 8}, 8, 0.25, 1.0),
        ({"rank": 16, "rslora": True}, 4, 1.0, 1.0),
        ({"rank": 16, "rslora": True, "alpha": 8}, 8, 2.0, 1.0),
        ({"rank": 16, "rslora_plus": True}, 4, 1.0, 4.0),
        ({"rank": 16, "rslora_plus": True, "alpha": 99, "lora_plus_scale": 2.0}, 4, 1.0, 4.0),
    ],
)
def test_alpha_and_scale_follow_erniekits_rules(keys: dict, alpha: float, scaling: float, plus: float) -> None:
    settings = LoRASettings.resolve(**keys)
    assert (settings.alpha, settings.scaling, settings.lora_plus_scale) == (alpha, scaling, plus)


def test_no_targets_means_all_of_the_family() -> None:
    assert LoRASettings.resolve(targets=()).targets is None
    assert LoRASettings.resolve(targets=["q_proj"]).targets == ("q_proj",)


@pytest.mark.parametrize("keys", [{"rank": 0}, {"alpha": 0}, {"alpha": -2}])
def test_impossible_numbers_are_refused_by_key(keys: dict) -> None:
    with pytest.raises(ConfigError) as error:
        LoRASettings.resolve(**keys)
    assert error.value.where == f"lora_{next(iter(keys))}"
