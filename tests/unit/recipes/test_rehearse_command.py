"""`erniekit rehearse` as it is typed: what it says and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.cli.main import main
from erniekit.parallel import comm, gradients
from erniekit.parallel.layout import Layout
from erniekit.recipes.rehearsal import fewest
from support.small_shape import EXPERTS


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A recipe of two tensor-parallel ranks; its model is a config.json alone."""
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    keys = dict(
        model_name_or_path=tmp_path, train_dataset_path="none.jsonl", tensor_parallel_degree=2, max_seq_len=32,
        gradient_accumulation_steps=4, compute_type="fp32", device="cpu", moe_group="mp",
    )  # fmt: skip
    return ["rehearse", *(f"{key}={value}" for key, value in keys.items())]


def test_a_recipe_whose_ranks_match_is_fine(words, capsys):
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "on 2 ranks: tp 2" in out
    assert "kinds    2 among 2 ranks; 2 of 4 micro-batches" in out
    assert "all ranks' calls match, and none waits for ever" in out


@pytest.mark.full
def test_fp8_training_is_rehearsed_with_its_scales(words, capsys):
    """Their first values are measured before the step, and they move behind it: a reduction over the ranks each."""

    def calls(*more):
        assert main([*words, *more, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["collectives"]

    assert calls("compute_type=fp8") > calls()


def test_stage_1_gathers_weights_and_sums_gradients_once_a_step(words, capsys):
    def calls(micro_batches):
        sharded = ["tensor_parallel_degree=1", "sharding_parallel_degree=2", "sharding=stage1"]
        count = [f"gradient_accumulation_steps={micro_batches}", f"--micro-batches={micro_batches}"]
        assert main([*words, *sharded, *count, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["collectives"]

    assert calls(1) == calls(3) > 0


def test_a_rank_that_skips_a_call_is_exit_code_1_and_named(words, capsys, monkeypatch):
    real = comm.all_reduce

    def skipping(x, group=None, op="sum"):
        if not (comm.rank_in() == 1 and x.dtype.itemsize == 8 and x.is_floating_point()):
            real(x, group, op)

    monkeypatch.setattr(gradients.comm, "all_reduce", skipping)
    assert main([*words, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["findings"][0]["ranks"] == [1]
    assert any("rank 0: all_reduce float64 [] (sum) at" in line for line in told["findings"][0]["calls"])


def test_a_rank_that_stops_with_an_error_is_a_finding(words, capsys, monkeypatch):
    def broken(x, group=None, op="sum"):
        raise RuntimeError("no such tensor")

    monkeypatch.setattr(gradients.comm, "all_reduce", broken)
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "rank 0 stops: RuntimeError: no such tensor" in out
    assert "at parallel/" in out


def test_one_rank_is_run_for_real_with_the_plan_beside_it(words, capsys):
    assert main([*words, "--rank", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rank"] == 1
    assert told["seconds_a_step"] > 0
    assert told["planned_bytes"] > 0
    assert told["planned_seconds"] is None, "nobody knows this CPU's rates"
    assert told["calls"] > 10


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--rank", "2"], "--rank 2: there are 2 ranks"),
        (["--ranks", "many"], "--ranks many"),
        (["--ranks", "²"], "--ranks ²"),
        (["--ranks", "1000000"], "more than is rehearsed"),
        (["--micro-batches", "1000000"], "more than is rehearsed"),
        (["--ranks", "3"], "needs a multiple of 2 ranks; there are 3"),
        (["--ranks", "0"], "--ranks 0: not a whole number from 1"),
        (["--shrunken", "two"], "--shrunken two: not a whole number from 1"),
        (["--rank"], "--rank has no number"),
        (["--ranks", "3", "--shrunken", "2"], "needs a multiple of 2 ranks; there are 3"),
        (["--ranks", "8", "--shrunken", "2"], "a layout spread over 2 axes needs 4 ranks"),
        (["--shrunken", "2", "--json"], "--json does nothing with --shrunken"),
        (["--shrunken", "2", "--rank", "0"], "--rank does nothing with --shrunken"),
        (["sharding_parallel_degree=-1", "sharding=stage1"], "how many?"),
        (["model_name_or_path=nowhere"], "the shape of nowhere is not known"),
        (["stage=VL-SFT"], "does not see"),
        (["stage=OCR-VL-SFT"], "OCR-VL-SFT"),
    ],
)
def test_bad_input_is_three_lines_and_exit_code_2(words, capsys, more, says):
    assert main([*words, *more]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "fix:" in err


def test_micro_batches_are_as_few_as_show_the_schedule():
    assert fewest(64, Layout()) == 2
    assert fewest(64, Layout(pp=8)) == 9
    assert fewest(4, Layout(pp=8)) == 2  # fewer than stages: all forward, then all backward
    assert fewest(64, Layout(pp=8, virtual_stages=2)) == 8
    assert fewest(1, Layout(tp=2)) == 1


BESIDE = {
    "KTO": ["stage=KTO", "fine_tuning=Full"],
    "KTO of adapters": ["stage=KTO"],
    "KTO with kept log-probabilities": ["stage=KTO", "reference_logps=cached"],
    "DPO": ["stage=DPO", "fine_tuning=Full"],
    "RM": ["stage=RM"],
    "RM of adapters": ["stage=RM", "fine_tuning=LoRA"],
    "CLS": ["stage=CLS", "class_labels=a,b,c"],
    "distillation": ["fine_tuning=Full"],
}


@pytest.mark.full
@pytest.mark.parametrize("name", BESIDE)
def test_stages_with_other_models_or_heads_are_rehearsed_with_them(name, words, tmp_path, capsys):
    spread = ["tensor_parallel_degree=1", "sharding=stage3", "sharding_parallel_degree=2", "moe_group=dummy"]
    more = [*BESIDE[name], *spread]
    if name == "distillation":
        more.append(f"teacher_model_name_or_path={tmp_path}")
    assert main([*words, *more, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["findings"] == []
    if name == "KTO":
        assert main([*words, "fine_tuning=Full", *spread, "--json"]) == 0
        plain = json.loads(capsys.readouterr().out)
        assert told["collectives"] > plain["collectives"], "passes before the step gather sharded weights as well"


@pytest.mark.full
def test_a_teachers_weights_are_in_the_memory_of_a_rank_that_is_run_for_real(words, tmp_path, capsys):
    alone = [*words, "fine_tuning=Full", "tensor_parallel_degree=1", "--rank", "0", "--json"]
    planned = []
    for more in ([], [f"teacher_model_name_or_path={tmp_path}"]):
        assert main([*alone, *more]) == 0
        planned.append(json.loads(capsys.readouterr().out)["planned_bytes"])
    assert planned[1] > planned[0]


def test_ranks_are_those_the_recipe_starts_and_what_says_so_is_named(words, capsys, tmp_path, monkeypatch):
    recipe = tmp_path / "started.yaml"
    recipe.write_text("nproc_per_node: 2\nnnodes: 2\n")
    command = ["rehearse", str(recipe), *words[1:]]
    assert main(command) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert "started.yaml on 4 ranks: dp 2 x tp 2 (" in first
    assert first.endswith(f"; nproc_per_node is 2 on 2 machines ({recipe}:1)")
    monkeypatch.setenv("NNODES", "3")
    assert main([*command, "nproc_per_node=2"]) == 0
    assert "dp 2 x tp 2 (" in capsys.readouterr().out.splitlines()[0], "the key goes before the environment"
    recipe.write_text("nproc_per_node: 2\n")
    assert main(command) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert "started.yaml on 6 ranks: dp 3 x tp 2 (" in first
    assert first.endswith(f"; nproc_per_node is 2 on 3 machines, as NNODES says ({recipe}:1)")
    assert main([*command, "--ranks", "2"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert "started.yaml on 2 ranks: tp 2" in first, "what is asked for goes before it"
    assert "nproc_per_node" not in first
    assert main([*command, "nproc_per_node=3", "nnodes=1"]) == 2
    error = capsys.readouterr().err
    assert "; nproc_per_node is 3 (key=value)" in error
    assert "--ranks N rehearses another number" in error
