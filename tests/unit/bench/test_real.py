"""`erniekit bench --real`: whole training commands, timed from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import sentencepiece

from erniekit.bench import real, real_cases
from erniekit.bench.real import failure, rates, table, write_model, write_rows
from erniekit.bench.real_cases import CASES, RealCase, tiny
from erniekit.cli.main import main
from erniekit.data.formats.detection import Detected
from erniekit.data.tokenizer import load_tokenizer
from erniekit.data.vision.budget import measure, model_rules
from support.clock import until
from support.processes import alive, wait_until_gone


def test_a_command_is_run_and_timed_from_its_first_line_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["bench", "--real", "--tiny", "--only", "sft", "--output_dir", str(tmp_path), "length_buckets=on"])
    said = capsys.readouterr().out
    assert code == 0, said
    (result,) = json.loads((tmp_path / "real.json").read_text())["results"]
    assert result["steps"] == 4
    assert 0 < result["first_line_s"] <= result["first_step_s"] < result["seconds"]
    parts = result["start_seconds"]
    assert list(parts) == ["plan", "data", "model", "checks", "probe and resume"]
    assert 0 < sum(parts.values()) < result["first_step_s"]
    assert 0 < result["to_the_end_s"] < result["seconds"] - result["first_step_s"]
    assert result["tokens_per_s"] > 0
    assert any("joined, padded to" in line for line in result["rows"])
    assert "| sft " in said


@pytest.mark.full
def test_rows_with_pictures_are_trained_and_pictures_a_second_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--real", "--tiny", "--only", "vl-lora", "--output_dir", str(tmp_path)]) == 0
    assert " pictures) |" in capsys.readouterr().out
    (result,) = json.loads((tmp_path / "real.json").read_text())["results"]
    printed = (tmp_path / "real-vl-lora.log").read_text()
    assert "seen: 24 pictures" in printed
    assert "6 tokens" in printed
    (least, most), template = tiny(CASES["vl-lora"]).rows, 32
    assert least / 2 < result["tokens_per_s"] / result["pictures_per_s"] < most + template


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("sft", "vl-lora")])
def test_every_case_runs_tiny(name: str, tmp_path: Path) -> None:
    assert main(["bench", "--real", "--tiny", "--only", name, "--output_dir", str(tmp_path)]) == 0


@pytest.mark.full
def test_a_command_that_fails_is_told_with_its_exit_code_its_last_lines_and_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--real", "--tiny", "--again", "--only", "sft", "--output_dir", str(tmp_path)]
    words.append("tensor_parallel_degree=2")  # which no rule about keys is against, and one device is
    assert main(["bench", *words]) == 1
    refused = "tensor_parallel_degree=2 needs a multiple of 2 ranks; there is 1"
    said, log = capsys.readouterr().out, tmp_path / "real-sft.log"
    assert f"sft failed: exit code 2; all it printed is in {log}" in said
    assert f"  error: {refused}" in said
    assert log.read_text().count(refused) == 1, "what failed is not run again"
    (result,) = json.loads((tmp_path / "real.json").read_text())["results"]
    assert result["exit_code"] == 2


@pytest.mark.full
def test_a_benchmark_that_is_stopped_leaves_no_process_and_no_files_of_its_cases(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    words = ["bench", "--real", "--tiny", "--only", "vl-lora", "--steps", "3000", "--output_dir", str(out)]
    with subprocess.Popen(
        [sys.executable, "-m", "erniekit", *words], env={**os.environ, "TMPDIR": str(work)}, stderr=subprocess.PIPE
    ) as bench:
        try:
            log = out / "real-vl-lora.log"
            until(lambda: log.exists() and "global_step: 1," in log.read_text(), "the first step is done", 120)
            (train,) = psutil.Process(bench.pid).children()
            others = [child.pid for child in train.children(recursive=True)]
            bench.send_signal(signal.SIGTERM)  # others may be ignored where tests run
            _, said = bench.communicate(timeout=60)
        finally:
            bench.kill()
    assert not alive(train.pid), "it is waited for"
    assert others, "decoders of pictures"
    wait_until_gone(*others)
    assert (bench.returncode, said) == (130, b"stopped\n")
    assert not list(work.iterdir())


def test_keys_that_results_are_read_from_are_not_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--real", "--tiny", "--output_dir", str(tmp_path / "out"), "max_steps=3"]) == 2
    assert "max_steps" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("lora_rnk=3", ["unknown key 'lora_rnk'", "did you mean lora_rank", "case sft of erniekit bench --real"]),
        ("lora_rank=none_at_all", ["lora_rank is 'none_at_all'; expected a whole number"]),
        ("moe_dropout_prob=0.5", ["not in this version: dropout"]),
        # Which the first case takes, and a later one does not.
        ("neftune_noise_alpha=5", ["case dpo of erniekit bench --real", "--only with cases other than dpo"]),
        ("data=my.jsonl", ["data is the benchmark's own key"]),
    ],
)
def test_keys_are_checked_for_every_case_before_one_starts(
    key: str, said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--real", "--tiny", "--output_dir", str(tmp_path / "out"), key]) == 2
    told = capsys.readouterr()
    assert told.out == "", "no case has begun"
    assert not (tmp_path / "out").exists()
    assert "fix:   " in told.err
    for part in said:
        assert part in told.err


def test_a_written_number_of_steps_counts_though_it_is_that_of_the_workloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a command measures is given here."""
    steps: list[int] = []

    def measured(case: RealCase, *_: object) -> dict[str, object]:
        steps.append(case.steps)
        return {"case": case.name, "about": "", "failed": [], "why": "not run"}

    monkeypatch.setattr(real, "measured", measured)
    for more in ([], ["--steps", "8"]):
        main(["bench", "--real", "--only", "lora", "--output_dir", str(tmp_path), *more])
    assert steps == [CASES["lora"].steps, 8]


