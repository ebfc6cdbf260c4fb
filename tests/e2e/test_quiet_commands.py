"""What a command prints is ours alone: no warning of a library's, on a CPU, with Triton installed and without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.demo.tiny import TRAIN, make_tiny_model

# As if Triton had not been installed: the path finder does not see it.
WITHOUT_TRITON = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] == "triton" else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""
OURS = re.compile(r"(warning: |where: |fix:   )")  # of stderr; results go to stdout
FOREIGN = re.compile(r"^[WE]\d{4} |Warning: |site-packages")


@pytest.mark.parametrize("triton", ["with Triton", pytest.param("without Triton", marks=pytest.mark.full)])
def test_training_evaluating_and_exporting_print_only_our_own_lines(triton: str, tmp_path: Path, root: Path):
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(WITHOUT_TRITON if triton == "without Triton" else "")
    model = make_tiny_model(tmp_path / "model")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(hooks), str(root / "src")]), "OMP_NUM_THREADS": "1"}

    def run(*words: str) -> str:
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert [line for line in done.stderr.splitlines() if not OURS.match(line)] == []
        assert [line for line in done.stdout.splitlines() if FOREIGN.search(line)] == []
        return done.stdout

    code = "from importlib.util import find_spec; print(find_spec('triton') is None)"
    assert triton == "with Triton" or run("-c", code).strip() == "True"
    data = f"--data={TRAIN}"
    run("-m", "erniekit", "train", f"--model_name_or_path={model}", data, "--output_dir=run", "max_steps=1")
    run("-m", "erniekit", "eval", "--model_name_or_path=run", f"--eval_dataset_path={TRAIN}", "--output_dir=eval")
    run("-m", "erniekit", "export", "run")


REST = (
    "quantize run/export quant=w8a16 output_dir=q8 --data DATA max_seq_len=256 calibration_rows=4",
    "export full format=gguf gguf_type=q8_0",
    "split full --max_shard_size 1",
    "chat run/export --prompt hi max_new_tokens=200",
    "chat q8 --prompt hi max_new_tokens=200",
    "doctor",
    "doctor --model_name_or_path=model --data=DATA --output_dir=next max_steps=2",
    "plan --model_name_or_path=model --data=DATA --output_dir=next --cluster 8x80G",
    "rehearse --model_name_or_path=model --data=DATA --output_dir=next --ranks 2",
    "data DATA",
    "data preview DATA --model_name_or_path=model",
    "data index text.jsonl --model_name_or_path model --output tokens",
    "config --model_name_or_path=model --data=DATA --output_dir=next",
    "recipes 0.3B",
    "bench --tiny --peers none --only A1 --steps 1 --warmup 1 --output_dir bench",
)


@pytest.mark.full
def test_every_other_command_prints_only_our_own_lines(tmp_path: Path, root: Path):
    make_tiny_model(tmp_path / "model")
    (tmp_path / "text.jsonl").write_text('{"text": "A short document."}\n' * 8)
    env = {
        **os.environ,
        "PYTHONPATH": str(root / "src"),
        "OMP_NUM_THREADS": "1",
        "ERNIEKIT_CACHE": str(tmp_path / "cache"),
    }
    first = "train --model_name_or_path=model --data=DATA max_steps=1"
    runs = (f"{first} --output_dir=run", f"{first} --output_dir=full fine_tuning=Full", "export run")
    foreign = []
    for command in (*runs, *REST):
        words = command.replace("DATA", str(TRAIN)).split()
        called = [sys.executable, "-m", "erniekit", *words]
        done = subprocess.run(called, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (command, done.stderr)
        lines = [line for line in done.stderr.splitlines() if not OURS.match(line)]
        lines += [line for line in done.stdout.splitlines() if FOREIGN.search(line)]
        allowed = ("[cut at the length limit]",)  # chat's own remark beside the answer
        foreign += [(command, line) for line in lines if line not in allowed]
    assert foreign == []
