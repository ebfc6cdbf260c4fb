"""The words of the key `islands`."""

from __future__ import annotations

import pytest

from erniekit.config import load
from erniekit.devices.islands import GIB, DeviceIsland, island_of_rank, parse_islands
from erniekit.errors import ConfigError

PIPELINE = ["pipeline_parallel_degree=2", "gradient_accumulation_steps=4"]


def test_an_island_is_a_device_and_ranks_and_maybe_speed_and_memory() -> None:
    found = parse_islands(("gpu:8:3.5:79G", "[iluvatar_gpu:8]", "cpu:2:1"))
    assert found == (
        DeviceIsland("gpu", 8, 3.5, 79 * GIB),
        DeviceIsland("iluvatar_gpu", 8),
        DeviceIsland("cpu", 2, 1.0),
    )
    assert [island_of_rank(found, rank).device for rank in (0, 7, 8, 15, 16)] == [
        "gpu", "gpu", "iluvatar_gpu", "iluvatar_gpu", "cpu"
    ]  # fmt: skip
    assert island_of_rank(found, 18) is None


@pytest.mark.parametrize("word", ["gpu", "gpu:0", "gpu:8:0", "gpu:8:fast", "gpu:8:1:79", "gpu:8:1:79G:x", ":8"])
def test_what_is_no_island_is_refused_with_the_form(word: str) -> None:
    with pytest.raises(ConfigError, match="is not an island") as error:
        parse_islands((word,))
    assert "DEVICE:RANKS" in (error.value.fix or "")


def test_a_device_that_nobody_knows_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="no device 'iluvatar_card'") as error:
        parse_islands(("iluvatar_card:8",))
    assert "did you mean iluvatar" in (error.value.fix or "")


def test_a_recipe_with_islands_needs_a_pipeline_across_them() -> None:
    cfg = load(["islands=gpu:1,cpu:1", *PIPELINE])
    assert cfg.parallel.islands == ("gpu:1", "cpu:1")
    with pytest.raises(ConfigError, match="pipeline_parallel_degree is 1"):
        load(["islands=gpu:1,cpu:1"])
    with pytest.raises(ConfigError, match="through the host"):
        load(["islands=gpu:1,cpu:1", *PIPELINE, "pp_runner=torch"])
