"""`erniekit bench` from the command line: a table, JSON, and mistakes in one line."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from erniekit.bench import real, worker
from erniekit.bench.command import Worker
from erniekit.bench.real_cases import CASES
from erniekit.bench.report import remarks, table
from erniekit.bench.workloads import WORKLOADS, BenchOptions
from erniekit.cli.main import main


def test_packed_sft_and_expert_lora_give_their_peers_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker's process does, without waiting for one to start."""
    files = {"A2-half": "hf", "C1-85": "peft-attention"}
    options = asdict(BenchOptions(peers=tuple(files.values()), steps=2, warmup=1, tiny=True, profile=True))
    orders = [{"workload": name, "options": options, "file": str(tmp_path / f"{name}.json")} for name in files]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(json.dumps(order) + "\n" for order in orders)))
    assert worker.main() == 0
    for name, peer in files.items():
        result = json.loads((tmp_path / f"{name}.json").read_text())
        ours, other = result["runs"]
        assert (ours["runner"], other["runner"]) == ("erniekit", peer)
        assert other["parity"]["equal"], other["parity"]
        assert {"loss", "logits"} <= other["parity"]["differences"].keys()
        assert ("grad_norm" in other["parity"]["differences"]) == (name == "A2-half")  # adapters differ in number
        assert ours["tokens_per_s"] == pytest.approx(result["tokens"] / ours["step_ms"] * 1000)
        assert result["ratio_to_best_peer"] is None  # toy sizes compare no speed
        assert not re.search(r"\dx ", "\n".join(table([result])))
        assert remarks([result])[1].startswith("--tiny checks that everything runs")
        assert len(ours["step_ms_all"]) == len(other["step_ms_all"]) == 2
        assert ours["of_ceiling"] * ours["step_ms"] == pytest.approx(
            result["flops"] / result["gemm"]["held_tflops"] / 1e9
        )
        assert result["gemm"].keys() == {"burst_tflops", "held_tflops"}
        assert "clock_mhz" not in ours  # a CPU has no such gauges
        assert result["profile"]["busy_ms"] > 0


