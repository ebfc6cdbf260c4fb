"""From pressing return to the first step: what a user waits for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Each takes a large part of a second to several, on a machine that has nothing else to do.
HEAVY = ("torch", "numpy", "transformers", "triton", "sympy", "torch._dynamo", "torch._inductor", "fastapi", "gradio",
         "tokenizers", "sentencepiece", "jinja2", "safetensors", "pandas", "pyarrow", "scipy", "sklearn", "datasets",
         "tensorboard", "PIL", "av")  # fmt: skip
NEEDED = {"torch", "numpy", "sentencepiece", "jinja2", "safetensors"}  # by the first step of this recipe
# What is loaded when the first line is printed, and when the first step's numbers are: in a process of its own.
LOADED = """
import json, sys
from erniekit.cli.main import main

class Screen:
    def __init__(self, out):
        self.out, self.seen = out, {}
    def write(self, text):
        if text.strip() and "line" not in self.seen:
            self.seen["line"] = sorted(sys.modules)
        if "global_step: 1" in text and "step" not in self.seen:
            self.seen["step"] = sorted(sys.modules)
        return self.out.write(text)
    def __getattr__(self, name):
        return getattr(self.out, name)

sys.stdout = Screen(sys.stdout)
code = main(sys.argv[1:])
print(json.dumps(sys.stdout.seen), file=sys.stderr)
sys.exit(code)
"""
# As above, for any command, which ends with its first line.
AT_ONCE = """
import os, sys
from erniekit.cli.main import main

class Screen:
    def write(self, text):
        if text.strip():
            os.write(1, " ".join([text.split()[0], *sorted(sys.modules)]).encode())
            os._exit(0)
    def __getattr__(self, name):
        return getattr(sys.__stdout__, name)

