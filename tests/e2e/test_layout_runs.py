"""`erniekit train` on two ranks as typed, with all checks before training on, in layouts with pitfalls of their own."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from erniekit.cli.main import main
from erniekit.demo import tiny
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

STAGES = dict(pipeline_parallel_degree=2, virtual_pp_degree=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama and an ERNIE with experts and a further layer, of four layers each."""
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.SHAPE, "num_hidden_layers", 4)
        for family in ("llama", "ernie4_5_moe"):
            tiny.make_tiny_model(folder / family, family=family)
    return folder


def train(models: str, output: str, more: dict[str, Any]) -> tuple[int, str]:
    """Exit code and what was said of one rank."""
    keys = dict(
        model_name_or_path=f"{models}/llama", train_dataset_path=tiny.TRAIN, output_dir=output, cache_dir=f"{models}/c",
        fine_tuning="Full", max_seq_len=128, max_steps=4, gradient_accumulation_steps=4, learning_rate=1e-3,
        logging_steps=1, device="cpu", compute_type="fp32", report_to="none", dataset_num_proc=1,
    )  # fmt: skip
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(["train", *(f"{key}={value}" for key, value in {**keys, **more}.items())])
    return code, said.getvalue()


def curve(output: Path) -> list[float]:
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param(dict(pp_schedule="zero_bubble"), marks=pytest.mark.full),
        pytest.param(dict(fine_tuning="LoRA"), marks=pytest.mark.full),
    ],
    ids=["auto", "zero_bubble", "LoRA"],
)
def test_several_stages_a_rank_give_the_losses_of_one_process(
    more: dict[str, Any], models: Path, tmp_path: Path, ranks: Ranks
) -> None:
    ((code, said),) = ranks.run(
        1, train, str(models), str(tmp_path / "one"), {k: v for k, v in more.items() if k != "pp_schedule"}
    )
    assert code == 0, said
    for code, said in ranks.run(2, train, str(models), str(tmp_path / "two"), {**STAGES, **more}):
        assert code == 0, said
    assert len(curve(tmp_path / "one")) == 4
    assert curve(tmp_path / "two") == pytest.approx(curve(tmp_path / "one"), abs=5e-6)  # fp32 sums in another order


def test_torchs_zero_bubble_with_layers_that_predict_further_tokens_is_refused_before_data_is_read(
    models: Path, tmp_path: Path, ranks: Ranks
) -> None:
    rows = tmp_path / "never-read.jsonl"
    rows.write_text("whoever reads this finds no JSON")
    more = dict(
        STAGES, pp_schedule="zero_bubble", pp_runner="torch", model_name_or_path=models / "ernie4_5_moe",
        num_nextn_predict_layers=1, train_dataset_path=rows,
    )  # fmt: skip
    for code, said in ranks.run(2, train, str(models), str(tmp_path / "out"), more):
        assert code == 2
        assert "torch's zero_bubble schedule does not work with layers that predict further tokens" in said
        assert "leave pp_runner out" in said
        assert "Traceback" not in said


def test_answers_that_all_lie_on_one_of_two_ranks_train_an_untied_head_as_one_process_does(
    models: Path, tmp_path: Path, ranks: Ranks
) -> None:
    """Questions fill three quarters of a sequence, so that the other rank has no label."""
    rows = tmp_path / "rows.jsonl"
    question = "what is the sum of these numbers: " + ", ".join(str(n) for n in range(10, 33))
    rows.write_text("".join(json.dumps({"src": [f"{question}, {k}?"], "tgt": ["no"]}) + "\n" for k in range(10, 40)))
    more = dict(train_dataset_path=rows, max_seq_len=128, gradient_accumulation_steps=1)
    ((code, said),) = ranks.run(1, train, str(models), str(tmp_path / "one"), more)
    assert code == 0, said
    for code, said in ranks.run(2, train, str(models), str(tmp_path / "two"), dict(more, context_parallel_degree=2)):
        assert code == 0, said
    assert curve(tmp_path / "two") == pytest.approx(curve(tmp_path / "one"), abs=5e-6)