@pytest.mark.full
def test_every_workload_runs_tiny(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--tiny", "--output_dir", str(tmp_path), "--steps", "2", "--warmup", "1"]
    assert main(words) == 0
    told = json.loads((tmp_path / "bench.json").read_text())
    assert not told["failed"]
    assert [r["workload"] for r in told["results"]] == list(WORKLOADS)
    for result in told["results"]:
        assert "step_ms" in result["runs"][0]
        for peer in result["runs"][1:]:
            assert peer.get("absent") or peer["parity"]["equal"], (result["workload"], peer)
    assert [r["case"] for r in told["commands"]] == list(CASES)
    printed = capfd.readouterr().out
    assert "toy sizes compare no speed with a peer's" in printed
    for row in (r"\| A2-half +\| erniekit ", r"\| vl-lora +\| erniekit train ", "sft: first line after"):
        assert re.search(row, printed), row


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "Z9"], "no workload 'Z9'"),
        (["--peers", "hff"], "did you mean hf?"),
        (["--steps", "0"], "--steps is 0"),
        (["attention"], "'attention' is not key=value"),
        (["--fast"], "unrecognized arguments: --fast"),
        (["--only", "A1", "--layers", "2"], "--layers does nothing without --real"),
        (["--only", "A1", "--again"], "--again does nothing without --real"),
        (["--calibrate", "--again"], "--again does nothing with --calibrate"),
        (["--only", "sft", "--peers", "hf"], "--peers does nothing where whole commands alone are timed"),
        (["--real", "--peers", "hf"], "--peers does nothing with --real"),
        (["--real", "--seed", "0"], "--seed does nothing with --real"),
        (["--real", "--warmup", "3"], "--warmup does nothing with --real"),
        (["--real", "--calibrate"], "--calibrate does nothing with --real"),
        (["--real", "--layers", "0"], "--layers is 0"),
        (["--stepps", "2"], "did you mean --steps? erniekit bench --help lists what it takes"),
    ],
)
def test_a_mistake_is_told_in_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_list_names_every_workload_and_every_whole_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*WORKLOADS, *CASES]
    assert main(["bench", "--list", "--only", "dpo,A1"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["A1", "dpo"]


def test_the_list_of_whole_commands_has_their_names_what_they_are_and_their_aims(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "--real", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(CASES)
    for line, case in zip(lines, CASES.values(), strict=True):
        assert case.about in line
        assert (f"{case.aim:,.0f} real tokens/s" if case.aim else "aim: -") in line
    assert main(["bench", "--real", "--list", "--only", "lora"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_no_time_left_begins_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--only", "A1,A2", "--seconds-limit", "1", "--output_dir", str(tmp_path)]) == 1
    assert "time limit: A1, A2-none, A2-half, A2-wide not begun" in capsys.readouterr().out
    assert main(["bench", "--only", "A1,sft,lora", "--seconds-limit", "1", "--output_dir", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "time limit: A1 not begun" in told
    assert "time limit: sft, lora not begun" in told


@pytest.mark.parametrize(("words", "told"), [([], True), (["--tiny"], False)])
def test_sizes_of_a_card_on_a_cpu_are_warned_of(
    words: list[str], told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["bench", "--seconds-limit", "0", "--output_dir", str(tmp_path), *words])
    assert ("no accelerator here" in capsys.readouterr().err) == told


def test_a_worker_is_stopped_when_its_time_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = Worker()
    slow.run([WORKLOADS["A1"]], BenchOptions(tiny=True), tmp_path, seconds=0.2)  # its imports alone take longer
    assert "stopped by the time limit" in capsys.readouterr().out
    assert not (tmp_path / "A1.json").exists()


@pytest.mark.parametrize("seconds", [0.05, 2.0])
def test_a_ctrl_c_ends_a_bench_and_what_measures_for_it_with_one_line(tmp_path: Path, seconds: float) -> None:
    words = ["bench", "--tiny", "--only", "A1", "--peers", "none", "--output_dir", tmp_path / "b"]
    process = subprocess.Popen(
        [sys.executable, "-m", "erniekit", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()  # it has begun: a worker is starting, or imports
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)  # its worker holds these pipes as well
    assert process.returncode == 130
    assert said.strip().splitlines()[-1] == "stopped"
    assert "Traceback" not in said


def test_the_table_says_who_was_absent_who_failed_and_what_is_short() -> None:
    ours = {
        "runner": "erniekit", "step_ms": 80.0, "tokens_per_s": 100e3, "trained_tokens_per_s": 99e3, "mfu": 0.4,
        "of_ceiling": 0.5, "peak_gib": 101.0, "compile_s": 20.0, "pairs_per_s": None, "clock_mhz": 1485.0,
        "power_w": 688.4, "temperature_c": 61.0,
    }  # fmt: skip
    slow = {**ours, "runner": "hf+compile", "power_w": 640.0, "temperature_c": None}
    result = {
        "workload": "A1", "target": 118e3, "unit": "tokens", "limit_gib": 100, "note": "", "ratio_to_best_peer": None,
        "device": "NVIDIA H200",
        "gemm": {"burst_tflops": 801.2, "held_tflops": 678.1, "clock_mhz": 1470.0, "power_w": 692.0},
        "runs": [
            ours, slow, {"runner": "hf", "failed": "out of memory"}, {"runner": "peft", "absent": "pip install peft"},
        ],
    }  # fmt: skip
    lines = table([result])
    assert len({len(line) for line in lines}) == 1
    assert "100,000" in lines[2]
    assert "40.0 %" in lines[2]
    assert "failed" in lines[4]
    assert "absent" in lines[5]
    assert "1.25x" in table([{**result, "ratio_to_best_peer": 1.25}])[2]
    assert remarks([result]) == [
        "NVIDIA H200: 801 TFLOP/s at first, 678 held (1470 MHz, 692 W)",
        "A1: target 118,000 tokens/s, 100,000.0: 85 %, short",
        "A1: peak 101.0 GiB, ABOVE the limit of 100",
        "A1: timed erniekit at 1485 MHz, 688 W, 61 C; hf+compile at 1485 MHz, 640 W",
        "A1: hf: out of memory",
        "A1: peft is absent: pip install peft",
    ]


def test_whole_commands_are_rows_of_the_same_table() -> None:
    run = {"first_line_s": 0.3, "first_step_s": 9.7, "tokens_per_s": 124e3, "trained_tokens_per_s": 120e3}
    run |= {"all_steps_tokens_per_s": 99e3, "to_the_end_s": 3.5, "step_ms": 51.5, "mfu": 0.26, "peak_gib": 12.5}
    sft = {"case": "sft", "about": "x", "aim": 110e3, **run, "before": [{**run, "first_step_s": 33.0}]}
    lora = {"case": "lora", "about": "y", "aim": None, "failed": ["no"], "exit_code": 2, "why": "exit code 2"}
    lines = table([], [sft, lora])
    assert len({len(line) for line in lines}) == 1
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    shown = ["sft", "erniekit train", "51.50", "124,000", "120,000", "26.0 %", "-", "12.5", "-", "", ""]
    assert cells == [shown, ["lora", "erniekit train", "failed", *["-"] * 8]]
    assert real.remarks([sft, lora]) == [
        "sft: first line after 0.3 s, first step after 33.0, then 9.7 s, 3.5 s from the last step to the end",
        "sft: target 110,000 tokens/s, 124,000.0: 113 %, reached",
        "lora: exit code 2",
    ]


def test_a_rate_is_told_once_for_all_workloads_and_without_gauges_too() -> None:
    run = {"runner": "erniekit", "failed": "not run"}
    results = [
        {"workload": "A1", "device": "cpu", "runs": [run], "gemm": {"burst_tflops": 0.1, "held_tflops": held}}
        for held in (0.0512, 0.09, 0.01)
    ]
    assert remarks(results)[0] == "cpu: 0.1 TFLOP/s at first, 0.0512 held"
    assert sum("TFLOP/s" in line for line in remarks(results)) == 1


def test_rows_with_pictures_give_the_numbers_of_transformers_own_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = asdict(BenchOptions(steps=1, warmup=1, tiny=True))
    order = {"workload": "V1", "options": options, "file": str(tmp_path / "V1.json")}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(order) + "\n"))
    assert worker.main() == 0
    result = json.loads((tmp_path / "V1.json").read_text())
    ours, other = result["runs"]
    assert other["runner"] == "peft-vl"
    assert other["parity"]["equal"], other["parity"]
    assert "loss" in other["parity"]["differences"]
    assert result["pictures"] == 4
    assert ours["pictures_per_s"] == pytest.approx(4 / ours["step_ms"] * 1000)
    assert "pictures)" in "\n".join(table([result]))


@pytest.mark.full
def test_kept_features_and_pictures_in_files_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = asdict(BenchOptions(steps=2, warmup=1, tiny=True))
    names = ("V1", "V1-cached", "V1-input")
    orders = [{"workload": name, "options": options, "file": str(tmp_path / f"{name}.json")} for name in names]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(json.dumps(order) + "\n" for order in orders)))
    assert worker.main() == 0
    plain, cached, files = (json.loads((tmp_path / f"{name}.json").read_text()) for name in names)
    assert cached["flops"] < plain["flops"] == files["flops"], "no picture is looked at again"
    first = [result["runs"][0]["first_steps"][0]["loss"] for result in (plain, cached)]
    assert first[0] == pytest.approx(first[1], abs=1e-5), "the same pictures, looked at before"
    assert cached["runs"][1]["parity"]["equal"], cached["runs"][1]["parity"]
    (ours,) = files["runs"]
    assert 0 <= ours["data_wait"] <= 1
    assert f"V1-input: erniekit waited for data {100 * ours['data_wait']:.1f} % of the time" in remarks([files])
