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


def test_a_model_with_experts_shows_each_group_with_every_expert_counted(moe: nn.Module) -> None:
    inject(moe, LoRASettings.resolve(rank=4), seed=1)
    rows = {row.group: row for row in coverage(moe)}
    assert {g: (r.num_adapted, r.num_total) for g, r in rows.items()} == {
        "attention": (16, 16),
        "dense mlp": (3, 3),
        "shared experts": (9, 9),
        "routed experts": (72, 72),
        "router": (0, 3),
        "rest": (0, 0),
    }
    assert rows["routed experts"].trainable == 3 * 8 * 3 * 4 * (64 + 24)
    assert sum(r.trainable for r in rows.values()) == sum(p.numel() for p in lora_state(moe).values())
    assert sum(r.parameters for r in rows.values()) == sum(p.numel() for p in moe.parameters() if not p.requires_grad)
    table = coverage_table(moe)
    assert "not adapted: router, embeddings, norms, biases" in table
    assert len(table.splitlines()) <= 10


def test_groups_left_out_of_a_model_with_experts_are_named(moe: nn.Module) -> None:
    inject(moe, LoRASettings.resolve(targets=["q_proj", "gate", r".*\.shared_experts\.down_proj"]), seed=1)
    table = coverage_table(moe)
    assert "k, v, o, dense mlp, shared experts gate/up, routed experts, embeddings" in table
    assert next(line for line in table.splitlines() if "router" in line).split()[1:4] == ["gate", "3/3", "8"]
    assert max(map(len, table.splitlines())) <= 110
