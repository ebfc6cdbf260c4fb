from __future__ import annotations

import pytest

from erniekit.errors import ConfigError
from erniekit.lora.settings import LoRASettings


def test_no_targets_means_all_of_the_family() -> None:
    assert LoRASettings.resolve(targets=()).targets is None
    assert LoRASettings.resolve(targets=["q_proj"]).targets == ("q_proj",)


@pytest.mark.parametrize("keys", [{"rank": 0}, {"alpha": 0}, {"alpha": -2}])
def test_impossible_numbers_are_refused_by_key(keys: dict) -> None:
    with pytest.raises(ConfigError) as error:
        LoRASettings.resolve(**keys)
    assert error.value.where == f"lora_{next(iter(keys))}"
