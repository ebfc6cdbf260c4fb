"""The cases of `erniekit bench --real`."""

from __future__ import annotations

import pytest

from erniekit.bench.real_cases import CASES, chosen, cut
from erniekit.errors import ConfigError


def test_unknown_cases_are_refused() -> None:
    with pytest.raises(ConfigError, match="no case 'stf'"):
        chosen(["stf"])
    assert [case.name for case in chosen([])] == list(CASES)


def test_experts_can_be_cut_to_some_layers() -> None:
    short = cut(CASES["lora"], 8)
    assert (short.model["num_hidden_layers"], short.model["moe_layer_end_index"], short.aim) == (8, 7, None)
    assert cut(CASES["vl-lora"], 8).model["moe_layer_end_index"] == [7, 7]
    assert cut(CASES["sft"], 8) is CASES["sft"]
