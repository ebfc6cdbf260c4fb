"""Which kernels a run uses: printed by the doctor, kept with the run, forced by a key."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from erniekit.cli.main import main
from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import ConfigError
from erniekit.kernels.selection import force


@pytest.fixture(autouse=True)
def nothing_stays_forced() -> Iterator[None]:
    """A run that was refused leaves its choice behind, and later tests are in the same process."""
    yield
    force({})


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "experts", family="ernie4_5_moe")


def test_a_run_keeps_what_was_chosen_and_why(train: Callable, experts: Path, tmp_path: Path) -> None:
    train(tmp_path, max_steps=1, model_name_or_path=experts, fine_tuning="LoRA")
    story = json.loads((tmp_path / "run.json").read_text())
    found = {row["operation"]: (row["implementation"], row["reason"]) for row in story["kernels"]}
    assert found["experts"] == ("plain", "triton: not on cpu")
    assert found["grouped products"] == (
        "loop",
        "quack: not on cpu; torch: not on cpu; blocks: no wait to be saved on a CPU",
    )
    assert found["packed attention"][0] == "sdpa"
    assert found["compiled layers"] == ("no", "no Triton for this device")
    assert found["CUDA graphs"] == ("no", "this kind of device replays no graphs")
    assert found["AdamW"][0] == "torch"
    assert found["results of a step"][0] == "at once"
    assert "quack: not on cpu; torch: not on cpu" in (tmp_path / "report.html").read_text()


def test_the_doctor_prints_it(train: Callable, experts: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    train(tmp_path / "run", max_steps=1, model_name_or_path=experts)
    command = json.loads((tmp_path / "run" / "run.json").read_text())["config"]
    keys = {row["key"]: row["value"] for row in command}
    words = [f"{key}={keys[key]}" for key in ("model_name_or_path", "train_dataset_path", "train_dataset_type")]
    capsys.readouterr()
    assert main(["doctor", *words, f"output_dir={tmp_path / 'other'}", "device=cpu", "max_steps=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("kernels"))
    assert lines[first].split()[1:3] == ["attention", "sdpa"]
    assert any(line.split()[:2] == ["experts", "plain"] for line in lines[first:])


def test_a_forced_kernel_is_used(train: Callable, experts: Path, tmp_path: Path) -> None:
    train(tmp_path, max_steps=1, model_name_or_path=experts, kernels="experts=plain")
    story = json.loads((tmp_path / "run.json").read_text())
    assert {"operation": "experts", "implementation": "plain", "reason": "forced by kernels"} in story["kernels"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("expert=plain", "no operation 'expert'"),
        ("experts=fast", "no implementation 'fast' of experts"),
        ("experts=triton", "experts cannot be forced here: triton: not on cpu"),
    ],
)
def test_what_cannot_be_forced_is_refused_in_words(
    train: Callable, experts: Path, tmp_path: Path, word: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        train(tmp_path, max_steps=1, model_name_or_path=experts, kernels=word)


def test_a_mistyped_kernel_on_the_command_line_is_three_lines_and_code_2(
    experts: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"src": ["a question"], "tgt": ["an answer"]}\n' * 8)
    words = [f"model_name_or_path={experts}", f"train_dataset_path={rows}", f"output_dir={tmp_path / 'out'}"]
    assert main(["train", *words, "device=cpu", "max_steps=1", "kernels=experts=fast"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in said[-3:]] == ["error", "where", "fix"]
    assert "no implementation 'fast' of experts: one of triton, plain" in said[-3]
    assert not (tmp_path / "out").exists(), "nothing was spent"