def test_five_rows_with_a_picture_fill_a_pack_as_in_the_workload(tmp_path: Path) -> None:
    case, model, file = CASES["vl-lora"], tmp_path / "model", tmp_path / "rows.jsonl"
    write_model(case, model)
    write_rows(case, model, file, 6)
    rules = model_rules(model, case.keys["max_pixels"])
    tokenizer, config = load_tokenizer(model), json.loads((model / "config.json").read_text())
    assert tokenizer.special_ids["<|IMAGE_PLACEHOLDER|>"] == config["im_patch_id"]
    assert tokenizer.special_ids["<|IMAGE_END|>"] == config["image_end_token_id"]
    found = measure(str(file), Detected("messages", ""), rules, case.keys["max_seq_len"], tokenizer)
    assert (found.rows, found.pictures, dict(found.kinds)) == (6, 6, {})
    assert set(found.tokens) == {case.picture}
    longest, shortest = max(found.whole), min(found.whole)
    assert 5 * longest <= case.keys["max_seq_len"] < 6 * shortest
    assert len({path.read_bytes() for path in (tmp_path / "pictures").iterdir()}) == 6, "no two are alike"


def test_rows_have_the_tokens_that_a_case_asks_for(tmp_path: Path) -> None:
    for name in ("sft", "dpo-rows"):
        case, folder = tiny(CASES[name]), tmp_path / name
        write_model(case, folder)
        write_rows(case, folder, tmp_path / f"{name}.jsonl", 20)
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for row in rows:
            parts = [*row["src"], *row["tgt"]] if name == "sft" else row["src"]
            tokens = sum(len(pieces.encode(part)) for part in parts)
            assert 0.4 * case.rows[0] < tokens <= case.rows[1] + 8


def test_a_rate_counts_the_later_steps_and_a_mean_all_but_the_first() -> None:
    records = [dict(tokens_per_second=speed, interval_runtime=1.0) for speed in (1, 10, 50, 100, 102, 98)]
    found = rates(records)
    assert found["tokens_per_s"] == 100
    assert found["all_steps_tokens_per_s"] == 72


def test_a_failed_command_has_a_line_of_its_own() -> None:
    result = {"case": "sft", "about": "x", "aim": None, "failed": ["no"], "exit_code": 2, "why": "exit code 2"}
    *_, row = table([result])
    assert "failed" in row
    assert "x: exit code 2" in row


def test_the_first_step_of_a_run_before_stands_next_to_that_of_the_run() -> None:
    run = {"first_line_s": 0.3, "first_step_s": 17.8, "tokens_per_s": 100.0, "to_the_end_s": 1.0}
    run |= {"all_steps_tokens_per_s": None, "case": "sft", "about": "x", "aim": None}
    *_, row = table([{**run, "before": [{**run, "first_step_s": 48.0}]}])
    assert "48.0, then 17.8" in row


def test_a_failure_is_an_exit_code_or_a_signal_or_a_step_that_is_missing() -> None:
    assert failure(0, 60, 60) == ""
    assert failure(2, 0, 60) == "exit code 2"
    assert failure(-9, 12, 60) == "killed by signal 9 (Killed)"
    assert failure(0, 12, 60) == "ended after step 12 of 60"


def test_results_of_other_cases_and_the_last_good_one_of_a_failed_case_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a command measures is given here; a whole command is run by the tests above."""
    cases = [real_cases.tiny(case) for case in real_cases.chosen(["sft", "lora"])]
    fine = {"tokens_per_s": 5.0}
    outcomes = iter([fine, fine, {"failed": ["no"], "why": "exit code 2"}, {"failed": ["no"], "why": "exit code 2"}])
    monkeypatch.setattr(real, "measured", lambda case, *given: {"case": case.name, **next(outcomes)})
    assert not real.run_real(cases, tmp_path, tmp_path, {"seed": "1"}, False, tiny=True)[1]
    for _ in range(2):
        told, failed = real.run_real(cases[:1], tmp_path, tmp_path, {}, False)
        assert failed
        assert len(told) == 1
        kept = {one["case"]: one for one in json.loads((tmp_path / "real.json").read_text())["results"]}
        assert kept["lora"]["tokens_per_s"] == kept["sft"]["last_good"]["tokens_per_s"] == 5.0
        assert (kept["lora"]["keys"], kept["lora"]["tiny"], kept["sft"]["tiny"]) == ({"seed": "1"}, True, False)


def test_a_results_file_of_something_else_is_no_reason_to_fail(tmp_path: Path) -> None:
    for text in ("", "[]", "{}", '{"results": [1]}'):
        (tmp_path / "real.json").write_text(text)
        assert real.kept_results(tmp_path / "real.json") == {}
