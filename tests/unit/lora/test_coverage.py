from __future__ import annotations

from torch import nn

from erniekit.lora.coverage import coverage, coverage_table
from erniekit.lora.inject import inject, lora_state
from erniekit.lora.settings import LoRASettings


def test_full_coverage_counts_every_projection_and_parameter(ernie: nn.Module) -> None:
    inject(ernie, LoRASettings.resolve(rank=4), seed=1)
    attention, mlp, rest = coverage(ernie)
    assert (attention.num_adapted, attention.num_total) == (12, 12)
    assert (mlp.num_adapted, mlp.num_total) == (9, 9)
    assert attention.ranks == (4,)
    assert attention.trainable + mlp.trainable == sum(p.numel() for p in lora_state(ernie).values())
    base = attention.parameters + mlp.parameters + rest.parameters
    assert base == sum(p.numel() for p in ernie.parameters() if not p.requires_grad)


def test_what_is_not_adapted_is_named(ernie: nn.Module) -> None:
    inject(ernie, LoRASettings.resolve(targets=["q_proj", r"layers\.[01]\.mlp\.down_proj"]), seed=1)
    table = coverage_table(ernie)
    assert "down(2/3)" in table
    left_out = next(line for line in table.splitlines() if "not adapted" in line)
    assert left_out.split(": ")[1] == "k, v, o, gate, up, embeddings, norms"


def test_an_untied_head_shows_as_not_adapted(llama: nn.Module) -> None:
    inject(llama, LoRASettings.resolve(), seed=1)
    assert "embeddings, norms, head" in coverage_table(llama)


def test_the_table_has_at_most_eight_lines_of_screen_width(ernie: nn.Module) -> None:
    inject(ernie, LoRASettings.resolve(targets=[r"layers\.0\..*"]), seed=1)
    lines = coverage_table(ernie).splitlines()
    assert len(lines) <= 8
    assert max(map(len, lines)) <= 100
