"""`erniekit plan` as it is typed: lines, JSON, the written recipe, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.cli.main import main
from erniekit.config import load
from erniekit.config.note import shown
from erniekit.devices import DEVICES
from erniekit.devices.islands import parse_islands
from erniekit.parallel.islands import Islands, check_islands
from erniekit.parallel.layout import Layout, fit
from erniekit.parallel.world import check_model, layout_of
from erniekit.planner import report
from erniekit.planner.cards import CARDS
from erniekit.recipes import plan_command as plan_module
from erniekit.recipes.plan_command import MARK, plan_command
from erniekit.recipes.planning import packs_of, shape_of
from support.planned_recipe import RECIPE


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(RECIPE)
    return file


def test_a_plan_is_ranked_explained_and_priced(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(recipe), "--cluster", "4x24G"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"plan     {recipe} on 4 cards (24G) of 24 GiB"
    text = "\n".join(lines)
    for word in ("361 M weights", "data sheet", "tokens/s", "GiB of a rank", "levers", "smallest", "recipe's"):
        assert word in text


@pytest.mark.parametrize("base", ["bf16", "int8", "wint4/8"])
@pytest.mark.parametrize("cluster", ["1x1G", "1x2G"])
def test_a_change_that_was_said_not_to_fit_is_not_what_to_do(
    base: str, cluster: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(recipe), "--cluster", cluster, "fine_tuning=LoRA", f"frozen_base={base}"]
    assert main(words) == 2
    said = capsys.readouterr()
    assert "does not fit" in said.out
    fix = said.err.partition("fix:   ")[2].strip()
    assert fix.startswith("use cards with more memory")
    assert "LoRA" not in fix
    assert "frozen_base" not in fix


def test_rows_that_are_not_packed_are_said_to_be_planned_at_their_longest(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(recipe), "--cluster", "4x24G", "max_seq_len=2048"]
    for packing in (True, False):
        assert main([*words, f"packing={packing}"]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note ")]
        assert any("each row is planned as max_seq_len = 2,048 tokens" in line for line in lines) == (not packing)
        assert main([*words, f"packing={packing}", "--json"]) == 0
        notes = json.loads(capsys.readouterr().out)["notes"]
        assert [f"note     {note}" for note in notes] == lines
        assert any("max_seq_len=LENGTH plans rows of that length" in note for note in notes) == (not packing)


@pytest.mark.parametrize(
    ("card", "attention", "noted"), [("H200", "auto", 1), ("A100", "auto", 0), ("H200", "sdpa", 0)]
)
def test_the_attention_kernel_that_is_planned_is_noted_for_programs_too(
    card: str, attention: str, noted: int, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(recipe), "--cluster", f"1x{card}", f"attention={attention}", "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert sum("planned as FlashAttention-4 computes it" in note for note in notes) == noted


def test_a_pipelines_step_is_drawn_and_a_foreign_picture_is_left_alone(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, other = tmp_path / "step.svg", tmp_path / "other.svg"
    words = ["plan", str(recipe), "--cluster", "2xA100", "--timeline"]
    for _ in range(2):  # a second time over our own
        assert main([*words, str(picture)]) == 0
    said = capsys.readouterr().out
    assert "rank 1    ." in said, "the second rank waits for the first"
    assert picture.read_text().count("<rect") >= 2 * 2 * 4
    other.write_text("<svg></svg>")
    for word in (str(other), "step.png", str(tmp_path / "no" / "step.svg")):
        assert main([*words, word]) == 2
    assert other.read_text() == "<svg></svg>"


def test_json_has_the_same_for_programs(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(recipe), "--cluster=2xA100", "--json", "--top", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packs_per_step"] == 8
    best = found["ranked"][0]
    assert len(found["ranked"]) == 3
    assert best["tokens_per_second"] > 0
    assert best["gib_by_stage"][0]["total"] == pytest.approx(
        sum(v for k, v in best["gib_by_stage"][0].items() if k != "total")
    )


def test_the_written_recipe_is_the_run_with_the_best_layout(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = recipe.parent / "planned.yaml"
    for _ in range(2):  # ours may be written again
        assert main(["plan", str(recipe), "--cluster", "2xA100", "--write", str(target)]) == 0
    assert target.read_text().startswith(MARK)
    cfg = load([str(target)], "train")
    assert cfg.data.max_seq_len == 8192
    p = cfg.parallel
    axes = (p.tensor_parallel_degree, p.pipeline_parallel_degree, p.data_parallel_degree, p.sharding_parallel_degree)
    assert axes[0] * axes[1] * axes[2] * axes[3] == 2
    assert [f.name for f in recipe.parent.iterdir() if f.name.startswith(".")] == []


def test_a_file_of_somebody_else_is_left_alone(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = recipe.parent / "theirs.yaml"
    target.write_text("a: 1\n")
    for word in (target, recipe):
        before = word.read_text()
        assert main(["plan", str(recipe), "--cluster", "2xA100", "--write", str(word)]) == 2
        assert word.read_text() == before
    (recipe.parent / "link.yaml").symlink_to(target)
    assert main(["plan", str(recipe), "--cluster", "2xA100", "--write", str(recipe.parent / "link.yaml")]) == 2


def test_a_number_chooses_the_layout_that_is_written(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = recipe.parent / "planned.yaml"
    words = ["plan", str(recipe), "--cluster", "4xA100", "--json", "--top", "2", "--write", str(target)]
    assert main([*words, "--take", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["taken"] == 3
    third = found["ranked"][2]["keys"]
    assert third != found["ranked"][0]["keys"]
    cfg = load([str(target)], "train")
    assert {key: shown(cfg[key]) for key in third} == {key: shown(value) for key, value in third.items()}
    before = target.read_text()
    assert main([*words, "--take", "9999"]) == 2
    assert "fit" in capsys.readouterr().err
    assert target.read_text() == before
    assert main(["plan", str(recipe), "--cluster", "4xA100", "--take", "2"]) == 2


@pytest.mark.parametrize(
    "words", [["fine_tuning=LoRA", "frozen_base=wint4/8"], ["fine_tuning=LoRA"], [], ["recompute=True"]]
)
def test_only_changes_that_help_are_listed(words: list[str], recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(recipe), "--cluster", "2xA100", "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["ranked"][0]
    now = max(stage["total"] for stage in best["gib_by_stage"])
    assert found["levers"]
    for lever in found["levers"]:
        faster = lever["tokens_per_second"] and lever["tokens_per_second"] > best["tokens_per_second"]
        assert lever["gib"] < now or faster, lever
    if words[-1:] == ["frozen_base=wint4/8"]:
        assert {"frozen_base": "int8"} not in [lever["keys"] for lever in found["levers"]]


def test_layouts_are_named_whole(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(recipe), "--cluster", "16xA100", "model_name_or_path=baidu/ERNIE-4.5-21B-A3B-Paddle"]
    assert main([*words, "--json"]) == 0
    names = [one["layout"] for one in json.loads(capsys.readouterr().out)["ranked"][: report.SHOWN]]
    assert max(map(len, names)) > 58
    assert main(words) == 0
    said = capsys.readouterr().out
    assert all(f"{name} " in said for name in names)


@pytest.mark.parametrize("edit", ["\nmax_seq_len: 4096\n", "# mine\n"])
def test_a_written_recipe_that_was_edited_since_is_left_alone(
    edit: str, recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = recipe.parent / "planned.yaml"
    words = ["plan", str(recipe), "--cluster", "1xA100", "--write", str(target)]
    assert main(words) == 0
    written = target.read_text()
    target.write_text(written + edit)
    assert main(words) == 2
    assert target.read_text() == written + edit
    assert "changed since" in capsys.readouterr().err

    # and while the plan is made
    target.write_text(written)
    search = plan_module._planned
    monkeypatch.setattr(plan_module, "_planned", lambda *a: [search(*a), target.write_text(written + edit)][0])
    assert main(words) == 2
    assert target.read_text() == written + edit
    assert sorted(f.name for f in recipe.parent.iterdir()) == ["planned.yaml", "run.yaml"]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([], "which cluster"),
        (["--cluster", "8 cards"], "is not a cluster"),
        (["--cluster", "2xA100", "--packs", "none"], "--packs"),
        (["--cluster", "2xA100", "--calibration", "nowhere.json"], "no file"),
        (["--cluster", "2xA100", "--write", "no/such/folder/x.yaml"], "no folder"),
        (["--cluster", "2xA100", "model_name_or_path=somebody/else"], "shape of somebody/else"),
        (["--cluster", "2x2G", "max_seq_len=131072"], "no layout of this run fits"),
        (["--cluster", "4xA100", "--packs", "3", "batch_size=2"], "no layout of this run fits"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_three_lines(
    words: list[str], what: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(recipe), *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()[-3:]
    assert what in lines[0]
    assert [line.split(":")[0] for line in lines] == ["error", "where", "fix"]
    assert lines[2].removeprefix("fix:").strip()


def test_a_calibration_file_is_taken_and_another_is_not(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recipe.parent / "calibration.json"
    rows = [{"flops": 1e12, "rate": 1e13}]
    file.write_text(json.dumps({"format": "erniekit-calibration-1", "dense": rows}))
    words = [str(recipe), "--cluster", "1xA100", "--json", "--calibration", str(file)]
    assert plan_command(words) == 0
    slow = json.loads(capsys.readouterr().out)
    assert slow["rates"]["dense"] == "measured"
    plan_command(words[:4])
    assert slow["ranked"][0]["step_seconds"] > json.loads(capsys.readouterr().out)["ranked"][0]["step_seconds"]
    file.write_text("{}")
    assert main(["plan", *words]) == 2


def test_a_step_has_the_packs_that_the_recipe_makes_on_these_ranks(recipe: Path) -> None:
    assert packs_of(load([str(recipe)], "train"), 8) == 32
    assert packs_of(load([str(recipe), "tensor_parallel_degree=4"], "train"), 8) == 8
    given = ["model_name_or_path=x", "train_dataset_path=y", "batch_size=1", "global_batch_size=24"]
    assert packs_of(load(given, "train"), 8) == 24


# --- what is written is what was planned


def layout_written(target: Path, ranks: int) -> Layout:
    cfg = load([str(target)], "train")
    return fit(ranks, layout_of(cfg.parallel, ranks, cfg.moe.moe_group))


@pytest.mark.parametrize("own", ["tensor_parallel_degree=2 moe_group=mp", "sharding=stage2 sharding_parallel_degree=8",
                                 "pipeline_parallel_degree=4 pp_seg_method=[0,5,12,20,31]",
                                 "use_expert_parallel=True expert_parallel_degree=4"])  # fmt: skip
def test_nothing_of_the_recipes_own_layout_is_left_in_a_written_one(
    own: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = recipe.parent / "planned.yaml"
    words = ["model_name_or_path=baidu/ERNIE-4.5-21B-A3B-Paddle", "fine_tuning=LoRA", *own.split()]
    for take in ("1", "9"):
        asked = ["plan", str(recipe), *words, "--cluster", "8xA100", "--packs", "32", "--json", "--write", str(target)]
        assert main([*asked, "--take", take]) == 0
        found = json.loads(capsys.readouterr().out)["ranked"][int(take) - 1]
        assert layout_written(target, 8).describe() == found["layout"]


def test_a_plan_for_unlike_islands_is_written_with_them_and_resolves_to_a_layout_they_take(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    islands, target = recipe.parent / "islands.yaml", recipe.parent / "planned.yaml"
    islands.write_text("islands: [8xH200-141G, {card: BI150, machines: 1, devices: 8}]")
    words = ["plan", str(recipe), "model_name_or_path=baidu/ERNIE-4.5-21B-A3B-Paddle", "fine_tuning=LoRA"]
    assert main([*words, "--cluster", str(islands), "--packs", "32", "--json", "--write", str(target)]) == 0
    best = json.loads(capsys.readouterr().out)["ranked"][0]
    cfg = load([str(target)], "train")
    named = parse_islands(cfg.parallel.islands)
    assert [(one.device, one.ranks) for one in named] == [("nvidia", 8), ("iluvatar", 8)]
    assert cfg.given("compute_type"), "ranks of unlike devices would each take their own"
    layout = layout_written(target, 16)
    assert layout.describe() == best["layout"]
    interconnects = tuple(one.device for one in named for _ in range(one.ranks))
    check_islands(Islands(interconnects, ("nccl",) * 16), layout)
    shape = shape_of(cfg).config
    assert shape.moe is not None
    kept = check_model(layout, shape.num_layers, shape.moe.experts)
    assert kept.stage_cuts == layout.stage_cuts != ()
    assert kept.stage_cuts[layout.pp // 2 - 1] > shape.num_layers // 2, "the faster island has more layers"


def test_islands_of_one_vendor_apart_are_refused_as_a_run_would_be(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    islands = recipe.parent / "islands.yaml"
    islands.write_text("islands: [8xH200, 8xBI150, 8xA100]")
    assert main(["plan", str(recipe), "--cluster", str(islands)]) == 2
    assert "next to each other" in capsys.readouterr().err


def test_every_card_is_of_a_vendor_that_a_recipe_can_name() -> None:
    assert {card.vendor for card in CARDS.values()} <= set(DEVICES)
