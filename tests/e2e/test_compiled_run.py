"""`compile: True` on a CPU, where torch starts a C++ compiler in the first step: what is told meanwhile, and what a
signal does."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import erniekit
from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import Preempted
from erniekit.parallel import compiled
from erniekit.train.guard import Signals
from erniekit.train.step import TrainStep
from support.clock import until

LINE = "compile  layers are compiled in the first step: it can take a minute or more\n"


def compilers(parent: int) -> list[str]:
    names = []
    for child in psutil.Process(parent).children(recursive=True):
        try:
            names.append(child.name())
        except psutil.NoSuchProcess:
            continue
    return [name for name in names if name in ("cc1plus", "clang++", "clang")]


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="torch finds no compiler")
@pytest.mark.full  # a minute of compiling
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_ends_torchs_compilers_too_stops_the_run_as_any_other(
    number: signal.Signals, words: list[str], tmp_path: Path
) -> None:
    """As a terminal's Ctrl-C and a scheduler's SIGTERM: to the run and all it has started."""
    log, output = tmp_path / "log", tmp_path / "run"
    command = [sys.executable, "-m", "erniekit", "train", *words, "compile=True", f"output_dir={output}"]
    folders = {name: str(tmp_path / name) for name in ("ERNIEKIT_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR")}
    (tmp_path / "TMPDIR").mkdir()
    with log.open("wb") as told:
        run = subprocess.Popen(
            command, stdout=told, stderr=subprocess.STDOUT, env={**os.environ, **folders}, start_new_session=True
        )
        try:
            # Torch first tries what the processor can do, and goes on where that fails. Then its own sources come.
            sources = (tmp_path / "TORCHINDUCTOR_CACHE_DIR").rglob

            def compiles() -> bool:
                return any(sources("*.main.cpp")) and bool(compilers(run.pid))

            until(lambda: run.poll() is not None or compiles(), "it compiles", 300)
            assert LINE in log.read_text(), "told before it takes its time"
            os.killpg(run.pid, number)
            code = run.wait(300)
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
    text = log.read_text()
    assert code == Preempted.exit_code, text
    assert f"{number.name}: stopped while layers were compiled, without a new save\nnext: erniekit train" in text
    assert "Traceback" not in text
    assert "fault of erniekit" not in text
    assert not list((tmp_path / "TMPDIR").glob("erniekit-crash-*"))


def test_the_line_is_told_once_before_the_first_step_and_only_where_layers_are_compiled(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")  # the line does not depend on who compiles
    launch = TrainStep.launch

    def launched(step: TrainStep, batches: object, number: int) -> object:
        print(f"launching {number}")
        return launch(step, batches, number)

    monkeypatch.setattr(TrainStep, "launch", launched)
    train(tmp_path / "compiled", compile=True, max_steps=2, doctor="off")
    told = capsys.readouterr().out
    assert told.count(LINE) == 1
    assert told.index(LINE) < told.index("launching 1")
    train(tmp_path / "compiled", compile=True, max_steps=2, doctor="off")
    assert LINE not in capsys.readouterr().out, "all steps are there, and none is compiled"
    train(tmp_path / "written", max_steps=1, doctor="off")
    assert LINE not in capsys.readouterr().out


def test_an_error_of_the_compiler_is_the_stop_only_where_a_signal_came() -> None:
    from torch._dynamo.exc import TorchRuntimeError

    with Signals() as signals:
        with pytest.raises(TorchRuntimeError), signals.ends_compilers():
            raise TorchRuntimeError("of the layer itself")
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(ValueError, match="of ours"), signals.ends_compilers():
            raise ValueError("of ours")
        with pytest.raises(Preempted, match="SIGTERM: stopped while layers were compiled"), signals.ends_compilers():
            raise TorchRuntimeError("its compiler was ended")


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="torch finds no compiler")
@pytest.mark.full  # a minute of compiling
def test_a_compiled_policy_and_its_reference_are_one_network_at_first(tmp_path: Path) -> None:
    """In bf16, with adapters on experts too: layers compiled with and without gradients give the same bits."""
    model = make_tiny_model(tmp_path / "model", family="ernie4_5_moe")
    pairs = [
        {"src": [f"Add {n} to {n}."], "tgt": [], "response": [str(2 * n), "no"], "sort": [1, 0]} for n in range(64)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    words = dict(
        stage="DPO", model_name_or_path=model, train_dataset_path=tmp_path / "pairs.jsonl", output_dir=tmp_path / "run",
        fine_tuning="LoRA", max_steps=2, max_seq_len=512, compute_type="bf16", device="cpu", compile=True,
        learning_rate=1e-3, warmup_steps=0, lr_scheduler_type="constant", gradient_accumulation_steps=1,
        logging_steps=1, report_to="none", save_strategy="no", doctor="off", probe_tokens=0, packing=True,
    )  # fmt: skip
    erniekit.run("train", **words)
    first, second = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[:2])
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert first["rewards/margins"] == 0
    assert second["rewards/margins"] != 0, "it must really have trained"