sys.stdout = Screen()
sys.exit(main(sys.argv[1:]))
"""
LONG = (
    "eval MODEL eval_dataset_path=ROWS", "eval MODEL eval_tasks=hellaswag", "export lora_path=MODEL output_dir=out",
    "quantize MODEL quant=w8a16 output_dir=out", "split output_dir=MODEL", "server MODEL port=0", "chat MODEL",
    "doctor", "doctor model_name_or_path=MODEL data=ROWS output_dir=out", "bench --tiny", "bench --calibrate --tiny",
    "plan model_name_or_path=MODEL data=ROWS output_dir=out --cluster 8x80G", "webui port=0 root=.",
    "rehearse model_name_or_path=MODEL data=ROWS output_dir=out --ranks 2",
    "rehearse model_name_or_path=MODEL data=ROWS output_dir=out --shrunken 2", "demo --dir demo",
)  # fmt: skip
LIMIT = 6.0  # seconds; the best of three, as other tests share the machine


def words(tiny_model: Path, rows: Path, output: Path) -> list[str]:
    keys = dict(
        model_name_or_path=tiny_model, train_dataset_path=rows, output_dir=output, fine_tuning="LoRA",
        compute_type="fp32", max_seq_len=96, max_steps=2, device="cpu",
    )  # fmt: skip
    return ["train", *(f"{k}={v}" for k, v in keys.items())]


@pytest.fixture(scope="module")
def loaded(tiny_model: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("loaded")
    command = [sys.executable, "-c", LOADED, *words(tiny_model, rows, folder / "run"), "report_to=none"]
    env = {**os.environ, "ERNIEKIT_CACHE": str(folder / "cache")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stderr.splitlines()[-1])


def test_the_first_line_is_printed_before_anything_heavy_is_imported(loaded: dict[str, list[str]]) -> None:
    assert not set(HEAVY) & set(loaded["line"])
    assert len(loaded["line"]) < 500, "small files add up, too"


def test_the_first_step_has_imported_only_what_it_needs(loaded: dict[str, list[str]]) -> None:
    assert set(HEAVY) & set(loaded["step"]) <= NEEDED


@pytest.mark.parametrize("command", LONG)
def test_commands_that_take_long_print_their_first_line_at_once(
    command: str, tiny_model: Path, rows: Path, tmp_path: Path
) -> None:
    words = command.replace("MODEL", str(tiny_model)).replace("ROWS", str(rows)).split()
    done = subprocess.run(
        [sys.executable, "-c", AT_ONCE, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, *modules = done.stdout.split()
    assert first in ("erniekit", "plan", "rehearse"), first
    assert not (set(HEAVY) - {"safetensors"}) & set(modules), "torch alone takes seconds"


def first_step(tiny_model: Path, rows: Path, output: Path, cache: Path) -> float:
    command = [sys.executable, "-m", "erniekit", *words(tiny_model, rows, output)]
    start = time.monotonic()
    process = subprocess.Popen(command, env={**os.environ, "ERNIEKIT_CACHE": str(cache)}, stdout=subprocess.PIPE)
    metrics = output / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert time.monotonic() - start < 240
        assert process.poll() in (None, 0)
        time.sleep(0.02)
    took = time.monotonic() - start
    process.communicate(timeout=240)
    assert process.returncode == 0
    return took


@pytest.mark.full
def test_the_first_step_of_a_tiny_model_comes_within_six_seconds(tiny_model: Path, rows: Path, tmp_path: Path) -> None:
    times = []
    for k in range(3):
        times.append(first_step(tiny_model, rows, tmp_path / f"run{k}", tmp_path / "cache"))
        if times[-1] < LIMIT:
            break
    assert min(times) < LIMIT, times
    print(f"first step after {min(times):.2f} s")


@pytest.mark.parametrize(
    "delay", [0.1, *(pytest.param(n / 10, marks=pytest.mark.full) for n in (0, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20))]
)
def test_a_ctrl_c_behind_the_first_line_stops_the_command_whatever_it_imports(
    delay: float, tiny_model: Path, rows: Path, tmp_path: Path
) -> None:
    """numpy's import drops the exception of a Ctrl-C, or is left in half."""
    process = subprocess.Popen(
        [sys.executable, "-m", "erniekit", *words(tiny_model, rows, tmp_path / "run"), "max_steps=100000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "ERNIEKIT_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline()
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode in (75, 130), err  # 75: the run was prepared already, or trained
    assert "fault of erniekit" not in err
    if process.returncode == 130:
        assert "global_step" not in out


# What a command has imported when it ends, behind its own words.
AT_THE_END = """
import sys
from erniekit.cli.main import main

code = main(sys.argv[1:])
print("torch" in sys.modules, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("train model_name_or_path=MODEL data=none.jsonl output_dir=out", "none.jsonl"),
        ("train model_name_or_path=MODEL data=ROWS,no*.jsonl output_dir=out", "no*.jsonl"),
        ("train model_name_or_path=MODEL data=ROWS eval_dataset_path=none.csv output_dir=out", "none.csv"),
        ("train model_name_or_path=MODEL stage=PT data=none.txt output_dir=out", "none.txt"),
        ("eval MODEL eval_dataset_path=none.jsonl", "none.jsonl"),
        ("quantize MODEL quant=w4a16 data=none.jsonl output_dir=out", "none.jsonl"),
    ],
)
def test_a_missing_dataset_is_told_before_torch_is_imported(
    command: str, missing: str, tiny_model: Path, rows: Path, tmp_path: Path
) -> None:
    arguments = command.replace("MODEL", str(tiny_model)).replace("ROWS", str(rows)).split()
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_END, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 2
    what, where, fix, imported = done.stderr.splitlines()
    assert what in ("error: dataset does not exist", "error: no file matches this pattern")
    assert where == f"where: {missing}"
    assert fix.startswith("fix:   check ")
    assert imported == "False"
    assert not list(tmp_path.iterdir())


def test_a_dataset_that_a_run_does_not_read_may_be_missing(tiny_model: Path, rows: Path, tmp_path: Path) -> None:
    given = ["eval_dataset_path=none.jsonl", "do_eval=False", "evaluation_strategy=no", "report_to=none"]
    done = subprocess.run(
        [sys.executable, "-m", "erniekit", *words(tiny_model, rows, tmp_path / "run"), *given],
        env={**os.environ, "ERNIEKIT_CACHE": str(tmp_path / "cache")}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
